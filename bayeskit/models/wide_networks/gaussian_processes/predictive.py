"""What a Pyro model of a Gaussian process predicts, draw by draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DrawsError


class Predictions(NamedTuple):
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


def rows(values: Mapping[str, Tensor], site: str, event_dim: int) -> Iterator[dict[str, Tensor]]:
    """Yield site values draw by draw, whatever the leading dimensions of draws are.

    Parameters
    ----------
    values : mapping
        ``{site: (*batch, *shape)}``.
    site : str
        One that must be there.
    event_dim : int
        How many dimensions one draw of it has.
    """
    if site not in values:
        raise DrawsError(f"draws must have a value of site {site!r}; those given have {sorted(values)}")
    batch = values[site].shape[: values[site].dim() - event_dim]
    flat = {}
    for name, value in values.items():
        if value.shape[: len(batch)] != batch:
            raise DrawsError(f"site {name!r} has shape {tuple(value.shape)}, which does not begin with {tuple(batch)}")
        flat[name] = value.reshape(batch.numel(), *value.shape[len(batch) :])
    for i in range(batch.numel()):
        yield {name: value[i] for name, value in flat.items()}


def run_at(function: Callable[..., Any], values: Mapping[str, Tensor], *args: Any) -> Any:
    """Run a part of a model at given values of its sites.

    Raises
    ------
    DrawsError
        If a site has no value.
    """
    result = None

    def run() -> None:
        nonlocal result
        result = function(*args)

    with torch.no_grad(), global_stream(new_generator(0)):
        trace = pyro.poutine.trace(pyro.poutine.condition(run, data=dict(values))).get_trace()
    missing = [name for name in trace.stochastic_nodes if trace.nodes[name]["type"] == "sample"]
    if missing:
        raise DrawsError(f"draws must have a value of site {missing[0]!r}; those given have {sorted(values)}")
    return result
