"""Gaussian-process limits of wide networks, read from the torch module itself."""

from bayeskit.models.wide_networks.activations.module import Elementwise
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth, Kernels, infinite_width

__all__ = ["Elementwise", "InfiniteWidth", "Kernels", "infinite_width"]
