"""Estimators on draws from the posterior."""

from bayeskit.inference.evidence.posterior.bridge_sampling import bridge_sampling
from bayeskit.inference.evidence.posterior.harmonic_mean import harmonic_mean
from bayeskit.inference.evidence.posterior.stabilised_harmonic_mean import stabilised_harmonic_mean
from bayeskit.inference.evidence.posterior.warp_bridge_sampling import warp_bridge_sampling

__all__ = ["bridge_sampling", "harmonic_mean", "stabilised_harmonic_mean", "warp_bridge_sampling"]
