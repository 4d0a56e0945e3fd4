"""What Laplace's approximation of an integral misses: a number with its standard error, and quadrature along lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bayeskit.core.convergence import MAX_PARETO_SHAPE
from bayeskit.core.statistics import log_mean_exp, log_mean_exp_error, pareto_shape
from bayeskit.errors import SettingsError

__all__ = ["LaplaceCorrection", "LineRule", "line_rule"]

#: Ends of the panels of the quadrature in standard deviations, and the degree in each.
_EDGES, _DEGREE = (0.0, 1.0, 2.0, 3.0, 4.5, 6.5, 9.0, 12.0), 8
#: Standard deviation of log weights below which their tail says nothing.
_EQUAL_WEIGHTS = 1e-3
#: Share of an integral at the ends of the quadrature beyond which it is not trusted.
_MOST_LEFT_OVER = 1e-6
#: Halvings of an interval between two nodes, in the search for a quantile.
_HALVINGS = 30


E = TypeVar("E", bound=Any)  # Evidence, whose module imports this one


@dataclass(frozen=True, repr=False)
class LaplaceCorrection:
    """The ratio of an evidence to that by Laplace's approximation; made by :meth:`MarginalTarget.correction`.

    Attributes
    ----------
    log_weights : Tensor
        Log ratio of likelihood and approximation at some draws, ``(chains, draws)``.
    left_over : float
        Largest share of an integral beyond the ends of the quadrature; zero for importance sampling.

    Examples
    --------
    >>> import torch
    >>> LaplaceCorrection(torch.full((4, 100), 0.01, dtype=torch.float64))
    LaplaceCorrection(0.0100 +- 0.0000 nats)
    """

    log_weights: Tensor
    left_over: float = 0.0

    @property
    def log_ratio(self) -> float:
        """Log evidence minus that of the approximation, in nats."""
        return float(log_mean_exp(self.log_weights))

    @property
    def standard_error(self) -> float:
        """Monte Carlo standard error of :attr:`log_ratio`, in nats."""
        return float(log_mean_exp_error(self.log_weights))

    @property
    def pareto_k(self) -> float:
        """Shape of the largest weights; NaN if all are equal or there are too few."""
        return pareto_shape(self.log_weights.flatten())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the correction or its error cannot be trusted."""
        found = []
        if self.pareto_k > MAX_PARETO_SHAPE and float(self.log_weights.std()) > _EQUAL_WEIGHTS:
            found.append(
                f"the largest weights dominate the correction (Pareto k {self.pareto_k:.2f} > {MAX_PARETO_SHAPE}): the "
                "approximation is poor; take more points by num_inner=..., or sample these sites with the others"
            )
        if self.left_over > _MOST_LEFT_OVER:
            found.append(
                f"the quadrature leaves out up to {self.left_over:.1e} of an integral, beyond 12 standard deviations "
                "from the mode, or the density bends too much: the approximation is poor; sample these sites with the "
                "others"
            )
        if not found and not math.isfinite(self.log_ratio):
            found.append("the likelihood is zero or NaN at a point of the integral, so there is no correction")
        return tuple(found)

    @property
    def trusted(self) -> bool:
        """True if there is no warning."""
        return not self.warnings and math.isfinite(self.log_ratio)

    def applied(self, estimate: E) -> E:
        """Return an estimate of the evidence of the marginal target, corrected: values add up, variances as well.

        Parameters
        ----------
        estimate : Evidence
            Of the marginal target.

        Returns
        -------
        Evidence
            With the warnings of both, and the parts as ``diagnostics``.

        Raises
        ------
        SettingsError
            If the estimate is corrected already.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.evidence import Evidence
        >>> correction = LaplaceCorrection(torch.full((4, 100), 0.01, dtype=torch.float64))
        >>> correction.applied(Evidence("bridge_sampling", -94.08, 0.004, 8000))
        bridge_sampling: log evidence -94.0700 +- 0.0040
        """
        if "laplace_correction" in estimate.diagnostics:
            raise SettingsError(
                "the estimate is corrected already, as are all of a target made by marginalize(correct=True)"
            )
        return replace(
            estimate,
            log_evidence=estimate.log_evidence + self.log_ratio,
            standard_error=math.hypot(estimate.standard_error, self.standard_error),
            warnings=(*estimate.warnings, *self.warnings),
            diagnostics=estimate.diagnostics
            | {"laplace_correction": self.log_ratio, "laplace_correction_error": self.standard_error},
        )

    def __repr__(self) -> str:
        flag = "" if self.trusted else ", NOT TRUSTED: " + "; ".join(self.warnings)
        return f"LaplaceCorrection({self.log_ratio:.4f} +- {self.standard_error:.4f} nats{flag})"


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
