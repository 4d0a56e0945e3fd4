"""Curvature of networks: Fisher and Gauss-Newton matrices, natural gradients, Laplace; structure of Hessians."""

from typing import TYPE_CHECKING

from bayeskit._lazy import imported_when_used

if TYPE_CHECKING:
    from bayeskit.inference.curvature.fisher_matrices import (
        empirical_fisher,
        fisher,
        gauss_newton,
    )
    from bayeskit.inference.curvature.laplace import (
        LaplacePosterior,
        Prediction,
        find_parameter_mode,
        laplace_posterior,
    )
    from bayeskit.inference.curvature.likelihoods import (
        BernoulliOutputs,
        Categorical,
        GaussianOutputs,
        OutputLikelihood,
        Poisson,
    )
    from bayeskit.inference.curvature.matrices import (
        Curvature,
        Trace,
    )
    from bayeskit.inference.curvature.natural_gradients import (
        GradientFields,
        gradient_fields,
        natural_gradient,
    )

__all__ = [
    "BernoulliOutputs",
    "Categorical",
    "Curvature",
    "GaussianOutputs",
    "GradientFields",
    "LaplacePosterior",
    "OutputLikelihood",
    "Poisson",
    "Prediction",
    "Trace",
    "empirical_fisher",
    "find_parameter_mode",
    "fisher",
    "gauss_newton",
    "gradient_fields",
    "laplace_posterior",
    "natural_gradient",
]

_ROOM = "bayeskit.inference.curvature"

__getattr__ = imported_when_used(
    _ROOM,
    {
        "BernoulliOutputs": f"{_ROOM}.likelihoods",
        "Categorical": f"{_ROOM}.likelihoods",
        "Curvature": f"{_ROOM}.matrices",
        "GaussianOutputs": f"{_ROOM}.likelihoods",
        "GradientFields": f"{_ROOM}.natural_gradients",
        "LaplacePosterior": f"{_ROOM}.laplace",
        "OutputLikelihood": f"{_ROOM}.likelihoods",
        "Poisson": f"{_ROOM}.likelihoods",
        "Prediction": f"{_ROOM}.laplace",
        "Trace": f"{_ROOM}.matrices",
        "empirical_fisher": f"{_ROOM}.fisher_matrices",
        "find_parameter_mode": f"{_ROOM}.laplace",
        "fisher": f"{_ROOM}.fisher_matrices",
        "gauss_newton": f"{_ROOM}.fisher_matrices",
        "gradient_fields": f"{_ROOM}.natural_gradients",
        "laplace_posterior": f"{_ROOM}.laplace",
        "natural_gradient": f"{_ROOM}.natural_gradients",
    },
)
