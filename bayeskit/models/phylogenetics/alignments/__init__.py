"""Alignments of sequences, and the files they come in."""
