"""Four predictions of one wide network that are easily mistaken for one another."""

from bayeskit.models.wide_networks.regression.compare import (
    GaussianProcessComparison,
    ProcessPrediction,
    compare_gaussian_processes,
)
from bayeskit.models.wide_networks.regression.ensemble import Ensemble, last_layer_ensemble, ntk_ensemble
from bayeskit.models.wide_networks.regression.kernel_regression import KernelRegression, ntk_regression
from bayeskit.models.wide_networks.regression.kernels import PrecomputedKernel, WideKernel
from bayeskit.models.wide_networks.regression.posterior import Posterior, nngp_posterior, ntk_posterior
from bayeskit.models.wide_networks.regression.process import GaussianProcess
from bayeskit.models.wide_networks.regression.training import (
    GradientDescent,
    GradientFlow,
    mean_squares_rate,
    relative_ridge,
)

__all__ = [
    "Ensemble",
    "GaussianProcess",
    "GaussianProcessComparison",
    "GradientDescent",
    "GradientFlow",
    "KernelRegression",
    "Posterior",
    "PrecomputedKernel",
    "ProcessPrediction",
    "WideKernel",
    "compare_gaussian_processes",
    "last_layer_ensemble",
    "mean_squares_rate",
    "nngp_posterior",
    "ntk_ensemble",
    "ntk_posterior",
    "ntk_regression",
    "relative_ridge",
]
