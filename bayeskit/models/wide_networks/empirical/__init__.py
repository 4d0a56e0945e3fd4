"""Kernels of networks as they are, of finite width."""

from bayeskit.models.wide_networks.empirical.kernel import empirical_ntk
from bayeskit.models.wide_networks.empirical.linearized import Linearized, linearize
from bayeskit.models.wide_networks.empirical.products import ntk_vector_product

__all__ = ["Linearized", "empirical_ntk", "linearize", "ntk_vector_product"]
