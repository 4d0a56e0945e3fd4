"""Updating beliefs by a loss instead of a likelihood."""

from bayeskit.inference.generalized import calibrate, losses
from bayeskit.inference.generalized.coherence import CoherenceReport, coherence_check
from bayeskit.inference.generalized.conjugate import (
    BetaPosterior,
    GaussianPosterior,
    Quadratic,
    beta_posterior,
    gaussian_posterior,
    quadratic_coefficients,
)
from bayeskit.inference.generalized.cross_validation import cross_validation_evidence, enumerated_cross_validation
from bayeskit.inference.generalized.cross_validation_result import CrossValidation
from bayeskit.inference.generalized.data_particles import Carriage
from bayeskit.inference.generalized.grid import GridPosterior, grid_posterior
from bayeskit.inference.generalized.minimizer import Minimum, minimize
from bayeskit.inference.generalized.pooling import DeepSets, Max, Mean, Pooling, Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.prequential import Prequential, prequential
from bayeskit.inference.generalized.prior import Flat
from bayeskit.inference.generalized.propriety import ProprietyReport, propriety_check
from bayeskit.inference.generalized.sandwich import Information, information

__all__ = [
    "BetaPosterior",
    "Carriage",
    "CoherenceReport",
    "CrossValidation",
    "DeepSets",
    "Flat",
    "GaussianPosterior",
    "GibbsPosterior",
    "GridPosterior",
    "Information",
    "Max",
    "Mean",
    "Minimum",
    "Pooling",
    "Prequential",
    "ProprietyReport",
    "Quadratic",
    "Sum",
    "beta_posterior",
    "calibrate",
    "coherence_check",
    "cross_validation_evidence",
    "enumerated_cross_validation",
    "gaussian_posterior",
    "grid_posterior",
    "information",
    "losses",
    "minimize",
    "prequential",
    "propriety_check",
    "quadratic_coefficients",
]
