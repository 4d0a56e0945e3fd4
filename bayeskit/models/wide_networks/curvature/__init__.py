"""Curvature of a network's likelihood in its parameters, and what follows from it."""

from bayeskit.models.wide_networks.curvature.laplace import (
    LaplacePosterior,
    Prediction,
    find_mode,
    laplace_posterior,
)
from bayeskit.models.wide_networks.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from bayeskit.models.wide_networks.curvature.matrices import empirical_fisher, fisher, gauss_newton
from bayeskit.models.wide_networks.curvature.natural_gradient import GradientFields, gradient_fields, natural_gradient
from bayeskit.models.wide_networks.curvature.operator import Curvature, OutputCurvature, Trace

__all__ = [
    "Bernoulli",
    "Categorical",
    "Curvature",
    "OutputCurvature",
    "Gaussian",
    "GradientFields",
    "LaplacePosterior",
    "Likelihood",
    "Poisson",
    "Prediction",
    "Trace",
    "empirical_fisher",
    "find_mode",
    "fisher",
    "gauss_newton",
    "gradient_fields",
    "laplace_posterior",
    "natural_gradient",
]
