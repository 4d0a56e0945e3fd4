"""Distributions over topologies: sample frequencies, conditional clades and subsplit Bayesian networks."""

from bayeskit.models.phylogenetics._distributions._frequencies import SampleFrequencies, Smoothed
from bayeskit.models.phylogenetics._distributions._networks import ConditionalCladeDistribution, SubsplitBayesianNetwork
from bayeskit.models.phylogenetics._distributions._topology_distribution import (
    TopologyDistribution,
)

__all__ = [
    "ConditionalCladeDistribution",
    "SampleFrequencies",
    "Smoothed",
    "SubsplitBayesianNetwork",
    "TopologyDistribution",
]
