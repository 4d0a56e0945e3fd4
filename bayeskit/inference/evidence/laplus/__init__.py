"""Laplus: approximations of posteriors of positive coordinates, and importance sampling from one of them."""

from bayeskit.inference.evidence.laplus.approximations import beta_prime_laplus, gamma_laplus, lognormal_laplus
from bayeskit.inference.evidence.laplus.importance_sampling import gamma_laplus_importance_sampling

__all__ = ["beta_prime_laplus", "gamma_laplus", "gamma_laplus_importance_sampling", "lognormal_laplus"]
