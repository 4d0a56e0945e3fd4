"""Bayesian inference of trees: evidence of many topologies, and variational inference."""

from bayeskit.models.phylogenetics.workflows._growing_support import SupportGrowth
from bayeskit.models.phylogenetics.workflows._substitution_average import (
    average_substitution_models,
)
from bayeskit.models.phylogenetics.workflows._topology_comparison import compare_topologies
from bayeskit.models.phylogenetics.workflows._topology_evidence import topology_evidence
from bayeskit.models.phylogenetics.workflows._topology_inference import TopologyInference, infer_topologies
from bayeskit.models.phylogenetics.workflows._topology_report import write_topology_report
from bayeskit.models.phylogenetics.workflows._variational import (
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
    "TopologyInference",
    "VariationalPosterior",
    "average_substitution_models",
    "compare_topologies",
    "infer_topologies",
    "topology_evidence",
    "variational_inference",
    "write_topology_report",
]
