"""Layers of a network, as maps of covariances."""
