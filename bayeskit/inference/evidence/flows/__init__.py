"""Estimators from a normalizing flow that was fitted to posterior draws."""

from bayeskit.inference.evidence.flows.fitted_flow import FittedFlow, fit_flow
from bayeskit.inference.evidence.flows.importance_sampling import flow_importance_sampling
from bayeskit.inference.evidence.flows.learned_harmonic_mean import learned_harmonic_mean

__all__ = ["FittedFlow", "fit_flow", "flow_importance_sampling", "learned_harmonic_mean"]
