"""Phylogenetic likelihoods: alignments, trees and substitution models."""

from bayeskit.models.phylogenetics.alignment import Alignment
from bayeskit.models.phylogenetics.datasets import primates
from bayeskit.models.phylogenetics.substitution import JC69
from bayeskit.models.phylogenetics.tree import Tree
from bayeskit.models.phylogenetics.tree_model import TreeModel

__all__ = ["JC69", "Alignment", "Tree", "TreeModel", "primates"]
