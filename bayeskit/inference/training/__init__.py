"""Training: from a model, a guide, an objective and data to fitted parameters."""

from bayeskit.inference.training.fitting import Fit, fit

__all__ = ["Fit", "fit"]
