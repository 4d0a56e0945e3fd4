"""Generalized Bayesian inference, with a loss in place of the negative log likelihood."""

from bayeskit.inference.generalized import calibrate, losses
from bayeskit.inference.generalized._bootstrap import loss_likelihood_bootstrap, posterior_bootstrap
from bayeskit.inference.generalized._certificates import (
    certify,
    divergence_from_prior,
    invert_binary_divergence,
    pac_bayes_certificate,
)
from bayeskit.inference.generalized._checks import (
    coherence_check,
    propriety_check,
    residual_mismatch,
)
from bayeskit.inference.generalized._coarsened import (
    calibration_curve,
    coarsened_posterior,
    coarsening_weight,
)
from bayeskit.inference.generalized._coverage import (
    BatchSelector,
    coverage_report,
    replicate_posteriors,
)
from bayeskit.inference.generalized._exact import (
    beta_posterior,
    gaussian_posterior,
    grid_posterior,
)
from bayeskit.inference.generalized._generalization import (
    generalization_gap,
    path_information,
)
from bayeskit.inference.generalized._minimizer import information_matrices, minimize
from bayeskit.inference.generalized._posterior import DeepSets, GibbsPosterior, Max, Mean, Pooling, Sum
from bayeskit.inference.generalized._prior import Flat

__all__ = [
    "BatchSelector",
    "DeepSets",
    "Flat",
    "GibbsPosterior",
    "Max",
    "Mean",
    "Pooling",
    "Sum",
    "beta_posterior",
    "calibrate",
    "calibration_curve",
    "certify",
    "coarsened_posterior",
    "coarsening_weight",
    "coherence_check",
    "coverage_report",
    "divergence_from_prior",
    "gaussian_posterior",
    "generalization_gap",
    "grid_posterior",
    "information_matrices",
    "invert_binary_divergence",
    "loss_likelihood_bootstrap",
    "losses",
    "minimize",
    "pac_bayes_certificate",
    "path_information",
    "posterior_bootstrap",
    "propriety_check",
    "replicate_posteriors",
    "residual_mismatch",
]
