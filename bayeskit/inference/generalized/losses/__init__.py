"""Losses: what a parameter costs, given data."""

from bayeskit.inference.generalized.losses.absolute import Absolute, SmoothAbsolute
from bayeskit.inference.generalized.losses.alpha_divergence import (
    AlphaDivergence,
    DensityEstimate,
    EmpiricalMass,
    KernelDensity,
)
from bayeskit.inference.generalized.losses.beta_divergence import BetaDivergence
from bayeskit.inference.generalized.losses.cox import CoxPartialLikelihood
from bayeskit.inference.generalized.losses.densities import log_power_integral
from bayeskit.inference.generalized.losses.discrete_fisher import DiscreteFisherDivergence
from bayeskit.inference.generalized.losses.exponential import Exponential
from bayeskit.inference.generalized.losses.gamma_divergence import GammaDivergence
from bayeskit.inference.generalized.losses.hinge import Hinge, SmoothHinge
from bayeskit.inference.generalized.losses.huber import Huber
from bayeskit.inference.generalized.losses.kernel_stein import KernelSteinDiscrepancy
from bayeskit.inference.generalized.losses.log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses.logistic import Logistic
from bayeskit.inference.generalized.losses.loss import FunctionLoss, Loss, PointwiseLoss
from bayeskit.inference.generalized.losses.margin import MarginLoss
from bayeskit.inference.generalized.losses.mean_discrepancy import (
    GaussianEmbedding,
    MaximumMeanDiscrepancy,
    MeanEmbedding,
    Simulated,
)
from bayeskit.inference.generalized.losses.pinball import Pinball, SmoothPinball
from bayeskit.inference.generalized.losses.prediction import PredictionLoss, linear
from bayeskit.inference.generalized.losses.score_matching import ScoreMatching
from bayeskit.inference.generalized.losses.scores import score_of
from bayeskit.inference.generalized.losses.squared import HalfSquared
from bayeskit.inference.generalized.losses.stein_kernels import GeneralInverseMultiquadric

__all__ = [
    "AlphaDivergence",
    "DensityEstimate",
    "EmpiricalMass",
    "KernelDensity",
    "BetaDivergence",
    "log_power_integral",
    "DiscreteFisherDivergence",
    "GammaDivergence",
    "KernelSteinDiscrepancy",
    "GaussianEmbedding",
    "MaximumMeanDiscrepancy",
    "MeanEmbedding",
    "Simulated",
    "ScoreMatching",
    "score_of",
    "GeneralInverseMultiquadric",
    "Absolute",
    "CoxPartialLikelihood",
    "Exponential",
    "FunctionLoss",
    "HalfSquared",
    "Hinge",
    "Huber",
    "Logistic",
    "Loss",
    "MarginLoss",
    "NegativeLogLikelihood",
    "Pinball",
    "PointwiseLoss",
    "PredictionLoss",
    "SmoothAbsolute",
    "SmoothHinge",
    "SmoothPinball",
    "linear",
]
