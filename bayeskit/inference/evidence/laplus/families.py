"""The distributions that stand for a posterior of positive coordinates, each coordinate by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Gamma, LogNormal

from bayeskit.inference.evidence.laplus.matching import (
    fitted_shapes,
    is_inside,
    match_beta_prime,
    match_gamma,
    match_lognormal,
    slope_at_zero,
)
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode

#: Quantiles of the exponential distribution at which the density is looked at where the mode is at zero.
_QUANTILES = 20


class Family(Protocol):
    """Independent distributions of positive coordinates."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the coordinates, of the shape of `x`."""
        ...


@dataclass(frozen=True)
class BetaPrime:
    """Ratios of gamma variables: densities in proportion to x^(a - 1) (1 + x)^(-a - b).

    Parameters
    ----------
    first_shape, second_shape : Tensor
        `a` and `b`, positive.

    Examples
    --------
    >>> import torch
    >>> BetaPrime(torch.tensor(1.0), torch.tensor(1.0)).log_prob(torch.tensor(1.0)).exp()
    tensor(0.2500)
    """

    first_shape: Tensor
    second_shape: Tensor

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities, of the shape of `x`; NaN where `b` is not positive."""
        a, b = self.first_shape, torch.where(self.second_shape > 0, self.second_shape, torch.nan)
        constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
        return constant + (a - 1) * x.log() - (a + b) * x.log1p()


def gamma_family(density: PositiveDensity, mode: PositiveMode) -> tuple[Gamma, int]:
    """Return gamma distributions, their shapes fitted where the mode is at zero, and evaluations spent on that."""
    shape, rate = match_gamma(mode.position, mode.first, mode.second)
    points = _points_from_zero(mode)
    fitted, count = _fitted(density, mode, points, -slope_at_zero(mode.first) * points)
    return Gamma(torch.where(is_inside(mode.position, mode.second), shape, fitted), rate, validate_args=False), count


def beta_prime_family(density: PositiveDensity, mode: PositiveMode) -> tuple[BetaPrime, int]:
    """Return beta prime distributions, and evaluations spent on their shapes."""
    first, second = match_beta_prime(mode.position, mode.first, mode.second)
    points, slope = _points_from_zero(mode), slope_at_zero(mode.first)
    fitted, count = _fitted(density, mode, points, -slope * points.log1p())
    inside = is_inside(mode.position, mode.second)
    return BetaPrime(torch.where(inside, first, fitted), torch.where(inside, second, slope - fitted)), count


def lognormal_family(density: PositiveDensity, mode: PositiveMode) -> tuple[LogNormal, int]:
    """Return lognormal distributions."""
    return LogNormal(*match_lognormal(mode.position, mode.first, mode.second), validate_args=False), 0


def _points_from_zero(mode: PositiveMode) -> Tensor:
    """Return quantiles of the exponential distribution with the mode's slope, `(points, d)`."""
    levels = (torch.arange(_QUANTILES, dtype=mode.position.dtype, device=mode.position.device) + 0.5) / _QUANTILES
    return -(-levels).log1p().unsqueeze(-1) / slope_at_zero(mode.first)


def _fitted(density: PositiveDensity, mode: PositiveMode, points: Tensor, tail: Tensor) -> tuple[Tensor, int]:
    """Return shapes fitted along each coordinate whose mode is not inside, `(d,)`, the others held at the mode."""
    outside = (~is_inside(mode.position, mode.second)).nonzero().flatten()
    shapes = torch.ones_like(mode.position)
    if not len(outside):
        return shapes, 0
    x = mode.position.expand(len(points), len(outside), -1).clone()
    x[:, torch.arange(len(outside)), outside] = points[:, outside]
    shapes[outside] = fitted_shapes(density.log_density(x).to(x), tail[:, outside], points[:, outside])
    return shapes, x[..., 0].numel()
