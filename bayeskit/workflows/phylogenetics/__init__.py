"""Bayesian inference of trees: evidence of many topologies, and variational inference."""

from bayeskit.workflows.phylogenetics.growing_support import SupportGrowth
from bayeskit.workflows.phylogenetics.topology_comparison import TopologyComparison, compare_topologies
from bayeskit.workflows.phylogenetics.variational import (
    FlowLengths,
    LearningRates,
    LogNormalLengths,
    VariationalPosterior,
    variational_inference,
)

__all__ = [
    "FlowLengths",
    "LearningRates",
    "LogNormalLengths",
    "SupportGrowth",
    "TopologyComparison",
    "VariationalPosterior",
    "compare_topologies",
    "variational_inference",
]
