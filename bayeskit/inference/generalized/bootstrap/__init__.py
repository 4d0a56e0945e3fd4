"""Posteriors by minimising a loss under random weights of the data."""
