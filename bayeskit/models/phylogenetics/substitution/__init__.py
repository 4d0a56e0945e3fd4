"""Substitution models: how bases change along an edge."""

from bayeskit.models.phylogenetics.substitution.base import BASE_ORDER, SubstitutionModel, empirical_frequencies
from bayeskit.models.phylogenetics.substitution.hasegawa import HKY85, K80
from bayeskit.models.phylogenetics.substitution.jukes_cantor import JC69
from bayeskit.models.phylogenetics.substitution.time_reversible import GTR

__all__ = ["BASE_ORDER", "GTR", "HKY85", "JC69", "K80", "SubstitutionModel", "empirical_frequencies"]
