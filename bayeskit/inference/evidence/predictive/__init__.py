"""Predictive scores: how well a model predicts its data one by one, which is no log evidence."""

from bayeskit.inference.evidence.predictive.conditional_predictive_ordinates import conditional_predictive_ordinates
from bayeskit.inference.evidence.predictive.observations import Observations, refuses
from bayeskit.inference.evidence.predictive.pointwise_predictive_density import pointwise_predictive_density
from bayeskit.inference.evidence.predictive.result import PredictiveScore

__all__ = [
    "Observations",
    "PredictiveScore",
    "conditional_predictive_ordinates",
    "pointwise_predictive_density",
    "refuses",
]
