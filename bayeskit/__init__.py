"""bayeskit: posterior draws, marginal likelihoods and objectives for Pyro models."""

from bayeskit import errors, exact
from bayeskit._moved import answer_to_old_paths
from bayeskit.draws import Draws
from bayeskit.inference.samplers import sample
from bayeskit.inference.training import Fit, fit
from bayeskit.logdensity.recurrence import scan
from bayeskit.logdensity.target import Target
from bayeskit.workflows.simulation_based_calibration import SBCResult, sbc

__version__ = "0.1.0"

answer_to_old_paths()

__all__ = ["Draws", "Fit", "SBCResult", "Target", "__version__", "errors", "exact", "fit", "sample", "sbc", "scan"]
