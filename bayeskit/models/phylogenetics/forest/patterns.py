"""Distinct sub-patterns of sets of taxa, found once and kept.

Which site patterns look alike below a node depends on the *taxa* below it and on nothing else. So they are found once
for every set of taxa that turns up, whatever topology it turns up in, and a new topology made of known sets costs no
search. Where all changes between bases are equally likely, patterns that differ only by a renaming of the bases count
as alike, too.

The renamings that leave a sub-pattern as it is are all those that permute bases within the blocks of some partition of
the four bases. There are fifteen such groups, so that every question about them is answered from a small table.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: A code is `row * CODE_BASE + renaming`.
CODE_BASE = 32
_PARTITIONS = [labels for labels in itertools.product(range(4), repeat=4) if labels == tuple(map(labels.index, labels))]


class Renamings(NamedTuple):
    """A group of renamings of the four bases, and tables about it.

    A set of renamings is a bit mask; a *stabiliser* is the number of one of the groups in `stabilizers`.

    Attributes
    ----------
    images : ndarray
        `images[g, i]` is what renaming `g` makes of base `i`; renaming 0 changes nothing.
    relative : ndarray
        `relative[g, h]` does `h` first, then the inverse of `g`.
    stabilizers : ndarray
        Each stabiliser as a set, in ascending order.
    coset : ndarray
        `coset[s, t, g]` is the smallest renaming that does one in `t`, `g`, and one in `s`.
    carriers : ndarray
        `carriers[s, g, h]` is the set of all renamings that make `g x` of `h x`, where `s` leaves `x` as it is.
    first : ndarray
        `first[code]` is the smallest renaming in a set; the set is given modulo 37, which tells powers of two apart.
    tips : ndarray
        `tips[a, b]` is the set of all renamings that make the set of bases `b` of the set `a`.
    reading : ndarray
        `reading[g, i]` is the base that renaming `g` makes `i` of.
    """

    images: NDArray[np.int64]
    relative: NDArray[np.int64]
    stabilizers: NDArray[np.int64]
    coset: NDArray[np.int64]
    carriers: NDArray[np.int64]
    first: NDArray[np.int64]
    tips: NDArray[np.int64]
    reading: NDArray[np.int64]

    @classmethod
    @lru_cache
    def of(cls, interchangeable: bool) -> Renamings:
        """Return all renamings, or the one that changes nothing."""
        images = np.array(list(itertools.permutations(range(4)))[: 24 if interchangeable else 1])
        number = {tuple(image): place for place, image in enumerate(images.tolist())}
        product = np.array([[number[tuple(g[h].tolist())] for h in images] for g in images])
        inverse = (product == 0).argmax(axis=1)
        bits = 1 << np.arange(len(images))
        labels = np.array(_PARTITIONS)
        inside = (labels[:, images] == labels[:, None]).all(axis=-1)
        stabilizers = np.unique(inside @ bits)
        inside = (stabilizers[:, None] & bits) != 0
        relative = product[inverse]
        # coset[s, t, g]: over all a in s and b in t, the smallest a g b.
        reached = product[product]  # [a, g, b]
        allowed = inside[:, None, :, None, None] & inside[None, :, None, None, :]
        coset = np.where(allowed, reached, len(images)).min(axis=(2, 4))
        # carriers[s, g, h]: k with inverse(g) k h in s.
        between = product[product[inverse][:, :, None], np.arange(len(images))]  # [g, k, h]
        carriers = np.einsum("sgkh,k->sgh", inside[:, between], bits)
        sets = np.arange(16)
        renamed = np.zeros((16, len(images)), dtype=np.int64)
        for base in range(4):
            renamed |= ((sets[:, None] >> base) & 1) << images[None, :, base]
        tips = (renamed[:, None] == sets[:, None]) @ bits
        first = np.zeros(37, dtype=np.int64)
        first[bits % 37] = np.arange(len(images))
        return cls(images, relative, stabilizers, coset, carriers, first, tips, images[inverse])

    def smallest(self, sets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the smallest renaming of each set."""
        return self.first[(sets & -sets) % 37]


class Rows(NamedTuple):
    """The distinct sub-patterns of one set of taxa.

    Attributes
    ----------
    codes : ndarray
        For each pattern its row, and the renaming that makes it of the row's representative: `(patterns,)`.
    representatives : ndarray
        A pattern that shows each row, shape `(rows,)`.
    stabilizers : ndarray
        The renamings that leave each row's representative as it is, shape `(rows,)`.
    """

    codes: NDArray[np.int64]
    representatives: NDArray[np.int64]
    stabilizers: NDArray[np.int64]


def tip_rows(masks: NDArray[np.uint8], group: Renamings) -> Rows:
    """Find the rows of a single taxon from the set of bases that each pattern shows."""
    smallest = (group.tips != 0).argmax(axis=1)  # any renamed set tells which sets are alike
    _, first, row = np.unique(smallest[masks], return_index=True, return_inverse=True)
    renaming = group.smallest(group.tips[masks[first][row], masks])
    own = group.tips[masks[first], masks[first]]
    return Rows(row * CODE_BASE + renaming, first, np.searchsorted(group.stabilizers, own))


def join_rows(one: Rows, other: Rows, group: Renamings) -> Rows:
    """Find the rows of the union of two disjoint sets of taxa."""
    # Codes may be stored in 32 bits, which the keys of pairs of rows leave.
    row_a, renaming_a = np.divmod(one.codes.astype(np.int64), CODE_BASE)
    row_b, renaming_b = np.divmod(other.codes.astype(np.int64), CODE_BASE)
    kept_a, kept_b = one.stabilizers[row_a], other.stabilizers[row_b]
    # Two pairs of sub-patterns are alike if their parts are, and one renaming serves both parts.
    between = group.coset[kept_a, kept_b, group.relative[renaming_a, renaming_b]]
    keys = (row_a * len(other.representatives) + row_b) * CODE_BASE + between
    _, first, row = np.unique(keys, return_index=True, return_inverse=True)
    shown = first[row]
    serves = (
        group.carriers[kept_a, renaming_a, renaming_a[shown]] & group.carriers[kept_b, renaming_b, renaming_b[shown]]
    )
    return Rows(
        row * CODE_BASE + group.smallest(serves),
        first,
        np.searchsorted(group.stabilizers, serves[first]),
    )
