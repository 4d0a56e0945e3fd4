"""Smooth activations whose moments have a closed form: erf, GELU, sines, Gaussian bumps, exponentials."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bayeskit.models.wide_networks.activations.activation import Activation, Moments
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.covariance import gap_of


class Smooth(Activation):
    """What activations with a closed form share: the gain, which has none, goes by quadrature."""

    def gain(self) -> Activation:
        """Return ``x f'(x)``."""
        return Quadrature(self).gain()


@dataclass(frozen=True)
class Erf(Smooth):
    """The error function.

    References
    ----------
    Williams, C. K. I. (1997). Computing with infinite networks. Advances in Neural Information Processing Systems 9.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return torch.erf(x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        determinant = 1 + 2 * (a + b) + 4 * (gap_of(k, a, b) if gap is None else gap)
        nngp = (2 / math.pi) * torch.atan2(2 * k, determinant.sqrt())
        slope = (4 / math.pi) * determinant.rsqrt() if derivative else None
        return Moments(nngp, slope)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return nothing: the function is odd."""
        return None


@dataclass(frozen=True)
class Gelu(Smooth):
    """The argument times the normal distribution function at it.

    References
    ----------
    Tsuchida, R., Pearce, T., van der Heide, C., Roosta, F., Gallagher, M. (2021). Avoiding kernel fixed points:
    computing with ELU and GELU infinite networks. AAAI 35, 9967-9977.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return functional.gelu(x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers, from repeated integration by parts."""
        first, second = 1 + a, 1 + b
        square = k.square()
        if gap is None:
            gap = gap_of(k, a, b)
        determinant = 1 + a + b + gap
        both = 0.25 + torch.atan2(k, determinant.sqrt()) / (2 * math.pi)  # of two distribution functions
        density = determinant.rsqrt() / (2 * math.pi)
        nngp = k * both + density * (gap + square / first + square / second)
        slope = None
        if derivative:
            slope = both + k * density * (1 / first + 1 / second + 1 / determinant)
        return Moments(nngp, slope)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return a * (2 * math.pi * (1 + a)).rsqrt()


@dataclass(frozen=True)
class Sine(Smooth):
    """A sine of given amplitude, angular frequency and phase; a phase of half of pi is a cosine.

    With amplitude ``sqrt(2)`` and phase ``pi / 4`` its kernel is that of radial basis functions,
    ``exp(-frequency**2 E(u - v)**2 / 2)``.
    """

    frequency: float = 1.0
    phase: float = 0.0
    amplitude: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.amplitude * torch.sin(self.frequency * x + self.phase)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers, from those of their difference and sum."""
        square = self.frequency**2
        difference = torch.exp(-0.5 * square * (a + b - 2 * k))
        total = math.cos(2 * self.phase) * torch.exp(-0.5 * square * (a + b + 2 * k))
        half = 0.5 * self.amplitude**2
        return Moments(half * (difference - total), half * square * (difference + total) if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return self.amplitude * math.sin(self.phase) * torch.exp(-0.5 * self.frequency**2 * a)


@dataclass(frozen=True)
class GaussianBump(Smooth):
    """``exp(-rate x**2)``."""

    rate: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return torch.exp(-self.rate * x.square())

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        twice = 2 * self.rate
        determinant = 1 + twice * (a + b) + twice * twice * (gap_of(k, a, b) if gap is None else gap)
        nngp = determinant.rsqrt()
        return Moments(nngp, twice * twice * k * nngp / determinant if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return (1 + 2 * self.rate * a).rsqrt()


@dataclass(frozen=True)
class Exponential(Smooth):
    """``exp(rate x)``."""

    rate: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return torch.exp(self.rate * x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        square = self.rate**2
        nngp = torch.exp(0.5 * square * (a + b + 2 * k))
        return Moments(nngp, square * nngp if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return torch.exp(0.5 * self.rate**2 * a)
