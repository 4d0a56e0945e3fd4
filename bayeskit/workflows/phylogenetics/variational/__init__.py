"""Variational inference over topologies and branch lengths."""
