"""Gradients of expectations over discrete variables: every estimator is a draw of weighted points."""

from bayeskit.inference.gradients.comparison import GradientComparison, GradientStatistics, compare
from bayeskit.inference.gradients.estimator import Enumeration, GradientEstimator, Table, WeightedPoints
from bayeskit.inference.gradients.relaxed import (
    REBAR,
    RELAX,
    Annealed,
    ExponentialDecay,
    GumbelSoftmax,
    StraightThrough,
)
from bayeskit.inference.gradients.score_function import (
    ARM,
    VIMCO,
    ControlVariate,
    DisARM,
    LeaveOneOut,
    MovingAverage,
    ScoreFunction,
)
from bayeskit.inference.gradients.space import Autoregressive, Space, space_of
from bayeskit.inference.gradients.without_replacement import (
    ImportanceWithoutReplacement,
    RaoBlackwell,
    UnorderedSet,
    best_k,
    gumbel_top_k,
    stochastic_beam_search,
)

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
