"""Shared services: statistics, storage, random streams, checks of input, progress, other packages."""
