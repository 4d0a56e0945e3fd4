"""Networks with sparse variational posteriors of their weights: pruned, shrunk, and rounded by what the data tell."""

from bayeskit.models.sparse_networks.log_uniform import LogUniform, log_uniform_divergence

__all__ = ["LogUniform", "log_uniform_divergence"]
