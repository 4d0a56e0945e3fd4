"""Objectives: bounds and divergences by which a Pyro model and its guide are trained."""

from bayeskit.inference.objectives.constrained import GECO, InfoVAE, MeanSquaredError, NegativeLogLikelihood
from bayeskit.inference.objectives.evidence_lower_bound import ELBO, STL, Cyclical, Linear, Schedule, infomax_weight
from bayeskit.inference.objectives.hierarchical import AuxiliaryELBO
from bayeskit.inference.objectives.importance_weighted import IWAE, DReG, Renyi
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.objectives.objective import Objective
from bayeskit.inference.objectives.reweighted_wake_sleep import ReweightedWakeSleep
from bayeskit.inference.objectives.sumo import SUMO, GeometricTail, ReciprocalTail, Tail, sumo_estimate
from bayeskit.inference.objectives.thermodynamic import TVO, EqualMoments, LogUniform, TemperatureSchedule
from bayeskit.inference.objectives.variational_contrastive_divergence import VCD

__all__ = [
    "ELBO",
    "GECO",
    "IWAE",
    "STL",
    "SUMO",
    "sumo_estimate",
    "TVO",
    "VCD",
    "AuxiliaryELBO",
    "Cyclical",
    "DReG",
    "EqualMoments",
    "GeometricTail",
    "InfoVAE",
    "LatentDensity",
    "Linear",
    "LogUniform",
    "MeanSquaredError",
    "NegativeLogLikelihood",
    "Objective",
    "ReciprocalTail",
    "Renyi",
    "ReweightedWakeSleep",
    "Schedule",
    "Tail",
    "TemperatureSchedule",
    "infomax_weight",
]
