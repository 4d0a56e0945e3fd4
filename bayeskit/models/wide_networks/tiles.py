"""Matrices of pairs of inputs, block by block, so that what layers hold in between stays in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

SIZE = 1 << 16  # covariances of pairs of sites that one block holds


class Block(NamedTuple):
    """Rows and columns of one block of a matrix.

    Attributes
    ----------
    rows, columns : slice
        Where it lies.
    mirrored : bool
        Whether its transpose is a block, too, which need not be computed.
    """

    rows: slice
    columns: slice
    mirrored: bool


def side(num_pairs_of_sites: int, size: int = SIZE) -> int:
    """Return how many inputs a block's side has, each pair of which has so many covariances."""
    return max(int(math.sqrt(size / max(num_pairs_of_sites, 1))), 1)


def blocks(num_rows: int, num_columns: int, symmetric: bool, length: int) -> Iterator[Block]:
    """Yield the blocks of a matrix, or those on and above the diagonal of a symmetric one."""
    for first in range(0, num_rows, length):
        rows = slice(first, min(first + length, num_rows))
        for second in range(first if symmetric else 0, num_columns, length):
            columns = slice(second, min(second + length, num_columns))
            yield Block(rows, columns, symmetric and second > first)
