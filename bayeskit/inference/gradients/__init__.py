"""Gradient estimators of expectations over discrete variables, as draws of weighted points."""

from bayeskit.inference.gradients._comparison import compare_estimators
from bayeskit.inference.gradients._estimator import Enumeration, GradientEstimator, Table
from bayeskit.inference.gradients._relaxed import (
    REBAR,
    RELAX,
    Annealed,
    ExponentialDecay,
    GumbelSoftmax,
    StraightThrough,
)
from bayeskit.inference.gradients._score_function import (
    ARM,
    VIMCO,
    ControlVariate,
    DisARM,
    LeaveOneOut,
    MovingAverage,
    ScoreFunction,
)
from bayeskit.inference.gradients._space import Autoregressive, Space
from bayeskit.inference.gradients._without_replacement import (
    ImportanceWithoutReplacement,
    RaoBlackwell,
    UnorderedSet,
    best_k,
    gumbel_top_k,
    stochastic_beam_search,
)

__all__ = [
    "ARM",
    "Annealed",
    "Autoregressive",
    "ControlVariate",
    "DisARM",
    "Enumeration",
    "ExponentialDecay",
    "GradientEstimator",
    "GumbelSoftmax",
    "ImportanceWithoutReplacement",
    "LeaveOneOut",
    "MovingAverage",
    "REBAR",
    "RELAX",
    "RaoBlackwell",
    "ScoreFunction",
    "Space",
    "StraightThrough",
    "Table",
    "UnorderedSet",
    "VIMCO",
    "best_k",
    "compare_estimators",
    "gumbel_top_k",
    "stochastic_beam_search",
]
