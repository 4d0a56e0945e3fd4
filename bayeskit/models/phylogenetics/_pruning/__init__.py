"""Felsenstein's pruning: one plan for any number of topologies, as compiled code or as tensor operations."""
