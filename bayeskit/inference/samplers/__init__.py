"""Samplers: init/step kernels for a batch of chains, and the loop that runs them."""

from bayeskit.inference.samplers._adaptation import Adaptation, ChEES, LongestAxis
from bayeskit.inference.samplers._chains import Chains, Convergence, RunSettings, run
from bayeskit.inference.samplers._driver import Algorithm, Control, drive
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._ladder import Exchange, sample_ladder
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._minibatch import Epochs, IndependentRows, MinibatchTarget
from bayeskit.inference.samplers._nested import ConstrainedSlice, sample_nested
from bayeskit.inference.samplers._nuts import NUTS
from bayeskit.inference.samplers._population_moves import PopulationHMC
from bayeskit.inference.samplers._populations import PopulationMoves, ResampleMove
from bayeskit.inference.samplers._pyro_nuts import sample_with_pyro
from bayeskit.inference.samplers._sampling import sample
from bayeskit.inference.samplers._smc import SMCSchedule, sample_smc
from bayeskit.inference.samplers._stochastic_gradient import (
    SGHMC,
    SGLD,
    Constant,
    Polynomial,
    PreconditionedSGLD,
    sample_stochastic_gradient,
)

__all__ = [
    "Adaptation",
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
    "IndependentRows",
    "LongestAxis",
    "Metric",
    "MinibatchTarget",
    "NUTS",
    "Polynomial",
    "PopulationHMC",
    "PopulationMoves",
    "PreconditionedSGLD",
    "ResampleMove",
    "RunSettings",
    "SGHMC",
    "SGLD",
    "SMCSchedule",
    "drive",
    "run",
    "sample",
    "sample_ladder",
    "sample_nested",
    "sample_smc",
    "sample_stochastic_gradient",
    "sample_with_pyro",
]
