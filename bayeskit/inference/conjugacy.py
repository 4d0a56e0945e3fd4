"""Coordinates whose density given all others is of a conjugate family, so that their integral has a closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayeskit.core.torch_internals import standard_gamma

__all__ = ["ConjugateCoordinates", "ConjugateFamily", "conjugate_coordinates"]

#: Distance of the points from which parameters are found, and of those at which a family is tested.
_APART, _TESTED = 0.5, (-2.0, -1.0, 0.0, 1.0, 2.0)


class ConjugateFamily(Protocol):
    """Densities ``exp(a s(z) + b t(z))`` of an unconstrained coordinate ``z``."""

    @property
    def name(self) -> str:
        """Name of the distribution of the constrained value."""

    def statistics(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``s(z)`` and ``t(z)``."""

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivatives of ``s`` and ``t``."""

    def log_integral(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the log of the integral, or NaN where it is infinite."""

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        """Return a draw of ``z`` for each pair of parameters."""


class _Normal:
    """``exp(a z - b z^2 / 2)``."""

    name = "normal"

    def statistics(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two statistics."""
        return z, -0.5 * z.square()

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return their derivatives."""
        return torch.ones_like(z), -z

    def log_integral(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the log of the integral."""
        b = torch.where(b > 0, b, torch.nan)
        return 0.5 * (a.square() / b + math.log(2 * math.pi) - b.log())

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        """Return normal draws."""
        return a / b + torch.randn(a.shape, generator=generator, dtype=a.dtype) / b.sqrt()


class _Gamma:
    """``exp(a z - b e^z)``: ``e^z`` is gamma distributed; with ``sign`` -1 it is its inverse."""

    def __init__(self, sign: int) -> None:
        self.sign, self.name = sign, "gamma" if sign > 0 else "inverse gamma"

    def statistics(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two statistics."""
        return self.sign * z, -(self.sign * z).exp()

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return their derivatives."""
        return torch.full_like(z, self.sign), -self.sign * (self.sign * z).exp()

    def log_integral(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the log of the integral."""
        a, b = torch.where(a > 0, a, torch.nan), torch.where(b > 0, b, torch.nan)
        return torch.lgamma(a) - a * b.log()

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        """Return log gamma draws, or minus these."""
        return self.sign * (_log_gamma_draws(a, generator) - b.log())


class _Beta:
    """``p^a (1 - p)^b`` for ``p`` the logistic function of ``z`` minus an offset ``(m,)``: a stick of a Dirichlet's."""

    def __init__(self, offset: Tensor, name: str = "beta") -> None:
        self.offset, self.name = offset, name

    def statistics(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two statistics."""
        w = z - self.offset
        return logsigmoid(w), logsigmoid(-w)

    def slopes(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return their derivatives."""
        w = z - self.offset
        return (-w).sigmoid(), -w.sigmoid()

    def log_integral(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the log of the integral."""
        a, b = torch.where(a > 0, a, torch.nan), torch.where(b > 0, b, torch.nan)
        return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)

    def drawn(self, a: Tensor, b: Tensor, generator: torch.Generator) -> Tensor:
        """Return log odds of beta draws."""
        return self.offset.cpu() + _log_gamma_draws(a, generator) - _log_gamma_draws(b, generator)


def _log_gamma_draws(a: Tensor, generator: torch.Generator) -> Tensor:
    """Return logs of gamma draws, which are finite for any shape ``a``: a draw for ``a + 1`` times ``U^(1 / a)``."""
    uniform = torch.rand(a.shape, generator=generator, dtype=a.dtype).clamp(min=torch.finfo(a.dtype).tiny)
    return standard_gamma(a + 1, generator).log() + uniform.log() / a


class _Group(NamedTuple):
    """Coordinates of one family."""

    family: ConjugateFamily
    columns: Tensor  # (c,)


class ConjugateCoordinates:
    """Independent coordinates, each of a conjugate family, whose parameters follow from slopes at two points."""

    def __init__(self, groups: Sequence[_Group], start: Tensor) -> None:
        self._groups = tuple(groups)
        self.points = torch.stack([start - _APART, start + _APART])  # (2, m)

    @property
    def description(self) -> str:
        """Numbers and families of the coordinates."""
        return ", ".join(f"{len(columns)} {family.name}" for family, columns in self._groups)

    def parameters(self, slopes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of each group of coordinates from slopes at the two points, ``(2, n, m)``."""
        return [_solved(family, self.points[:, columns], slopes[..., columns]) for family, columns in self._groups]

    def log_integral(self, value: Tensor, slopes: Tensor) -> Tensor:
        """Return log integrals ``(n,)`` from log densities at the first point ``(n,)`` and slopes ``(2, n, m)``."""
        found = value
        for (family, columns), (a, b) in zip(self._groups, self.parameters(slopes), strict=True):
            s, t = family.statistics(self.points[0, columns])
            found = found + (family.log_integral(a, b) - a * s - b * t).sum(-1)
        return found

    def drawn(self, slopes: Tensor, generator: torch.Generator) -> Tensor:
        """Return a draw of all coordinates for each row of slopes, ``(2, n, m) -> (n, m)``."""
        z = torch.empty_like(slopes[0])
        for (family, columns), (a, b) in zip(self._groups, self.parameters(slopes), strict=True):
            z[:, columns] = family.drawn(a.cpu(), b.cpu(), generator).to(z)
        return z


def _solved(family: ConjugateFamily, points: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parameters with which a family has slopes ``(2, n, c)`` at two points ``(2, c)``."""
    (s, other_s), (t, other_t) = family.slopes(points)
    determinant = s * other_t - other_s * t
    here, there = slopes
    return (here * other_t - there * t) / determinant, (there * s - here * other_s) / determinant


def conjugate_coordinates(
    slope: Callable[[Tensor], Tensor], start: Tensor, others: Tensor, num_sticks: Tensor
) -> ConjugateCoordinates | None:
    """Return the families of independent coordinates, or None if one of them belongs to none.

    Parameters
    ----------
    slope : callable
        The gradient of the log density by all coordinates at points ``(k, m)``, for n vectors of the others:
        ``(k, n, m)``.
    start : Tensor
        Where the density is not negligible, ``(m,)``.
    others : Tensor
        More points at which a family is tested, ``(k, m)``.
    num_sticks : Tensor
        Number of coordinates of a simplex from each one to its last, ``(m,)``; zero for those of no simplex.
    """
    is_stick, offset = num_sticks > 0, num_sticks.clamp(min=1).to(start).log()
    z = start + torch.tensor([-_APART, _APART, *_TESTED]).to(start).unsqueeze(-1)
    z = torch.cat([z, others])
    found = slope(z)
    near = math.sqrt(torch.finfo(start.dtype).eps)
    left, groups = torch.ones_like(start, dtype=torch.bool), []
    families = _Normal(), _Gamma(1), _Gamma(-1), _Beta(offset), _Beta(offset, "Dirichlet")
    for family in families:
        a, b = _solved(family, z[:2], found[:2])
        s, t = (x.unsqueeze(1) for x in family.slopes(z[2:]))
        gap = (a * s + b * t - found[2:]).abs()
        holds = ~(gap > near * ((a * s).abs() + (b * t).abs())).any(0) & family.log_integral(a, b).isfinite()
        columns = (holds.all(0) & left & (is_stick == (family.name == "Dirichlet"))).nonzero()[:, 0]
        if len(columns):
            left[columns] = False
            within = _Beta(offset[columns], family.name) if isinstance(family, _Beta) else family
            groups.append(_Group(within, columns))
    return None if bool(left.any()) else ConjugateCoordinates(groups, start)
