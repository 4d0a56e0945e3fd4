"""The canonical form of topologies that come as numbers of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.trees import clades


def canonical_children(children: NDArray[Any], num_taxa: int, rooted: bool) -> NDArray[np.int32]:
    """Check that pairs of children make topologies, and bring them into the order of `Topologies`.

    Parameters
    ----------
    children : ndarray
        Both children of each internal node, children before parents, shape `(topologies, internal, 2)`, integers.
    num_taxa : int
        Number of taxa.
    rooted : bool
        Whether the topologies are rooted; unrooted ones hang from taxon 0, which is no child.

    Returns
    -------
    ndarray
        The same topologies in canonical form, int32.

    Raises
    ------
    TreeError
        If they are no integers, a child does not come before its parent, or a node is not used exactly once.

    Examples
    --------
    >>> canonical_children(np.array([[[3, 1], [4, 2]]]), 4, rooted=False).tolist()
    [[[1, 3], [2, 4]]]
    """
    if not np.issubdtype(children.dtype, np.integer):
        raise TreeError(f"children: {children.dtype} numbers no nodes. Remedy: give integers.")
    count, internal = children.shape[:2]
    first = 0 if rooted else 1
    own = np.arange(num_taxa, num_taxa + internal)
    used = np.arange(first, num_taxa + internal - 1)
    pairs = np.sort(children, axis=-1)
    if not ((pairs < own[:, None]).all() and (np.sort(pairs.reshape(count, -1), axis=1) == used).all()):
        raise TreeError(
            "children: a node is not used exactly once, or comes after its parent. Remedy: give the `children` of "
            "Topologies."
        )
    sets = clades.below(pairs, num_taxa)[:, num_taxa:]
    order = clades.order(sets)
    if (order == np.arange(internal)).all():
        return pairs.astype(np.int32)
    return clades.children_of(np.take_along_axis(sets, order[..., None], axis=1), num_taxa, first)


def first_rows(children: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find where each distinct topology appears first, and which of them each one is.

    Parameters
    ----------
    children : ndarray
        In canonical form, shape `(topologies, internal, 2)`.

    Returns
    -------
    first : ndarray
        Shape `(distinct,)`, rising.
    index : ndarray
        Shape `(topologies,)`.

    Examples
    --------
    >>> [part.tolist() for part in first_rows(np.array([[[1, 3], [2, 4]], [[1, 2], [3, 4]], [[1, 3], [2, 4]]]))]
    [[0, 1], [0, 1, 0]]
    """
    if not len(children):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    _, first, index = np.unique(children.reshape(len(children), -1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[index.ravel()]
