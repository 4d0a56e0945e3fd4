"""Tempered sequential Monte Carlo: a pilot that learns a schedule, and replicates that run it frozen."""

from bayeskit.inference.samplers.smc.population_hmc import PopulationHMC
from bayeskit.inference.samplers.smc.run import SMCRun, sample_smc
from bayeskit.inference.samplers.smc.stages import Schedule, SMCInfo, SMCState, Stage

__all__ = ["PopulationHMC", "SMCInfo", "SMCRun", "SMCState", "Schedule", "Stage", "sample_smc"]
