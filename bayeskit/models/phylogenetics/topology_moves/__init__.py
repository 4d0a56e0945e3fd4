"""Moves of Markov chains over unrooted topologies and branch lengths."""
