"""Gaussian-process limits of wide networks, read from a torch module, and tangent kernels of finite networks."""

from bayeskit.models.wide_networks._activations import Elementwise
from bayeskit.models.wide_networks._empirical_kernels import empirical_ntk, linearize, ntk_vector_product
from bayeskit.models.wide_networks._finite_width import (
    finite_width_bias,
    kernel_regime,
    ntk_drift,
    ntk_drift_against_width,
    ntk_drift_of_snapshots,
)
from bayeskit.models.wide_networks._kernels import InfiniteWidth, Kernels, infinite_width

__all__ = [
    "Elementwise",
    "InfiniteWidth",
    "Kernels",
    "empirical_ntk",
    "finite_width_bias",
    "infinite_width",
    "kernel_regime",
    "linearize",
    "ntk_drift",
    "ntk_drift_against_width",
    "ntk_drift_of_snapshots",
    "ntk_vector_product",
]
