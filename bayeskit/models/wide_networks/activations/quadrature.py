"""Any other activation: moments from its expansion in Hermite polynomials, by Gauss-Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from scipy.special import roots_hermitenorm
from torch import Tensor
from torch.func import vjp

from bayeskit._settings import whole_number
from bayeskit.errors import BayeskitError, ModelError, SettingsError
from bayeskit.models.wide_networks.activations.activation import Activation, Moments
from bayeskit.models.wide_networks.covariance import root, visible

NEGLIGIBLE = 1e-300  # weights of nodes that are left out, beyond 37 standard deviations: float64 has lost their digits

CHUNK = 1 << 12  # variances whose expansion is computed at once
FINE_NODES = 1 << 13  # of the rule that judges the other
FINEST = 1e-3  # standard deviations within which its nodes are evenly spaced, a few millionths apart
ROUNDING = 1e-13  # relative differences of second moments that say nothing
REACH = 37.5  # standard deviations to which it extends; squares of functions that have moments are finite there
SAME = 1e-5  # relative differences of an elementwise function's values that are rounding errors, be it in float32


@dataclass(frozen=True)
class Quadrature(Activation):
    r"""A function whose moments have no closed form.

    The function of a normal number with variance ``a`` is expanded in Hermite polynomials, once an input,
    :math:`f(\sqrt a\,z) = \sum_n h_n(a)\,\mathrm{He}_n(z) / \sqrt{n!}`, with coefficients by Gauss-Hermite quadrature,
    and moments are power series in the correlation, :math:`\sum_n h_n(a) h_n(b) c^n`; likewise those of the
    derivative, which torch finds. What errors may be :meth:`error_bound` tells: small for functions that are smooth
    on the scale of :math:`\sqrt a`, large for those with kinks.

    Parameters
    ----------
    function : callable
        From a tensor to one of the same shape, elementwise, of operations that torch can differentiate.
    num_terms : int, default 128
        Of the series, at most; those that rounding would swallow are left out.
    num_nodes : int, default 512
        Of the quadrature.

    Raises
    ------
    SettingsError
        If the function cannot be called, or there are fewer nodes than terms.
    ModelError
        As moments in a network are computed, if the function is not elementwise, or as those of derivatives are, if
        torch cannot differentiate it.

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

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        scale = root(a) * root(b)
        cosine = k / torch.where(scale > 0, scale, 1)
        nngp = _series(self.expansion(a), self.expansion(b), cosine)
        if not derivative:
            return Moments(nngp)
        slope = self._slope()
        return Moments(nngp, _series(slope.expansion(a), slope.expansion(b), cosine))

    def expansion(self, a: Tensor) -> Tensor:
        """Return the coefficients of normalised Hermite polynomials for each variance, ``(*shape, num_terms)``."""
        nodes, polynomials = (x.to(a.device) for x in _rule(self.num_nodes, self.num_terms))
        pieces = root(a.double()).reshape(-1, 1).split(CHUNK)
        found = torch.cat([self._values(piece * nodes) @ polynomials for piece in pieces])
        return found.reshape(*a.shape, self.num_terms).to(a.dtype)

    def check_elementwise(self) -> None:
        """Refuse functions whose values at some numbers depend on others, or on chance.

        Raises
        ------
        ModelError
            If values are others in part of a tensor, in another order or at a second time.
        """
        x = torch.linspace(-3.1, 2.9, 35, dtype=torch.float64).reshape(5, 7)
        rows, columns = torch.tensor([3, 0, 4, 1]), torch.tensor([6, 2, 0, 5, 1])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, part = self._values(x), self._values(x[rows][:, columns])
        size = SAME * float(whole.abs().nan_to_num(0, 0, 0).max())
        if not torch.allclose(whole[rows][:, columns], part, rtol=SAME, atol=size, equal_nan=True):
            raise ModelError(
                f"{_name(self.function)} is not elementwise: its values at some numbers are others in part of a "
                "tensor, or in another order; networks with such layers have another limit, or none"
            )

    def error_bound(self, a: Tensor, b: Tensor | None = None, c: float = 1.0, derivative: bool = True) -> Moments:
        r"""Return how far moments may be off.

        What the terms left out can add is bounded by Cauchy and Schwarz,
        :math:`|c|^N \sqrt{R(a) R(b)}` with :math:`R(a) = \mathrm E f(\sqrt a z)^2 - \sum_{n<N} h_n(a)^2` after N terms.
        That is a bound but for the quadrature's own error, which is estimated: by the change of coefficients as nodes
        are doubled, and by how far second moments are from those of another rule, a trapezoidal one whose 8192 nodes
        lie within thousandths of a standard deviation, and closer towards zero. It misses what lies between those.

        Parameters
        ----------
        a, b : Tensor
            Variances; by default ``b`` is ``a``.
        c : float, default 1.0
            The correlation; the bound grows with its size.
        derivative : bool, default True
            Whether that of derivatives is wanted.

        Returns
        -------
        Moments
            Of the errors of both moments, in float64.
        """
        if not abs(c) <= 1:
            raise SettingsError(f"c must be a correlation in [-1, 1], not {c!r}")
        a = a.detach().double()
        b = a if b is None else b.detach().double()
        with torch.no_grad():
            slope = self._slope()._bound(a, b, abs(c)) if derivative else None
            return Moments(self._bound(a, b, abs(c)), slope)

    def _bound(self, a: Tensor, b: Tensor, c: float) -> Tensor:
        parts = [self._parts(x) for x in ((a,) if a is b else (a, b))]
        first, second = parts[0], parts[-1]
        quadrature = first.off * second.length + (first.length + first.off) * second.off
        return c**self.num_terms * root(first.rest * second.rest) + quadrature + root(first.missed * second.missed)

    def _parts(self, a: Tensor) -> _Parts:
        """Return how long the series is, what it leaves out, and by how much other nodes change it."""
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
            torch.where(missed > ROUNDING * second_moment, missed, 0),
        )

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return self.expansion(a)[..., 0]

    def gain(self) -> Activation:
        """Return ``x f'(x)``."""
        return replace(self, function=Gain(self.function))

    def _slope(self) -> Quadrature:
        return replace(self, function=Derivative(self.function))

    def _values(self, x: Tensor) -> Tensor:
        # Modules such as SELU(inplace=True) write into what they are given.
        try:
            values = self.function(x.clone())
        except BayeskitError:
            raise
        except Exception as error:  # whatever the function's own code raises on its tensors
            raise ModelError(f"{_name(self.function)} fails on a tensor of shape {tuple(x.shape)}: {error}") from error
        if not isinstance(values, Tensor) or values.shape != x.shape:
            raise ModelError(f"{_name(self.function)} is not elementwise: it must return a tensor of its input's shape")
        return values


@dataclass(frozen=True)
class _Parts:
    """Of a truncated series: its length, the squared length of what is missing, and by how much nodes move both."""

    length: Tensor
    rest: Tensor
    off: Tensor
    missed: Tensor


@dataclass(frozen=True)
class Derivative:
    """The derivative of an elementwise function, as torch finds it: zero at jumps."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``f'(x)``."""
        try:
            values, pull, *_ = vjp(lambda u: self.function(u.clone()), x)
            slopes: Tensor = pull(torch.ones_like(values))[0]
        except Exception as error:  # torch raises whatever the function's own code raises on its tensors
            raise ModelError(
                f"{_name(self.function)} has no derivative that torch.func finds: {error}. Write it with torch's "
                "operations; or take the nngp kernel only, which needs none"
            ) from error
        return slopes


@dataclass(frozen=True)
class Gain:
    """The derivative of a function with respect to the logarithm of its argument."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x f'(x)``."""
        return x * Derivative(self.function)(x)


def _series(first: Tensor, second: Tensor, cosine: Tensor) -> Tensor:
    """Return a power series in the correlation, whose coefficients are products, by Horner's rule."""
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
    if isinstance(function, Derivative | Gain | Quadrature):
        return _name(function.function)
    return str(getattr(function, "__name__", function))


@lru_cache(maxsize=8)
def _rule(num_nodes: int, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return the nodes for a standard normal law, and weights times normalised Hermite polynomials at them."""
    nodes, weights = roots_hermitenorm(num_nodes)
    weights = weights / weights.sum()
    nodes, weights = nodes[weights > NEGLIGIBLE], weights[weights > NEGLIGIBLE]
    values = np.empty((len(nodes), num_terms))
    # The recurrence is linear, so that it may begin with the weights; polynomials alone would overflow.
    values[:, 0] = weights
    if num_terms > 1:
        values[:, 1] = nodes * weights
    for n in range(1, num_terms - 1):
        values[:, n + 1] = (nodes * values[:, n] - math.sqrt(n) * values[:, n - 1]) / math.sqrt(n + 1)
    return torch.from_numpy(nodes), torch.from_numpy(values)


@lru_cache(maxsize=1)
def _fine_rule() -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the trapezoidal rule for a standard normal law, in steps of a hyperbolic sine."""
    end = math.asinh(REACH / FINEST)
    step = 2 * end / FINE_NODES
    place = (torch.arange(FINE_NODES, dtype=torch.float64) + 0.5) * step - end
    nodes = FINEST * place.sinh()
    density = torch.exp(-0.5 * nodes.square()) / math.sqrt(2 * math.pi)
    return nodes, step * FINEST * place.cosh() * density
