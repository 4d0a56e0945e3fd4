"""Diagnostics of importance weights: their tail, their effective number, and what their proposal does not cover."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit._core.convergence import MAX_PARETO_SHAPE, MIN_EFFECTIVE
from bayeskit._core.statistics import log_mean_exp, num_largest, pareto_shape
from bayeskit._draws import Draws

#: Share of posterior draws above which those that the proposal does not cover matter.
MIN_MISSED_SHARE = 0.01
#: Largest Pareto shape of weights with finite variance.
_INFINITE_VARIANCE = 0.5
#: Weights that are all below so many times their mean have no tail that matters.
_BOUNDED = 10.0


def weight_problems(shape: float, effective: float) -> list[str]:
    """Check importance weights by their Pareto shape and effective number."""
    problems = []
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): "
            "use bridge sampling or stepping stone"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: use more draws or a closer proposal")
    return problems


def largest_shape(num_weights: int, slowness: float = 1.0) -> float:
    """Return the largest fitted Pareto ``k`` at which ``num_weights`` weights may have finite variance."""
    # The mean of raw weights has a standard error only for ``k`` below one half. The fit to the ``t`` largest weights
    # has an error of about ``(1 + k) / sqrt(t)``, and is too small if the largest weights were not drawn; the limit
    # allows for both. ``slowness`` is the number of draws per independent draw.
    effective = max((num_largest(num_weights) - 1) / max(slowness, 1.0), 1.0)
    return _INFINITE_VARIANCE - (1 + _INFINITE_VARIANCE) / math.sqrt(effective)


def shape_that_matters(log_weights: Tensor, others: Tensor) -> float:
    """Return the Pareto shape of weights, at most zero if neither they nor ``others`` include a large weight."""
    # A few weights that differ from all others can look like a heavy tail although no weight can dominate; ``others``
    # detect large weights sooner.
    mean = float(log_mean_exp(log_weights.reshape(1, -1)))
    largest = max(float(log_weights.max()), float(others.max()) if others.numel() else -math.inf)
    shape = pareto_shape(log_weights)
    return min(shape, 0.0) if largest - mean < math.log(_BOUNDED) else shape


def missed_draws(log_prob: Callable[[Tensor], Tensor], draws: Draws | None, largest: float) -> list[str]:
    """Return a warning if over 1 % of draws exceed the ``largest`` log weight; ``log_prob`` maps ``(n, d) -> (n,)``."""
    if draws is None:
        return []
    x = draws.unconstrained.flatten(0, 1)
    log_weights = (draws.log_prior + draws.log_likelihood).flatten() - log_prob(x)
    share = float((log_weights > largest).to(torch.float64).mean())
    if share <= MIN_MISSED_SHARE:
        return []
    return [f"{100 * share:.0f} % of the posterior draws lie outside the proposal: use bridge sampling"]
