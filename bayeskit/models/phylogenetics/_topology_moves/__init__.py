"""Moves of Markov chains over unrooted topologies and branch lengths."""

from bayeskit.models.phylogenetics._topology_moves._chains import Moves

__all__ = ["Moves"]
