"""Gaussian processes of wide networks: posteriors, trained ensembles, models for Pyro and GPyTorch, variance fits.

:class:`GPyTorchKernel` and :func:`large_regression` require GPyTorch, which is imported on first use.
"""

from typing import TYPE_CHECKING

from bayeskit._lazy import imported_when_used
from bayeskit.models.wide_networks.gaussian_processes.comparison import (
    GaussianProcessComparison,
    ProcessPrediction,
    compare_gaussian_processes,
)
from bayeskit.models.wide_networks.gaussian_processes.ensemble import (
    Ensemble,
    GradientDescent,
    GradientFlow,
    last_layer_ensemble,
    ntk_ensemble,
)
from bayeskit.models.wide_networks.gaussian_processes.posterior import (
    GaussianProcess,
    KernelRegression,
    Posterior,
    nngp_posterior,
    ntk_posterior,
    ntk_regression,
)
from bayeskit.models.wide_networks.gaussian_processes.wide_kernels import PrecomputedKernel, WideKernel

if TYPE_CHECKING:
    from bayeskit.models.wide_networks.gaussian_processes.gpytorch_kernel import GPyTorchKernel
    from bayeskit.models.wide_networks.gaussian_processes.large_data import (
        ConjugateGradients,
        InducingPoints,
        LargeRegression,
        large_regression,
    )
    from bayeskit.models.wide_networks.gaussian_processes.marginal_likelihood import (
        DepthComparison,
        VarianceFit,
        fit_depths,
        fit_variances,
    )
    from bayeskit.models.wide_networks.gaussian_processes.models import ClassificationModel, RegressionModel
    from bayeskit.models.wide_networks.gaussian_processes.pyro_kernel import PyroKernel

__all__ = [
    "ClassificationModel",
    "ConjugateGradients",
    "DepthComparison",
    "Ensemble",
    "GPyTorchKernel",
    "GaussianProcess",
    "GaussianProcessComparison",
    "GradientDescent",
    "GradientFlow",
    "InducingPoints",
    "KernelRegression",
    "LargeRegression",
    "Posterior",
    "PrecomputedKernel",
    "ProcessPrediction",
    "PyroKernel",
    "RegressionModel",
    "VarianceFit",
    "WideKernel",
    "compare_gaussian_processes",
    "fit_depths",
    "fit_variances",
    "large_regression",
    "last_layer_ensemble",
    "nngp_posterior",
    "ntk_ensemble",
    "ntk_posterior",
    "ntk_regression",
]

_ROOM = "bayeskit.models.wide_networks.gaussian_processes"

__getattr__ = imported_when_used(
    _ROOM,
    {
        "ClassificationModel": f"{_ROOM}.models",
        "ConjugateGradients": f"{_ROOM}.large_data",
        "DepthComparison": f"{_ROOM}.marginal_likelihood",
        "GPyTorchKernel": f"{_ROOM}.gpytorch_kernel",
        "InducingPoints": f"{_ROOM}.large_data",
        "LargeRegression": f"{_ROOM}.large_data",
        "PyroKernel": f"{_ROOM}.pyro_kernel",
        "RegressionModel": f"{_ROOM}.models",
        "VarianceFit": f"{_ROOM}.marginal_likelihood",
        "fit_depths": f"{_ROOM}.marginal_likelihood",
        "fit_variances": f"{_ROOM}.marginal_likelihood",
        "large_regression": f"{_ROOM}.large_data",
    },
)
