"""Felsenstein's pruning on one tree: likelihoods of batches of branch lengths, and their derivatives."""
