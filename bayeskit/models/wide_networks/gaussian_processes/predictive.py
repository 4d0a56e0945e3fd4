"""What a Pyro model of a Gaussian process predicts, draw by draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import pyro
import torch
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DrawsError, KernelError

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
    function: Callable[..., Laws], values: Mapping[str, Tensor], x: Tensor, *rest: Tensor
) -> NormalMixture:
    """Return means and variances that a part of a model gives at each draw of its sites.

    Parameters
    ----------
    function : callable
        ``(x, *rest) -> (mean, variance)``, with sites in it.
    values : mapping
        ``{site: (*batch, *shape)}``, whatever the leading dimensions of draws are.
    x, *rest : Tensor
        The inputs of the data, what else the function needs, and the new inputs last.

    Raises
    ------
    DrawsError
        If a site has no value, or draws have different leading dimensions.
    KernelError
        If the covariance of the data is not positive definite at some draw.
    """
    draws = _flat(values, _event_dims(function, x, *rest))
    number = len(next(iter(draws.values()))) if draws else 1

    def one(row: dict[str, Tensor]) -> Laws:
        with pyro.poutine.condition(data=row):
            return function(x, *rest)

    length = max(CHUNK // (len(x) * (len(x) + len(rest[-1]))), 1)
    with torch.no_grad():
        try:
            if not draws:
                raise RuntimeError("there is nothing to batch")
            means, variances = torch.vmap(one, chunk_size=length)(draws)
        except RuntimeError:  # a kernel whose code depends on values, or a covariance that is not positive definite
            laws = [_law(one, {name: value[i] for name, value in draws.items()}, i) for i in range(number)]
            means, variances = (torch.stack(column) for column in zip(*laws, strict=True))
    return NormalMixture(means, variances)


def _law(function: Callable[[dict[str, Tensor]], Laws], row: dict[str, Tensor], number: int) -> Laws:
    try:
        return function(row)
    except torch.linalg.LinAlgError as error:
        raise KernelError(
            f"the covariance of the data is not positive definite at draw {number}; look for repeated inputs, or give "
            "the model more jitter"
        ) from error


def _event_dims(function: Callable[..., Laws], x: Tensor, *rest: Tensor) -> dict[str, int]:
    """Return how many dimensions one draw of each site has."""

    def run() -> None:  # a trace does not take just any result
        with suppress(torch.linalg.LinAlgError):  # at variances that nobody asked for
            function(x, *rest)

    with torch.no_grad(), global_stream(new_generator(0)):
        trace = pyro.poutine.trace(run).get_trace()
    sites = ((name, trace.nodes[name]) for name in trace.stochastic_nodes)
    return {name: torch.as_tensor(node["value"]).dim() for name, node in sites if node["type"] == "sample"}


def _flat(values: Mapping[str, Tensor], event_dims: Mapping[str, int]) -> dict[str, Tensor]:
    """Return draws of all sites with one leading dimension."""
    missing = sorted(set(event_dims) - set(values))
    if missing:
        raise DrawsError(f"draws must have a value of each site, and have none of {missing}; given: {sorted(values)}")
    batch, flat = None, {}
    for name, event_dim in event_dims.items():
        value = values[name]
        found = value.shape[: value.dim() - event_dim]
        batch = found if batch is None else batch
        if found != batch:
            raise DrawsError(f"site {name!r} has shape {tuple(value.shape)}, which does not begin with {tuple(batch)}")
        if not batch.numel():
            raise DrawsError(f"there are no draws: site {name!r} has shape {tuple(value.shape)}")
        flat[name] = value.reshape(batch.numel(), *value.shape[len(batch) :])
    return flat
