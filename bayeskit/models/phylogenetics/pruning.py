"""Felsenstein's pruning on one tree: likelihoods of batches of branch lengths, and their derivatives."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.models.phylogenetics.site_rates import Categories, mix
from bayeskit.models.phylogenetics.substitution import SubstitutionModel
from bayeskit.models.phylogenetics.trees import Tree, choose_root, count_sub_patterns, neighbors_of

__all__ = [
    "BranchDerivatives",
    "Level",
    "MatrixTransport",
    "Plan",
    "PruningSchedule",
    "Sites",
    "States",
    "Transport",
    "UniformTransport",
    "branch_derivatives",
    "build_schedule",
    "log_likelihood",
    "make_plan",
    "pattern_log_likelihoods",
    "root_log_likelihoods",
]

# The order in which distinct partial likelihoods are computed, each once: a schedule lists for every node its distinct
# sub-patterns (its *rows*) and, for each row, the rows of its two children. If the substitution model treats all four
# bases alike, sub-patterns that differ only by a renaming of the bases share a row, which is read with its states
# permuted. Nodes are grouped by their distance from the root, so that one gather and one product serve a whole level,
# which needs only the table of the previous level.

_ALL_RENAMINGS = np.array(list(itertools.permutations(range(4))))
_NO_RENAMING = np.arange(4)[None]


@dataclass(frozen=True, eq=False)
class Level:
    """All nodes at one distance from the root, and the lines of their table of messages."""

    # The table has one line for each state of each row: first the lines of the tips (state 0 of all tip rows, state 1,
    # ...), then the lines of the inner rows in the same order.

    tips: slice  # the level's tip lines among those of all levels
    left: tuple[Tensor, ...]  # by state, one factor of each inner row as a line of the next deeper table, (rows,) each
    right: tuple[Tensor, ...]  # likewise, the other factor
    targets: Tensor  # lines of all factors, (8 * rows,)
    siblings: Tensor  # line of the other factor in the same product, (8 * rows,)
    parents: Tensor  # line of the product, `state * rows + row`, (8 * rows,)
    # by coefficient of an edge, its place in the table for the edge above each inner row, (rows,) each
    slots: tuple[Tensor, ...]
    weights: Tensor  # number of sites of each inner row, (rows,)

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
class PruningSchedule:
    """The data of the likelihood of one alignment on one topology other than branch lengths."""

    levels: tuple[Level, ...]  # from the deepest to the one below the root
    tip_sets: Tensor  # bases that each tip line's row allows, entries 0 and 1, (4, tip_lines)
    tip_states: Tensor  # entry of `tip_sets` for the line's own state, (tip_lines,)
    tip_edges: Tensor  # edge above each tip line, (tip_lines,)
    tip_line_states: Tensor  # state of each tip line, (tip_lines,)
    root_factors: tuple[tuple[Tensor, ...], ...]  # by neighbour of the root and state, line of the factor, (root_rows,)
    root_targets: Tensor  # all of `root_factors` in one list, (12 * root_rows,)
    root_weights: Tensor  # number of sites of each root row, (root_rows,)
    weights: Tensor  # of all inner rows, level by level, and of the root rows
    root_of_pattern: Tensor  # root row of each site pattern, (patterns,)
    num_edges: int

    @property
    def num_updates(self) -> int:
        """Number of partial likelihoods computed, those at the root included."""
        return self.weights.shape[0]


class _Renamings:
    """A group of renamings of the four bases."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images  # [g, i]: image of base i under renaming g
        number = {tuple(image): index for index, image in enumerate(images.tolist())}
        # [g, h]: h first, then g.
        self.compose = np.array([[number[tuple(g[h].tolist())] for h in images] for g in images])
        self.inverse = np.array([number[tuple(np.argsort(g).tolist())] for g in images])


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of one node, and the renamed sub-patterns ("versions") that are read from them."""

    num_rows: int
    factors: np.ndarray  # version of each child in each row, (children, rows); for a tip its set of bases, (1, rows)
    row_of: np.ndarray  # of each version, (versions,)
    renaming_of: np.ndarray  # that turns the row into each version, (versions,)
    renamed: np.ndarray  # [v, g]: version that renaming g makes of version v
    versions: np.ndarray  # of each site pattern, (patterns,)
    rows: np.ndarray  # of each site pattern, (patterns,)


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
    """Positions of the rows of each node in the table of a level."""

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
) -> PruningSchedule:
    """Return the schedule of distinct sub-patterns below each node, with the root that makes it cheapest.

    `patterns` `(taxa, patterns)` are sets of bases as bits in the order of `tree.taxa`; `weights` are `(patterns,)`.
    """
    # The likelihood of a time-reversible model does not depend on the choice of the root.
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
    return PruningSchedule(
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


# Transport of partial likelihoods along an edge, and of their adjoints back. The batch of branch lengths is the *last*
# dimension, so that a gather moves contiguous runs and arithmetic uses vector instructions; the four states of a row
# are four separate tensors, which lets a compiler keep them in registers.

States = list[Tensor]


class Transport(ABC):
    """Transport of partial likelihoods along edges, with some coefficients per edge."""

    #: Coefficients per edge.
    num_coefficients: int
    #: Whether `inner_terms` needs the partial likelihoods beside the messages.
    uses_partials: bool
    #: Target of each term of the gradient: the terms of tips first, then the inner terms level by level.
    slots: Tensor

    @abstractmethod
    def table(self, inputs: Tensor) -> Tensor:
        """Turn inputs `(batch, edges, *shape)` into coefficients `(num_coefficients * edges, batch)`."""

    @abstractmethod
    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""

    @abstractmethod
    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods, four tensors `(rows, batch)`, to the upper ends of their edges."""

    @abstractmethod
    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints of messages to the lower ends of their edges: the transpose of `send`."""

    @abstractmethod
    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return what each row adds to the gradient of its edge, in as many tensors as slots."""

    @abstractmethod
    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return what each tip line adds to the gradient of its edge, shape `(lines, batch)`."""

    @abstractmethod
    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Turn summed terms `(slots, batch)` into the gradient of `inputs`."""


class UniformTransport(Transport):
    """Transport if all changes are equally likely; the input is the branch length."""

    # The matrix is `a I + (1 - a) J / 4` with `a = exp(-4 t / 3)`, so a message is `a L + (1 - a) mean(L)` and its
    # derivative by `t` is `-4/3 (message - mean(message))`.

    num_coefficients = 2
    uses_partials = False

    def __init__(self, schedule: PruningSchedule) -> None:
        self._tip_keep = schedule.tip_edges
        self._tip_mix = schedule.tip_edges + schedule.num_edges
        self._tip_states = schedule.tip_states[:, None]
        self._tip_means = schedule.tip_sets.mean(0)[:, None]
        self.slots = torch.cat([schedule.tip_edges, *(level.slots[0] for level in schedule.levels)])

    def table(self, inputs: Tensor) -> Tensor:
        """Return `a` and `1 - a` of all edges from inputs `(batch, edges)`."""
        events = inputs.T * (4.0 / 3.0)
        # 1 - exp(-x) by way of tanh: exact to rounding for short branches in eager mode and
        # compiled, where expm1 may be carried out as exp() - 1.
        half = torch.tanh(0.5 * events)
        return torch.cat([torch.exp(-events), 2.0 * half / (1.0 + half)])

    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""
        return table[self._tip_keep] * self._tip_states + table[self._tip_mix] * self._tip_means

    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods to the upper ends of their edges."""
        keep, mix = (table[slot] for slot in level.slots)
        return _mix(keep, mix, partials)

    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints to the lower ends; the matrix is symmetric."""
        return self.send(table, adjoints, level)

    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return what each row adds to the gradient of its edge."""
        mean = 0.25 * ((messages[0] + messages[1]) + (messages[2] + messages[3]))
        first, second, third, last = (
            adjoint * (mean - message) for adjoint, message in zip(adjoints, messages, strict=True)
        )
        return [(first + second) + (third + last)]

    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return what each tip line adds to the gradient of its edge."""
        return adjoints * (self._tip_means - messages)

    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient by branch lengths, `(batch, edges)`."""
        return (sums * (4.0 / 3.0)).T.reshape(inputs.shape)


class MatrixTransport(Transport):
    """Transport with arbitrary matrices; the input is one transition matrix for each edge."""

    num_coefficients = 16
    uses_partials = True

    def __init__(self, schedule: PruningSchedule) -> None:
        first = schedule.tip_edges + schedule.tip_line_states * (4 * schedule.num_edges)
        self._tip_slots = [first + base * schedule.num_edges for base in range(4)]
        self._tip_sets = [allowed[:, None] for allowed in schedule.tip_sets]
        inner = (slot for level in schedule.levels for slot in level.slots)
        self.slots = torch.cat([*self._tip_slots, *inner])

    def table(self, inputs: Tensor) -> Tensor:
        """Return the entries of the matrices `(batch, edges, 4, 4)`, entry by entry."""
        batch, edges = inputs.shape[:2]
        return inputs.reshape(batch, edges, 16).permute(2, 1, 0).reshape(16 * edges, batch)

    def tip_messages(self, table: Tensor) -> Tensor:
        """Return the messages of all tips, shape `(tip_lines, batch)`."""
        return _dot([table[slot] for slot in self._tip_slots], self._tip_sets)

    def send(self, table: Tensor, partials: States, level: Level) -> States:
        """Carry partial likelihoods to the upper ends of their edges."""
        entries = [table[slot] for slot in level.slots]
        return [_dot(entries[4 * row : 4 * row + 4], partials) for row in range(4)]

    def pull_back(self, table: Tensor, adjoints: States, level: Level) -> States:
        """Carry adjoints to the lower ends of their edges."""
        entries = [table[slot] for slot in level.slots]
        return [_dot(entries[column::4], adjoints) for column in range(4)]

    def inner_terms(self, adjoints: States, messages: States, partials: States) -> States:
        """Return the outer products of adjoints and partial likelihoods, entry by entry."""
        return [adjoint * partial for adjoint in adjoints for partial in partials]

    def tip_terms(self, adjoints: Tensor, messages: Tensor) -> Tensor:
        """Return the outer products of adjoints and tip states, one line for each column."""
        return torch.cat([adjoints * allowed for allowed in self._tip_sets])

    def gradient(self, sums: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient by matrix entries, `(batch, edges, 4, 4)`."""
        batch, edges = inputs.shape[:2]
        return sums.reshape(16, edges, batch).permute(2, 1, 0).reshape(inputs.shape)


def _mix(keep: Tensor, mix: Tensor, states: States) -> States:
    mean = (0.25 * mix) * ((states[0] + states[1]) + (states[2] + states[3]))
    return [keep * state + mean for state in states]


def _dot(entries: States, states: States) -> Tensor:
    products = [entry * state for entry, state in zip(entries, states, strict=True)]
    return (products[0] + products[1]) + (products[2] + products[3])


# The likelihood of an alignment on a tree, and its gradient, in two passes over the rows of a schedule (J. Felsenstein
# 1981, J. Mol. Evol. 17, 368-376; X. Ji et al. 2020, Mol. Biol. Evol. 37, 3047-3060; K. Kobert, A. Stamatakis and T.
# Flouri 2017, Syst. Biol. 66, 205-217). Each partial likelihood is divided by its largest entry, so that nothing
# underflows, and the logarithms of these scalers are added up. The downward pass treats the scalers as constants, which
# is exact: a scaler divides the likelihood and multiplies it again, so its derivative cancels.


class Plan(NamedTuple):
    """A schedule, its transport, and the source rows of scalers."""

    schedule: PruningSchedule
    transport: Transport
    # For each level with inner rows and then for the root: which rows of the level below are the factors of each row,
    # one tensor (rows,) for each factor. The number after the last row stands for tips, which have no scaler.
    scaler_rows: tuple[tuple[Tensor, ...], ...]


def make_plan(schedule: PruningSchedule, transport: Transport) -> Plan:
    """Join a schedule and a transport."""

    def rows(factors: Sequence[tuple[Tensor, ...]], below: Level) -> tuple[Tensor, ...]:
        inner = [lines[0] - below.num_tip_lines for lines in factors]
        return tuple(torch.where(line < 0, below.num_rows, line % max(below.num_rows, 1)) for line in inner)

    levels = schedule.levels
    factors = [(level.left, level.right) for level in levels[1:]] + [schedule.root_factors]
    return Plan(schedule, transport, tuple(rows(pair, below) for pair, below in zip(factors, levels, strict=True)))


class _Upward(NamedTuple):
    """Results of the upward pass, with the batch as the last dimension."""

    coefficients: Tensor  # table of the transport, (coefficients, batch)
    tip_messages: Tensor  # (tip_lines, batch)
    tables: list[Tensor]  # messages of each level, (lines, batch)
    scalers: list[Tensor]  # largest entry of each product, (rows, batch), for levels with inner rows
    sites: Tensor  # scaled likelihood of each root row, (root_rows, batch)


def _products(table: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> States:
    return [table[one] * table[other] for one, other in zip(left, right, strict=True)]


def _safe(values: Tensor) -> Tensor:
    """Return divisors that are neither zero nor so small that their inverse overflows."""
    # Zeros become ones, which leaves an impossible row impossible.
    return torch.where(values > 0, values.clamp(min=torch.finfo(values.dtype).tiny), torch.ones_like(values))


def _upward(inputs: Tensor, frequencies: Tensor, plan: Plan) -> _Upward:
    """Run the upward pass for inputs `(batch, edges, *shape)` and frequencies `(4, batch)`."""
    schedule, transport = plan.schedule, plan.transport
    coefficients = transport.table(inputs)
    tip_messages = transport.tip_messages(coefficients)
    tables: list[Tensor] = []
    scalers: list[Tensor] = []
    for level in schedule.levels:
        parts = [tip_messages[level.tips]] if level.num_tip_lines else []
        if level.num_rows:
            products = _products(tables[-1], level.left, level.right)
            largest = torch.maximum(torch.maximum(products[0], products[1]), torch.maximum(products[2], products[3]))
            # The scaler divides the likelihood and multiplies it again, so it is a constant in derivatives.
            scaler = _safe(largest.detach())
            inverse = 1.0 / scaler
            parts += transport.send(coefficients, [product * inverse for product in products], level)
            scalers.append(scaler)
        tables.append(torch.cat(parts))
    one, other, third = schedule.root_factors
    pairs = _products(tables[-1], one, other)
    terms = [
        frequency * pair * tables[-1][line] for frequency, pair, line in zip(frequencies, pairs, third, strict=True)
    ]
    return _Upward(coefficients, tip_messages, tables, scalers, (terms[0] + terms[1]) + (terms[2] + terms[3]))


def _weighted_sum(upward: _Upward, plan: Plan) -> Tensor:
    """Return the log-likelihood of all sites together, shape `(1, batch)`."""
    logs = torch.cat([*upward.scalers, upward.sites]).log()
    # Thousands of terms are added up; in single precision their sum would lose two more digits.
    return (plan.schedule.weights[:, None] * logs).sum(0, keepdim=True, dtype=torch.float64).to(logs.dtype)


def _root_logs(upward: _Upward, plan: Plan) -> Tensor:
    """Return the log-likelihood of each root row, shape `(root_rows, batch)`, float64."""
    # As many terms are added up as there are taxa; in single precision their sum would lose two more digits.
    none = torch.zeros_like(upward.sites[:1], dtype=torch.float64)
    below = none
    for values, factors in zip([*upward.scalers, upward.sites], plan.scaler_rows, strict=True):
        # The logarithm of zero is avoided, because its derivative is infinite.
        impossible = values == 0
        logs = torch.where(impossible, -torch.inf, torch.where(impossible, 1.0, values).log().double())
        for rows in factors:
            logs = logs + below[rows]
        below = torch.cat([logs, none])
    return below[:-1]


def _downward(
    inputs: Tensor, frequencies: Tensor, upward: _Upward, cotangent: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the gradients by inputs and frequencies of the sum of root rows times cotangents `(root_rows, batch)`."""
    schedule, transport = plan.schedule, plan.transport
    coefficients = upward.coefficients
    batch = coefficients.shape[1]
    cotangent = cotangent.to(coefficients.dtype)
    share = torch.where(upward.sites > 0, cotangent / _safe(upward.sites), torch.zeros_like(cotangent))
    table = upward.tables[-1]
    factors = [[table[line] for line in factor] for factor in schedule.root_factors]
    by_frequency = [share * one * other * third for one, other, third in zip(*factors, strict=True)]
    adjoints = [
        share * frequencies[state] * factors[one][state] * factors[other][state]
        for one, other in ((1, 2), (0, 2), (0, 1))
        for state in range(4)
    ]
    gathered = _scatter(torch.cat(adjoints), schedule.root_targets, table.shape[0])
    inner_terms: list[States] = []
    tip_adjoints: list[Tensor] = []
    for number in reversed(range(len(schedule.levels))):
        level, table = schedule.levels[number], upward.tables[number]
        if level.num_tip_lines:
            tip_adjoints.insert(0, gathered[: level.num_tip_lines])
        if not level.num_rows:
            continue
        below, scaler = upward.tables[number - 1], upward.scalers[number - 1]
        own = list(gathered[level.num_tip_lines :].reshape(4, level.num_rows, batch))
        messages = list(table[level.num_tip_lines :].reshape(4, level.num_rows, batch))
        products = _products(below, level.left, level.right) if transport.uses_partials else []
        partials = [product / scaler for product in products]
        inner_terms.insert(0, transport.inner_terms(own, messages, partials))
        inverse = 1.0 / scaler
        pulled = torch.cat([adjoint * inverse for adjoint in transport.pull_back(coefficients, own, level)])
        gathered = _scatter(pulled[level.parents] * below[level.siblings], level.targets, below.shape[0])
    terms = [transport.tip_terms(torch.cat(tip_adjoints), upward.tip_messages)]
    terms += [term for group in inner_terms for term in group]
    num_slots = inputs.shape[1:].numel()
    sums = _scatter(torch.cat(terms), transport.slots, num_slots)
    return transport.gradient(sums, inputs), torch.stack([term.sum(0) for term in by_frequency])


def _scatter(values: Tensor, targets: Tensor, size: int) -> Tensor:
    """Add lines of `values` up into `size` lines; in a fixed order on a CPU."""
    out = values.new_zeros((size, values.shape[1]))
    return out.scatter_add(0, targets[:, None].expand_as(values), values)


class _LogLikelihood(torch.autograd.Function):
    """Log-likelihoods of inputs `(*batch, edges, *shape)` and frequencies `(*batch, 4)`."""

    # The first output is (root_rows, *batch), or (1, *batch) for all sites together if `summed`; the others, with the
    # batch last, are for the downward pass.

    @staticmethod
    def forward(inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool) -> tuple[Tensor, ...]:
        batch = frequencies.shape[:-1]
        upward = _upward(*_flatten(inputs, frequencies, batch), plan)
        value = _weighted_sum(upward, plan) if summed else _root_logs(upward, plan)
        saved = [upward.coefficients, upward.tip_messages, *upward.tables, *upward.scalers, upward.sites]
        return tuple(tensor.reshape(tensor.shape[0], *batch) for tensor in (value, *saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, frequencies, ctx.plan, ctx.summed = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(values, frequencies, *output[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        inputs, frequencies, *saved = ctx.saved_tensors
        return (*_Gradient.apply(inputs, frequencies, ctx.plan, ctx.summed, cotangent, *saved), None, None)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        inputs = _to_front(inputs, in_dims[0], info.batch_size)
        frequencies = _to_front(frequencies, in_dims[1], info.batch_size)
        out = _LogLikelihood.apply(inputs, frequencies, plan, summed)
        # All outputs carry the batch dimensions behind their lines.
        return out, tuple(1 for _ in out)


class _Gradient(torch.autograd.Function):
    """The downward pass as a function of its own, so that `vmap` of a gradient stays batched natively."""

    @staticmethod
    def forward(
        inputs: Tensor, frequencies: Tensor, plan: Plan, summed: bool, *behind: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = frequencies.shape[:-1]
        flat, flat_frequencies = _flatten(inputs, frequencies, batch)
        merged = [tensor.reshape(tensor.shape[0], batch.numel()) for tensor in behind]
        cotangent, coefficients, tip_messages, *middle, sites = merged
        depth = len(plan.schedule.levels)
        upward = _Upward(coefficients, tip_messages, middle[:depth], middle[depth:], sites)
        by_row = plan.schedule.root_weights[:, None] * cotangent if summed else cotangent
        by_input, by_frequency = _downward(flat, flat_frequencies, upward, by_row, plan)
        return by_input.reshape(inputs.shape), by_frequency.T.reshape(frequencies.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "The tree likelihood has first derivatives only. Remedy: use finite differences of its gradient."
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: Tensor,
        frequencies: Tensor,
        plan: Plan,
        summed: bool,
        *behind: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        inputs = _to_front(inputs, in_dims[0], info.batch_size)
        frequencies = _to_front(frequencies, in_dims[1], info.batch_size)
        moved = [
            _to_front(tensor, dim, info.batch_size).movedim(0, 1)
            for tensor, dim in zip(behind, in_dims[4:], strict=True)
        ]
        return _Gradient.apply(inputs, frequencies, plan, summed, *moved), (0, 0)


def _flatten(inputs: Tensor, frequencies: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
    """Merge the batch dimensions, and put them last in the frequencies."""
    size = batch.numel()
    return inputs.reshape(size, *inputs.shape[len(batch) :]), frequencies.reshape(size, 4).T


def _to_front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def log_likelihood(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Return the log-likelihood of an alignment in nats, `(*batch)`, differentiable once by both tensors.

    `inputs` are `(*batch, edges)` or `(*batch, edges, 4, 4)`, by the transport, and `frequencies` `(*batch, 4)`.
    """
    # `torch.func.vmap` and `grad`, in either order, `make_fx` and `torch.compile` apply to it.
    return _LogLikelihood.apply(inputs, frequencies, plan, True)[0][0]


def root_log_likelihoods(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Return log-likelihoods of root rows in nats, `(root_rows, *batch)`, float64, as `log_likelihood`."""
    return _LogLikelihood.apply(inputs, frequencies, plan, False)[0]


def pattern_log_likelihoods(inputs: Tensor, frequencies: Tensor, plan: Plan) -> Tensor:
    """Return log-likelihoods of site patterns in nats, `(*batch, patterns)`; arguments as in `log_likelihood`."""
    # Plain tensor operations are differentiable any number of times.
    batch = frequencies.shape[:-1]
    rows = _root_logs(_upward(*_flatten(inputs, frequencies, batch), plan), plan)
    patterns = rows[plan.schedule.root_of_pattern]
    return patterns.T.reshape(*batch, patterns.shape[0]).to(frequencies.dtype)


# First and second derivatives of a likelihood by each branch length, in two passes over the patterns (X. Ji et al.
# 2020, Mol. Biol. Evol. 37, 3047-3060). The product of an edge's messages from below and from above is the likelihood;
# with the rate matrix between them it is the derivative with respect to the length of that edge. Only ratios to the
# likelihood are needed, so all partial likelihoods are scaled freely.


class BranchDerivatives(NamedTuple):
    """Log-likelihood and its derivatives with respect to each branch length.

    Attributes
    ----------
    value : Tensor
        Log-likelihood in nats, shape `(*batch)`.
    first : Tensor
        First derivatives, shape `(*batch, edges)`.
    second : Tensor
        Second derivatives, the diagonal of the Hessian matrix, shape `(*batch, edges)`.
    """

    value: Tensor
    first: Tensor
    second: Tensor


class Sites(NamedTuple):
    """The data, pattern by pattern."""

    tips: Tensor  # allowed bases, entries 0 and 1, (taxa, 4, patterns), taxa in the order of the tree
    weights: Tensor  # number of sites of each pattern, (patterns,)


#: About how many numbers all messages of a chunk may take.
_CHUNK_NUMBERS = 2**24


def branch_derivatives(
    tree: Tree, sites: Sites, lengths: Tensor, substitution: SubstitutionModel, categories: Categories
) -> BranchDerivatives:
    """Return a log-likelihood, `(*batch)`, and its first and second derivatives by branch lengths, `(*batch, edges)`.

    `lengths` `(categories, *batch, edges)` include the rate of each category; the models' batches broadcast.
    """
    batch = lengths.shape[1:-1]
    size = batch.numel()
    matrices = substitution.transition_matrices(lengths).reshape(len(lengths), size, tree.num_edges, 4, 4)
    rate_matrix = substitution.rate_matrix(lengths).expand(*batch, 4, 4).reshape(size, 4, 4)
    frequencies = substitution.frequencies(lengths).expand(*batch, 4).reshape(size, 4)
    rates, weights, invariant = categories.expand(batch)
    rates, weights = rates.reshape(size, len(lengths)), weights.reshape(size, len(lengths))
    invariant = None if invariant is None else invariant.reshape(size)
    step = max(1, _CHUNK_NUMBERS // max(1, matrices[:, :1, :, 0].numel() * len(sites.weights)))
    parts = []
    for start in range(0, max(size, 1), step):
        part = slice(start, start + step)
        chunk = Categories(rates[part], weights[part], None if invariant is None else invariant[part])
        parts.append(_derivatives(tree, sites, matrices[:, part], rate_matrix[part], frequencies[part], chunk))
    value, first, second = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return BranchDerivatives(
        value.reshape(batch), first.reshape(*batch, tree.num_edges), second.reshape(*batch, tree.num_edges)
    )


def _derivatives(
    tree: Tree, sites: Sites, matrices: Tensor, rate_matrix: Tensor, frequencies: Tensor, categories: Categories
) -> BranchDerivatives:
    """Compute the derivatives of one chunk, from transition matrices `(categories, chunk, edges, 4, 4)`."""
    messages, logs = _derivatives_upward(tree, sites, matrices, frequencies)
    mixed = mix(logs.movedim(-1, 0), categories, frequencies, sites.tips.amin(0).T).movedim(0, -1)
    possible = mixed != -torch.inf
    # The probability of each category, given the site.
    rates, weights = (vector.movedim(-1, 0)[..., None] for vector in categories[:2])
    posterior = weights * torch.exp(logs - torch.where(possible, mixed, 0.0))
    weight = torch.where(possible, sites.weights, 0.0)
    first: list[Tensor] = [torch.empty(0)] * tree.num_edges
    second = list(first)
    for edge, above in _derivatives_downward(tree, matrices, frequencies, messages):
        message = messages[edge]
        changed = rate_matrix @ message
        likelihood = (above * message).sum(-2)
        inverse = posterior * rates / torch.where(likelihood > 0, likelihood, 1.0)
        slope = (inverse * (above * changed).sum(-2)).sum(0)
        bend = (inverse * rates * ((rate_matrix.mT @ above) * changed).sum(-2)).sum(0)
        first[edge] = (weight * slope).sum(-1)
        second[edge] = (weight * (bend - slope.square())).sum(-1)
    value = (sites.weights * mixed).sum(-1)
    return BranchDerivatives(value, torch.stack(first, -1), torch.stack(second, -1))


def _derivatives_upward(tree: Tree, sites: Sites, matrices: Tensor, frequencies: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the message of each edge, `(categories, chunk, 4, patterns)`, and the log-likelihoods of the patterns."""
    logs = torch.zeros_like(matrices[..., 0, 0, 0, None])
    messages: list[Tensor] = [torch.empty(0)] * tree.num_edges
    partials = {tip: sites.tips[tip] for tip in range(tree.num_taxa)}
    for node in range(tree.num_edges + 1):
        if node >= tree.num_taxa:
            below = tree.children[node - tree.num_taxa]
            product = messages[below[0]]
            for child in below[1:]:
                product = product * messages[child]
            partials[node], scaler = _scaled(product)
            logs = logs + scaler.log()
        if node < tree.num_edges:
            messages[node] = matrices[..., node, :, :] @ partials.pop(node)
    likelihood = (frequencies[..., None] * partials[tree.root]).sum(-2)
    return messages, logs + likelihood.log()


def _derivatives_downward(
    tree: Tree, matrices: Tensor, frequencies: Tensor, messages: list[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each edge with the probability of all data not below it, `(categories, chunk, 4, patterns)`, scaled."""
    outside = {tree.root: frequencies[..., None]}
    for node in range(tree.root, tree.num_taxa - 1, -1):
        below, rest = tree.children[node - tree.num_taxa], outside.pop(node)
        for child in below:
            above = rest
            for sibling in below:
                if sibling != child:
                    above = above * messages[sibling]
            above, _ = _scaled(above)
            if child >= tree.num_taxa:
                outside[child] = matrices[..., child, :, :].mT @ above
            yield child, above


def _scaled(partial: Tensor) -> tuple[Tensor, Tensor]:
    """Divide partial likelihoods `(..., 4, patterns)` by their largest entry, and return it too."""
    largest = partial.amax(-2)
    largest = torch.where(largest > 0, largest, 1.0)
    return partial / largest[..., None, :], largest
