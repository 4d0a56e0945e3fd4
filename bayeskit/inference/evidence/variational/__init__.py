"""Estimators from a distribution that was optimised to be close to the posterior."""

from bayeskit.inference.evidence.variational.evidence_lower_bound import evidence_lower_bound
from bayeskit.inference.evidence.variational.mean_field import MeanField, fit_mean_field
from bayeskit.inference.evidence.variational.variational_importance_sampling import variational_importance_sampling

__all__ = ["MeanField", "evidence_lower_bound", "fit_mean_field", "variational_importance_sampling"]
