"""Updating beliefs by a loss instead of a likelihood."""

from bayeskit.inference.generalized import losses
from bayeskit.inference.generalized.pooling import DeepSets, Max, Mean, Pooling, Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.prior import Flat

__all__ = ["DeepSets", "Flat", "GibbsPosterior", "Max", "Mean", "Pooling", "Sum", "losses"]
