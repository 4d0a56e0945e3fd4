"""Estimators from a normalizing flow that was fitted to posterior draws."""
