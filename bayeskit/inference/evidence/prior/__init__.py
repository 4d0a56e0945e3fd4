"""Estimators on draws from the prior."""
