"""Run a model or guide once more, on the items it had and on values given to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from bayeskit.inference.objectives.layout import PARTICLES, Layout
from bayeskit.inference.objectives.sites import Site


class SubsampleIndices(Messenger):
    """Note which items every plate takes, while it is entered.

    Attributes
    ----------
    values : dict of Tensor
        Indices by name of the plate.

    Examples
    --------
    >>> import pyro, torch
    >>> with SubsampleIndices() as indices, pyro.plate("data", 5, subsample=torch.tensor([3, 1])):
    ...     pass
    >>> indices.values["data"]
    tensor([3, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Tensor] = {}

    def _pyro_post_sample(self, message: Any) -> None:
        if site_is_subsample(message):
            self.values[message["name"]] = message["value"]


class _Supply(Messenger):
    """Fix the plates' items, and give latent sites the values that ``value_of`` names."""

    def __init__(self, indices: Mapping[str, Tensor], value_of: Callable[[str, Any], Tensor | None]) -> None:
        super().__init__()
        self._indices, self._value_of = indices, value_of

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if site_is_subsample(message):
            if message["value"] is None and name in self._indices:
                message["value"] = self._indices[name]
        elif not message["is_observed"]:
            value = self._value_of(name, message["fn"])
            if value is not None:
                message["value"], message["done"] = value, True


def supplied_sites(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layout: Layout,
    indices: Mapping[str, Tensor],
    value_of: Callable[[str, Any], Tensor | None],
) -> dict[str, Site]:
    """Run a model or guide once more, on the same items and on given values, and return its sample sites.

    Parameters
    ----------
    function : callable
    args, kwargs
        What it is called with.
    layout : Layout
        The number of particles and where they stand.
    indices : mapping of Tensor
        The items that each plate takes, by name.
    value_of : callable
        The value of a latent site, given its name and distribution; None has it drawn.

    Returns
    -------
    dict
        Sites by name, those of subsampling left out.
    """
    function = _Supply(indices, value_of)(function)
    if layout.num_particles > 1:
        function = pyro.plate(PARTICLES, layout.num_particles, dim=-layout.nesting - 1)(function)
    with poutine.block(expose_types=["param"]):  # the optimiser has to hear of parameters met here first
        trace = poutine.trace(function).get_trace(*args, **kwargs)
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample"}
