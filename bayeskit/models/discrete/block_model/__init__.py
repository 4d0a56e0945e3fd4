"""The stochastic block model, with its exact twin and Zachary's karate club."""

from bayeskit.models.discrete.block_model.annealing import AnnealedEvidence, annealed_evidence
from bayeskit.models.discrete.block_model.comparison import BlockComparison, compare_num_blocks
from bayeskit.models.discrete.block_model.karate import KarateClub, karate_club
from bayeskit.models.discrete.block_model.plots import plot_adjacency, plot_co_assignment
from bayeskit.models.discrete.block_model.stochastic_block_model import (
    BlockPosterior,
    EdgeProbabilities,
    StochasticBlockModel,
    co_assignment,
)

__all__ = [
    "AnnealedEvidence",
    "BlockComparison",
    "BlockPosterior",
    "EdgeProbabilities",
    "KarateClub",
    "StochasticBlockModel",
    "annealed_evidence",
    "co_assignment",
    "compare_num_blocks",
    "karate_club",
    "plot_adjacency",
    "plot_co_assignment",
]
