"""Phylogenetics: alignments, trees and samples of trees, substitution models and their likelihoods."""

from bayeskit.models.phylogenetics.alignment import Alignment
from bayeskit.models.phylogenetics.consensus import ConsensusTree, greedy_consensus, majority_rule_consensus
from bayeskit.models.phylogenetics.datasets import primates
from bayeskit.models.phylogenetics.enumeration import all_topologies
from bayeskit.models.phylogenetics.substitution import JC69
from bayeskit.models.phylogenetics.topologies import Topologies
from bayeskit.models.phylogenetics.tree import Tree
from bayeskit.models.phylogenetics.tree_distances import asdsf, robinson_foulds, split_frequencies
from bayeskit.models.phylogenetics.tree_model import TreeModel
from bayeskit.models.phylogenetics.tree_plots import plot_credible_set, plot_split_frequencies, plot_tree
from bayeskit.models.phylogenetics.tree_sample import TreeSample

__all__ = [
    "JC69",
    "Alignment",
    "ConsensusTree",
    "Topologies",
    "Tree",
    "TreeModel",
    "TreeSample",
    "all_topologies",
    "asdsf",
    "greedy_consensus",
    "majority_rule_consensus",
    "plot_credible_set",
    "plot_split_frequencies",
    "plot_tree",
    "primates",
    "robinson_foulds",
    "split_frequencies",
]
