"""Distributions over topologies: sample frequencies, conditional clades and subsplit Bayesian networks."""

from bayeskit.models.phylogenetics.distributions.conditional_clades import ConditionalCladeDistribution
from bayeskit.models.phylogenetics.distributions.sample_frequencies import SampleFrequencies
from bayeskit.models.phylogenetics.distributions.split_probabilities import SplitProbabilities
from bayeskit.models.phylogenetics.distributions.subsplit_network import SubsplitBayesianNetwork
from bayeskit.models.phylogenetics.distributions.topology_distribution import (
    Estimate,
    TopologyDistribution,
)
from bayeskit.models.phylogenetics.distributions.uniform import Smoothed

__all__ = [
    "ConditionalCladeDistribution",
    "Estimate",
    "SampleFrequencies",
    "Smoothed",
    "SplitProbabilities",
    "SubsplitBayesianNetwork",
    "TopologyDistribution",
]
