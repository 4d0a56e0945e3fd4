"""Estimates after training: held-out log likelihoods, and the information of latent variables on the data."""

from bayeskit.inference.held_out._annealing import (
    annealed_importance_sampling,
    bidirectional_annealing,
)
from bayeskit.inference.held_out._by_evidence import by_evidence
from bayeskit.inference.held_out._importance import importance_sampling
from bayeskit.inference.held_out._information import (
    Information,
    active_units,
    aggregate_kl,
    mutual_information,
)
from bayeskit.inference.samplers._weighted_particles import sigmoid_schedule

__all__ = [
    "Information",
    "active_units",
    "aggregate_kl",
    "annealed_importance_sampling",
    "bidirectional_annealing",
    "by_evidence",
    "importance_sampling",
    "mutual_information",
    "sigmoid_schedule",
]
