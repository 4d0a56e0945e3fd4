"""The Hessian of the log density by the inner coordinates: the parts that give it, and the search for its structure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler import Cost
from bayeskit._core.inputs import check_memory
from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit.inference.curvature._structure import Band, BandStencil, DiagonalBlocks, Stencil, Structure
from bayeskit.inference.marginal._inner_density import BOTH, LIKELIHOOD, PRIOR, InnerDensity, Terms

#: Number of draws from the prior at which entries that are zero are looked for.
_PATTERN_POINTS = 3
#: Number of coordinates from which on a chain is looked for, and the bandwidths that are tried.
_LONG, _BANDWIDTHS = 100, (1, 2, 4, 8)
#: Units of rounding of a slope in its derivative.
_ROUNDING = 1e2


class HessianPart(NamedTuple):
    """Terms of the log density whose Hessian is found together."""

    terms: Terms
    is_quadratic: bool  # by z, so that the Hessian is the same at all z
    stencil: Stencil | BandStencil
    directions: Tensor  # (c, m)

    def products(self, density: InnerDensity, r: Tensor, z: Tensor) -> Tensor:
        """Return the Hessian's products with all directions, ``(c, n, m)``."""
        found: Tensor = torch.func.vmap(lambda v: density.hessian_product(r, z, v, self.terms)[0])(self.directions)
        return found


class Hessian:
    """Minus the Hessian of a log density by the inner coordinates, the sum of parts, in the layout of a structure."""

    def __init__(self, density: InnerDensity, structure: Structure, parts: tuple[HessianPart, ...]) -> None:
        self.density, self.structure, self.parts = density, structure, parts

    @property
    def description(self) -> str:
        """The structure in words, with the number of products where these are fewer than coordinates."""
        num_products = sum(part.stencil.num_directions for part in self.parts)
        is_coloured = self.structure.is_dense and num_products < self.density.num_inner
        return self.structure.description + (f", from {num_products} products" if is_coloured else "")

    @property
    def is_quadratic(self) -> bool:
        """Whether the log density is quadratic by the inner coordinates."""
        return all(part.is_quadratic for part in self.parts)

    def constant(self, r: Tensor, z: Tensor) -> Tensor:
        """Return minus the Hessian of the quadratic parts, ``(n, G, b, b)``, or zero."""
        found = z.new_zeros(())
        for part in self.parts:
            if part.is_quadratic:
                found = found + part.stencil.blocks(part.products(self.density, r, z))
        return found

    def curve(self, r: Tensor, z: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return minus the Hessian ``(n, G, b, b)``, the gradient ``(n, m)`` and the log density ``(n,)``."""
        minus, slope, value = constant, z.new_zeros(()), z.new_zeros(())
        for part in self.parts:
            if part.is_quadratic:
                gradient, term = self.density.slope(r, z, part.terms)
            else:
                product = torch.func.vmap(
                    lambda v, terms=part.terms: self.density.hessian_product(r, z, v, terms),
                    out_dims=(0, None, None),  # type: ignore[arg-type]
                )
                products, gradient, term = product(part.directions)
                minus = minus + part.stencil.blocks(products)
            slope, value = slope + gradient, value + term
        return self.structure.completed(minus), slope, value

    def half_log_det_gradient(self, r: Tensor, z: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by ``r`` and ``z`` of half the log determinant, from the inverse."""
        return trace_gradient(self.density, self.parts, r, z, [part.stencil.weights(inverse) for part in self.parts])


def trace_gradient(
    density: InnerDensity, parts: Sequence[HessianPart], r: Tensor, z: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients by ``r`` and ``z`` of minus half the weighted sum of products ``(c, n, m)`` of parts."""

    def trace(u: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        r, z = u.split([density.dim, density.num_inner], -1)
        total = u.new_zeros(())
        for part, weight in zip(parts, weights, strict=True):
            total = total - 0.5 * (part.products(density, r, z) * weight).sum()
        return total, ()

    (gradient,) = gradient_and_rest(trace, torch.cat([r, z], -1), *weights)
    return gradient[:, : density.dim], gradient[:, density.dim :]


def derivative_rounding(slope: Tensor) -> Tensor:
    """Return the size of second derivatives that are no more than the rounding of the first."""
    return _ROUNDING * torch.finfo(slope.dtype).eps * slope.abs()


class HessianSamples:
    """Hessians at draws ``(k, p), (k, m)`` from the prior, by whose products a structure is accepted or refused."""

    def __init__(self, density: InnerDensity, r: Tensor, z: Tensor) -> None:
        self.density, self.r, self.z = density, r, z

    @property
    def _direction(self) -> Tensor:
        """A direction in which no entry of a Hessian cancels another, ``(m,)``."""
        place = torch.arange(self.density.num_inner, dtype=torch.float64)
        return 1.5 + place.mul(2.4).sin().mul(0.5).to(self.z)

    def pattern(self, terms: Terms) -> Tensor:
        """Return which entries of the Hessian are not zero at some of the first points, ``(m, m)``."""
        density, r, z = self.density, self.r[:_PATTERN_POINTS], self.z[:_PATTERN_POINTS]
        m = density.num_inner
        eye = torch.eye(m, dtype=density.dtype, device=density.device)
        num_bytes = Cost.of_call(lambda v: [density.hessian_product(r[:1], z[:1], v, terms)[0]], eye[0]).num_bytes
        size = Cost(0, len(r) * num_bytes).num_at_once
        product = torch.func.vmap(lambda v: density.hessian_product(r, z, v, terms)[0])
        pattern = torch.cat([(product(some) != 0).any(1) for some in eye.split(size)])
        return pattern | pattern.T | torch.eye(m, dtype=torch.bool, device=density.device)

    def agree(self, terms: Terms, structure: Structure, stencil: Stencil | BandStencil) -> bool:
        """Tell whether a stencil's products give the whole Hessian: its product with any direction, at all points."""
        if stencil.num_directions == self.density.num_inner:
            return True
        v = self._direction
        product, slope, _ = self.density.hessian_product(self.r, self.z, v, terms)
        there, rounding = -product, derivative_rounding(slope).norm(dim=1)
        part = self._part_of(terms, stencil)
        blocks = stencil.blocks(part.products(self.density, self.r, self.z))
        here = structure.times(blocks, v.expand_as(self.z))
        gap, size = (here - there).norm(dim=1), there.norm(dim=1)
        return not bool((gap > math.sqrt(torch.finfo(self.z.dtype).eps) * size + rounding).any())

    def part(self, terms: Terms, stencil: Stencil | BandStencil) -> HessianPart:
        """Return a part, which is quadratic if its Hessian is the same at other inner coordinates."""
        v, z = self._direction, self.z
        others = z.roll(1, 0) + 0.5 * z + 0.1
        one, other = (self.density.hessian_product(self.r, at, v, terms)[0] for at in (z, others))
        gap, size = (one - other).norm(dim=1), one.norm(dim=1)
        is_quadratic = bool((gap <= 1e3 * torch.finfo(z.dtype).eps * size).all())
        return self._part_of(terms, stencil)._replace(is_quadratic=is_quadratic)

    def _part_of(self, terms: Terms, stencil: Stencil | BandStencil) -> HessianPart:
        directions = stencil.directions.to(self.z.dtype)
        return HessianPart(terms=terms, is_quadratic=False, stencil=stencil, directions=directions)

    def hessian(
        self,
        structure: Structure,
        prior: Stencil | BandStencil,
        likelihood: Stencil | BandStencil,
        both: Stencil | BandStencil,
    ) -> Hessian:
        """Return the Hessian from a constant part and another if the prior alone is quadratic, else from one part."""
        parts = (self.part(PRIOR, prior), self.part(LIKELIHOOD, likelihood))
        if parts[0].is_quadratic and not parts[1].is_quadratic:
            return Hessian(self.density, structure, parts)
        return Hessian(self.density, structure, (self.part(BOTH, both),))


def find_hessian(samples: HessianSamples) -> Hessian:
    """Return the Hessian with its structure: independent groups, a chain, or dense."""
    density = samples.density
    m = density.num_inner
    if m >= _LONG and (chain := _find_chain(samples)) is not None:
        return chain
    names = ", ".join(map(repr, density.over))
    check_memory(f"the Hessian of {names} has {m} x {m} entries: their number", m * m, 2 * density.dtype.itemsize)
    prior, likelihood = samples.pattern(PRIOR), samples.pattern(LIKELIHOOD)
    full = torch.ones(m, m, dtype=torch.bool, device=density.device)
    for patterns in ((prior, likelihood), (full, full)):
        either = patterns[0] | patterns[1]
        structure = DiagonalBlocks.joined(either)
        stencils = [Stencil(pattern, structure) for pattern in (*patterns, either)]
        if all(samples.agree(terms, structure, stencils[terms[0]]) for terms in (PRIOR, LIKELIHOOD)):
            break
    return samples.hessian(structure, *stencils)


def _find_chain(samples: HessianSamples) -> Hessian | None:
    """Return the Hessian of many coordinates of which only near ones depend on each other; None for others."""
    density = samples.density
    for width in _BANDWIDTHS:
        band = Band(density.num_inner, width, density.device)
        tried = {reach: BandStencil(band, reach, density.device) for reach in (0, width)}
        fit = [
            [reach for reach, stencil in tried.items() if samples.agree(terms, band, stencil)]
            for terms in (PRIOR, LIKELIHOOD)
        ]
        if fit[0] and fit[1]:
            reaches = [min(each) for each in fit]
            if max(reaches) == 0:
                separate = DiagonalBlocks(torch.arange(density.num_inner, device=density.device))
                diagonal = Stencil(None, separate)
                return samples.hessian(separate, diagonal, diagonal, diagonal)
            return samples.hessian(band, tried[reaches[0]], tried[reaches[1]], tried[max(reaches)])
    return None
