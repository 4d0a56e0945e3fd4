"""Bayesian inference of trees: evidence of many topologies, and variational inference."""

from bayeskit.models.phylogenetics.topology_moves import Moves
from bayeskit.workflows.phylogenetics.growing_support import SupportGrowth
from bayeskit.workflows.phylogenetics.substitution_average import SubstitutionAverage, average_substitution_models
from bayeskit.workflows.phylogenetics.topology_comparison import TopologyComparison, compare_topologies
from bayeskit.workflows.phylogenetics.topology_evidence import TopologyEvidence, topology_evidence
from bayeskit.workflows.phylogenetics.topology_inference import TopologyInference, infer_topologies
from bayeskit.workflows.phylogenetics.topology_report import write_topology_report
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
    "Moves",
    "SubstitutionAverage",
    "SupportGrowth",
    "TopologyComparison",
    "TopologyEvidence",
    "TopologyInference",
    "VariationalPosterior",
    "average_substitution_models",
    "compare_topologies",
    "infer_topologies",
    "topology_evidence",
    "variational_inference",
    "write_topology_report",
]
