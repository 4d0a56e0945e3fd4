"""Losses of a parameter given data."""

from bayeskit.inference.generalized.losses._cox import CoxPartialLikelihood
from bayeskit.inference.generalized.losses._densities import (
    AlphaDivergence,
    BetaDivergence,
    DensityEstimate,
    EmpiricalMass,
    GammaDivergence,
    KernelDensity,
)
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._loss import FunctionLoss, Loss, PointwiseLoss
from bayeskit.inference.generalized.losses._margin import Exponential, Hinge, Logistic, MarginLoss, SmoothHinge
from bayeskit.inference.generalized.losses._mean_discrepancy import (
    GaussianEmbedding,
    MaximumMeanDiscrepancy,
    MeanEmbedding,
    Simulated,
)
from bayeskit.inference.generalized.losses._prediction import (
    Absolute,
    HalfSquared,
    Huber,
    Pinball,
    PredictionLoss,
    SmoothAbsolute,
    SmoothPinball,
    linear,
)
from bayeskit.inference.generalized.losses._scores import (
    DiscreteFisherDivergence,
    GeneralInverseMultiquadric,
    KernelSteinDiscrepancy,
    ScoreMatching,
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
]
