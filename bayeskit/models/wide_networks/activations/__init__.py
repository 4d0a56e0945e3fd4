"""Activation functions, with their moments under normal laws."""

from bayeskit.models.wide_networks.activations.activation import Activation, Moments
from bayeskit.models.wide_networks.activations.module import Elementwise
from bayeskit.models.wide_networks.activations.piecewise_linear import PiecewiseLinear
from bayeskit.models.wide_networks.activations.polynomial import Polynomial, hermite, monomial
from bayeskit.models.wide_networks.activations.quadrature import Quadrature
from bayeskit.models.wide_networks.activations.sign import Step
from bayeskit.models.wide_networks.activations.smooth import Erf, Exponential, GaussianBump, Gelu, Sine

__all__ = [
    "Activation",
    "Elementwise",
    "Erf",
    "Exponential",
    "GaussianBump",
    "Gelu",
    "Moments",
    "PiecewiseLinear",
    "Polynomial",
    "Quadrature",
    "Sine",
    "Step",
    "hermite",
    "monomial",
]
