"""Training of a model and guide by stochastic optimization of an objective."""

from bayeskit.inference.training.fitting import fit
from bayeskit.inference.training.result import Fit

__all__ = ["Fit", "fit"]
