"""The order in which partial likelihoods are computed, each distinct one once.

Below a node, many site patterns look alike: the partial likelihood depends only on the tips below.
A schedule lists for every node its distinct sub-patterns (its *rows*), which rows of the two
children each comes from, and groups the nodes by their distance from the root, so that one gather
and one product serve a whole level however many nodes it has. A node's children all stand one
level deeper, so a level needs no other table than that of the level before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics.tree import Tree

#: Cost of one more level, in rows: a level costs a fixed number of calls and kernels to compile.
_LEVEL_COST = 100


@dataclass(frozen=True, eq=False)
class Level:
    """All nodes at one distance from the root.

    A level makes a table of messages, one row for each distinct sub-pattern below one of its
    nodes: first the rows of its tips (`tip_rows` of them), then those of its internal nodes
    (`inner_rows`).

    Attributes
    ----------
    left, right : Tensor
        For each inner row, its two factors as rows of the next deeper level's table, shape
        `(inner_rows,)`, int64.
    edges : Tensor
        Edge through which each row of the table is sent, shape `(tip_rows + inner_rows,)`, int64.
    tip_states : Tensor
        Bases that each tip row allows, shape `(tip_rows, 4)`, entries 0 and 1.
    weights : Tensor
        Number of sites that use each inner row, shape `(inner_rows,)`.
    """

    left: Tensor
    right: Tensor
    edges: Tensor
    tip_states: Tensor
    weights: Tensor

    @property
    def tip_rows(self) -> int:
        """Number of rows that belong to tips."""
        return self.tip_states.shape[0]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything the likelihood of one alignment on one topology needs but the branch lengths.

    Attributes
    ----------
    levels : tuple of Level
        From the deepest to the one below the root.
    root_rows : tuple of Tensor
        For each site pattern, the rows of its three factors at the root, each `(patterns,)`.
    weights : Tensor
        Number of sites of each pattern, shape `(patterns,)`.
    num_edges : int
        Number of edges of the tree.
    pattern_rows : tuple of Tensor
        For each level, the inner rows that each pattern passes through, shape
        `(inner_nodes, patterns)`.
    """

    levels: tuple[Level, ...]
    root_rows: tuple[Tensor, Tensor, Tensor]
    weights: Tensor
    num_edges: int
    pattern_rows: tuple[Tensor, ...]

    @property
    def num_updates(self) -> int:
        """Number of partial likelihoods computed, the root's included."""
        return sum(level.left.shape[0] for level in self.levels) + self.weights.shape[0]


def build_schedule(
    tree: Tree, patterns: np.ndarray, weights: np.ndarray, dtype: torch.dtype, device: torch.device
) -> Schedule:
    """Find the distinct sub-patterns below every node and put them in order.

    Parameters
    ----------
    tree : Tree
        The topology.
    patterns : ndarray
        Sets of bases as bits, shape `(taxa, patterns)`, rows in the order of `tree.taxa`.
    weights : ndarray
        Number of sites of each pattern, shape `(patterns,)`.
    dtype : torch.dtype
        Type of the floating-point tables.
    device : torch.device
        Where the tables live.

    Returns
    -------
    Schedule
        The schedule, hung from the internal node that makes it cheapest; the likelihood of a
        time-reversible model does not depend on that choice.
    """
    neighbors = _neighbors(tree)
    tips = [np.unique(row, return_inverse=True) for row in patterns]
    ids = _sub_patterns(tree, neighbors, [inverse.ravel() for _, inverse in tips])
    counts = {key: int(value.max()) + 1 for key, value in ids.items()}
    root = _choose_root(tree, neighbors, counts)

    by_depth: list[list[tuple[int, int]]] = [[(root, -1)]]
    while True:
        deeper = [(child, node) for node, parent in by_depth[-1] for child in neighbors[node] if child != parent]
        if not deeper:
            break
        by_depth.append(deeper)

    levels: list[Level] = []
    pattern_rows: list[Tensor] = []
    start: dict[int, int] = {}
    for nodes in reversed(by_depth[1:]):
        below = start
        leaf = [item for item in nodes if item[0] < tree.num_taxa]
        inner = [item for item in nodes if item[0] >= tree.num_taxa]
        start, size = {}, 0
        for item in [*leaf, *inner]:
            start[item[0]] = size
            size += counts[item]
        tip_rows = sum(counts[item] for item in leaf)
        factors: list[list[np.ndarray]] = [[], []]
        row_weights, passed = [], []
        for item in inner:
            node, parent = item
            own = ids[item]
            some_pattern = np.empty(counts[item], dtype=np.int64)
            some_pattern[own] = np.arange(own.size)
            children = [child for child in neighbors[node] if child != parent]
            for side, child in zip(factors, children, strict=True):
                side.append(below[child] + ids[child, node][some_pattern])
            row_weights.append(np.bincount(own, weights=weights, minlength=counts[item]))
            passed.append(start[node] - tip_rows + own)
        states = [(tips[node][0][:, None] >> np.arange(4)) & 1 for node, _ in leaf]
        # Children have smaller numbers than parents, so the smaller end names the edge.
        edges = np.repeat([min(item) for item in [*leaf, *inner]], [counts[item] for item in [*leaf, *inner]])
        levels.append(
            Level(
                left=_index(factors[0], device),
                right=_index(factors[1], device),
                edges=_index([edges], device),
                tip_states=torch.as_tensor(np.concatenate([*states, np.zeros((0, 4))]), dtype=dtype, device=device),
                weights=torch.as_tensor(np.concatenate([*row_weights, np.zeros(0)]), dtype=dtype, device=device),
            )
        )
        pattern_rows.append(_index(passed, device).reshape(len(passed), patterns.shape[1]))
    first, second, third = (_index([start[child] + ids[child, root]], device) for child in neighbors[root])
    return Schedule(
        tuple(levels),
        (first, second, third),
        torch.as_tensor(weights, dtype=dtype, device=device),
        tree.num_edges,
        tuple(pattern_rows),
    )


def _index(parts: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.as_tensor(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]).astype(np.int64), device=device)


def _neighbors(tree: Tree) -> list[list[int]]:
    neighbors: list[list[int]] = [[] for _ in range(tree.num_edges + 1)]
    for node, parent in enumerate(tree.parents):
        neighbors[node].append(parent)
        neighbors[parent].append(node)
    return neighbors


def _sub_patterns(
    tree: Tree, neighbors: list[list[int]], tip_ids: list[np.ndarray]
) -> dict[tuple[int, int], np.ndarray]:
    """Number the distinct sub-patterns on the far side of every edge, seen from either end.

    Returns
    -------
    dict
        For `(node, towards)` the number of each pattern among those of the subtree that holds
        `node` when the edge to `towards` is cut, shape `(patterns,)`.
    """
    ids: dict[tuple[int, int], np.ndarray] = {}

    def combine(node: int, towards: int) -> None:
        if node < tree.num_taxa:
            ids[node, towards] = tip_ids[node]
            return
        one, other = (ids[child, node] for child in neighbors[node] if child != towards)
        pairs = one.astype(np.int64) * (int(other.max()) + 1) + other
        ids[node, towards] = np.unique(pairs, return_inverse=True)[1].ravel()

    parents = tree.parents
    for node in range(tree.num_edges):
        combine(node, parents[node])
    for node in reversed(range(tree.num_edges)):
        combine(parents[node], node)
    return ids


def _choose_root(tree: Tree, neighbors: list[list[int]], counts: dict[tuple[int, int], int]) -> int:
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
