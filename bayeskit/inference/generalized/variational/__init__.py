"""Posteriors by minimising an expected loss and a divergence from the prior."""
