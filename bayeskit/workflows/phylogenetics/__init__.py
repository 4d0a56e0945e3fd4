"""What joins trees with inference: the evidence of many topologies, and variational inference over trees."""

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
    "TopologyComparison",
    "VariationalPosterior",
    "compare_topologies",
    "variational_inference",
]
