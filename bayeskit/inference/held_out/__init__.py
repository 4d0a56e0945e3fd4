"""Prediction of data held out, by trained models and by posteriors, and the information of latent variables on data."""

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
from bayeskit.inference.held_out._leave_out import cross_validation_evidence, enumerated_cross_validation
from bayeskit.inference.samplers._weighted_particles import sigmoid_schedule

__all__ = [
    "Information",
    "active_units",
    "aggregate_kl",
    "annealed_importance_sampling",
    "bidirectional_annealing",
    "by_evidence",
    "cross_validation_evidence",
    "enumerated_cross_validation",
    "importance_sampling",
    "mutual_information",
    "sigmoid_schedule",
]
