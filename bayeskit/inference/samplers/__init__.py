"""Samplers: init/step kernels over a batch of chains, and the one loop that runs them."""

from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.hmc import HMC, HMCInfo, HMCState
from bayeskit.inference.samplers.run import RunSettings, run
from bayeskit.inference.samplers.sample import Ladder, sample, sample_ladder

__all__ = [
    "HMC",
    "Adaptation",
    "AdaptationState",
    "HMCInfo",
    "HMCState",
    "Ladder",
    "RunSettings",
    "run",
    "sample",
    "sample_ladder",
]
