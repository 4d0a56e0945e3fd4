"""Pruning on many topologies at once."""
