"""Noisy genotype matrices of subclonal evolution, under a perfect phylogeny."""

from bayeskit.models.discrete.genotypes.conflicts import (
    conflict_free_matrices,
    conflicting_pairs,
    has_conflict,
    num_conflict_free,
)
from bayeskit.models.discrete.genotypes.genotype_model import GenotypeModel
from bayeskit.models.discrete.genotypes.mutation_tree import MutationTree
from bayeskit.models.discrete.genotypes.noisy_genotypes import GenotypePosterior, NoisyGenotypes
from bayeskit.models.discrete.genotypes.plots import plot_genotypes

__all__ = [
    "GenotypeModel",
    "GenotypePosterior",
    "MutationTree",
    "NoisyGenotypes",
    "conflict_free_matrices",
    "conflicting_pairs",
    "has_conflict",
    "num_conflict_free",
    "plot_genotypes",
]
