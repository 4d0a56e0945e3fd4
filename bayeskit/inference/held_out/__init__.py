"""Estimates after training: held-out log likelihoods, and what the code knows of the data."""

from bayeskit.inference.held_out.active_units import ActiveUnits, active_units
from bayeskit.inference.held_out.annealed_importance_sampling import annealed_importance_sampling
from bayeskit.inference.held_out.annealing_path import sigmoid_schedule
from bayeskit.inference.held_out.bidirectional import Sandwich, bidirectional_annealing
from bayeskit.inference.held_out.by_evidence import by_evidence
from bayeskit.inference.held_out.importance_sampling import importance_sampling
from bayeskit.inference.held_out.information import Information, aggregate_kl, mutual_information
from bayeskit.inference.held_out.result import HeldOut

__all__ = [
    "ActiveUnits",
    "HeldOut",
    "Information",
    "Sandwich",
    "active_units",
    "aggregate_kl",
    "annealed_importance_sampling",
    "bidirectional_annealing",
    "by_evidence",
    "importance_sampling",
    "mutual_information",
    "sigmoid_schedule",
]
