"""Losses: what a parameter costs, given data."""

from bayeskit.inference.generalized.losses.absolute import Absolute, SmoothAbsolute
from bayeskit.inference.generalized.losses.loss import FunctionLoss, Loss, PointwiseLoss
from bayeskit.inference.generalized.losses.prediction import PredictionLoss, linear
from bayeskit.inference.generalized.losses.squared import HalfSquared

__all__ = [
    "Absolute",
    "FunctionLoss",
    "HalfSquared",
    "Loss",
    "PointwiseLoss",
    "PredictionLoss",
    "SmoothAbsolute",
    "linear",
]
