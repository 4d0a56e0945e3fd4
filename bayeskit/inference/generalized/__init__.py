"""Updating beliefs by a loss instead of a likelihood."""

from bayeskit.inference.generalized import calibrate, losses
from bayeskit.inference.generalized.bootstrap.loss_likelihood_bootstrap import loss_likelihood_bootstrap
from bayeskit.inference.generalized.bootstrap.posterior_bootstrap import posterior_bootstrap
from bayeskit.inference.generalized.checks.coherence import CoherenceReport, coherence_check
from bayeskit.inference.generalized.checks.mismatch import ResidualMismatch, residual_mismatch
from bayeskit.inference.generalized.checks.propriety import ProprietyReport, propriety_check
from bayeskit.inference.generalized.coarsened import (
    CalibrationCurve,
    calibration_curve,
    coarsened_posterior,
    coarsening_weight,
)
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors, replicate_posteriors
from bayeskit.inference.generalized.coverage.report import BatchSelector, CoverageReport, coverage_report
from bayeskit.inference.generalized.cross_validation.data_particles import Carriage
from bayeskit.inference.generalized.cross_validation.evidence import (
    cross_validation_evidence,
    enumerated_cross_validation,
)
from bayeskit.inference.generalized.cross_validation.prequential import Prequential, prequential
from bayeskit.inference.generalized.cross_validation.result import CrossValidation
from bayeskit.inference.generalized.exact.conjugate import (
    BetaPosterior,
    GaussianPosterior,
    Quadratic,
    beta_posterior,
    gaussian_posterior,
    quadratic_coefficients,
)
from bayeskit.inference.generalized.exact.grid import GridPosterior, grid_posterior
from bayeskit.inference.generalized.martingale.copula import CopulaUpdate
from bayeskit.inference.generalized.martingale.posterior import MartingalePosterior, martingale_posterior
from bayeskit.inference.generalized.martingale.predictive import PolyaUrn, Predictive, ScoreDriven, normal_location
from bayeskit.inference.generalized.minimizer import Minimum, minimize
from bayeskit.inference.generalized.pooling import DeepSets, Max, Mean, Pooling, Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.prior import Flat
from bayeskit.inference.generalized.sandwich import Information, information
from bayeskit.inference.generalized.variational import divergences
from bayeskit.inference.generalized.variational.objective import GVI

__all__ = [
    "BatchSelector",
    "BetaPosterior",
    "CalibrationCurve",
    "Carriage",
    "CoherenceReport",
    "CopulaUpdate",
    "CoverageReport",
    "CrossValidation",
    "DeepSets",
    "Flat",
    "GVI",
    "GaussianPosterior",
    "GibbsPosterior",
    "GridPosterior",
    "Information",
    "MartingalePosterior",
    "Max",
    "Mean",
    "Minimum",
    "PolyaUrn",
    "Pooling",
    "Predictive",
    "Prequential",
    "ProprietyReport",
    "Quadratic",
    "ReplicatePosteriors",
    "ResidualMismatch",
    "ScoreDriven",
    "Sum",
    "beta_posterior",
    "calibrate",
    "calibration_curve",
    "coarsened_posterior",
    "coarsening_weight",
    "coherence_check",
    "coverage_report",
    "cross_validation_evidence",
    "divergences",
    "enumerated_cross_validation",
    "gaussian_posterior",
    "grid_posterior",
    "information",
    "loss_likelihood_bootstrap",
    "losses",
    "martingale_posterior",
    "minimize",
    "normal_location",
    "posterior_bootstrap",
    "prequential",
    "propriety_check",
    "quadratic_coefficients",
    "replicate_posteriors",
    "residual_mismatch",
]
