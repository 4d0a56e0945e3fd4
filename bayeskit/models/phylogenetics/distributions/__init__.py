"""Distributions over topologies: sample frequencies, conditional clades and subsplit Bayesian networks."""

from bayeskit.models.phylogenetics.distributions.frequencies import SampleFrequencies, Smoothed
from bayeskit.models.phylogenetics.distributions.networks import ConditionalCladeDistribution, SubsplitBayesianNetwork
from bayeskit.models.phylogenetics.distributions.topology_distribution import (
    Estimate,
    SplitProbabilities,
    TopologyDistribution,
)

__all__ = [
    "ConditionalCladeDistribution",
    "Estimate",
    "SampleFrequencies",
    "Smoothed",
    "SplitProbabilities",
    "SubsplitBayesianNetwork",
    "TopologyDistribution",
]
