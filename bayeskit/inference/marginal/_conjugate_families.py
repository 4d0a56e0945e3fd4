"""Coordinates whose density given all others is of a conjugate family, so that their integral has a closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayeskit._core.torch_internals import standard_gamma

#: Distance of the first points from the start, and the longest step from there to a mode.
_APART, _LONGEST_STEP, _NUM_ROUNDS = 0.5, 15.0, 2
#: Largest width of a density, and the distances from its mode in widths at which a family is tested.
_WIDEST, _TESTED = 5.0, (-5.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0)
#: Units of rounding of a slope that a test allows for; shape from which on a series is used.
_ROUNDING, _LARGE = 1e2, 100.0


class ConjugateFamily(Protocol):
    """Log-concave densities ``exp(a s(z) + b t(z))`` of an unconstrained coordinate ``z``."""

    @property
    def name(self) -> str:
        """Name of the distribution of the constrained value."""

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of ``s`` and ``t``."""

    def mode(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mode and the width there, not finite where the integral is infinite."""

    def log_integral(self, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        """Return the log of the integral of the density relative to that at ``z``, NaN where it is infinite."""

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        """Return a draw of ``z`` for each pair of parameters."""


class _Normal:
    """``exp(a z - b z^2 / 2)``."""

    name = "normal"

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(z), -z

    def mode(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b = _positive(b)
        return a / b, b.rsqrt()

    def log_integral(self, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        b = _positive(b)
        return 0.5 * (b * (a / b - z).square() + math.log(2 * math.pi) - b.log())

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        return a / b + torch.randn(a.shape, generator=generator, dtype=a.dtype) / b.sqrt()


class _Gamma:
    """``exp(a z - b e^z)``: ``e^z`` is gamma distributed; with ``sign`` -1 it is its inverse."""

    def __init__(self, sign: int) -> None:
        self.sign, self.name = sign, "gamma" if sign > 0 else "inverse gamma"

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(z, self.sign), -self.sign * (self.sign * z).exp()

    def mode(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _positive(a), _positive(b)
        return self.sign * (a.log() - b.log()), a.rsqrt()

    def log_integral(self, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        a, b = _positive(a), _positive(b)
        below = a.log() - b.log() - self.sign * z
        return _above_stirling(a) + a * (below + torch.expm1(-below))

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        return self.sign * (_log_gamma_draws(a, generator) - b.log())


class _Beta:
    """``p^a (1 - p)^b`` for ``p`` the logistic function of ``z`` minus an offset ``(m,)``: a stick of a Dirichlet's."""

    def __init__(self, offset: Tensor, name: str = "beta") -> None:
        self.offset, self.name = offset, name

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        w = z - self.offset
        return (-w).sigmoid(), -w.sigmoid()

    def mode(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = _positive(a), _positive(b)
        return self.offset + a.log() - b.log(), (1 / a + 1 / b).sqrt()

    def log_integral(self, a: Tensor, b: Tensor, z: Tensor) -> Tensor:
        a, b = _positive(a), _positive(b)
        w, both = z - self.offset, a + b
        below = a * ((a / both).log() - logsigmoid(w)) + b * ((b / both).log() - logsigmoid(-w))
        return _above_stirling(a) + _above_stirling(b) - _above_stirling(both) + below

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        return self.offset.cpu() + _log_gamma_draws(a, generator) - _log_gamma_draws(b, generator)


def _positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.nan)


def _above_stirling(a: Tensor) -> Tensor:
    """Return ``lgamma(a) - a log(a) + a``, by its series where the terms would cancel."""
    large, small = a.clamp(min=_LARGE), a.clamp(max=_LARGE)
    series = 0.5 * (math.log(2 * math.pi) - large.log()) + 1 / (12 * large) - 1 / (360 * large**3)
    return torch.where(a > _LARGE, series + 1 / (1260 * large**5), torch.lgamma(small) - small * small.log() + small)


def _log_gamma_draws(a: Tensor, generator: torch.Generator) -> Tensor:
    """Return logs of gamma draws, which are finite for any shape ``a``: a draw for ``a + 1`` times ``U^(1 / a)``."""
    uniform = torch.rand(a.shape, generator=generator, dtype=a.dtype).clamp(min=torch.finfo(a.dtype).tiny)
    return standard_gamma(a + 1, generator).log() + uniform.log() / a


class _Group(NamedTuple):
    """Coordinates of one family."""

    family: ConjugateFamily
    columns: Tensor  # (c,)

    def of(self, x: Tensor) -> Tensor:
        """Return these coordinates of ``(*batch, m)``."""
        return x if len(self.columns) == x.shape[-1] else x[..., self.columns]


class _Fit(NamedTuple):
    """Modes and widths of densities of one family."""

    mode: Tensor
    width: Tensor


class ConjugateCoordinates:
    """Independent coordinates, each of a conjugate family, whose parameters follow from slopes at two points."""

    def __init__(self, groups: Sequence[_Group], start: Tensor) -> None:
        self._groups, self.start = tuple(groups), start

    @property
    def description(self) -> str:
        """Numbers and families of the coordinates."""
        return ", ".join(f"{len(columns)} {family.name}" for family, columns in self._groups)

    def points(self, slope: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
        """Return one width below each mode, the mode, and one above, ``(3, n, m)``, from slopes at points ``(n, m)``.

        Parameters are found from slopes at two points, and lose digits where both are far from the mode; so they are
        found again there.
        """
        start = self.start.expand(num_rows, -1)
        if len(self._groups) == 1:
            return _around(_fitted(self._groups[0].family, slope, start))
        points = start.expand(3, -1, -1).clone()
        for family, columns in self._groups:

            def within(z: Tensor, columns: Tensor = columns) -> Tensor:
                return slope(start.index_copy(1, columns, z))[:, columns]

            points[:, :, columns] = _around(_fitted(family, within, start[:, columns]))
        return points

    def parameters(self, points: Tensor, slopes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of each group of coordinates from slopes at the outer points, both ``(3, n, m)``."""
        points, slopes = points[::2], slopes[::2]
        return [_solved(group.family, group.of(points), group.of(slopes)) for group in self._groups]

    def log_integral(self, value: Tensor, points: Tensor, slopes: Tensor) -> Tensor:
        """Return log integrals from log densities at the middle point, ``(n,)``, and slopes at all points."""
        found = value
        for group, (a, b) in zip(self._groups, self.parameters(points, slopes), strict=True):
            found = found + group.family.log_integral(a, b, group.of(points[1])).sum(-1)
        return found

    def drawn(self, points: Tensor, slopes: Tensor, generator: torch.Generator) -> Tensor:
        """Return a draw of all coordinates for each row, ``(n, m)``."""
        z = torch.empty_like(slopes[0])
        for (family, columns), (a, b) in zip(self._groups, self.parameters(points, slopes), strict=True):
            z[:, columns] = family.drawn(a.cpu(), b.cpu(), generator).to(z)
        return z


def _solved(family: ConjugateFamily, points: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameters with which a family has the slopes at two points, ``(2, n, c)``."""
    (s, other_s), (t, other_t) = family.slopes(points)
    determinant = s * other_t - other_s * t
    here, there = slopes
    return (here * other_t - there * t) / determinant, (there * s - here * other_s) / determinant


def _fitted(family: ConjugateFamily, slope: Callable[[Tensor], Tensor], start: Tensor) -> _Fit:
    """Return the mode of a family near ``start`` ``(n, c)``, and the width there."""
    z, mode, width = start, start, torch.ones_like(start)
    for _ in range(1 if isinstance(family, _Normal) else _NUM_ROUNDS):
        points = torch.stack([z - _APART, z + _APART])
        slopes = torch.stack([slope(point) for point in points])
        mode, width = family.mode(*_solved(family, points, slopes))
        if not isinstance(family, _Normal):
            # Far from the mode one parameter is no more than rounding, but the slope says in which direction it lies.
            far = z + _LONGEST_STEP * slopes.sum(0).sign()
            z = torch.where(mode.isfinite(), mode.clamp(z - _LONGEST_STEP, z + _LONGEST_STEP), far)
    return _Fit(mode, width.clamp(max=_WIDEST))


def _around(fit: _Fit) -> Tensor:
    """Return one width below the mode, the mode, and one above, ``(3, n, c)``."""
    return torch.stack([fit.mode - fit.width, fit.mode, fit.mode + fit.width])


def conjugate_coordinates(
    slope: Callable[[Tensor], Tensor], start: Tensor, num_rows: int, num_sticks: Tensor
) -> ConjugateCoordinates | None:
    """Return the families of independent coordinates, or None if one of them belongs to none, or all are normal.

    A family is tested at up to five widths around its mode, where the density is not negligible: what a slope misses,
    times the width, is an error in nats.

    ``slope`` is the gradient of the log density at ``(n, m)``, ``start`` ``(m,)`` is near the modes, and ``num_sticks``
    ``(m,)`` is the number of coordinates of a simplex from each to its last, zero for those of no simplex.
    """
    is_stick, offset = num_sticks > 0, num_sticks.clamp(min=1).to(start).log()
    eps, left, groups = torch.finfo(start.dtype).eps, torch.ones_like(start, dtype=torch.bool), []
    families = _Normal(), _Gamma(1), _Gamma(-1), _Beta(offset), _Beta(offset, "Dirichlet")
    for family in families:
        if not bool((left & (is_stick == (family.name == "Dirichlet"))).any()):
            continue
        fit = _fitted(family, slope, start.expand(num_rows, -1))
        near = torch.stack([fit.mode - fit.width, fit.mode + fit.width])
        a, b = _solved(family, near, torch.stack([slope(z) for z in near]))
        holds = family.log_integral(a, b, fit.mode).isfinite()
        is_finite = holds.double().mean(0) > 0.5  # some vectors may have no integral
        for distance in _TESTED:
            z = fit.mode + distance * fit.width
            s, t = (weight * x for weight, x in zip((a, b), family.slopes(z), strict=True))
            missed = (s + t - slope(z)).abs() * fit.width
            rounding = _ROUNDING * eps * (s.abs() + t.abs()) * fit.width
            holds = holds & ~(missed > math.sqrt(eps) + rounding)
        holds = holds | ~family.log_integral(a, b, fit.mode).isfinite()
        columns = (holds.all(0) & is_finite & left & (is_stick == (family.name == "Dirichlet"))).nonzero()[:, 0]
        if len(columns):
            left[columns] = False
            within = _Beta(offset[columns], family.name) if isinstance(family, _Beta) else family
            groups.append(_Group(within, columns))
    if bool(left.any()) or all(isinstance(group.family, _Normal) for group in groups):
        return None  # one Newton step is exact for normal coordinates, and cheaper
    return ConjugateCoordinates(groups, start)
