"""Targets in which some sites are integrated out, in closed form or by Laplace's approximation."""

from bayeskit.inference.marginal.correction import LaplaceCorrection
from bayeskit.inference.marginal.target import MarginalTarget, marginalize

__all__ = ["LaplaceCorrection", "MarginalTarget", "marginalize"]
