"""Gradients of expectations over discrete variables: every estimator is a draw of weighted points."""

from bayeskit.inference.gradients.autoregressive import Autoregressive
from bayeskit.inference.gradients.binary import ARM, DisARM
from bayeskit.inference.gradients.compare import GradientComparison, GradientStatistics, compare
from bayeskit.inference.gradients.enumeration import Enumeration
from bayeskit.inference.gradients.estimator import GradientEstimator, Table, WeightedPoints
from bayeskit.inference.gradients.importance import ImportanceWithoutReplacement
from bayeskit.inference.gradients.rebar import REBAR
from bayeskit.inference.gradients.relax import RELAX
from bayeskit.inference.gradients.relaxed import GumbelSoftmax, StraightThrough
from bayeskit.inference.gradients.score_function import ControlVariate, LeaveOneOut, MovingAverage, ScoreFunction
from bayeskit.inference.gradients.space import Space, space_of
from bayeskit.inference.gradients.temperature import Annealed, ExponentialDecay
from bayeskit.inference.gradients.top_k import RaoBlackwell, best_k
from bayeskit.inference.gradients.unordered_set import UnorderedSet
from bayeskit.inference.gradients.vimco import VIMCO
from bayeskit.inference.gradients.without_replacement import gumbel_top_k, stochastic_beam_search

__all__ = [
    "ARM",
    "VIMCO",
    "Autoregressive",
    "DisARM",
    "ImportanceWithoutReplacement",
    "RaoBlackwell",
    "REBAR",
    "RELAX",
    "GumbelSoftmax",
    "StraightThrough",
    "Annealed",
    "ExponentialDecay",
    "best_k",
    "compare",
    "ControlVariate",
    "Enumeration",
    "GradientComparison",
    "GradientEstimator",
    "GradientStatistics",
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
