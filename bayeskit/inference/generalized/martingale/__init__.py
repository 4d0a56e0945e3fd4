"""Posteriors by predicting the data that are missing."""
