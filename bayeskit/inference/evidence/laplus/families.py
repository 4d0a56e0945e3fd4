"""The distributions that stand for a posterior of positive coordinates, each coordinate by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributions import Gamma, LogNormal

from bayeskit.inference.evidence.laplus.matching import (
    is_inside,
    match_beta_prime,
    match_gamma,
    match_lognormal,
    slope_at_zero,
)
from bayeskit.inference.evidence.laplus.modes import SHORTEST
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode

#: Powers of x at zero that are no closer to none than this count as a pole.
_MIN_POWER = 0.01
#: Where a coordinate is looked for, and how often the interval is halved.
_LARGEST, _BISECTIONS = 1e9, 60


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


class AtZero(NamedTuple):
    """What stands for the coordinates whose mode is at zero.

    Attributes
    ----------
    shape : Tensor
        One where the density is finite at zero, and the power of its pole plus one, at least .001, where it is not;
        shape `(d,)`.
    rate : Tensor
        Of the exponential or gamma distribution, shape `(d,)`.
    num_evaluations : int
    """

    shape: Tensor
    rate: Tensor
    num_evaluations: int


def gamma_family(density: PositiveDensity, mode: PositiveMode) -> tuple[Gamma, int]:
    """Return gamma distributions, and evaluations spent on those of coordinates whose mode is at zero."""
    shape, rate = match_gamma(mode.position, mode.first, mode.second)
    inside, other = is_inside(mode.position, mode.second), _at_zero(density, mode)
    gamma = Gamma(torch.where(inside, shape, other.shape), torch.where(inside, rate, other.rate), validate_args=False)
    return gamma, other.num_evaluations


def beta_prime_family(density: PositiveDensity, mode: PositiveMode) -> tuple[BetaPrime, int]:
    """Return beta prime distributions, and evaluations spent on those of coordinates whose mode is at zero."""
    first, second = match_beta_prime(mode.position, mode.first, mode.second)
    inside, other = is_inside(mode.position, mode.second), _at_zero(density, mode)
    # With a slope of minus the sum of both shapes at zero, beside the pole.
    tail = other.rate - other.shape
    return BetaPrime(torch.where(inside, first, other.shape), torch.where(inside, second, tail)), other.num_evaluations


def lognormal_family(density: PositiveDensity, mode: PositiveMode) -> tuple[LogNormal, int]:
    """Return lognormal distributions, which have mean and variance of the gamma one where the mode is at zero."""
    location, scale = match_lognormal(mode.position, mode.first, mode.second)
    inside, other = is_inside(mode.position, mode.second), _at_zero(density, mode)
    variance = (1 / other.shape).log1p()
    centre = (other.shape / other.rate).log() - variance / 2
    lognormal = LogNormal(
        torch.where(inside, location, centre), torch.where(inside, scale, variance.sqrt()), validate_args=False
    )
    return lognormal, other.num_evaluations


def _at_zero(density: PositiveDensity, mode: PositiveMode) -> AtZero:
    """Look along each coordinate whose mode is at zero, the others held."""
    outside = (~is_inside(mode.position, mode.second)).nonzero().flatten()
    shape, rate = torch.ones_like(mode.position), slope_at_zero(mode.first)
    if not len(outside):
        return AtZero(shape, rate, 0)
    count, row = 0, torch.arange(len(outside))

    def derivative(x: Tensor) -> Tensor:
        """Return the first derivatives along each such coordinate at `x`, `(outside,)`."""
        nonlocal count
        count += len(outside)
        points = mode.position.expand(len(outside), -1).clone()
        points[row, outside] = x
        return density.value_and_gradient(points)[1][row, outside]

    near = torch.full_like(rate[outside], SHORTEST)
    # Of a density in proportion to a power of x times what is finite, x times the derivative tends to the power.
    power = (near * derivative(near)).nan_to_num(nan=0.0)
    pole = power < -_MIN_POWER
    shape[outside] = torch.where(pole, (1 + power).clamp(min=0.001), 1.0)
    if bool(pole.any()):
        # There the slope says nothing of the tail: match the logarithm of the coordinate at its own mode instead.
        low, high = near.log(), torch.full_like(near, _LARGEST).log()
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            rising = middle.exp() * derivative(middle.exp()) + 1 > 0
            low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
        rate[outside] = torch.where(pole, shape[outside] / low.exp(), rate[outside])
    return AtZero(shape, rate, count)
