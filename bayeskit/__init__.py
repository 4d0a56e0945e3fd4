"""bayeskit: posterior draws, marginal likelihoods and objectives for Pyro models."""

from bayeskit import errors, exact
from bayeskit.draws import Draws
from bayeskit.inference.samplers import sample
from bayeskit.target import Target

__version__ = "0.1.0"

__all__ = ["Draws", "Target", "__version__", "errors", "exact", "sample"]
