"""Workflows: runs in a folder, model comparison, invariant causes, calibration studies, exams of evidence methods."""

from bayeskit.workflows._bayes_factors import ModelComparison, compare_models
from bayeskit.workflows._calibration import calibration_in_folder
from bayeskit.workflows._exam import run_exam, run_generated_exam
from bayeskit.workflows._folder import evidence_in_folder, posterior_in_folder, save_netcdf
from bayeskit.workflows._invariance import RegressionPrior, invariant_subsets
from bayeskit.workflows._learned_likelihoods import (
    learn_likelihood,
    rejection_abc,
)
from bayeskit.workflows._simulation_based_calibration import SBCResult, sbc

__all__ = [
    "ModelComparison",
    "RegressionPrior",
    "SBCResult",
    "calibration_in_folder",
    "compare_models",
    "evidence_in_folder",
    "invariant_subsets",
    "learn_likelihood",
    "posterior_in_folder",
    "rejection_abc",
    "run_exam",
    "run_generated_exam",
    "save_netcdf",
    "sbc",
]
