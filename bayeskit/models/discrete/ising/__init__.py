"""Ising models on grids, with exact partition functions."""

from bayeskit.models.discrete.ising.closed_form import CRITICAL_COUPLING, kaufman_log_partition
from bayeskit.models.discrete.ising.ising_grid import IsingExpectations, IsingGrid

__all__ = ["CRITICAL_COUPLING", "IsingExpectations", "IsingGrid", "kaufman_log_partition"]
