"""Estimators of the marginal likelihood, with standard errors and diagnostics."""

from bayeskit.inference.evidence._arithmetic_mean import corrected_arithmetic_mean
from bayeskit.inference.evidence._bridge import bridge_sampling, warp_bridge_sampling
from bayeskit.inference.evidence._budget import (
    Budget,
    LadderBudget,
    NestedSamplingBudget,
    PosteriorBudget,
    SMCBudget,
)
from bayeskit.inference.evidence._calibration import Calibration, Problem, calibrate
from bayeskit.inference.evidence._chibs_method import chib
from bayeskit.inference.evidence._comparison import EvidenceComparison, compare
from bayeskit.inference.evidence._conditionals import ConjugateBlock
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._empirical_bayes import maximize
from bayeskit.inference.evidence._flows import fit_flow, flow_importance_sampling, learned_harmonic_mean
from bayeskit.inference.evidence._judging._constants import check_constants
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, from_draws
from bayeskit.inference.evidence._judging._verdict import Verdict
from bayeskit.inference.evidence._ladder import (
    generalised_stepping_stone,
    modified_path_sampling,
    path_sampling,
    stepping_stone,
    thermodynamic_integration,
)
from bayeskit.inference.evidence._laplace_approximation import (
    laplace,
    laplace_importance_sampling,
    maximum_likelihood,
    maximum_posterior,
)
from bayeskit.inference.evidence._laplus import (
    beta_prime_laplus,
    gamma_laplus,
    gamma_laplus_importance_sampling,
    lognormal_laplus,
)
from bayeskit.inference.evidence._likelihood_weights import harmonic_mean, naive_monte_carlo, stabilised_harmonic_mean
from bayeskit.inference.evidence._methods import METHODS, Method, Part, select
from bayeskit.inference.evidence._modes import find_mode
from bayeskit.inference.evidence._nested_evidence import nested_sampling
from bayeskit.inference.evidence._predictive import conditional_predictive_ordinates, pointwise_predictive_density
from bayeskit.inference.evidence._prequential_evidence import prequential
from bayeskit.inference.evidence._result import Evidence, PredictiveScore
from bayeskit.inference.evidence._sequential import adaptive_smc, smc
from bayeskit.inference.evidence._tolerance import tolerance_check
from bayeskit.inference.evidence._variational import (
    evidence_lower_bound,
    fit_mean_field,
    variational_importance_sampling,
)

__all__ = [
    "Budget",
    "Calibration",
    "ConjugateBlock",
    "Diagnostics",
    "Evidence",
    "EvidenceComparison",
    "LadderBudget",
    "METHODS",
    "Method",
    "NestedSamplingBudget",
    "Part",
    "PosteriorBudget",
    "PredictiveScore",
    "Problem",
    "SMCBudget",
    "Verdict",
    "adaptive_smc",
    "beta_prime_laplus",
    "bridge_sampling",
    "calibrate",
    "check_constants",
    "chib",
    "compare",
    "conditional_predictive_ordinates",
    "corrected_arithmetic_mean",
    "estimator",
    "evidence_lower_bound",
    "find_mode",
    "fit_flow",
    "fit_mean_field",
    "flow_importance_sampling",
    "from_draws",
    "gamma_laplus",
    "gamma_laplus_importance_sampling",
    "generalised_stepping_stone",
    "harmonic_mean",
    "laplace",
    "laplace_importance_sampling",
    "learned_harmonic_mean",
    "lognormal_laplus",
    "maximize",
    "maximum_likelihood",
    "maximum_posterior",
    "modified_path_sampling",
    "naive_monte_carlo",
    "nested_sampling",
    "path_sampling",
    "pointwise_predictive_density",
    "prequential",
    "select",
    "smc",
    "stabilised_harmonic_mean",
    "stepping_stone",
    "thermodynamic_integration",
    "tolerance_check",
    "variational_importance_sampling",
    "warp_bridge_sampling",
]
