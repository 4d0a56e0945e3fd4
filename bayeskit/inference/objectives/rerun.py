"""Run a model or guide once more, on the items it had and on values given to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyro
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from bayeskit._pyro.draws import MendedDraws
from bayeskit.inference.objectives.layout import PARTICLES, Layout
from bayeskit.inference.objectives.sites import Site


class _Rows(NamedTuple):
    rows: Tensor
    num_items: int


_ROWS: ContextVar[_Rows | None] = ContextVar("rows of the minibatch", default=None)


@contextmanager
def rows_of_minibatch(rows: Tensor | None, num_items: int) -> Iterator[None]:
    """Say which of ``num_items`` data the minibatch holds that model and guide are called with inside.

    A model whose plate has the size of the minibatch cannot know; training loops do.

    Parameters
    ----------
    rows : Tensor or None
        Shape ``(batch,)``; None where it is not known.
    num_items : int
        Of the whole data.

    Examples
    --------
    >>> import pyro, torch
    >>> with rows_of_minibatch(torch.tensor([7, 2]), 10), SubsampleIndices() as indices, pyro.plate("data", 2):
    ...     pass
    >>> indices.values["data"], indices.items["data"], indices.sizes["data"]
    (tensor([0, 1]), tensor([7, 2]), 10)
    """
    token = _ROWS.set(None if rows is None else _Rows(rows, num_items))
    try:
        yield
    finally:
        _ROWS.reset(token)


class SubsampleIndices(Messenger):
    """Note which items every plate takes, while it is entered.

    Attributes
    ----------
    values : dict of Tensor
        Indices by name of the plate.
    items : dict of Tensor
        The same, but for plates over a whole minibatch: its rows, where :func:`rows_of_minibatch` tells them.
    sizes : dict of int
        How many items there are in all.

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
        self.items: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}

    def _pyro_post_sample(self, message: Any) -> None:
        if not site_is_subsample(message):
            return
        name, value, size = message["name"], message["value"], int(message["fn"].size)
        self.values[name], known = value, _ROWS.get()
        whole = known is not None and len(value) == size == len(known.rows)
        self.items[name], self.sizes[name] = (known.rows, known.num_items) if known and whole else (value, size)


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
    with poutine.block(expose_types=["param"]), MendedDraws():  # the optimiser has to hear of parameters met here first
        trace = poutine.trace(function).get_trace(*args, **kwargs)
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample"}
