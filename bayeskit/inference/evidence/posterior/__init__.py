"""Estimators on draws from the posterior."""
