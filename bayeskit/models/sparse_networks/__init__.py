"""Networks with sparse variational posteriors of their weights: pruned, shrunk, and rounded by what the data tell."""

from bayeskit.models.sparse_networks._log_uniform import ImproperLogUniform, log_uniform_divergence
from bayeskit.models.sparse_networks._network import SparseNetwork, sparsify
from bayeskit.models.sparse_networks._priors import (
    HorseshoePrior,
    HyperbolicSecant,
    LogUniformPrior,
    SpikeAndSlab,
    SpikeAndSlabPrior,
)

__all__ = [
    "HorseshoePrior",
    "HyperbolicSecant",
    "ImproperLogUniform",
    "LogUniformPrior",
    "SparseNetwork",
    "SpikeAndSlab",
    "SpikeAndSlabPrior",
    "log_uniform_divergence",
    "sparsify",
]
