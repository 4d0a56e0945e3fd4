"""The integral over independent coordinates of conjugate families, in closed form."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._compiler import FailingApart
from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit.errors import DrawsError
from bayeskit.inference.curvature._structure import DiagonalBlocks, Stencil
from bayeskit.inference.marginal._conjugate_families import ConjugateCoordinates, conjugate_coordinates
from bayeskit.inference.marginal._hessian import HessianSamples
from bayeskit.inference.marginal._inner_density import BOTH, InnerDensity, RemainingPrior
from bayeskit.inference.marginal._integral import InnerIntegral, IntegralValue

#: Margin around the range of prior draws in which modes are bracketed, and number of halvings of the bracket.
_MARGIN, _HALVINGS = 10.0, 30


@dataclass(frozen=True)
class ConjugateIntegral(InnerIntegral):
    """The exact integral, from slopes at three points around the modes."""

    coordinates: ConjugateCoordinates

    @property
    def description(self) -> str:
        """Numbers and families of the coordinates."""
        return f"conjugate: {self.coordinates.description}"

    def start(self, r: Tensor) -> Tensor:
        """Return the same coordinates for all, on which nothing depends."""
        return self.coordinates.start.expand(len(r), -1)

    def evaluate(self, r: Tensor, start: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals in closed form."""
        # The points are constants: the result is the same at any.
        points = self._points(r).detach()

        def integral(r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            slopes, values = torch.func.vmap(lambda z: self.density.slope(r, z))(points)
            found = self.coordinates.log_integral(values[1], points, slopes)
            return found.sum(), (found,)

        gradient, value = gradient_and_rest(integral, r)
        likelihood = value - prior.value
        return IntegralValue(
            log_likelihood=likelihood,
            gradient=gradient - prior.gradient,
            found=likelihood.isfinite() & gradient.sum(-1).isfinite(),
            next_start=start,
        )

    def drawn(self, rows: Tensor, chunk: int, generator: torch.Generator) -> Tensor:
        """Return draws from the conjugate distributions; ``DrawsError`` where an integral is infinite."""
        density, parts = self.density, []
        with torch.no_grad(), FailingApart():
            for r in rows.split(chunk):
                points = self._points(r)
                slopes = torch.func.vmap(functools.partial(_slope, density, r))(points)
                found = self.coordinates.log_integral(torch.zeros_like(r[:, 0]), points, slopes)
                if lost := int((~found.isfinite()).sum()):
                    raise DrawsError(
                        f"the density has no finite integral by {sorted(density.over)} at {lost} of {len(r)} draws"
                    )
                parts.append(self.coordinates.drawn(points, slopes, generator))
        return torch.cat(parts)

    def _points(self, r: Tensor) -> Tensor:
        return self.coordinates.points(functools.partial(_slope, self.density, r), len(r))


def find_conjugate(samples: HessianSamples) -> ConjugateIntegral | None:
    """Return the integral if coordinates are independent given the others, each of a conjugate family, else None."""
    density, r = samples.density, samples.r
    separate = DiagonalBlocks(torch.arange(density.num_inner, device=density.device))
    if not samples.agree(BOTH, separate, Stencil(None, separate)):
        return None
    start, num_sticks = _bracketed_modes(samples), _num_sticks(density)
    coordinates = conjugate_coordinates(functools.partial(_slope, density, r), start, len(r), num_sticks)
    return None if coordinates is None else ConjugateIntegral(density, coordinates)


def _slope(density: InnerDensity, r: Tensor, z: Tensor) -> Tensor:
    """Return the gradient by ``z`` of the log density, ``(n, m)``."""
    return density.slope(r, z)[0]


def _num_sticks(density: InnerDensity) -> Tensor:
    """Return the number of coordinates of a simplex from each to its last, ``(m,)``; zero for those of no simplex.

    A simplex of k + 1 numbers is broken off a stick, in k steps.
    """
    found = []
    for site in density.whole.sites:
        if site.name in density.over:
            k = site.unconstrained_shape[-1] if site.unconstrained_shape else 1
            is_simplex = site.shape == (*site.unconstrained_shape[:-1], k + 1)
            sticks = torch.arange(k, 0, -1).repeat((site.stop - site.start) // k)
            found.append(sticks if is_simplex else torch.zeros_like(sticks))
    return torch.cat(found).to(density.device)


def _bracketed_modes(samples: HessianSamples) -> Tensor:
    """Return about where each of independent coordinates has its mode, by bisection of the slope, ``(m,)``."""
    low, high = samples.z.amin(0) - _MARGIN, samples.z.amax(0) + _MARGIN
    row = samples.r.median(0).values.unsqueeze(0)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        slope = _slope(samples.density, row, middle.unsqueeze(0)).squeeze(0)
        low, high = torch.where(slope > 0, middle, low), torch.where(slope > 0, high, middle)
    return 0.5 * (low + high)
