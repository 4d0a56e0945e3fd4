"""Estimators that carry points from the prior to the posterior."""

from bayeskit.inference.evidence.sequential.adaptive_smc import adaptive_smc
from bayeskit.inference.evidence.sequential.nested_sampling import nested_sampling
from bayeskit.inference.evidence.sequential.prequential import PrequentialEvidence, prequential
from bayeskit.inference.evidence.sequential.prequential import refuses as prequential_refuses
from bayeskit.inference.evidence.sequential.smc import smc

__all__ = ["PrequentialEvidence", "adaptive_smc", "nested_sampling", "prequential", "prequential_refuses", "smc"]
