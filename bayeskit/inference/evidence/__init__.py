"""Marginal likelihoods: one estimator a file, each with an error bar and a verdict on itself."""

from bayeskit.inference.evidence.budget import Budget
from bayeskit.inference.evidence.compare import EvidenceComparison, compare
from bayeskit.inference.evidence.ladder.path_sampling import path_sampling
from bayeskit.inference.evidence.ladder.stepping_stone import stepping_stone
from bayeskit.inference.evidence.laplus import (
    beta_prime_laplus,
    gamma_laplus,
    gamma_laplus_importance_sampling,
    lognormal_laplus,
)
from bayeskit.inference.evidence.methods import METHODS, Material, Method, select
from bayeskit.inference.evidence.mode.laplace_importance_sampling import laplace_importance_sampling
from bayeskit.inference.evidence.posterior.bridge_sampling import bridge_sampling
from bayeskit.inference.evidence.posterior.harmonic_mean import harmonic_mean
from bayeskit.inference.evidence.prior.naive_monte_carlo import naive_monte_carlo
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.sequential.nested_sampling import nested_sampling
from bayeskit.inference.evidence.sequential.smc import smc

__all__ = [
    "METHODS",
    "Budget",
    "Evidence",
    "EvidenceComparison",
    "Material",
    "Method",
    "beta_prime_laplus",
    "bridge_sampling",
    "compare",
    "gamma_laplus",
    "gamma_laplus_importance_sampling",
    "harmonic_mean",
    "laplace_importance_sampling",
    "lognormal_laplus",
    "naive_monte_carlo",
    "nested_sampling",
    "path_sampling",
    "select",
    "smc",
    "stepping_stone",
]
