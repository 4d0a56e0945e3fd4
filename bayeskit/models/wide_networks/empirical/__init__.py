"""Kernels of networks as they are, of finite width."""

from bayeskit.models.wide_networks.empirical.drift import ntk_drift, ntk_drift_against_width, ntk_drift_of_snapshots
from bayeskit.models.wide_networks.empirical.finite_width import finite_width_bias
from bayeskit.models.wide_networks.empirical.kernel import empirical_ntk
from bayeskit.models.wide_networks.empirical.linearized import Linearized, linearize
from bayeskit.models.wide_networks.empirical.power_law import PowerLaw, fit_power_law
from bayeskit.models.wide_networks.empirical.products import ntk_vector_product
from bayeskit.models.wide_networks.empirical.regime import kernel_regime

__all__ = [
    "PowerLaw",
    "fit_power_law",
    "finite_width_bias",
    "kernel_regime",
    "ntk_drift",
    "ntk_drift_against_width",
    "ntk_drift_of_snapshots",
    "Linearized",
    "empirical_ntk",
    "linearize",
    "ntk_vector_product",
]
