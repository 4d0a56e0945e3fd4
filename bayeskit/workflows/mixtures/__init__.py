"""Mixtures meet inference: evidence that label switching cannot fool, and the number of components."""

from bayeskit.workflows.mixtures.comparison import TemperingBudget, compare_num_components
from bayeskit.workflows.mixtures.evidence import mixture_evidence, symmetrised_bridge

__all__ = ["TemperingBudget", "compare_num_components", "mixture_evidence", "symmetrised_bridge"]
