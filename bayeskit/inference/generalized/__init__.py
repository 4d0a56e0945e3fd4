"""Updating beliefs by a loss instead of a likelihood."""

from bayeskit.inference.generalized import losses
from bayeskit.inference.generalized.coherence import CoherenceReport, coherence_check
from bayeskit.inference.generalized.conjugate import (
    BetaPosterior,
    GaussianPosterior,
    Quadratic,
    beta_posterior,
    gaussian_posterior,
    quadratic_coefficients,
)
from bayeskit.inference.generalized.grid import GridPosterior, grid_posterior
from bayeskit.inference.generalized.minimizer import Minimum, minimize
from bayeskit.inference.generalized.pooling import DeepSets, Max, Mean, Pooling, Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.prior import Flat
from bayeskit.inference.generalized.propriety import ProprietyReport, propriety_check
from bayeskit.inference.generalized.sandwich import Information, information

__all__ = [
    "BetaPosterior",
    "CoherenceReport",
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
    "ProprietyReport",
    "Quadratic",
    "Sum",
    "beta_posterior",
    "coherence_check",
    "gaussian_posterior",
    "grid_posterior",
    "information",
    "losses",
    "minimize",
    "propriety_check",
    "quadratic_coefficients",
]
