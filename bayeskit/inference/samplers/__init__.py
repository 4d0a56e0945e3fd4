"""Samplers: init/step kernels for a batch of chains, and the loop that runs them."""

from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState, ChEES, LongestAxis
from bayeskit.inference.samplers.chains import Chains, Convergence, RunSettings, run
from bayeskit.inference.samplers.driver import Algorithm, Control, Outcome, drive
from bayeskit.inference.samplers.hmc import HMC, HMCInfo, HMCState
from bayeskit.inference.samplers.ladder import Exchange, Ladder, sample_ladder
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.minibatch import Epochs, IndependentRows, MinibatchTarget
from bayeskit.inference.samplers.nested import ConstrainedSlice, NestedRun, NestedSampler, sample_nested
from bayeskit.inference.samplers.nuts import NUTS, NUTSInfo
from bayeskit.inference.samplers.population_moves import PopulationHMC
from bayeskit.inference.samplers.populations import PopulationMoves, ResampleMove, SMCInfo, SMCState
from bayeskit.inference.samplers.pyro_nuts import sample_with_pyro
from bayeskit.inference.samplers.sampling import sample
from bayeskit.inference.samplers.smc import SMCRun, SMCSchedule, Stage, sample_smc
from bayeskit.inference.samplers.stochastic_gradient import (
    SGHMC,
    SGLD,
    Constant,
    Polynomial,
    PreconditionedSGLD,
    sample_stochastic_gradient,
)

__all__ = [
    "Adaptation",
    "AdaptationState",
    "Algorithm",
    "ChEES",
    "Chains",
    "Constant",
    "ConstrainedSlice",
    "Control",
    "Convergence",
    "Epochs",
    "Exchange",
    "HMC",
    "HMCInfo",
    "HMCState",
    "IndependentRows",
    "Ladder",
    "LongestAxis",
    "Metric",
    "MinibatchTarget",
    "NUTS",
    "NUTSInfo",
    "NestedRun",
    "NestedSampler",
    "Outcome",
    "Polynomial",
    "PopulationHMC",
    "PopulationMoves",
    "PreconditionedSGLD",
    "ResampleMove",
    "RunSettings",
    "SGHMC",
    "SGLD",
    "SMCInfo",
    "SMCRun",
    "SMCSchedule",
    "SMCState",
    "Stage",
    "drive",
    "run",
    "sample",
    "sample_ladder",
    "sample_nested",
    "sample_smc",
    "sample_stochastic_gradient",
    "sample_with_pyro",
]
