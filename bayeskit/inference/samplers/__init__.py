"""Samplers: init/step kernels over a batch of chains, and the one loop that runs them."""

from bayeskit.inference.samplers.adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers.chains import Chains, Convergence, RunSettings
from bayeskit.inference.samplers.driver import Algorithm, Control, Outcome, drive
from bayeskit.inference.samplers.foreign import sample_with_pyro
from bayeskit.inference.samplers.hmc import HMC, HMCInfo, HMCState
from bayeskit.inference.samplers.ladder import Exchange, Ladder, sample_ladder
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.nuts.kernel import NUTS, NUTSInfo
from bayeskit.inference.samplers.run import run
from bayeskit.inference.samplers.sample import sample
from bayeskit.inference.samplers.smc.population_hmc import PopulationHMC
from bayeskit.inference.samplers.smc.run import SMCRun, sample_smc
from bayeskit.inference.samplers.smc.stages import Schedule, SMCInfo, SMCState, Stage
from bayeskit.inference.samplers.stochastic_gradient.rows import Epochs, IndependentRows
from bayeskit.inference.samplers.stochastic_gradient.run import sample_stochastic_gradient
from bayeskit.inference.samplers.stochastic_gradient.schedules import Constant, Polynomial
from bayeskit.inference.samplers.stochastic_gradient.sghmc import SGHMC
from bayeskit.inference.samplers.stochastic_gradient.sgld import SGLD, PreconditionedSGLD
from bayeskit.inference.samplers.stochastic_gradient.target import MinibatchTarget
from bayeskit.inference.samplers.trajectory import ChEES, LongestAxis

__all__ = [
    "NUTS",
    "NUTSInfo",
    "sample_with_pyro",
    "MinibatchTarget",
    "Epochs",
    "IndependentRows",
    "Constant",
    "Polynomial",
    "SGHMC",
    "SGLD",
    "PreconditionedSGLD",
    "sample_stochastic_gradient",
    "PopulationHMC",
    "SMCRun",
    "sample_smc",
    "Schedule",
    "SMCInfo",
    "SMCState",
    "Stage",
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
