"""Where to hang a tree from, so that its likelihood costs least."""

from __future__ import annotations

import numpy as np

from bayeskit.models.phylogenetics.trees.tree import Tree

#: Cost of one more level, in rows: a level costs a fixed number of calls and kernels to compile.
_LEVEL_COST = 30


def neighbors_of(tree: Tree) -> list[list[int]]:
    """List the neighbours of every node."""
    neighbors: list[list[int]] = [[] for _ in range(tree.num_edges + 1)]
    for node, parent in enumerate(tree.parents):
        neighbors[node].append(parent)
        neighbors[parent].append(node)
    return neighbors


def count_sub_patterns(tree: Tree, neighbors: list[list[int]], patterns: np.ndarray) -> dict[tuple[int, int], int]:
    """Count the distinct sub-patterns on the far side of every edge, seen from either end.

    Returns
    -------
    dict
        For `(node, towards)` the number of distinct sub-patterns of the subtree that holds `node`
        when the edge to `towards` is cut.
    """
    ids: dict[tuple[int, int], np.ndarray] = {}
    counts: dict[tuple[int, int], int] = {}

    def combine(node: int, towards: int) -> None:
        if node < tree.num_taxa:
            keys = patterns[node].astype(np.int64)
        else:
            one, other = (child for child in neighbors[node] if child != towards)
            keys = ids[one, node] * counts[other, node] + ids[other, node]
        distinct, inverse = np.unique(keys, return_inverse=True)
        ids[node, towards], counts[node, towards] = inverse.ravel(), len(distinct)

    parents = tree.parents
    for node in range(tree.num_edges):
        combine(node, parents[node])
    for node in reversed(range(tree.num_edges)):
        combine(parents[node], node)
    return counts


def choose_root(tree: Tree, neighbors: list[list[int]], counts: dict[tuple[int, int], int]) -> int:
    """Return the internal node with the fewest rows and levels below it."""
    parents = tree.parents
    # Hanging the tree from a neighbour turns one edge round and leaves all others as they are.
    rows = {tree.root: sum(counts[node, parents[node]] for node in range(tree.num_taxa, tree.num_edges))}
    height = {node: 0 for node in range(tree.num_taxa)}
    for offset, below in enumerate(tree.children):
        height[tree.num_taxa + offset] = 1 + max(height[child] for child in below)
    above = {tree.root: 0}
    best, best_cost = tree.root, rows[tree.root] + _LEVEL_COST * height[tree.root]
    for node in reversed(range(tree.num_taxa, tree.num_edges)):
        parent = parents[node]
        sisters = [height[child] for child in tree.children[parent - tree.num_taxa] if child != node]
        above[node] = 1 + max(above[parent], *(1 + value for value in sisters))
        rows[node] = rows[parent] - counts[node, parent] + counts[parent, node]
        cost = rows[node] + _LEVEL_COST * max(height[node], above[node])
        if cost < best_cost:
            best, best_cost = node, cost
    return best
