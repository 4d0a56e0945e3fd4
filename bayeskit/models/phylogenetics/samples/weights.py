"""Weights of sampled trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from bayeskit.errors import SettingsError


def shares(weights: Sequence[float] | np.ndarray | Tensor | None, count: int) -> np.ndarray:
    """Return weights divided by their sum, equal ones where none are given, shape `(count,)`, float64.

    Raises
    ------
    SettingsError
        If there are not as many, one is negative, or their sum is not positive and finite.

    Examples
    --------
    >>> shares([1, 3], 2).tolist()
    [0.25, 0.75]
    """
    if isinstance(weights, Tensor):
        weights = weights.detach().cpu().numpy()
    values = np.ones(count) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.shape != (count,) or not (values >= 0).all() or not 0 < values.sum() < np.inf:
        raise SettingsError(
            f"weights of shape {values.shape} are not those of {count} trees, or not all at least zero with a "
            "positive, finite sum. Remedy: give one non-negative weight for each tree."
        )
    return values / values.sum()


def check_shares(weights: np.ndarray, index: np.ndarray, num_topologies: int) -> None:
    """Refuse weights `(samples,)` that sum to something else than one, and an index `(samples,)` that leads nowhere.

    Raises
    ------
    SettingsError
        If so.
    """
    if not (weights >= 0).all() or not abs(weights.sum() - 1) <= 1e-9:
        raise SettingsError(
            "sample_weights: one is negative, or they do not sum to one. Remedy: make samples by "
            "TreeSample.from_topologies, which divides them by their sum."
        )
    if not np.issubdtype(index.dtype, np.integer) or ((index < 0) | (index >= num_topologies)).any():
        raise SettingsError(
            f"index: one is no number from 0 to {num_topologies - 1}. Remedy: give the topology of each tree."
        )
