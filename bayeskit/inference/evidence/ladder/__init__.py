"""Estimators on draws at every temperature between prior and posterior."""

from bayeskit.inference.evidence.ladder.generalised_stepping_stone import generalised_stepping_stone
from bayeskit.inference.evidence.ladder.modified_path_sampling import modified_path_sampling
from bayeskit.inference.evidence.ladder.path_sampling import path_sampling
from bayeskit.inference.evidence.ladder.stepping_stone import stepping_stone
from bayeskit.inference.evidence.ladder.thermodynamic_integration import thermodynamic_integration

__all__ = [
    "generalised_stepping_stone",
    "modified_path_sampling",
    "path_sampling",
    "stepping_stone",
    "thermodynamic_integration",
]
