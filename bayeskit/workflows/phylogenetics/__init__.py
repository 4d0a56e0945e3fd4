"""What joins trees with inference: the evidence of many topologies, and variational inference over trees."""

from bayeskit.workflows.phylogenetics.topology_comparison import TopologyComparison, compare_topologies
from bayeskit.workflows.phylogenetics.variational.flow import FlowLengths
from bayeskit.workflows.phylogenetics.variational.inference import variational_inference
from bayeskit.workflows.phylogenetics.variational.lengths import LogNormalLengths
from bayeskit.workflows.phylogenetics.variational.posterior import VariationalPosterior
from bayeskit.workflows.phylogenetics.variational.training import LearningRates

__all__ = [
    "FlowLengths",
    "LearningRates",
    "LogNormalLengths",
    "TopologyComparison",
    "VariationalPosterior",
    "compare_topologies",
    "variational_inference",
]
