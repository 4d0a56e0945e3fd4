"""Objectives: bounds and divergences by which a Pyro model and its guide are trained."""

from bayeskit.inference.objectives.annealing import Cyclical, Linear, Schedule
from bayeskit.inference.objectives.constrained import GECO, MeanSquaredError, NegativeLogLikelihood
from bayeskit.inference.objectives.doubly_reparameterized import DReG
from bayeskit.inference.objectives.evidence_lower_bound import ELBO, infomax_weight
from bayeskit.inference.objectives.hierarchical import AuxiliaryELBO
from bayeskit.inference.objectives.importance_weighted import IWAE
from bayeskit.inference.objectives.info_vae import InfoVAE
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.objectives.objective import Objective
from bayeskit.inference.objectives.renyi import Renyi
from bayeskit.inference.objectives.reweighted_wake_sleep import ReweightedWakeSleep
from bayeskit.inference.objectives.sticking_the_landing import STL
from bayeskit.inference.objectives.sumo import SUMO, sumo_estimate
from bayeskit.inference.objectives.tails import GeometricTail, ReciprocalTail, Tail
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
