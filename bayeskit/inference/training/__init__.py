"""Training of a model and guide by stochastic optimization of an objective."""

from bayeskit.inference.training._fitting import fit
from bayeskit.inference.training._result import Fit

__all__ = ["Fit", "fit"]
