"""Unnormalised models: log normalising constants from both sides, training, and posteriors of parameters."""

from bayeskit.inference.unnormalised.exchange import ExactDraws, ExchangePosterior, exchange_posterior
from bayeskit.inference.unnormalised.moves import Unnormalised, energy_target
from bayeskit.inference.unnormalised.normaliser import LogNormaliser, log_normaliser, noise_contrastive_constant
from bayeskit.inference.unnormalised.training import (
    EnergyObjective,
    NoiseContrastive,
    PersistentContrastiveDivergence,
    RankingNoiseContrastive,
    ScoreMatchingObjective,
    fit_energy,
)

__all__ = [
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
    "log_normaliser",
    "noise_contrastive_constant",
]
