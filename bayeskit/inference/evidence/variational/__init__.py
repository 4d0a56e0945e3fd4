"""Estimators from a distribution that was optimised to be close to the posterior."""
