"""Nested sampling: draws and slice moves of the prior above a likelihood, the run that raises it, and its result."""

from bayeskit.inference.samplers.nested.result import NestedRun
from bayeskit.inference.samplers.nested.run import NestedSampler, sample_nested
from bayeskit.inference.samplers.nested.slice import ConstrainedSlice

__all__ = ["ConstrainedSlice", "NestedRun", "NestedSampler", "sample_nested"]
