"""Losses of a parameter given data."""

from bayeskit.inference.generalized.losses.cox import CoxPartialLikelihood
from bayeskit.inference.generalized.losses.densities import (
    AlphaDivergence,
    BetaDivergence,
    DensityEstimate,
    EmpiricalMass,
    GammaDivergence,
    KernelDensity,
    log_power_integral,
)
from bayeskit.inference.generalized.losses.log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses.loss import FunctionLoss, Loss, PointwiseLoss
from bayeskit.inference.generalized.losses.margin import Exponential, Hinge, Logistic, MarginLoss, SmoothHinge
from bayeskit.inference.generalized.losses.mean_discrepancy import (
    GaussianEmbedding,
    MaximumMeanDiscrepancy,
    MeanEmbedding,
    Simulated,
)
from bayeskit.inference.generalized.losses.prediction import (
    Absolute,
    HalfSquared,
    Huber,
    Pinball,
    PredictionLoss,
    SmoothAbsolute,
    SmoothPinball,
    linear,
)
from bayeskit.inference.generalized.losses.scores import (
    DiscreteFisherDivergence,
    GeneralInverseMultiquadric,
    KernelSteinDiscrepancy,
    ScoreMatching,
    score_of,
)

__all__ = [
    "Absolute",
    "AlphaDivergence",
    "BetaDivergence",
    "CoxPartialLikelihood",
    "DensityEstimate",
    "DiscreteFisherDivergence",
    "EmpiricalMass",
    "Exponential",
    "FunctionLoss",
    "GammaDivergence",
    "GaussianEmbedding",
    "GeneralInverseMultiquadric",
    "HalfSquared",
    "Hinge",
    "Huber",
    "KernelDensity",
    "KernelSteinDiscrepancy",
    "Logistic",
    "Loss",
    "MarginLoss",
    "MaximumMeanDiscrepancy",
    "MeanEmbedding",
    "NegativeLogLikelihood",
    "Pinball",
    "PointwiseLoss",
    "PredictionLoss",
    "ScoreMatching",
    "Simulated",
    "SmoothAbsolute",
    "SmoothHinge",
    "SmoothPinball",
    "linear",
    "log_power_integral",
    "score_of",
]
