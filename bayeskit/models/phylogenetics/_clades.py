"""Sets of taxa as bits.

A set over `n` taxa takes `ceil(n / 64)` words of 64 bits, the last dimension of every array here; taxon `i` is bit
`i % 64` of word `i // 64`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeskit.errors import TreeError

Bits = NDArray[np.uint64]


def num_words(num_taxa: int) -> int:
    """Return the number of 64-bit words of a set."""
    return -(-num_taxa // 64)


def single(num_taxa: int) -> Bits:
    """Return the sets of one taxon each, shape `(taxa, words)`."""
    taxa = np.arange(num_taxa)
    sets = np.zeros((num_taxa, num_words(num_taxa)), dtype=np.uint64)
    sets[taxa, taxa // 64] = np.uint64(1) << (taxa % 64).astype(np.uint64)
    return sets


def everything(num_taxa: int) -> Bits:
    """Return the set of all taxa, shape `(words,)`."""
    return np.bitwise_or.reduce(single(num_taxa), axis=0)


def size(sets: Bits) -> NDArray[np.int64]:
    """Return the number of taxa of each set, shape `sets.shape[:-1]`."""
    return np.bitwise_count(sets).sum(axis=-1, dtype=np.int64)


def contains(sets: Bits, taxon: int) -> NDArray[np.bool_]:
    """Tell which sets hold a taxon, shape `sets.shape[:-1]`."""
    held: NDArray[np.bool_] = (sets[..., taxon // 64] >> np.uint64(taxon % 64)) & np.uint64(1) != 0
    return held


def members(one: Bits) -> list[int]:
    """Return the taxa of one set in ascending order."""
    return np.flatnonzero(np.unpackbits(one.astype("<u8").view(np.uint8), bitorder="little")).tolist()


def identify(sets: Bits) -> tuple[Bits, NDArray[np.int64]]:
    """Return the distinct sets, `(sets, words)`, and the index of each given set, `(*batch, words) -> (*batch,)`."""
    # Distinct sets are ordered by size and then by taxa.
    flat = np.ascontiguousarray(sets.reshape(-1, sets.shape[-1]))
    distinct, index = np.unique(flat, axis=0, return_inverse=True)
    ranking = order(distinct)
    rank = np.empty_like(ranking)
    rank[ranking] = np.arange(len(ranking))
    return distinct[ranking], rank[index.ravel()].reshape(sets.shape[:-1])


def order(sets: Bits) -> NDArray[np.int64]:
    """Return the order of sets `(*batch, count, words)` by size and then by taxa, shape `(*batch, count)`."""
    keys = [sets[..., word] for word in range(sets.shape[-1])]
    return np.lexsort((*keys, size(sets).astype(np.uint64)), axis=-1)


def below(children: NDArray[Any], num_taxa: int, tips: Bits | None = None) -> Bits:
    """Return the taxa below every node, `(trees, num_taxa + internal, words)`, from children `(trees, internal, 2)`.

    Children precede parents; `tips` `(trees, num_taxa, words)` are the tips' sets, by default taxon `i` at tip `i`.
    """
    count, internal = children.shape[:2]
    sets = np.empty((count, num_taxa + internal, num_words(num_taxa)), dtype=np.uint64)
    sets[:, :num_taxa] = single(num_taxa) if tips is None else tips
    trees = np.arange(count)
    for position in range(internal):
        left, right = children[:, position].T
        sets[:, num_taxa + position] = sets[trees, left] | sets[trees, right]
    return sets


def turned(sets: Bits, split: Bits, num_taxa: int) -> Bits:
    """Return the sets `(*batch, nodes, words)` with the root moved to the edge above `split` `(*batch, 1, words)`."""
    # Only nodes between the two roots change: they lie above the edge, and now hold the other taxa.
    above = ((split & ~sets) == 0).all(axis=-1) & (sets != split).any(axis=-1)
    return np.where(above[..., None], everything(num_taxa) & ~sets, sets)


_NO_TREES = "The sets of taxa do not form binary trees. Remedy: give nested sets, each the union of two."


def children_of(internal: Bits, num_taxa: int, first: int) -> NDArray[np.int32]:
    """Return the children of internal nodes, `(trees, internal, 2)`, from the taxa below, `(trees, internal, words)`.

    Sets are sorted as by `order`; `first` is 1 if taxon 0 is in no set, else 0; TreeError if no binary trees fit.
    """
    count = len(internal)
    children = _children_of(internal, num_taxa)
    sets = below(children, num_taxa)
    sizes, trees = size(sets), np.arange(count)[:, None]
    adds = sizes[trees, children[..., 0]] + sizes[trees, children[..., 1]] == sizes[:, num_taxa:]
    if not (adds.all() and (sets[:, num_taxa:] == internal).all() and (sizes[:, -1] == num_taxa - first).all()):
        raise TreeError(_NO_TREES)
    return children


def _children_of(internal: Bits, num_taxa: int) -> NDArray[np.int32]:
    count, nodes, words = internal.shape
    trees, children = np.arange(count), np.empty((count, nodes, 2), dtype=np.int32)
    sets = np.concatenate([np.broadcast_to(single(num_taxa), (count, num_taxa, words)), internal], axis=1)
    above = np.tile(np.arange(num_taxa + nodes), (count, 1))  # of a node without a parent so far, itself

    def highest(taxa: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the largest set so far that holds a taxon of each tree, and let the taxon point there."""
        found = taxa
        while ((higher := above[trees, found]) != found).any():
            found = higher
        above[trees, taxa] = found
        return found

    for position in range(nodes):
        one = highest(_lowest(internal[:, position]))
        rest = internal[:, position] & ~sets[trees, one]
        if not rest.any(axis=-1).all():
            raise TreeError(_NO_TREES)
        other = highest(_lowest(rest))
        children[:, position] = np.stack([np.minimum(one, other), np.maximum(one, other)], axis=-1)
        above[trees, one] = above[trees, other] = num_taxa + position
    return children


def _lowest(sets: Bits) -> NDArray[np.int64]:
    """Return the first taxon of each set, `(count, words) -> (count,)`; 0 for an empty one."""
    word = (sets != 0).argmax(axis=-1)
    value = sets[np.arange(len(sets)), word]
    bit = np.maximum(value & (~value + np.uint64(1)), np.uint64(1))
    return word * 64 + np.log2(bit.astype(np.float64)).astype(np.int64)
