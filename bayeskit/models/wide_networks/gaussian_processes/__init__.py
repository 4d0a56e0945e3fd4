"""Models with infinitely wide networks: kernels for Pyro and GPyTorch, regression, classification, variance fits.

The exact posterior is :func:`~bayeskit.models.wide_networks.nngp_posterior`.

:class:`GPyTorchKernel` and :func:`large_regression` require GPyTorch, which is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bayeskit._moved import answer_to_old_names
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

LAZY = {
    "ConjugateGradients": "large_data",
    "GPyTorchKernel": "gpytorch_kernel",
    "InducingPoints": "large_data",
    "LargeRegression": "large_data",
    "large_regression": "large_data",
}

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


def __getattr__(name: str) -> Any:
    """Import names that need GPyTorch on first use."""
    if name not in LAZY:
        return answer_to_old_names(__name__)(name)
    return getattr(importlib.import_module(f"{__name__}.{LAZY[name]}"), name)
