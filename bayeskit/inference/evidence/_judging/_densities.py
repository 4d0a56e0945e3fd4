"""Densities that are not a number, infinite, or rounded."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._logdensity.target import Target

#: Coordinates below this magnitude, in units of the log of the rounding unit, do not round to an end of the support.
_NEAR = 0.8


def without_nan(log_likelihood: Tensor) -> tuple[Tensor, list[str]]:
    """Replace NaN log likelihoods by minus infinity; also return a warning."""
    bad = log_likelihood.isnan()
    if not bool(bad.any()):
        return log_likelihood, []
    share = 100 * float(bad.to(torch.float64).mean())
    problem = f"the likelihood is NaN at {share:.2g} % of the points and was counted as zero there: correct the model"
    return torch.where(bad, -torch.inf, log_likelihood), [problem]


def without_infinity(log_density: Tensor) -> tuple[Tensor, list[str]]:
    """Return log densities with infinity as minus infinity, and a warning if there was any."""
    bad = log_density == torch.inf
    if not bool(bad.any()):
        return log_density, []
    share = 100 * float(bad.double().mean())
    problem = f"the density is infinite at {share:.2g} % of the points and counts as zero there: correct the model"
    return torch.where(bad, -torch.inf, log_density), [problem]


def with_rounding(standard_error: float, log_values: Tensor) -> float:
    """Add to a standard error the rounding error of log densities of this magnitude."""
    finite = log_values[log_values.isfinite()]
    size = float(finite.abs().median()) if finite.numel() else 0.0
    return math.hypot(standard_error, size * torch.finfo(log_values.dtype).eps)


def rounding_problems(
    target: Target, points: Tensor, log_weights: Tensor | None, standard_error: float
) -> tuple[list[str], float]:
    """Return a warning if rounded values can move an estimate by a standard error, and the share of mass affected.

    The points ``(*batch, d)`` stand for the posterior with ``log_weights (*batch)``, equal if None.
    """
    points = points.reshape(-1, points.shape[-1])
    weights = torch.ones_like(points[:, 0]) if log_weights is None else log_weights.reshape(-1).softmax(0)
    weights = weights / weights.sum()
    # The model is evaluated only at the few points that are so far out.
    end = -math.log(torch.finfo(points.dtype).eps)
    far = _NEAR * end
    rows = ((points.abs() > far).any(-1) & points.isfinite().all(-1)).nonzero().flatten()
    if not len(rows):
        return [], 0.0
    change, rounded = target.rounding(points[rows])
    # A likelihood that changes by one unit of rounding is a power of the distance to the end, which halves every log 2
    # of the coordinate: the exact value is many halvings closer.
    halvings = ((points[rows].abs().amax(-1) - end) / math.log(2)).clamp(min=1.0)
    moved = -torch.expm1(-halvings * change.abs().nan_to_num(nan=0.0))
    share = float((weights[rows] * moved).sum())
    if not share > standard_error:
        return [], share
    affected = [name for name, where in rounded.items() if bool((where & (moved > 0)).any())]
    return [
        f"{100 * share:.2g} % of the posterior lies where values of {', '.join(map(repr, affected))} are rounded to "
        "an end of their support, and the likelihood depends on their distance from it: write the likelihood as a "
        "function of the unconstrained value, such as Bernoulli(logits=...), or take a prior with less mass at the end"
    ], share
