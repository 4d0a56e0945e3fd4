"""Training of a model and guide by stochastic optimization of an objective."""

from bayeskit.inference.training.fitting import Fit, fit

__all__ = ["Fit", "fit"]
