"""Unnormalised models: log normalising constants from both sides, training, and posteriors of parameters."""

from bayeskit.models.unnormalised._exchange import ExactDraws, exchange_posterior
from bayeskit.models.unnormalised._models import EnergyModel, lipschitz_bound
from bayeskit.models.unnormalised._moves import Unnormalised, energy_target
from bayeskit.models.unnormalised._normaliser import log_normaliser, noise_contrastive_constant
from bayeskit.models.unnormalised._training import (
    EnergyObjective,
    NoiseContrastive,
    PersistentContrastiveDivergence,
    RankingNoiseContrastive,
    ScoreMatchingObjective,
    fit_energy,
)

__all__ = [
    "EnergyModel",
    "EnergyObjective",
    "ExactDraws",
    "NoiseContrastive",
    "PersistentContrastiveDivergence",
    "RankingNoiseContrastive",
    "ScoreMatchingObjective",
    "Unnormalised",
    "energy_target",
    "exchange_posterior",
    "fit_energy",
    "lipschitz_bound",
    "log_normaliser",
    "noise_contrastive_constant",
]
