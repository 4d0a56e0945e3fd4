"""Estimators that look at the density where it is highest."""
