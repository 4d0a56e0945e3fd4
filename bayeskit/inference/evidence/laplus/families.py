"""The distributions that stand for a posterior of positive coordinates, each coordinate by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributions import Gamma, LogNormal

from bayeskit.inference.evidence.laplus.matching import (
    BENT,
    ZERO,
    is_inside,
    match_beta_prime,
    match_gamma,
    match_lognormal,
)
from bayeskit.inference.evidence.laplus.modes import SHORTEST
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode

#: Powers of x at zero that are no closer to none than this count as a pole.
_MIN_POWER = 0.01
#: Where the mode of a logarithm is looked for, and how often the interval is halved.
_LARGEST, _BISECTIONS = 1e9, 60
#: A mode inside with less curvature than this, by the logarithm of the coordinate, is one at zero.
_STRAIGHT = 1e-6
#: A slope at zero at which the exponential distribution would reach a hundred times further than the density does.
_FLAT = 0.01
#: The slope at zero is taken where this share of the exponential is over, if it has too few digits further down.
_NEAR, _DIGITS = 3e-3, 1e3


class Family(Protocol):
    """Independent distributions of positive coordinates."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return log densities of the coordinates, of the shape of `x`."""
        ...


F = TypeVar("F", bound=Family)


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
    inside : Tensor
        Which other coordinates have their mode inside, bool, shape `(d,)`.
    shape : Tensor
        One where the density is finite at zero, and the power of its pole plus one, at least .001, where it is not;
        shape `(d,)`. NaN where nothing fits.
    rate : Tensor
        Of the exponential or gamma distribution, shape `(d,)`.
    flat : Tensor
        Where the density has no slope at zero: shape and rate are then those of the gamma distribution whose
        logarithm has the mode and curvature of the coordinate's, bool, shape `(d,)`.
    centre : Tensor
        The mode of the density of the coordinate's logarithm, shape `(d,)`.
    problems : tuple of str
        Why nothing fits.
    num_evaluations : int
    """

    inside: Tensor
    shape: Tensor
    rate: Tensor
    flat: Tensor
    centre: Tensor
    problems: tuple[str, ...]
    num_evaluations: int


class Fit(NamedTuple, Generic[F]):
    """Independent distributions, and where their height is compared with that of the density.

    Attributes
    ----------
    distribution : Family
    point : Tensor
        Shape `(d,)`.
    problems : tuple of str
    num_evaluations : int
    """

    distribution: F
    point: Tensor
    problems: tuple[str, ...]
    num_evaluations: int


def gamma_family(density: PositiveDensity, mode: PositiveMode) -> Fit[Gamma]:
    """Fit gamma distributions."""
    mode = _in_double(mode)
    shape, rate = match_gamma(mode.position, mode.first, mode.second)
    other = at_zero(density, mode)
    gamma = Gamma(
        torch.where(other.inside, shape, other.shape),
        torch.where(other.inside, rate, other.rate),
        validate_args=False,
    )
    return _fit(gamma, torch.where(other.flat, other.centre, mode.position), other)


def beta_prime_family(density: PositiveDensity, mode: PositiveMode) -> Fit[BetaPrime]:
    """Fit beta prime distributions."""
    mode = _in_double(mode)
    first, second = match_beta_prime(mode.position, mode.first, mode.second)
    other = at_zero(density, mode)
    # With a slope of minus the sum of both shapes at zero, beside the pole; or bent as much as the gamma distribution.
    head = torch.where(other.flat, other.shape * (1 + other.centre), other.shape)
    tail = torch.where(other.flat, head / other.centre, other.rate - other.shape)
    prime = BetaPrime(torch.where(other.inside, first, head), torch.where(other.inside, second, tail))
    return _fit(prime, torch.where(other.flat, other.centre, mode.position), other)


def lognormal_family(density: PositiveDensity, mode: PositiveMode) -> Fit[LogNormal]:
    """Fit lognormal distributions, which have mean and variance of the gamma one where the mode is at zero.

    A lognormal density vanishes at zero, so where the mode is there both are compared at its mean.
    """
    mode = _in_double(mode)
    location, scale = match_lognormal(mode.position, mode.first, mode.second)
    other = at_zero(density, mode)
    variance = torch.where(other.flat, 1 / other.shape, (1 / other.shape).log1p())
    centre = torch.where(other.flat, other.centre.log(), (other.shape / other.rate).log() - variance / 2)
    lognormal = LogNormal(
        torch.where(other.inside, location, centre),
        torch.where(other.inside, scale, variance.sqrt()),
        validate_args=False,
    )
    return _fit(
        lognormal,
        torch.where(other.inside, mode.position, torch.where(other.flat, other.centre, lognormal.mean)),
        other,
    )


def _fit(distribution: F, point: Tensor, other: AtZero) -> Fit[F]:
    return Fit(distribution, point, other.problems, other.num_evaluations)


def _in_double(mode: PositiveMode) -> PositiveMode:
    """Return the mode in double precision: constants of distributions with large shapes cancel in single."""
    return mode._replace(position=mode.position.double(), first=mode.first.double(), second=mode.second.double())


def at_zero(density: PositiveDensity, mode: PositiveMode) -> AtZero:
    """Look along each coordinate whose mode is at zero, the others held."""
    x, dtype = mode.position, density.target.dtype
    # Second derivatives are differences of gradients.
    straight = max(_STRAIGHT, 10 * torch.finfo(dtype).eps ** (2 / 3))
    inside = is_inside(x, mode.second) & (-mode.second * x.square() > straight)
    # A search that was stopped on its way down has a slope left.
    inside &= (x >= ZERO) | ((mode.first * x).abs() < BENT)
    outside = (~inside).nonzero().flatten()
    shape, rate, flat, centre = torch.ones_like(x), torch.ones_like(x), torch.zeros_like(inside), x.clone()
    if not len(outside):
        return AtZero(inside, shape, rate, flat, centre, (), 0)
    count, row = 0, torch.arange(len(outside), device=x.device)

    def log_slope(at: Tensor) -> Tensor:
        """Return the coordinate times the first derivative, along each such coordinate, `(outside,)`."""
        nonlocal count
        count += len(outside)
        points = x.expand(len(outside), -1).clone()
        points[row, outside] = at
        return density.log_slope(points.to(dtype))[row, outside].double()

    near = torch.full_like(x[outside], SHORTEST)
    # Of a density in proportion to a power of x times what is finite, x times the derivative tends to the power.
    power = log_slope(near).nan_to_num(nan=0.0)
    pole = power < -_MIN_POWER
    low, high = near.log(), torch.full_like(near, _LARGEST).log()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        rising = log_slope(middle.exp()) > -1
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    top = low.exp()
    # In single precision, or in large units, the slope at the mode has no digits left: take it where it has.
    digits = power.abs() > _DIGITS * torch.finfo(dtype).eps
    later = (_NEAR * top).clamp(min=SHORTEST)
    slope = torch.where(digits, mode.first[outside].abs(), (log_slope(later) / later).abs())
    level = ~pole & ~(slope * top > _FLAT)
    step = torch.finfo(dtype).eps ** (1 / 3)
    bent = -(log_slope((low + step).exp()) - log_slope((low - step).exp())) / (2 * step)
    # There the slope says nothing of the tail: match the logarithm of the coordinate at its own mode instead.
    own = torch.where(pole, (1 + power).clamp(min=0.001), torch.where(level, bent, 1.0))
    known = (power > -1) & (own > 0) & ((low < math.log(_LARGEST) - 1) | ~(pole | level))
    own = torch.where(known, own, torch.nan)
    shape[outside], centre[outside], flat[outside] = own, top, level
    rate[outside] = torch.where(pole | level, own / top, slope)
    problems = tuple(
        f"{density.target.names[int(i)]} has neither a mode inside nor a slope or pole at zero that a distribution "
        "would have: rescale it, or use laplace_importance_sampling"
        for i in outside[~known]
    )
    return AtZero(inside, shape, rate, flat, centre, problems, count)
