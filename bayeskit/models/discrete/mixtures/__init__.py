"""Finite mixtures of normal distributions: models, priors, relabelling and plots."""

from bayeskit.models.discrete.mixtures.conjugate import (
    exact_log_evidence,
    log_joint_of_assignments,
    sample_exact_posterior,
)
from bayeskit.models.discrete.mixtures.gaussian_mixture import (
    GaussianMixture,
    MixturePrior,
    OrderedSample,
    UnknownSizeMixture,
    galaxy_velocities,
)
from bayeskit.models.discrete.mixtures.labels import Labels, aligned, relabel
from bayeskit.models.discrete.mixtures.plots import (
    plot_num_components,
    plot_predictive,
    plot_responsibilities,
    predictive_density,
)

__all__ = [
    "GaussianMixture",
    "Labels",
    "MixturePrior",
    "OrderedSample",
    "UnknownSizeMixture",
    "aligned",
    "exact_log_evidence",
    "galaxy_velocities",
    "log_joint_of_assignments",
    "plot_num_components",
    "plot_predictive",
    "plot_responsibilities",
    "predictive_density",
    "relabel",
    "sample_exact_posterior",
]
