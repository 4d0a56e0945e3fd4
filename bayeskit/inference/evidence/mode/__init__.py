"""Estimators that look at the density where it is highest."""

from bayeskit.inference.evidence.mode.laplace import laplace
from bayeskit.inference.evidence.mode.laplace_importance_sampling import laplace_importance_sampling
from bayeskit.inference.evidence.mode.point_estimates import maximum_likelihood, maximum_posterior
from bayeskit.inference.evidence.modes import Mode, find_mode

__all__ = [
    "Mode",
    "find_mode",
    "laplace",
    "laplace_importance_sampling",
    "maximum_likelihood",
    "maximum_posterior",
]
