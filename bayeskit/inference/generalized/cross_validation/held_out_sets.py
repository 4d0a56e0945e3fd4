"""Sets of data that are held out: all of one size, or some at random."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError


def as_sizes(p: Any, num_data: int) -> tuple[int, ...]:
    """Return the sizes of held-out sets in increasing order, by default all of them.

    Raises
    ------
    SettingsError
        If one is no whole number from 1 to the number of data, or there is none.

    Examples
    --------
    >>> as_sizes(None, 3), as_sizes(2, 3), as_sizes((3, 1), 3)
    ((1, 2, 3), (2,), (1, 3))
    """
    if p is None:
        return tuple(range(1, num_data + 1))
    given: Iterable[Any] = p if isinstance(p, Iterable) else (p,)
    sizes = sorted({whole_number("p", x, 1) for x in given})
    if not sizes or sizes[-1] > num_data:
        found = f"not {sizes[-1]}" if sizes else "but none is given"
        raise SettingsError(
            f"p is how many of the {num_data} data are held out, so it must lie between 1 and {num_data}, {found}"
        )
    return tuple(sizes)


def check_number(num_data: int, sizes: Iterable[int], most: int, remedy: str) -> None:
    """Refuse to enumerate more than ``most`` sets.

    Raises
    ------
    SettingsError
    """
    count = sum(math.comb(num_data, p) for p in sizes)
    if count > most:
        raise SettingsError(f"there are {count} sets of data to go through, more than max_sets={most}: {remedy}")


def all_sets(num_data: int, size: int) -> Tensor:
    """Return every set of ``size`` data as a row of a mask, ``(C(n, size), n)``.

    Examples
    --------
    >>> all_sets(3, 2).int().tolist()
    [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    """
    rows = torch.tensor(list(combinations(range(num_data), size)), dtype=torch.long)
    return torch.zeros(len(rows), num_data, dtype=torch.bool).scatter(1, rows.reshape(len(rows), size), True)


def sampled_sets(num_data: int, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` random sets without repetition, all of them where there are no more, ``(count, n)``."""
    if math.comb(num_data, size) <= count:
        return all_sets(num_data, size)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        rows = torch.rand(num_data, generator=generator, device=generator.device).argsort()[:size]
        found.setdefault(tuple(rows.sort().values.tolist()))
    rows = torch.tensor(list(found), dtype=torch.long)
    return torch.zeros(count, num_data, dtype=torch.bool).scatter(1, rows, True)
