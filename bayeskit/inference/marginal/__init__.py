"""Targets in which some sites are integrated out, in closed form or by Laplace's approximation."""

from bayeskit.inference.marginal._correction import LaplaceCorrection
from bayeskit.inference.marginal._target import MarginalTarget, marginalize

__all__ = ["LaplaceCorrection", "MarginalTarget", "marginalize"]
