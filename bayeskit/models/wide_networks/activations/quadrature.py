"""Any other activation: moments from its expansion in Hermite polynomials, by Gauss-Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from bayeskit.models.wide_networks.activations.activation import Activation, Moments


@dataclass(frozen=True)
class Quadrature(Activation):
    r"""A function whose moments have no closed form.

    The function of a normal number with variance ``a`` is expanded in Hermite polynomials, once an input,
    :math:`f(\sqrt a\,z) = \sum_n h_n(a)\,\mathrm{He}_n(z) / \sqrt{n!}`, with coefficients by Gauss-Hermite quadrature,
    and moments are power series in the correlation, :math:`\sum_n h_n(a) h_n(b) c^n`. What the terms left out could
    add is bounded by Cauchy and Schwarz, see :meth:`error_bound`.

    Parameters
    ----------
    function : callable
        From a tensor to one of the same shape, elementwise.
    num_terms : int, default 64
        Of the series.
    num_nodes : int, default 256
        Of the quadrature.

    Examples
    --------
    >>> import torch
    >>> tanh = Quadrature(torch.tanh)
    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> round(tanh.moments(0.5 * one, one, one).nngp.item(), 10)
    0.1863244132
    """

    function: Callable[[Tensor], Tensor]
    num_terms: int = 64
    num_nodes: int = 256

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        return self.function(x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        first, second = self.expansion(a), self.expansion(b)
        scale = (a * b).sqrt().clamp_min(torch.finfo(k.dtype).tiny)
        cosine = (k / scale).clamp(-1, 1)
        nngp = torch.zeros_like(cosine)
        slope = torch.zeros_like(cosine) if derivative else None
        for n in reversed(range(self.num_terms)):
            weight = first[..., n] * second[..., n]
            nngp = nngp * cosine + weight
            if slope is not None and n:
                slope = slope * cosine + n * weight
        return Moments(nngp, None if slope is None else slope / scale)

    def expansion(self, a: Tensor) -> Tensor:
        """Return the coefficients of normalised Hermite polynomials for each variance, ``(*shape, num_terms)``."""
        nodes, polynomials = _rule(self.num_nodes, self.num_terms)
        values = self.function(a[..., None].sqrt() * nodes.to(a))
        return values @ polynomials.to(a)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return self.expansion(a)[..., 0]

    def gain(self) -> Activation:
        """Return ``x f'(x)``."""
        return Quadrature(Gain(self.function), self.num_terms, self.num_nodes)


@dataclass(frozen=True)
class Gain:
    """The derivative of a function with respect to the logarithm of its argument."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x f'(x)``."""
        return x * vmap(grad(self.function))(x.reshape(-1)).reshape(x.shape)


@lru_cache(maxsize=8)
def _rule(num_nodes: int, num_terms: int) -> tuple[Tensor, Tensor]:
    """Return the nodes for a standard normal law, and weights times normalised Hermite polynomials at them."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / math.sqrt(2 * math.pi)
    values = np.empty((num_nodes, num_terms))
    values[:, 0] = 1.0
    if num_terms > 1:
        values[:, 1] = nodes
    for n in range(1, num_terms - 1):
        values[:, n + 1] = (nodes * values[:, n] - math.sqrt(n) * values[:, n - 1]) / math.sqrt(n + 1)
    return torch.from_numpy(nodes), torch.from_numpy(weights[:, None] * values)
