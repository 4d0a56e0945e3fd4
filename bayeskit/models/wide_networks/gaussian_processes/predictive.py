"""What a Pyro model of a Gaussian process predicts, draw by draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DrawsError

CHUNK = 1 << 22  # numbers of covariances that are held at once

Laws = tuple[Tensor, Tensor]
"""Means and variances."""


class NormalMixture(NamedTuple):
    """Normal laws of the function at new inputs, one a draw.

    Attributes
    ----------
    means, variances : Tensor
        Given the draw, ``(draws, ...)``.
    """

    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> Tensor:
        """Of all draws together."""
        return self.means.mean(0)

    @property
    def variance(self) -> Tensor:
        """Of all draws together: the mean of the variances and the variance of the means."""
        return self.variances.mean(0) + self.means.var(0, correction=0)


def predict_each(
    function: Callable[..., Laws], values: Mapping[str, Tensor], site: str, event_dim: int, x: Tensor, *rest: Tensor
) -> NormalMixture:
    """Return means and variances that a part of a model gives at each draw of its sites.

    Parameters
    ----------
    function : callable
        ``(x, *rest) -> (mean, variance)``, with sites in it.
    values : mapping
        ``{site: (*batch, *shape)}``, whatever the leading dimensions of draws are.
    site : str
        One that must be there.
    event_dim : int
        How many dimensions one draw of it has.
    x, *rest : Tensor
        The inputs of the data, what else the function needs, and the new inputs last.

    Raises
    ------
    DrawsError
        If a site has no value, or draws have different leading dimensions.
    """
    draws = _flat(values, site, event_dim)
    number = len(draws[site])
    _check_sites(function, {name: value[0] for name, value in draws.items()}, x, *rest)

    def one(row: dict[str, Tensor]) -> Laws:
        with pyro.poutine.condition(data=row):
            return function(x, *rest)

    length = max(CHUNK // (len(x) * (len(x) + len(rest[-1]))), 1)
    with torch.no_grad():
        try:
            means, variances = torch.vmap(one, chunk_size=length)(draws)
        except RuntimeError:  # a kernel whose code depends on values, or a covariance that is not positive definite
            laws = [one({name: value[i] for name, value in draws.items()}) for i in range(number)]
            means, variances = (torch.stack(column) for column in zip(*laws, strict=True))
    return NormalMixture(means, variances)


def _flat(values: Mapping[str, Tensor], site: str, event_dim: int) -> dict[str, Tensor]:
    """Return draws with one leading dimension."""
    if site not in values:
        raise DrawsError(f"draws must have a value of site {site!r}; those given have {sorted(values)}")
    batch = values[site].shape[: values[site].dim() - event_dim]
    if not batch.numel():
        raise DrawsError(f"there are no draws: site {site!r} has shape {tuple(values[site].shape)}")
    flat = {}
    for name, value in values.items():
        if value.shape[: len(batch)] != batch:
            raise DrawsError(f"site {name!r} has shape {tuple(value.shape)}, which does not begin with {tuple(batch)}")
        flat[name] = value.reshape(batch.numel(), *value.shape[len(batch) :])
    return flat


def _check_sites(function: Callable[..., Laws], values: dict[str, Tensor], *args: Tensor) -> None:
    """Refuse draws that have no value of a site."""

    def run() -> None:  # a trace does not take just any result
        function(*args)

    with torch.no_grad(), global_stream(new_generator(0)):
        trace = pyro.poutine.trace(pyro.poutine.condition(run, data=values)).get_trace()
    missing = [name for name in trace.stochastic_nodes if trace.nodes[name]["type"] == "sample"]
    if missing:
        raise DrawsError(f"draws must have a value of site {missing[0]!r}; those given have {sorted(values)}")
