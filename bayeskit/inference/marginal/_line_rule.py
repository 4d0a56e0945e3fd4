"""Quadrature along a line from derivatives of the log density, and quantiles of the distribution."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Ends of the panels of the quadrature in standard deviations, and the degree in each.
_EDGES, _DEGREE = (0.0, 1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 12.0), 8
#: Halvings of an interval between two nodes, in the search for a quantile.
_HALVINGS = 30


class LineRule(NamedTuple):
    """A rule for integrals of exp(h) along a line from the derivative of h, with h(0) = 0."""

    nodes: Tensor  # (J,)
    log_weights: Tensor  # (J,)
    integrals: Tensor  # (J, J), from derivatives at all nodes to h at each

    def quantiles(self, height: Tensor, chance: Tensor) -> Tensor:
        """Return where the distribution functions of ``exp(h)`` ``(J, n, m)`` reach ``chance``, both ``(n, m)``.

        Between two nodes the distribution function is the cubic that has the density as slope at both.
        """
        density = (height - height.amax(0)).exp().movedim(0, -1)
        function = density @ self.integrals.T
        function = function - function[..., :1]
        level = (chance * function[..., -1]).unsqueeze(-1)
        right = torch.searchsorted(function.contiguous(), level).clamp(1, len(self.nodes) - 1)
        low, high = (function.gather(-1, k) for k in (right - 1, right))
        width = self.nodes[right] - self.nodes[right - 1]
        first, last = (density.gather(-1, k) * width for k in (right - 1, right))
        below, above = torch.zeros_like(level), torch.ones_like(level)
        for _ in range(_HALVINGS):
            t = 0.5 * (below + above)
            s = 1 - t
            cubic = s**2 * (1 + 2 * t) * low + t**2 * (1 + 2 * s) * high + s * t * (s * first - t * last)
            below, above = torch.where(cubic < level, t, below), torch.where(cubic < level, above, t)
        return (self.nodes[right - 1] + width * 0.5 * (below + above)).squeeze(-1)


@cache
def line_rule(pieces: int) -> LineRule:
    """Return the rule over panels, each in so many pieces of Chebyshev points (Clenshaw and Curtis)."""
    degree = _DEGREE
    parts = [np.linspace(low, high, pieces, endpoint=False) for low, high in pairwise(_EDGES)]
    edges = [*np.concatenate(parts).tolist(), _EDGES[-1]]
    x = np.cos(np.pi * np.arange(degree + 1) / degree)[::-1]
    coefficients = np.linalg.inv(np.polynomial.chebyshev.chebvander(x, degree))
    primitive = np.polynomial.chebyshev.chebint(coefficients, axis=0, lbnd=-1)
    inside = np.polynomial.chebyshev.chebvander(x, degree + 1) @ primitive  # integrals from -1 to each point
    count = degree * (len(edges) - 1)
    nodes, weights, integrals = np.zeros(count + 1), np.zeros(count + 1), np.zeros((count + 1, count + 1))
    for panel, (low, high) in enumerate(pairwise(edges)):
        here = slice(panel * degree, (panel + 1) * degree + 1)
        half = 0.5 * (high - low)
        nodes[here] = low + half * (x + 1)
        weights[here] += half * inside[-1]
        integrals[here, :] = integrals[panel * degree]
        integrals[here, here] += half * inside
    # The same to the left, with the point in the middle shared.
    size = 2 * count + 1
    both, add = np.zeros((size, size)), np.zeros(size)
    both[count:, count:] = integrals
    both[: count + 1, : count + 1] += -integrals[::-1, ::-1]
    add[count:] = weights
    add[: count + 1] += weights[::-1]
    points = np.concatenate([-nodes[:0:-1], nodes])
    return LineRule(*(torch.as_tensor(np.ascontiguousarray(a)) for a in (points, np.log(add), both)))
