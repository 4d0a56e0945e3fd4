"""Samplers: init/step kernels over a batch of chains, and the one loop that runs them."""

from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.chains import Chains, Convergence, RunSettings
from bayeskit.inference.samplers.driver import Algorithm, Control, Outcome, drive
from bayeskit.inference.samplers.hmc import HMC, HMCInfo, HMCState
from bayeskit.inference.samplers.ladder import Exchange, Ladder, sample_ladder
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.run import run
from bayeskit.inference.samplers.sample import sample
from bayeskit.inference.samplers.trajectory import ChEES, LongestAxis

__all__ = [
    "HMC",
    "Adaptation",
    "AdaptationState",
    "Algorithm",
    "Chains",
    "ChEES",
    "Control",
    "Convergence",
    "Exchange",
    "HMCInfo",
    "HMCState",
    "Ladder",
    "LongestAxis",
    "Metric",
    "Outcome",
    "RunSettings",
    "drive",
    "run",
    "sample",
    "sample_ladder",
]
