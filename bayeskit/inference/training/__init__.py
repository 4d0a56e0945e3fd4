"""Training: from a model, a guide, an objective and data to fitted parameters."""

from bayeskit.inference.training.fit import fit
from bayeskit.inference.training.result import Fit

__all__ = ["Fit", "fit"]
