"""Activation functions and their moments under normal distributions."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial import hermite_e
from scipy.special import roots_hermitenorm
from torch import Tensor, nn
from torch.func import vjp
from torch.nn import functional

from bayeskit.errors import BayeskitError, ModelError, SettingsError
from bayeskit.extend import global_stream, new_generator, visible, whole_number
from bayeskit.models.wide_networks._covariance import (
    acute_angle,
    angle,
    excess_of_size,
    gap_of,
    root,
    where_zero,
)

# Interface of activation functions: moments under normal distributions.


class NormalMoments(NamedTuple):
    """Moments of a function ``f`` of jointly normal variables ``u`` and ``v`` with mean zero.

    Attributes
    ----------
    nngp : Tensor
        ``E f(u) f(v)``.
    derivative : Tensor or None
        ``E f'(u) f'(v)``.
    gap : Tensor or None
        ``E f(u)**2 E f(v)**2 - nngp**2``, if it is known more accurately than by subtraction.
    """

    nngp: Tensor
    derivative: Tensor | None = None
    gap: Tensor | None = None


class Activation(ABC):
    """A scalar function, applied to each feature of a layer."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""

    @abstractmethod
    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables with mean zero.

        Parameters
        ----------
        k : Tensor
            Covariances.
        a, b : Tensor
            Variances, which broadcast against ``k``.
        gap : Tensor, optional
            ``a b - k**2``, if it is known more accurately than by subtraction.
        derivative : bool, default True
            Whether to compute the moment of the derivatives.

        Returns
        -------
        NormalMoments
        """

    @abstractmethod
    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``; None if zero."""

    @abstractmethod
    def gain(self) -> Activation:
        """Return the function's derivative with respect to the logarithm of its argument, ``x f'(x)``."""


# Activations that are linear on either side of zero: ReLU, leaky ReLU, absolute value, identity.


@dataclass(frozen=True)
class PiecewiseLinear(Activation):
    r"""Piecewise linear function with slope ``left`` below zero and ``right`` above.

    With :math:`\alpha` half the sum and :math:`\beta` half the difference of the slopes, the function is
    :math:`\alpha x + \beta |x|`. Its moments are sums of the moments of the identity and the absolute value, without
    cross terms.

    The derivative at zero follows torch: ``left`` for ``relu`` and ``leaky_relu``, zero for the absolute value. It
    matters only if a feature has variance zero: at an input of zeros, without biases.

    Parameters
    ----------
    left, right : float
        Slopes.

    References
    ----------
    Cho, Y., Saul, L. K. (2009). Kernel methods for deep learning. Advances in Neural Information Processing Systems
    22 (arc-cosine kernels of degrees zero and one).

    Examples
    --------
    >>> import torch
    >>> variance = torch.tensor(2.0, dtype=torch.float64)
    >>> PiecewiseLinear(0.0, 1.0).moments(variance, variance, variance).nngp.item()  # half of the variance
    1.0
    """

    left: float
    right: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        if self.left == -self.right:
            return self.right * x.abs()
        return torch.where(x > 0, self.right * x, self.left * x)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        odd, even = (0.5 * (self.right + self.left)) ** 2, (0.5 * (self.right - self.left)) ** 2
        known = gap is not None
        if gap is None:
            gap = gap_of(k, a, b)
        # The tangent of the angle between features stays accurate if the cosine is near one or minus one.
        sine = root(gap)
        acute, ahead = acute_angle(sine, k)
        nngp = (2 * even / math.pi) * torch.addcmul(sine, k, ahead)
        if odd:
            nngp = nngp + odd * k
        slope = None
        if derivative:
            middle = 0.0 if self.left == -self.right else self.left  # the slope at zero
            slope = (2 * even / math.pi) * ahead + odd
            slope = where_zero(a, b, slope, one=middle * 0.5 * (self.left + self.right), both=middle**2)
        return NormalMoments(nngp, slope, self._gap(k, gap, sine, acute, a, b, nngp) if known else None)

    def _gap(self, k: Tensor, gap: Tensor, sine: Tensor, acute: Tensor, a: Tensor, b: Tensor, nngp: Tensor) -> Tensor:
        """Return the gap of the function's moments, given the gap of its arguments."""
        odd, even = (0.5 * (self.right + self.left)) ** 2, (0.5 * (self.right - self.left)) ** 2
        size = k.abs()
        parallel = torch.addcmul(sine, acute, size, value=-1)
        # The excess of a negative covariance is the excess of its absolute value plus their difference.
        missing = torch.add((odd + even) * excess_of_size(size, gap, a, b), parallel, alpha=-2 * even / math.pi)
        if odd:
            missing = missing + odd * (size - k)
        return missing.clamp_min(0) * torch.addcmul(nngp, root(a), root(b), value=odd + even)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return 0.5 * (self.right - self.left) * math.sqrt(2 / math.pi) * root(a)

    def gain(self) -> Activation:
        """Return the function itself."""
        return self


# Activations that are constant on either side of zero.


@dataclass(frozen=True)
class Step(Activation):
    """Step function: ``left`` below zero, ``right`` above, and their mean at zero.

    The derivative is zero almost everywhere, so no gradient passes through it, as in a finite network.
    """

    left: float = -1.0
    right: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        middle = 0.5 * (self.left + self.right)
        return middle + 0.5 * (self.right - self.left) * torch.sign(x)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        middle, height = 0.5 * (self.left + self.right), 0.5 * (self.right - self.left)
        between = angle(root(gap_of(k, a, b) if gap is None else gap), k)
        # A variable with variance zero lies at the step, where the function is ``middle``: equivalent to a right angle.
        between = where_zero(a, b, between, 0.5 * math.pi, 0.5 * math.pi)
        nngp = middle**2 + height**2 * (1 - (2 / math.pi) * between)
        return NormalMoments(nngp, torch.zeros_like(nngp) if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return torch.full_like(a, 0.5 * (self.left + self.right))

    def gain(self) -> Activation:
        """Return zero."""
        return Step(0.0, 0.0)


# Polynomials as activations: monomials, Hermite polynomials and any other.

_LARGEST_DEGREE = 150  # factorials of somewhat larger numbers overflow float64
_LARGEST_HERMITE = 40  # at higher degrees cancellation of powers leaves fewer than ten digits


@dataclass(frozen=True)
class PolynomialActivation(Activation):
    """A polynomial.

    Parameters
    ----------
    coefficients : tuple of float
        Coefficients of the powers 0, 1, 2, ...

    Raises
    ------
    SettingsError
        If there are no coefficients, more than 151, or if they are not finite.

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
            raise SettingsError(f"a polynomial needs one or more finite coefficients, not {self.coefficients!r}")
        if len(self.coefficients) > _LARGEST_DEGREE + 1:
            raise SettingsError(
                f"the degree of a polynomial must be at most {_LARGEST_DEGREE}, not {len(self.coefficients) - 1}; use "
                "Quadrature(function) with num_terms equal to the degree plus one"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values, by Horner's rule."""
        result = torch.full_like(x, self.coefficients[-1])
        for coefficient in reversed(self.coefficients[:-1]):
            result = result * x + coefficient
        return result

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables, from its Hermite expansion."""
        first, second = self._expansion(a), self._expansion(b)
        nngp = _series([_factorial(r) * x * y for r, (x, y) in enumerate(zip(first, second, strict=True))], k)
        slope = None
        if derivative:
            # The derivative with respect to the covariance is the moment of the derivatives.
            slope = _series(
                [r * _factorial(r) * x * y for r, (x, y) in enumerate(zip(first, second, strict=True)) if r],
                k,
            )
        return NormalMoments(nngp, slope)

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
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return self._expansion(a)[0]

    def gain(self) -> Activation:
        """Return ``x f'(x)``: the polynomial with each coefficient multiplied by its degree."""
        return PolynomialActivation(tuple(power * coefficient for power, coefficient in enumerate(self.coefficients)))


def monomial(degree: int) -> PolynomialActivation:
    """Return the activation ``x**degree``.

    Parameters
    ----------
    degree : int
        From 0 to 150.

    Raises
    ------
    SettingsError
        If the degree is outside this range.

    Examples
    --------
    >>> import torch
    >>> monomial(3)(torch.tensor(2.0)).item()
    8.0
    """
    degree = whole_number("degree", degree, least=0)
    return PolynomialActivation((0.0,) * degree + (1.0,))


def hermite(degree: int) -> PolynomialActivation:
    """Return the probabilists' Hermite polynomial, scaled to second moment one under the standard normal distribution.

    Parameters
    ----------
    degree : int
        From 0 to 40; higher degrees lose accuracy to cancellation of powers.

    Raises
    ------
    SettingsError
        If the degree is outside this range.

    Examples
    --------
    >>> import torch
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(hermite(3).moments(0.5 * one, one, one).nngp.item(), 12)  # 0.5**3
    0.125
    """
    degree = whole_number("degree", degree, least=0)
    if degree > _LARGEST_HERMITE:
        raise SettingsError(
            f"degree must be at most {_LARGEST_HERMITE}, not {degree}; higher degrees lose accuracy to cancellation"
        )
    basis = np.zeros(degree + 1)
    basis[degree] = 1.0
    return PolynomialActivation(
        tuple(float(x) for x in hermite_e.herme2poly(basis) / math.sqrt(math.factorial(degree)))
    )


def _factorial(number: int) -> float:
    return float(math.factorial(number))  # torch cannot multiply by integers of more than 64 bits


def _series(coefficients: list[Tensor], k: Tensor) -> Tensor:
    """Return a power series in the covariance, by Horner's rule."""
    if not coefficients:
        return torch.zeros_like(k)
    result = coefficients[-1].expand_as(k) if coefficients[-1].dim() else coefficients[-1] + torch.zeros_like(k)
    for coefficient in reversed(coefficients[:-1]):
        result = result * k + coefficient
    return result


# Any other activation: moments from its expansion in Hermite polynomials, by Gauss-Hermite quadrature.

_NEGLIGIBLE = 1e-300  # smaller quadrature weights, beyond 37 standard deviations, have lost digits and are left out

CHUNK = 1 << 12  # variances whose expansion is computed at once
_FINE_NODES = 1 << 13  # nodes of the trapezoidal rule that estimates the quadrature error
_FINEST = 1e-3  # standard deviations around zero in which these nodes are evenly spaced, a few millionths apart
_ROUNDING = 1e-13  # largest relative difference of second moments that counts as a rounding error
_REACH = 37.5  # range of the trapezoidal rule in standard deviations; squares of functions with moments are finite
SAME = 1e-5  # largest relative difference of function values that counts as a rounding error, also in float32


@dataclass(frozen=True)
class Quadrature(Activation):
    r"""A function whose moments are computed by quadrature.

    For each input variance ``a`` the function is expanded in Hermite polynomials,
    :math:`f(\sqrt a\,z) = \sum_n h_n(a)\,\mathrm{He}_n(z) / \sqrt{n!}`, with coefficients by Gauss-Hermite quadrature.
    Moments are power series in the correlation, :math:`\sum_n h_n(a) h_n(b) c^n`. The derivative, by automatic
    differentiation, is expanded in the same way. Errors are small for functions that are smooth on the scale of
    :math:`\sqrt a` and large for functions with kinks; see :meth:`error_bound`.

    Parameters
    ----------
    function : callable
        Elementwise function of a tensor, differentiable by torch.
    num_terms : int, default 128
        Largest number of terms of the series; terms below rounding error are left out.
    num_nodes : int, default 512
        Number of quadrature nodes.

    Raises
    ------
    SettingsError
        If the function is not callable, or there are fewer nodes than terms.
    ModelError
        When moments in a network are computed, if the function is not elementwise, or torch cannot differentiate it.

    Examples
    --------
    >>> import torch
    >>> tanh = Quadrature(torch.tanh)
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(tanh.moments(0.5 * one, one, one).nngp.item(), 10)
    0.1863244132
    """

    function: Callable[[Tensor], Tensor]
    num_terms: int = 128
    num_nodes: int = 512

    def __post_init__(self) -> None:
        """Check settings."""
        if not callable(self.function):
            raise SettingsError(f"an activation must be a function of a tensor, not {self.function!r}")
        least = whole_number("num_terms", self.num_terms, least=1)
        whole_number("num_nodes", self.num_nodes, least=least)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.function(x)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        scale = root(a) * root(b)
        cosine = k / torch.where(scale > 0, scale, 1)
        nngp = _hermite_series(self.expansion(a), self.expansion(b), cosine)
        if not derivative:
            return NormalMoments(nngp)
        slope = self._slope()
        return NormalMoments(nngp, _hermite_series(slope.expansion(a), slope.expansion(b), cosine))

    def expansion(self, a: Tensor) -> Tensor:
        """Return coefficients of the normalised Hermite polynomials at each variance, ``(*shape, num_terms)``."""
        nodes, polynomials = (x.to(a.device) for x in _rule(self.num_nodes, self.num_terms))
        pieces = root(a.double()).reshape(-1, 1).split(CHUNK)
        found = torch.cat([self._values(piece * nodes) @ polynomials for piece in pieces])
        return found.reshape(*a.shape, self.num_terms).to(a.dtype)

    def check_elementwise(self) -> None:
        """Check that the function is elementwise and deterministic.

        Raises
        ------
        ModelError
            If values change with the other entries of the tensor, with their order, or between calls.
        """
        x = torch.linspace(-3.1, 2.9, 35, dtype=torch.float64).reshape(5, 7)
        rows, columns = torch.tensor([3, 0, 4, 1]), torch.tensor([6, 2, 0, 5, 1])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, part = self._values(x), self._values(x[rows][:, columns])
        size = SAME * float(whole.abs().nan_to_num(0, 0, 0).max())
        if not torch.allclose(whole[rows][:, columns], part, rtol=SAME, atol=size, equal_nan=True):
            raise ModelError(
                f"{_name(self.function)} is not elementwise: its value at one entry depends on other entries or their "
                "order, or changes between calls; networks with such layers have a different limit, or none"
            )

    def error_bound(self, a: Tensor, b: Tensor | None = None, c: float = 1.0, derivative: bool = True) -> NormalMoments:
        r"""Return estimated upper bounds on the absolute errors of the moments.

        The truncation error after N terms is at most :math:`|c|^N \sqrt{R(a) R(b)}` by the Cauchy-Schwarz inequality,
        with :math:`R(a) = \mathrm E f(\sqrt a z)^2 - \sum_{n<N} h_n(a)^2`. The quadrature error is estimated in two
        ways: from the change of coefficients when the number of nodes is doubled, and from the difference of second
        moments to a trapezoidal rule with 8192 nodes. These nodes are thousandths of a standard deviation apart, and
        closer near zero; features between two nodes are missed.

        Parameters
        ----------
        a, b : Tensor
            Variances; by default ``b`` is ``a``.
        c : float, default 1.0
            Correlation; the bound grows with its absolute value.
        derivative : bool, default True
            Whether to bound the error of the moment of the derivatives.

        Returns
        -------
        NormalMoments
            Errors of both moments, in float64.

        Raises
        ------
        SettingsError
            If ``c`` is outside [-1, 1].
        """
        if not abs(c) <= 1:
            raise SettingsError(f"c must be a correlation in [-1, 1], not {c!r}")
        a = a.detach().double()
        b = a if b is None else b.detach().double()
        with torch.no_grad():
            slope = self._slope()._bound(a, b, abs(c)) if derivative else None
            return NormalMoments(self._bound(a, b, abs(c)), slope)

    def _bound(self, a: Tensor, b: Tensor, c: float) -> Tensor:
        parts = [self._parts(x) for x in ((a,) if a is b else (a, b))]
        first, second = parts[0], parts[-1]
        quadrature = first.off * second.length + (first.length + first.off) * second.off
        return c**self.num_terms * root(first.rest * second.rest) + quadrature + root(first.missed * second.missed)

    def _parts(self, a: Tensor) -> _Parts:
        """Return the norm of the series, its truncation error, and its quadrature errors."""
        finer = replace(self, num_nodes=2 * self.num_nodes)
        nodes, polynomials = (x.to(a.device) for x in _rule(finer.num_nodes, self.num_terms))
        values = self._values(root(a)[..., None] * nodes)
        fine = values @ polynomials
        second_moment = values.square() @ polynomials[:, 0]
        nodes, weights = (x.to(a.device) for x in _fine_rule())
        missed = (self._values(root(a)[..., None] * nodes).square() @ weights - second_moment).abs()
        return _Parts(
            fine.square().sum(-1).sqrt(),
            (second_moment - fine.square().sum(-1)).clamp_min(0),
            (self.expansion(a) - fine).square().sum(-1).sqrt(),
            torch.where(missed > _ROUNDING * second_moment, missed, 0),
        )

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return self.expansion(a)[..., 0]

    def gain(self) -> Activation:
        """Return ``x f'(x)``."""
        return replace(self, function=_Gain(self.function))

    def _slope(self) -> Quadrature:
        return replace(self, function=_Derivative(self.function))

    def _values(self, x: Tensor) -> Tensor:
        # Modules such as SELU(inplace=True) overwrite their input.
        try:
            values = self.function(x.clone())
        except BayeskitError:
            raise
        except Exception as error:  # the function's own code may raise any error
            raise ModelError(f"{_name(self.function)} fails on a tensor of shape {tuple(x.shape)}: {error}") from error
        if not isinstance(values, Tensor) or values.shape != x.shape:
            raise ModelError(f"{_name(self.function)} is not elementwise: it must return a tensor of its input's shape")
        return values


@dataclass(frozen=True)
class _Parts:
    """Norm of a truncated series, squared norm of the remainder, and quadrature errors of series and second moment."""

    length: Tensor
    rest: Tensor
    off: Tensor
    missed: Tensor


@dataclass(frozen=True)
class _Derivative:
    """Derivative of an elementwise function by automatic differentiation; zero at jumps."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``f'(x)``."""
        try:
            values, pull, *_ = vjp(lambda u: self.function(u.clone()), x)
            slopes: Tensor = pull(torch.ones_like(values))[0]
        except Exception as error:  # the function's own code may raise any error
            raise ModelError(
                f"torch.func cannot differentiate {_name(self.function)}: {error}. Remedy: write it with torch "
                "operations, or compute only the nngp kernel, which needs no derivative"
            ) from error
        return slopes


@dataclass(frozen=True)
class _Gain:
    """The derivative of a function with respect to the logarithm of its argument."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x f'(x)``."""
        return x * _Derivative(self.function)(x)


def _hermite_series(first: Tensor, second: Tensor, cosine: Tensor) -> Tensor:
    """Return the power series in the correlation with coefficients ``first * second``, by Horner's rule."""
    if not (visible(first) and visible(second)):
        return _horner(first, second, cosine, first.shape[-1])
    largest = [x.detach().abs().reshape(-1, x.shape[-1]).amax(0) for x in (first, second)]
    size = largest[0] * largest[1]
    felt = (size > torch.finfo(size.dtype).eps * size.sum()).nonzero()
    return _horner(first, second, cosine, int(felt.max()) + 1 if len(felt) else 1)


def _horner(first: Tensor, second: Tensor, cosine: Tensor, num_terms: int) -> Tensor:
    result = torch.zeros_like(cosine)
    for n in reversed(range(num_terms)):
        result = torch.addcmul(first[..., n] * second[..., n], result, cosine)
    return result


def _name(function: object) -> str:
    if isinstance(function, _Derivative | _Gain | Quadrature):
        return _name(function.function)
    return str(getattr(function, "__name__", function))


@lru_cache(maxsize=8)
def _rule(num_nodes: int, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return nodes for the standard normal distribution, and weights times normalised Hermite polynomials there."""
    nodes, weights = roots_hermitenorm(num_nodes)
    weights = weights / weights.sum()
    nodes, weights = nodes[weights > _NEGLIGIBLE], weights[weights > _NEGLIGIBLE]
    values = np.empty((len(nodes), num_terms))
    # The recurrence is linear, so it can start from the weights; the polynomials alone would overflow.
    values[:, 0] = weights
    if num_terms > 1:
        values[:, 1] = nodes * weights
    for n in range(1, num_terms - 1):
        values[:, n + 1] = (nodes * values[:, n] - math.sqrt(n) * values[:, n - 1]) / math.sqrt(n + 1)
    return torch.from_numpy(nodes), torch.from_numpy(values)


@lru_cache(maxsize=1)
def _fine_rule() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the trapezoidal rule for a standard normal variable, spaced by a hyperbolic sine."""
    end = math.asinh(_REACH / _FINEST)
    step = 2 * end / _FINE_NODES
    place = (torch.arange(_FINE_NODES, dtype=torch.float64) + 0.5) * step - end
    nodes = _FINEST * place.sinh()
    density = torch.exp(-0.5 * nodes.square()) / math.sqrt(2 * math.pi)
    return nodes, step * _FINEST * place.cosh() * density


# Smooth activations whose moments have a closed form: erf, GELU, sines, Gaussian bumps, exponentials.


class Smooth(Activation):
    """Base of activations whose moments have a closed form; moments of the gain are by quadrature."""

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

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        determinant = 1 + 2 * (a + b) + 4 * (gap_of(k, a, b) if gap is None else gap)
        nngp = (2 / math.pi) * torch.atan2(2 * k, determinant.sqrt())
        slope = (4 / math.pi) * determinant.rsqrt() if derivative else None
        return NormalMoments(nngp, slope)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return None: the function is odd, so its mean is zero."""
        return None


@dataclass(frozen=True)
class Gelu(Smooth):
    """The Gaussian error linear unit, ``x Phi(x)`` with the standard normal distribution function ``Phi``.

    References
    ----------
    Tsuchida, R., Pearce, T., van der Heide, C., Roosta, F., Gallagher, M. (2021). Avoiding kernel fixed points:
    computing with ELU and GELU infinite networks. AAAI 35, 9967-9977.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return functional.gelu(x)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables, by repeated integration by parts."""
        first, second = 1 + a, 1 + b
        square = k.square()
        if gap is None:
            gap = gap_of(k, a, b)
        determinant = 1 + a + b + gap
        both = 0.25 + torch.atan2(k, determinant.sqrt()) / (2 * math.pi)  # E Phi(u) Phi(v)
        density = determinant.rsqrt() / (2 * math.pi)
        nngp = k * both + density * (gap + square / first + square / second)
        slope = None
        if derivative:
            slope = both + k * density * (1 / first + 1 / second + 1 / determinant)
        return NormalMoments(nngp, slope)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return a * (2 * math.pi * (1 + a)).rsqrt()


@dataclass(frozen=True)
class Sine(Smooth):
    """A sine of given amplitude, angular frequency and phase; phase ``pi / 2`` gives a cosine.

    With amplitude ``sqrt(2)`` and phase ``pi / 4`` its kernel is the squared-exponential (RBF) kernel
    ``exp(-frequency**2 E(u - v)**2 / 2)``.
    """

    frequency: float = 1.0
    phase: float = 0.0
    amplitude: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.amplitude * torch.sin(self.frequency * x + self.phase)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables, from their difference and sum."""
        square = self.frequency**2
        difference = torch.exp(-0.5 * square * (a + b - 2 * k))
        total = math.cos(2 * self.phase) * torch.exp(-0.5 * square * (a + b + 2 * k))
        half = 0.5 * self.amplitude**2
        return NormalMoments(half * (difference - total), half * square * (difference + total) if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return self.amplitude * math.sin(self.phase) * torch.exp(-0.5 * self.frequency**2 * a)


@dataclass(frozen=True)
class GaussianBump(Smooth):
    """``exp(-rate x**2)``."""

    rate: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return torch.exp(-self.rate * x.square())

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        twice = 2 * self.rate
        determinant = 1 + twice * (a + b) + twice * twice * (gap_of(k, a, b) if gap is None else gap)
        nngp = determinant.rsqrt()
        return NormalMoments(nngp, twice * twice * k * nngp / determinant if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return (1 + 2 * self.rate * a).rsqrt()


@dataclass(frozen=True)
class ExponentialActivation(Smooth):
    """``exp(rate x)``."""

    rate: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return torch.exp(self.rate * x)

    def moments(
        self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True
    ) -> NormalMoments:
        """Return moments of the function of two jointly normal variables."""
        square = self.rate**2
        nngp = torch.exp(0.5 * square * (a + b + 2 * k))
        return NormalMoments(nngp, square * nngp if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a centred normal variable with variance ``a``."""
        return torch.exp(0.5 * self.rate**2 * a)


# The activation of a function.

_HALF_PI = 1.5707963267948966

_CLOSED: dict[Any, Callable[..., Activation | None]] = {
    torch.relu: lambda: PiecewiseLinear(0.0, 1.0),
    functional.relu: lambda inplace=False: PiecewiseLinear(0.0, 1.0),
    functional.leaky_relu: lambda negative_slope=0.01, inplace=False: PiecewiseLinear(negative_slope, 1.0),
    torch.abs: lambda: PiecewiseLinear(-1.0, 1.0),
    operator.abs: lambda: PiecewiseLinear(-1.0, 1.0),
    torch.erf: Erf,
    torch.special.erf: Erf,
    torch.sin: Sine,
    torch.cos: lambda: Sine(phase=_HALF_PI),
    torch.exp: ExponentialActivation,
    torch.sign: Step,
    torch.square: lambda: monomial(2),
    torch.pow: lambda exponent: _power(exponent),
    operator.pow: lambda exponent: _power(exponent),
}
_METHODS = torch.relu, torch.abs, torch.erf, torch.sin, torch.cos, torch.exp, torch.sign, torch.square, torch.pow
_CLOSED |= {function.__name__: _CLOSED[function] for function in _METHODS}
_SAME = (
    *(torch.tanh, torch.sigmoid, functional.silu, functional.softplus, functional.elu, functional.selu),
    *(functional.celu, functional.mish, functional.hardtanh, functional.relu6, functional.softsign),
    *(functional.logsigmoid, functional.hardswish, functional.hardsigmoid, functional.tanhshrink),
)
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{function: function for function in _SAME},
    **dict.fromkeys(("tanh", functional.tanh), torch.tanh),
    **dict.fromkeys(("sigmoid", functional.sigmoid), torch.sigmoid),
}


def activation_of_function(target: Any, settings: tuple[Any, ...], options: dict[str, Any]) -> Activation | None:
    """Return the activation of a function, or of a tensor method given by name; None if it is unknown.

    ``settings`` and ``options`` are the positional and keyword arguments after the tensor.
    """
    if target is functional.gelu:
        return Gelu() if options.get("approximate", "none") == "none" else Quadrature(_Bound(target, (), options))
    if target in _CLOSED:
        return _CLOSED[target](*settings, **options)
    if target in _FUNCTIONS:
        function = _FUNCTIONS[target]
        return Quadrature(_Bound(function, settings, options) if settings or options else function)
    return None


def _power(exponent: Any) -> Activation | None:
    """Return a monomial, or None for other powers, which are infinite at zero or undefined for negative numbers."""
    whole = isinstance(exponent, int | float) and float(exponent).is_integer() and exponent >= 0
    return monomial(int(exponent)) if whole else None


@dataclass(frozen=True)
class _Bound:
    """A function with fixed further arguments."""

    function: Callable[..., Any]
    settings: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x, *self.settings, **self.options)
        return result


# Activations as torch modules, and the activation of a torch module.

_PROBES = (-2.3, -0.4, 0.0, 0.7, 1.1, 2.6, 3.9)  # test points of the check for elementwise functions
_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Hardtanh, nn.ReLU6),
    *(nn.Softsign, nn.LogSigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink),
)


class Elementwise(nn.Module):
    """An activation, or any elementwise function, as a torch module.

    Parameters
    ----------
    activation : Activation or callable
        Moments of torch's own functions are in closed form where available; other functions use quadrature.

    Attributes
    ----------
    activation : Activation

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 8), Elementwise(torch.tanh), nn.Linear(8, 1))
    >>> Elementwise(torch.erf).activation
    Erf()
    """

    def __init__(self, activation: Activation | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation = _activation_of(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.activation(x)


def activation_of_module(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes, or None."""
    if isinstance(module, Elementwise):
        return module.activation
    if isinstance(module, nn.ReLU) and _unchanged(module, nn.ReLU):
        return PiecewiseLinear(0.0, 1.0)
    if isinstance(module, nn.LeakyReLU) and _unchanged(module, nn.LeakyReLU):
        return PiecewiseLinear(module.negative_slope, 1.0)
    if isinstance(module, nn.GELU) and _unchanged(module, nn.GELU):
        return Gelu() if module.approximate == "none" else Quadrature(module)
    return Quadrature(module) if isinstance(module, _MODULES) else None


def _unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module has the forward method of class ``kind``."""
    return type(module).forward is kind.forward


def _activation_of(function: Activation | Callable[[Tensor], Tensor]) -> Activation:
    if isinstance(function, Activation):
        return function
    known = None
    if isinstance(function, nn.Module):
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise SettingsError(
                f"{type(function).__name__} has trainable parameters, but an activation must be a fixed function; "
                "freeze them with requires_grad_(False)"
            )
        known = activation_of_module(function)
    elif callable(function) and isinstance(function, Hashable):
        known = activation_of_function(function, (), {})
    if known is None:
        known = Quadrature(function)
        _check_elementwise(function)
    return known


@torch.no_grad()
def _check_elementwise(function: Callable[[Tensor], Tensor]) -> None:
    """Raise a ``ModelError`` if a function mixes the entries of a tensor or is random."""
    # Repeated, because two-valued noise could agree by chance on few entries.
    x = torch.tensor(_PROBES, dtype=torch.float64).repeat(8)
    part = len(x) - 4
    try:
        with global_stream(new_generator(0)):  # in case there is noise
            values, reversed_part = function(x.clone()), function(x[:part].flip(0))
    except RuntimeError:  # for example, its tensors are on another device, as the data may be
        return
    alike = isinstance(values, Tensor) and values.shape == x.shape
    if alike:
        again = reversed_part.double().flip(0)
        alike = torch.allclose(again, values[:part].double(), rtol=1e-9, equal_nan=True)
    if not alike:
        raise ModelError(
            "an activation must be elementwise and deterministic, but this function mixes the entries of a tensor or "
            "is random; use separate layers for softmax, normalization and dropout"
        )
