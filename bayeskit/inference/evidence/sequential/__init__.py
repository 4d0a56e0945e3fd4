"""Estimators that carry points from the prior to the posterior."""
