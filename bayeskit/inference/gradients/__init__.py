"""Gradients of expectations over discrete variables: every estimator is a draw of weighted points."""

from bayeskit.inference.gradients.enumeration import Enumeration
from bayeskit.inference.gradients.estimator import GradientEstimator, Table, WeightedPoints
from bayeskit.inference.gradients.score_function import ControlVariate, LeaveOneOut, MovingAverage, ScoreFunction
from bayeskit.inference.gradients.space import Space, space_of
from bayeskit.inference.gradients.unordered_set import UnorderedSet
from bayeskit.inference.gradients.without_replacement import gumbel_top_k, stochastic_beam_search

__all__ = [
    "ControlVariate",
    "Enumeration",
    "GradientEstimator",
    "LeaveOneOut",
    "MovingAverage",
    "ScoreFunction",
    "Space",
    "Table",
    "UnorderedSet",
    "WeightedPoints",
    "gumbel_top_k",
    "space_of",
    "stochastic_beam_search",
]
