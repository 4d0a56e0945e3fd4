"""Polynomials as activations: monomials, Hermite polynomials and any other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import hermite_e
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks.activations.activation import Activation, Moments

LARGEST_DEGREE = 150  # factorials of numbers somewhat larger leave the range of float64
LARGEST_HERMITE = 40  # of higher degrees, powers cancel to less than ten digits


@dataclass(frozen=True)
class Polynomial(Activation):
    """A polynomial.

    Parameters
    ----------
    coefficients : tuple of float
        Of the powers zero, one, two and so on.

    Raises
    ------
    SettingsError
        If there are none, or they are not finite, or more than 151.

    Examples
    --------
    >>> import torch
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> monomial(2).moments(0.5 * one, one, one).nngp.item()  # 1 + 2 * 0.5**2
    1.5
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check settings."""
        if not self.coefficients or not all(math.isfinite(x) for x in self.coefficients):
            raise SettingsError(f"a polynomial needs coefficients that are finite, not {self.coefficients!r}")
        if len(self.coefficients) > LARGEST_DEGREE + 1:
            raise SettingsError(
                f"a polynomial may have degree {LARGEST_DEGREE} at most, not {len(self.coefficients) - 1}; take "
                "Quadrature(function) with as many terms as its degree"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values, by Horner's rule."""
        result = torch.full_like(x, self.coefficients[-1])
        for coefficient in reversed(self.coefficients[:-1]):
            result = result * x + coefficient
        return result

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers, from its expansion in Hermite polynomials."""
        first, second = self._expansion(a), self._expansion(b)
        nngp = _series([_factorial(r) * x * y for r, (x, y) in enumerate(zip(first, second, strict=True))], k)
        slope = None
        if derivative:
            # The derivative with respect to the covariance is the moment of the derivatives.
            slope = _series(
                [r * _factorial(r) * x * y for r, (x, y) in enumerate(zip(first, second, strict=True)) if r],
                k,
            )
        return Moments(nngp, slope)

    def _expansion(self, a: Tensor) -> list[Tensor]:
        """Return the coefficient of the Hermite polynomial of each degree for variance ``a``."""
        result = []
        for degree in range(len(self.coefficients)):
            total = torch.zeros_like(a)
            for pairs in range((len(self.coefficients) - 1 - degree) // 2 + 1):
                power = degree + 2 * pairs
                ways = math.factorial(power) / (math.factorial(degree) * math.factorial(pairs) * 2**pairs)
                total = total + self.coefficients[power] * ways * a**pairs
            result.append(total)
        return result

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return self._expansion(a)[0]

    def gain(self) -> Activation:
        """Return the polynomial with each coefficient times its power."""
        return Polynomial(tuple(power * coefficient for power, coefficient in enumerate(self.coefficients)))


def monomial(degree: int) -> Polynomial:
    """Return ``x**degree``."""
    degree = whole_number("degree", degree, least=0)
    return Polynomial((0.0,) * degree + (1.0,))


def hermite(degree: int) -> Polynomial:
    """Return the probabilists' Hermite polynomial, divided so that its second moment is one at variance one.

    Its degree is 40 at most; powers of higher ones cancel, and with them their digits.
    """
    degree = whole_number("degree", degree, least=0)
    if degree > LARGEST_HERMITE:
        raise SettingsError(f"degree must be {LARGEST_HERMITE} at most, not {degree}: powers of higher ones cancel")
    basis = np.zeros(degree + 1)
    basis[degree] = 1.0
    return Polynomial(tuple(float(x) for x in hermite_e.herme2poly(basis) / math.sqrt(math.factorial(degree))))


def _factorial(number: int) -> float:
    return float(math.factorial(number))  # torch multiplies by no integer of more than 64 bits


def _series(coefficients: list[Tensor], k: Tensor) -> Tensor:
    """Return a power series in the covariance, by Horner's rule."""
    if not coefficients:
        return torch.zeros_like(k)
    result = coefficients[-1].expand_as(k) if coefficients[-1].dim() else coefficients[-1] + torch.zeros_like(k)
    for coefficient in reversed(coefficients[:-1]):
        result = result * k + coefficient
    return result
