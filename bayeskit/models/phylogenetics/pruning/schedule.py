"""The order in which partial likelihoods are computed, each distinct one once.

Below a node, many site patterns look alike: a partial likelihood depends only on the tips below.
A schedule lists for every node its distinct sub-patterns (its *rows*) and which rows of its two
children each comes from. Where the substitution model treats all four bases alike, sub-patterns
that differ only by a renaming of the bases share a row too, and are read with their states
permuted.

Nodes are grouped by their distance from the root, so that one gather and one product serve a whole
level however many nodes it has. All children of a level stand one level deeper, so a level needs no
other table than that of the level before it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics.trees.rooting import choose_root, count_sub_patterns, neighbors_of
from bayeskit.models.phylogenetics.trees.tree import Tree

_ALL_RENAMINGS = np.array(list(itertools.permutations(range(4))))
_NO_RENAMING = np.arange(4)[None]


@dataclass(frozen=True, eq=False)
class Level:
    """All nodes at one distance from the root.

    A level makes a table of messages with one line for each state of each row: first the lines of
    its tips (state 0 of all tip rows, state 1, ...), then those of its inner rows in the same way.

    Attributes
    ----------
    tips : slice
        Where the level's tip lines stand among the tip lines of all levels.
    left, right : tuple of Tensor
        For each state, the two factors of each inner row as lines of the next deeper level's
        table: four tensors of shape `(rows,)`, int64.
    targets, siblings, parents : Tensor
        The same as a list of factors: the line of the factor, the line of the other factor of
        that product, and the line of the product (`state * rows + row`), each `(8 * rows,)`.
    slots : tuple of Tensor
        For each coefficient of an edge, where the table of coefficients has the one for the edge
        above each inner row, shape `(rows,)`.
    weights : Tensor
        Number of sites that use each inner row, shape `(rows,)`.
    """

    tips: slice
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    targets: Tensor
    siblings: Tensor
    parents: Tensor
    slots: tuple[Tensor, ...]
    weights: Tensor

    @property
    def num_rows(self) -> int:
        """Number of inner rows."""
        return self.weights.shape[0]

    @property
    def num_tip_lines(self) -> int:
        """Number of lines that belong to tips, four for each row."""
        return self.tips.stop - self.tips.start

    @property
    def num_lines(self) -> int:
        """Number of lines of the level's table."""
        return self.num_tip_lines + 4 * self.num_rows


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything the likelihood of one alignment on one topology needs but the branch lengths.

    Attributes
    ----------
    levels : tuple of Level
        From the deepest to the one below the root.
    tip_sets : Tensor
        The bases that the row of each tip line allows, shape `(4, tip_lines)`, entries 0 and 1.
    tip_states : Tensor
        The entry of `tip_sets` for the line's own state, shape `(tip_lines,)`.
    tip_edges : Tensor
        Edge above each tip line, shape `(tip_lines,)`.
    tip_line_states : Tensor
        State of each tip line, shape `(tip_lines,)`.
    root_factors : tuple of tuple of Tensor
        For each of the root's three neighbours and each state, the line of the factor of each
        root row, shape `(root_rows,)`.
    root_targets : Tensor
        All of `root_factors` in one list, shape `(12 * root_rows,)`.
    root_weights : Tensor
        Number of sites of each root row, shape `(root_rows,)`.
    weights : Tensor
        The weights of all inner rows, level by level, and of the root rows.
    root_of_pattern : Tensor
        Root row of each site pattern, shape `(patterns,)`.
    num_edges : int
        Number of edges of the tree.
    """

    levels: tuple[Level, ...]
    tip_sets: Tensor
    tip_states: Tensor
    tip_edges: Tensor
    tip_line_states: Tensor
    root_factors: tuple[tuple[Tensor, ...], ...]
    root_targets: Tensor
    root_weights: Tensor
    weights: Tensor
    root_of_pattern: Tensor
    num_edges: int

    @property
    def num_updates(self) -> int:
        """Number of partial likelihoods computed, those at the root included."""
        return self.weights.shape[0]


class _Renamings:
    """A group of renamings of the four bases.

    Attributes
    ----------
    images : ndarray
        `images[g, i]` is what renaming `g` makes of base `i`.
    compose : ndarray
        `compose[g, h]` does `h` first, then `g`.
    inverse : ndarray
        Number of the inverse of each renaming.
    """

    def __init__(self, images: np.ndarray) -> None:
        self.images = images
        number = {tuple(image): index for index, image in enumerate(images.tolist())}
        self.compose = np.array([[number[tuple(g[h].tolist())] for h in images] for g in images])
        self.inverse = np.array([number[tuple(np.argsort(g).tolist())] for g in images])


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one node, and the renamed sub-patterns ("versions") that are read from them.

    Attributes
    ----------
    num_rows : int
        Number of rows.
    factors : ndarray
        Version of each child that makes up each row, shape `(children, rows)`; for a tip the row's
        set of bases instead, shape `(1, rows)`.
    row_of, renaming_of : ndarray
        Row of each version, and the renaming that makes the version of the row, `(versions,)`.
    renamed : ndarray
        `renamed[v, g]` is the version that renaming `g` makes of version `v`.
    versions, rows : ndarray
        Version and row of each site pattern, shape `(patterns,)`.
    """

    num_rows: int
    factors: np.ndarray
    row_of: np.ndarray
    renaming_of: np.ndarray
    renamed: np.ndarray
    versions: np.ndarray
    rows: np.ndarray


def _tip_rows(masks: np.ndarray, group: _Renamings) -> _Rows:
    sets = np.arange(16)
    renamed = np.zeros((16, len(group.images)), dtype=np.int64)
    for base in range(4):
        renamed |= ((sets[:, None] >> base) & 1) << group.images[None, :, base]
    smallest = renamed.min(axis=1)
    used = np.unique(smallest[masks])
    return _Rows(
        num_rows=len(used),
        factors=used[None],
        # Sets that no site shows get row 0; nothing ever asks for them.
        row_of=np.where(np.isin(smallest, used), np.searchsorted(used, smallest), 0),
        renaming_of=group.inverse[renamed.argmin(axis=1)],
        renamed=renamed,
        versions=masks.astype(np.int64),
        rows=np.searchsorted(used, smallest[masks]),
    )


def _inner_rows(one: _Rows, other: _Rows, group: _Renamings) -> _Rows:
    """Find the rows of a node from those of its two children."""
    size = len(other.renamed)
    used, pair_of = np.unique(one.versions * size + other.versions, return_inverse=True)
    pair_of = pair_of.ravel()
    # The row of a pair of versions is the smallest pair that renaming the bases can make of it.
    renamed_pairs = one.renamed[used // size] * size + other.renamed[used % size]
    best = renamed_pairs.argmin(axis=1)
    row_pairs, row_of_pair = np.unique(renamed_pairs[np.arange(len(used)), best], return_inverse=True)
    images = one.renamed[row_pairs // size] * size + other.renamed[row_pairs % size]
    _, first, version_of = np.unique(images, return_index=True, return_inverse=True)
    version_of = version_of.reshape(images.shape)
    row_of, renaming_of = np.divmod(first, images.shape[1])
    rows = row_of_pair.ravel()[pair_of]
    return _Rows(
        num_rows=len(row_pairs),
        factors=np.stack([row_pairs // size, row_pairs % size]),
        row_of=row_of,
        renaming_of=renaming_of,
        renamed=version_of[row_of[:, None], group.compose[:, renaming_of].T],
        versions=version_of[rows, group.inverse[best][pair_of]],
        rows=rows,
    )


@dataclass
class _Table:
    """Where the rows of each node stand in the table of a level."""

    num_tip_rows: int
    num_inner_rows: int
    start: dict[int, int]

    def lines(self, node: int, is_tip: bool, rows: _Rows, versions: np.ndarray, group: _Renamings) -> np.ndarray:
        """Return the lines of some versions of a node's rows, shape `(4, len(versions))`."""
        row = self.start[node] + rows.row_of[versions]
        # Renaming g moves the value of base i to base g(i), so state i is read where g came from.
        state = group.images[group.inverse[rows.renaming_of[versions]]].T
        if is_tip:
            return state * self.num_tip_rows + row
        return 4 * self.num_tip_rows + state * self.num_inner_rows + row


def build_schedule(
    tree: Tree,
    patterns: np.ndarray,
    weights: np.ndarray,
    num_coefficients: int,
    interchangeable: bool,
    dtype: torch.dtype,
    device: torch.device,
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
    num_coefficients : int
        How many numbers describe what happens along an edge.
    interchangeable : bool
        Whether the substitution model stays the same when bases are renamed.
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
    group = _Renamings(_ALL_RENAMINGS if interchangeable else _NO_RENAMING)
    neighbors = neighbors_of(tree)
    root = choose_root(tree, neighbors, count_sub_patterns(tree, neighbors, patterns))
    by_depth: list[list[tuple[int, int]]] = [[(root, -1)]]
    while by_depth[-1]:
        by_depth.append(
            [(child, node) for node, parent in by_depth[-1] for child in neighbors[node] if child != parent]
        )
    by_depth.pop()

    def index(array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64).ravel(), device=device)

    def real(array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.float64), dtype=dtype, device=device)

    def slots(edges: np.ndarray) -> tuple[Tensor, ...]:
        return tuple(index(edges + place * tree.num_edges) for place in range(num_coefficients))

    rows: dict[int, _Rows] = {}
    levels: list[Level] = []
    tip_sets: list[np.ndarray] = []
    tip_edges: list[np.ndarray] = []
    tip_lines = 0
    table = _Table(0, 0, {})
    for nodes in reversed(by_depth[1:]):
        below, start, counts = table, {}, [0, 0]
        # Numbers of nodes grow towards the tree's own root, so the smaller end names an edge.
        edge_of = {node: min(node, parent) for node, parent in nodes}
        tips = [node for node, _ in nodes if node < tree.num_taxa]
        inner = [(node, parent) for node, parent in nodes if node >= tree.num_taxa]
        for node in tips:
            rows[node] = _tip_rows(patterns[node], group)
        children_of = {node: [child for child in neighbors[node] if child != parent] for node, parent in inner}
        for node, (one, other) in children_of.items():
            rows[node] = _inner_rows(rows[one], rows[other], group)
        for node, _ in nodes:
            kind = 0 if node < tree.num_taxa else 1
            start[node] = counts[kind]
            counts[kind] += rows[node].num_rows
        table = _Table(counts[0], counts[1], start)
        factors = np.concatenate(
            [np.zeros((2, 4, 0), dtype=np.int64)]
            + [
                np.stack(
                    [
                        below.lines(child, child < tree.num_taxa, rows[child], rows[node].factors[side], group)
                        for side, child in enumerate(children)
                    ]
                )
                for node, children in children_of.items()
            ],
            axis=2,
        )
        flat = factors.reshape(2, -1)
        inner_edges = [np.full(rows[node].num_rows, edge_of[node]) for node in children_of]
        row_weights = [np.bincount(rows[node].rows, weights, rows[node].num_rows) for node in children_of]
        levels.append(
            Level(
                tips=slice(tip_lines, tip_lines + 4 * counts[0]),
                left=tuple(index(line) for line in factors[0]),
                right=tuple(index(line) for line in factors[1]),
                targets=index(flat),
                siblings=index(flat[::-1]),
                parents=index(np.tile(np.arange(flat.shape[1]), 2)),
                slots=slots(np.concatenate([*inner_edges, np.zeros(0, dtype=np.int64)])),
                weights=real(np.concatenate([*row_weights, np.zeros(0)])),
            )
        )
        tip_lines += 4 * counts[0]
        for _ in range(4):
            tip_sets.extend(rows[node].factors[0] for node in tips)
            tip_edges.extend(np.full(rows[node].num_rows, edge_of[node]) for node in tips)
    one, other, third = neighbors[root]
    pair = _inner_rows(rows[one], rows[other], group)
    top = _inner_rows(pair, rows[third], group)
    # A factor of the first product is a version of the pair: unfold it into versions of the two.
    row, renaming = pair.row_of[top.factors[0]], pair.renaming_of[top.factors[0]]
    versions = [
        rows[one].renamed[pair.factors[0][row], renaming],
        rows[other].renamed[pair.factors[1][row], renaming],
        top.factors[1],
    ]
    root_factors = np.stack(
        [
            table.lines(child, child < tree.num_taxa, rows[child], version, group)
            for child, version in zip((one, other, third), versions, strict=True)
        ]
    )
    root_weights = real(np.bincount(top.rows, weights, top.num_rows))
    sets = (np.concatenate(tip_sets)[None] >> np.arange(4)[:, None]) & 1
    line_states = np.concatenate(
        [np.repeat(np.arange(4), (level.tips.stop - level.tips.start) // 4) for level in levels]
    )
    return Schedule(
        levels=tuple(levels),
        tip_sets=real(sets),
        tip_states=real(sets[line_states, np.arange(tip_lines)]),
        tip_edges=index(np.concatenate(tip_edges)),
        tip_line_states=index(line_states),
        root_factors=tuple(tuple(index(line) for line in factor) for factor in root_factors),
        root_targets=index(root_factors),
        root_weights=root_weights,
        weights=torch.cat([*(level.weights for level in levels), root_weights]),
        root_of_pattern=index(top.rows),
        num_edges=tree.num_edges,
    )
