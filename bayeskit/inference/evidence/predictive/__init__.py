"""Predictive scores: how well a model foretells single observations."""
