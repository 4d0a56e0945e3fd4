"""Models with infinitely wide networks: kernels for Pyro and GPyTorch, regression, classification, variance fits.

The exact posterior is :func:`~bayeskit.models.wide_networks.nngp_posterior`.

:class:`GPyTorchKernel` and :func:`large_regression` require GPyTorch, which is imported on first use.
"""

from typing import TYPE_CHECKING

from bayeskit._lazy import imported_when_used
from bayeskit.models.wide_networks.gaussian_processes.marginal_likelihood import (
    DepthComparison,
    VarianceFit,
    fit_depths,
    fit_variances,
)
from bayeskit.models.wide_networks.gaussian_processes.models import ClassificationModel, PyroKernel, RegressionModel

if TYPE_CHECKING:
    from bayeskit.models.wide_networks.gaussian_processes.gpytorch_kernel import GPyTorchKernel
    from bayeskit.models.wide_networks.gaussian_processes.large_data import (
        ConjugateGradients,
        InducingPoints,
        LargeRegression,
        large_regression,
    )

__all__ = [
    "ClassificationModel",
    "ConjugateGradients",
    "DepthComparison",
    "GPyTorchKernel",
    "InducingPoints",
    "LargeRegression",
    "PyroKernel",
    "RegressionModel",
    "VarianceFit",
    "fit_depths",
    "fit_variances",
    "large_regression",
]

__getattr__ = imported_when_used(
    "bayeskit.models.wide_networks.gaussian_processes",
    {
        "ConjugateGradients": "bayeskit.models.wide_networks.gaussian_processes.large_data",
        "GPyTorchKernel": "bayeskit.models.wide_networks.gaussian_processes.gpytorch_kernel",
        "InducingPoints": "bayeskit.models.wide_networks.gaussian_processes.large_data",
        "LargeRegression": "bayeskit.models.wide_networks.gaussian_processes.large_data",
        "large_regression": "bayeskit.models.wide_networks.gaussian_processes.large_data",
    },
)
