"""What joins trees with inference: the evidence of many topologies."""

from bayeskit.workflows.phylogenetics.topology_comparison import TopologyComparison, compare_topologies

__all__ = ["TopologyComparison", "compare_topologies"]
