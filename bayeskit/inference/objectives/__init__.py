"""Training objectives for a Pyro model and guide: bounds and divergences."""

from bayeskit.inference.objectives._constrained import GECO, InfoVAE, LogLikelihoodConstraint, MeanSquaredError
from bayeskit.inference.objectives._evidence_lower_bound import (
    ELBO,
    STL,
    Cyclical,
    Linear,
    WeightSchedule,
    infomax_weight,
)
from bayeskit.inference.objectives._hierarchical import AuxiliaryELBO
from bayeskit.inference.objectives._importance_weighted import IWAE, DReG, Renyi
from bayeskit.inference.objectives._objective import Objective
from bayeskit.inference.objectives._reweighted_wake_sleep import ReweightedWakeSleep
from bayeskit.inference.objectives._sumo import SUMO, GeometricTail, ReciprocalTail, Tail, sumo_estimate
from bayeskit.inference.objectives._thermodynamic import TVO, EqualMoments, LogUniform, TemperatureSchedule
from bayeskit.inference.objectives._variational_contrastive_divergence import VCD

__all__ = [
    "AuxiliaryELBO",
    "Cyclical",
    "DReG",
    "ELBO",
    "EqualMoments",
    "GECO",
    "GeometricTail",
    "IWAE",
    "InfoVAE",
    "Linear",
    "LogLikelihoodConstraint",
    "LogUniform",
    "MeanSquaredError",
    "Objective",
    "ReciprocalTail",
    "Renyi",
    "ReweightedWakeSleep",
    "STL",
    "SUMO",
    "TVO",
    "Tail",
    "TemperatureSchedule",
    "VCD",
    "WeightSchedule",
    "infomax_weight",
    "sumo_estimate",
]
