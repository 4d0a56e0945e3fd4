"""Workflows: runs in a folder, model comparison, invariant causes, calibration studies, exams of evidence methods."""

from bayeskit.workflows.bayes_factors import ModelComparison, compare_models
from bayeskit.workflows.calibration import calibration_in_folder
from bayeskit.workflows.exam import Exam, ExamRow, run_exam, run_generated_exam
from bayeskit.workflows.folder import evidence_in_folder, posterior_in_folder, save_netcdf
from bayeskit.workflows.invariance import InvariantSubsets, RegressionPrior, invariant_subsets
from bayeskit.workflows.learned_likelihoods import (
    LearnedDistribution,
    LearnedLikelihood,
    learn_likelihood,
    rejection_abc,
)
from bayeskit.workflows.mixtures import TemperingBudget, compare_num_components, mixture_evidence, symmetrised_bridge
from bayeskit.workflows.simulation_based_calibration import SBCResult, sbc

__all__ = [
    "Exam",
    "ExamRow",
    "InvariantSubsets",
    "LearnedDistribution",
    "LearnedLikelihood",
    "ModelComparison",
    "RegressionPrior",
    "SBCResult",
    "TemperingBudget",
    "calibration_in_folder",
    "compare_models",
    "compare_num_components",
    "evidence_in_folder",
    "invariant_subsets",
    "learn_likelihood",
    "mixture_evidence",
    "posterior_in_folder",
    "rejection_abc",
    "run_exam",
    "run_generated_exam",
    "save_netcdf",
    "sbc",
    "symmetrised_bridge",
]
