"""Amortised posteriors: one network for all data of a model."""

from bayeskit.inference.amortization._posterior import AmortizedPosterior, amortize

__all__ = ["AmortizedPosterior", "amortize"]
