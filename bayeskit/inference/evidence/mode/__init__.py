"""Estimators that look at the density where it is highest."""

from bayeskit.inference.evidence.mode.laplace import laplace
from bayeskit.inference.evidence.mode.laplace_importance_sampling import laplace_importance_sampling
from bayeskit.inference.evidence.mode.modes import Mode, find_mode
from bayeskit.inference.evidence.mode.point_estimates import maximum_likelihood, maximum_posterior

__all__ = [
    "Mode",
    "find_mode",
    "laplace",
    "laplace_importance_sampling",
    "maximum_likelihood",
    "maximum_posterior",
]
