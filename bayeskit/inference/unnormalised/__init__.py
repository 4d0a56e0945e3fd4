"""Unnormalised models: log normalising constants from both sides, training, and posteriors of parameters."""

from bayeskit.inference.unnormalised.moves import Unnormalised, energy_target
from bayeskit.inference.unnormalised.normaliser import LogNormaliser, log_normaliser, noise_contrastive_constant

__all__ = ["LogNormaliser", "Unnormalised", "energy_target", "log_normaliser", "noise_contrastive_constant"]
