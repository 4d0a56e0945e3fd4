"""Where particles and data stand in a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.inference.objectives.sites import Site

PARTICLES = "_particles"


class Plate(NamedTuple):
    """A plate of independent data: its dimension counted from the right, items in the batch, items in all."""

    dim: int
    size: int
    full_size: int


@dataclass(frozen=True)
class Layout:
    """Where particles and data stand in a trace.

    Attributes
    ----------
    num_particles : int
    nesting : int
        Number of plate dimensions; particles stand left of them.
    plates : mapping
        By name, those plates that hold every latent site: their items are the data.
    """

    num_particles: int
    nesting: int
    plates: Mapping[str, Plate]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the data, leftmost plate first."""
        return tuple(p.size for p in sorted(self.plates.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(particles, *batch)``."""
        return (self.num_particles, *self.batch_shape)

    @property
    def scale(self) -> float:
        """How many items of the whole data each item of the batch stands for."""
        return math.prod(p.full_size / p.size for p in self.plates.values())

    def reduce(self, term: Tensor) -> Tensor:
        """Sum a term with plate dimensions over all but particles and data: ``(particles, *batch)``."""
        dims = sorted(p.dim for p in self.plates.values())
        shape = (1,) * (self.nesting + 1 - term.dim()) + tuple(term.shape)
        inner = [d for d in range(-self.nesting, 0) if d not in dims]
        term = term.reshape(shape)
        if inner:
            term = term.sum(inner)
        return term.expand(self.shape)

    def spread(self, events: int) -> tuple[int, ...]:
        """Return the shape in which a ``(particles, *batch)`` tensor meets a site's value."""
        sizes = {p.dim: p.size for p in self.plates.values()}
        plates = tuple(sizes.get(d, 1) for d in range(-self.nesting, 0))
        return (self.num_particles, *plates, *(1,) * events)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the plates that results keep: particles, where there are several, and data."""
        data = sorted(self.plates, key=lambda name: self.plates[name])
        return (PARTICLES, *data) if self.num_particles > 1 else tuple(data)

    def shaped(self, term: Tensor) -> Tensor:
        """Expand a term that has the dimensions of :attr:`labels` to ``(particles, *batch)``."""
        if self.num_particles == 1:
            term = term.unsqueeze(0)
        return term.expand(self.shape)


def reduced(site: Site, term: Tensor, layout: Layout) -> Tensor:
    """Apply a site's mask and scale to a term of it and sum it up to ``(K, *batch)``."""
    term, scale = masked(site, term), site["scale"]
    if not isinstance(scale, Tensor):
        scale = scale / layout.scale
        return layout.reduce(term if scale == 1 else term * scale)
    return layout.reduce(term * (scale / layout.scale))


def masked(site: Site, term: Tensor) -> Tensor:
    """Apply a site's mask to a term of it."""
    mask = site["mask"]
    if mask is None or mask is True:
        return term
    return torch.zeros_like(term) if mask is False else torch.where(mask, term, term.new_zeros(()))
