"""Phylogenetics: alignments, trees and samples of trees, substitution models and their likelihoods."""

from bayeskit.models.phylogenetics.alignments.alignment import Alignment
from bayeskit.models.phylogenetics.branch_length_priors import GammaDirichlet
from bayeskit.models.phylogenetics.datasets import primates
from bayeskit.models.phylogenetics.distributions import (
    ConditionalCladeDistribution,
    SampleFrequencies,
    Smoothed,
    SubsplitBayesianNetwork,
)
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.models.phylogenetics.pruning.branch_derivatives import BranchDerivatives
from bayeskit.models.phylogenetics.samples.consensus import ConsensusTree, greedy_consensus, majority_rule_consensus
from bayeskit.models.phylogenetics.samples.distances import asdsf, robinson_foulds, split_frequencies
from bayeskit.models.phylogenetics.samples.plots import plot_credible_set, plot_split_frequencies, plot_tree
from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
from bayeskit.models.phylogenetics.substitution import GTR, HKY85, JC69, K80, SubstitutionModel, empirical_frequencies
from bayeskit.models.phylogenetics.substitution.site_rates import GammaRates, InvariantSites, SiteRates
from bayeskit.models.phylogenetics.tree_model import TreeModel
from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
from bayeskit.models.phylogenetics.trees.topologies import Topologies
from bayeskit.models.phylogenetics.trees.tree import Tree

__all__ = [
    "GTR",
    "ForestLikelihood",
    "HKY85",
    "JC69",
    "K80",
    "Alignment",
    "BranchDerivatives",
    "ConditionalCladeDistribution",
    "GammaDirichlet",
    "GammaRates",
    "InvariantSites",
    "SiteRates",
    "SubstitutionModel",
    "ConsensusTree",
    "SampleFrequencies",
    "Smoothed",
    "SubsplitBayesianNetwork",
    "Topologies",
    "Tree",
    "TreeModel",
    "TreeSample",
    "all_topologies",
    "asdsf",
    "empirical_frequencies",
    "greedy_consensus",
    "majority_rule_consensus",
    "plot_credible_set",
    "plot_split_frequencies",
    "plot_tree",
    "primates",
    "robinson_foulds",
    "split_frequencies",
]
