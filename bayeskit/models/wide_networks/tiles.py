"""Matrices of pairs of inputs, block by block, so that what layers hold in between stays in the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch

from bayeskit._torch import one_thread

SIZE = 1 << 16  # covariances of pairs of sites that one block holds
WIDE_SIZE = 1 << 18  # where threads share a large matrix: small blocks would have them wait for the interpreter's lock
WIDE_BLOCKS = 8  # for each thread, at least, or blocks are small
GROUP = 16  # blocks on a side of a larger square, all of which are computed before others: pages of files fill up
BATCH = 32  # blocks for each thread before threads wait for each other

Result = TypeVar("Result")


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


def shared_size(num_covariances: int, device: torch.device) -> int:
    """Return how many covariances a block of a matrix of so many holds, all threads working."""
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    return WIDE_SIZE if workers > 1 and num_covariances >= WIDE_BLOCKS * workers * WIDE_SIZE else SIZE


def side(num_pairs_of_sites: int, size: int) -> int:
    """Return how many inputs a block's side has, each pair of which has so many covariances."""
    return max(int(math.sqrt(size / max(num_pairs_of_sites, 1))), 1)


def blocks(num_rows: int, num_columns: int, symmetric: bool, length: int) -> Iterator[Block]:
    """Yield the blocks of a matrix, or those on and above the diagonal of a symmetric one."""
    wide = GROUP * length
    for top in range(0, num_rows, wide):
        for left in range(top if symmetric else 0, num_columns, wide):
            for first in range(top, min(top + wide, num_rows), length):
                rows = slice(first, min(first + length, num_rows))
                for second in range(max(first, left) if symmetric else left, min(left + wide, num_columns), length):
                    columns = slice(second, min(second + length, num_columns))
                    yield Block(rows, columns, symmetric and second > first)


def each(function: Callable[[Block], Result], chosen: Sequence[Block], device: torch.device) -> Iterator[Result]:
    """Yield what a function makes of each block, in order.

    On a CPU there are as many blocks at a time as torch has threads, each of which works on its own with one: torch's
    way, many threads on one operation, is too fine for operations that fit into the cache.
    """
    workers = min(torch.get_num_threads(), len(chosen)) if device.type == "cpu" else 1
    # The number of threads is torch's own between batches, when the caller's code runs.
    for first in range(0, len(chosen), BATCH * workers):
        batch = chosen[first : first + BATCH * workers]
        if workers == 1:
            for block in batch:
                with one_thread():
                    result = function(block)
                yield result
            continue
        with one_thread(), ThreadPoolExecutor(workers, thread_name_prefix="bayeskit-kernel") as pool:
            results = list(pool.map(function, batch))
        yield from results
