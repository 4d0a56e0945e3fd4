"""Unnormalised models: log normalising constants from both sides, training, and posteriors of parameters."""

from bayeskit.models.unnormalised._exchange import ExactDraws, ExchangePosterior, exchange_posterior
from bayeskit.models.unnormalised._models import EnergyModel, lipschitz_bound
from bayeskit.models.unnormalised._moves import Unnormalised, energy_target
from bayeskit.models.unnormalised._normaliser import LogNormaliser, log_normaliser, noise_contrastive_constant
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
    "ExchangePosterior",
    "LogNormaliser",
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
