"""Finding rows of numbers in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


class RowNumbers:
    """Number of each row of a table.

    Parameters
    ----------
    rows : ndarray
        Integers, each row once, shape `(count, columns)`.

    Examples
    --------
    >>> RowNumbers(np.array([[3, 1], [0, 2]])).find(np.array([[0, 2], [7, 7], [3, 1]])).tolist()
    [1, -1, 0]
    """

    def __init__(self, rows: NDArray[Any]) -> None:
        keys = _keys(rows)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def find(self, rows: NDArray[Any]) -> Numbers:
        """Return the number of each row `(*batch, columns)` in the table, -1 where it is not there: `(*batch,)`."""
        keys = _keys(rows)
        if not len(self._sorted):
            return np.full(rows.shape[:-1], -1)
        place = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[place] == keys, self._order[place], -1).reshape(rows.shape[:-1])


def find_sorted(keys: Numbers, wanted: Numbers) -> Numbers:
    """Return where the wanted keys stand among ascending ones, -1 where they do not, shape of `wanted`.

    Examples
    --------
    >>> find_sorted(np.array([2, 5, 9]), np.array([[9, 3]])).tolist()
    [[2, -1]]
    """
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, -1)


def add_up(places: Numbers, values: Floats, count: int) -> Floats:
    """Add values to the places they belong to, `(count,)`; both are arrays of the same shape.

    Examples
    --------
    >>> add_up(np.array([0, 2, 0]), np.array([1.0, 2.0, 0.5]), 3).tolist()
    [1.5, 0.0, 2.0]
    """
    total: Floats = np.bincount(places.ravel(), values.ravel(), minlength=count).astype(np.float64, copy=False)
    return total


def _keys(rows: NDArray[Any]) -> NDArray[Any]:
    """Return one value a row that can be compared: a word, or the bytes of a longer row."""
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    size = flat.itemsize * flat.shape[1]
    return flat.view(np.uint64 if size == 8 else f"S{size}").ravel()
