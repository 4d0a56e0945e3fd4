"""Graphs of the options that make topologies: clades, their possible splits, and the resulting subclades."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._clades import Bits
from bayeskit.models.phylogenetics._topologies import Topologies

# Search for rows of numbers in a table.

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]


class RowNumbers:
    """Index from the rows of a table of distinct integer rows, `(count, columns)`, to their numbers."""

    def __init__(self, rows: NDArray[Any]) -> None:
        keys = _keys(rows)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def find(self, rows: NDArray[Any]) -> Numbers:
        """Return the number of each row `(*batch, columns)` in the table, -1 if absent: `(*batch,)`."""
        keys = _keys(rows)
        if not len(self._sorted):
            return np.full(rows.shape[:-1], -1)
        place = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.where(self._sorted[place] == keys, self._order[place], -1).reshape(rows.shape[:-1])


def _find_sorted(keys: Numbers, wanted: Numbers) -> Numbers:
    """Return the positions of `wanted` among ascending keys, -1 where absent, shape of `wanted`."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, -1)


def add_up(places: Numbers, values: Floats, count: int) -> Floats:
    """Return the sum of the values at each place, `(count,)`, from places and values of equal shape."""
    total: Floats = np.bincount(places.ravel(), values.ravel(), minlength=count).astype(np.float64, copy=False)
    return total


def _keys(rows: NDArray[Any]) -> NDArray[Any]:
    """Return one comparable value per row: a 64-bit word, or the bytes of a longer row."""
    flat = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))
    size = flat.itemsize * flat.shape[1]
    return flat.view(np.uint64 if size == 8 else f"S{size}").ravel()


# Options that make trees: clades, their possible splits, and the resulting subclades.


class CladeLevel(NamedTuple):
    """Groups whose clades have the same size, and their options."""

    groups: slice
    options: slice


@dataclass(frozen=True, eq=False)
class SubsplitGraph:
    """Every way to build a tree by splitting clades, each numbered once (Zhang and Matsen 2018; Jun et al. 2023).

    A *group* is a clade to split, with its sister if the split depends on it; its *options* are its splits.
    """

    # Options are stored group by group, and groups ascend by the size of their clades, so that an option leads only to
    # earlier groups and the last group is the root. In the literature, a group with a sister and an option of this
    # group are a parent-child subsplit pair; the options of the root are the root splits.

    taxa: tuple[str, ...]
    rooted: bool
    with_sisters: bool  # whether a split may depend on the sister of its clade
    clades: Bits  # ascending by size, (clades, words), uint64
    group_clade: Numbers  # clade of each group, (groups,)
    group_sister: Numbers  # clade that is its sister, -1 for none, (groups,)
    starts: Numbers  # first option of each group, and the number of options at the end, (groups + 1,)
    parts: Numbers  # clades that each option splits into, the smaller number first, (options, 2)

    @classmethod
    def from_choices(
        cls, taxa: tuple[str, ...], rooted: bool, with_sisters: bool, sets: Bits, choices: Numbers
    ) -> SubsplitGraph:
        """Return the graph of observed choices `(choices, 3)` of clade, sister (-1: none) and smaller part.

        The clades `sets` `(clades, words)` ascend by size, and choices may repeat.
        """
        count = len(sets)
        clade, sister, first = choices.T
        group_keys, group = np.unique(clade * (count + 1) + sister + 1, return_inverse=True)
        option_keys = np.unique(group * count + first)
        group, first = option_keys // count, option_keys % count
        group_clade, group_sister = group_keys // (count + 1), group_keys % (count + 1) - 1
        # The second part is the clade without the first part.
        second = RowNumbers(sets).find(sets[group_clade[group]] & ~sets[first])
        starts = np.searchsorted(group, np.arange(len(group_keys) + 1))
        parts = np.stack([first, second], axis=1)
        return cls(taxa, rooted, with_sisters, sets, group_clade, group_sister, starts, parts)

    def __post_init__(self) -> None:
        if not (self._is_ordered() and self._leads_down()):
            raise TreeError(
                "The splits do not form complete trees: a part is not a clade, or is never split. Remedy: make the "
                "graph from complete topologies."
            )

    def _is_ordered(self) -> bool:
        shapes = self.group_clade.shape == self.group_sister.shape == (len(self.starts) - 1,)
        ends = self.starts[0] == 0 and self.starts[-1] == len(self.parts)
        sizes = clades.size(self.clades)
        ascending = (np.diff(sizes) >= 0, np.diff(self.starts) > 0, np.diff(self._group_keys) > 0)
        return bool(shapes and ends and (self.parts >= 0).all() and all(one.all() for one in ascending))

    def _leads_down(self) -> bool:
        one, other = self.clades[self.parts[:, 0]], self.clades[self.parts[:, 1]]
        whole = ((one | other) == self.clades[self.group_clade[self.group_of]]) & ((one & other) == 0)
        tips = clades.size(self.clades[self.parts]) == 1
        return bool(whole.all() and (tips | (self.next_groups >= 0)).all())

    @property
    def of_rootings(self) -> bool:
        """Whether the graph describes the rootings of unrooted trees, over which probabilities are summed."""
        return not self.rooted and bool(clades.contains(self.clades[-1], 0))

    @property
    def num_choices(self) -> int:
        """Number of options that make one tree."""
        return len(self.taxa) - (1 if self.rooted or self.of_rootings else 2)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.group_clade)

    @property
    def num_options(self) -> int:
        """Number of options in all groups, root splits included."""
        return len(self.parts)

    @property
    def missing(self) -> int:
        """Index of an absent option, one past the last option."""
        return self.num_options

    @property
    def no_choice(self) -> int:
        """Index of a slot without a choice, two past the last option."""
        return self.num_options + 1

    @cached_property
    def group_of(self) -> Numbers:
        """Group of each option, shape `(options,)`."""
        return np.repeat(np.arange(self.num_groups), np.diff(self.starts))

    @cached_property
    def next_groups(self) -> Numbers:
        """Groups of both parts of each option, -1 for a part of one taxon, shape `(options, 2)`."""
        sister = self.parts[:, ::-1] if self.with_sisters else np.full_like(self.parts, -1)
        return self.find_group(self.parts, sister)

    @cached_property
    def levels(self) -> tuple[CladeLevel, ...]:
        """The groups by size of their clades, smallest first."""
        sizes = clades.size(self.clades[self.group_clade])
        edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), self.num_groups]
        return tuple(
            CladeLevel(slice(first, last), slice(int(self.starts[first]), int(self.starts[last])))
            for first, last in zip(edges[:-1], edges[1:], strict=True)
        )

    @cached_property
    def _clade_numbers(self) -> RowNumbers:
        return RowNumbers(self.clades)

    @cached_property
    def _group_keys(self) -> Numbers:
        return self.group_clade * (len(self.clades) + 1) + self.group_sister + 1

    @cached_property
    def _option_keys(self) -> Numbers:
        return self.group_of * len(self.clades) + self.parts[:, 0]

    def find_clade(self, sets: Bits) -> Numbers:
        """Return the number of each clade `(*batch, words)`, -1 if absent: `(*batch,)`."""
        return self._clade_numbers.find(sets)

    def find_group(self, clade: Numbers, sister: Numbers) -> Numbers:
        """Return the number of the group of a clade and its sister, -1 if absent; shapes are equal."""
        return _find_sorted(self._group_keys, np.where(clade < 0, -1, clade * (len(self.clades) + 1) + sister + 1))

    def find_option(self, clade: Numbers, sister: Numbers, first: Numbers) -> Numbers:
        """Return the numbers of options, `missing` where absent, from clade, sister and smaller part, equal shapes."""
        group = self.find_group(clade, sister)
        found = _find_sorted(
            self._option_keys, np.where((group < 0) | (first < 0), -1, group * len(self.clades) + first)
        )
        return np.where(found < 0, self.missing, found)

    def table(self, values: Floats, missing: float, no_choice: float = 0.0) -> Floats:
        """Append the values of `missing` and `no_choice` to values of options, `(options,)`."""
        return np.concatenate([values, [missing, no_choice]])

    def sum_groups(self, values: Floats) -> Floats:
        """Add up the values `(options,)` of the options of each group, shape `(groups,)`."""
        return np.add.reduceat(values, self.starts[:-1])

    def normalised(self, logits: Floats) -> Floats:
        """Return log probabilities that sum to one in each group: `(options,)` from logits of the same shape."""
        top = np.maximum.reduceat(logits, self.starts[:-1])[self.group_of]
        shifted = logits - top
        return shifted - np.log(self.sum_groups(np.exp(shifted)))[self.group_of]

    def shares(self, counts: Floats) -> Floats:
        """Return the log share of each option in its group's count, `(options,)`; equal shares if the count is zero."""
        totals = self.sum_groups(counts)
        sizes = np.diff(self.starts)
        shares = np.where(totals > 0, 0.0, 1 / sizes)[self.group_of]
        np.divide(counts, totals[self.group_of], out=shares, where=(totals > 0)[self.group_of])
        with np.errstate(divide="ignore"):
            return np.log(shares)

    def describe_clade(self, one: Bits) -> str:
        """Write a set of taxa with their names, four at most."""
        held = clades.members(one)
        names = [self.taxa[taxon] for taxon in held[:4]]
        more = [f"... ({len(held)} taxa)"] if len(held) > 4 else []
        return "{" + ", ".join([*names, *more]) + "}"

    def down(self) -> Iterator[CladeLevel]:
        """Go through the levels from the root on."""
        return reversed(self.levels)


# The options of a graph that make a topology, for one root or for all root positions.


class Choices(Protocol):
    """Options that make topologies, and the sums over them."""

    def log_prob(self, table: Floats) -> tuple[Floats, Floats]:
        """Return log probabilities `(topologies,)` from a `SubsplitGraph.table`, and the values that `counts` needs."""

    def counts(self, saved: Floats, weights: Floats) -> Floats:
        """Return the expected number of uses of each option, `(options,)`, under weights `(topologies,)`."""
        # It is also the gradient of the weighted sum of log probabilities with respect to those of the options.

    def equal_rootings(self) -> Floats:
        """Return saved values for `counts` with all root positions equally probable."""


@dataclass(frozen=True)
class OneRoot:
    """Options of topologies with one root position."""

    slots: Numbers  # option of each internal node, (internal, topologies)
    num_options: int  # of the graph

    def log_prob(self, table: Floats) -> tuple[Floats, Floats]:
        """Return log probabilities; see `Choices`."""
        total = table[self.slots].sum(axis=0)
        return total, total

    def counts(self, saved: Floats, weights: Floats) -> Floats:
        """Return expected counts; see `Choices`."""
        used = np.where(np.isneginf(saved), 0.0, weights)
        everywhere = np.broadcast_to(used, self.slots.shape)
        return add_up(self.slots, everywhere, self.num_options + 2)[: self.num_options]

    def equal_rootings(self) -> Floats:
        """Return zeros, as there is one root position; see `Choices`."""
        return np.zeros(self.slots.shape[1])


class _Hanging(NamedTuple):
    """Neighbours of every node, `(topologies, nodes)`; a node without a neighbour refers to itself."""

    parent: Numbers
    sibling: Numbers


def _hang(topologies: Topologies) -> _Hanging:
    """Return parent and sibling of every node in the canonical form of topologies."""
    count, internal = topologies.children.shape[:2]
    nodes = topologies.num_taxa + internal
    parent = np.broadcast_to(np.arange(nodes), (count, nodes)).copy()
    sibling = parent.copy()
    children = topologies.children.reshape(count, -1)
    above = np.repeat(np.arange(topologies.num_taxa, nodes), 2)
    np.put_along_axis(parent, children, np.broadcast_to(above, children.shape), axis=1)
    np.put_along_axis(sibling, children, topologies.children[..., ::-1].reshape(count, -1), axis=1)
    return _Hanging(parent, sibling)


def hanging_sets(topologies: Topologies) -> clades.Bits:
    """Return the taxa below every node, including the last node: `(topologies, nodes, words)`."""
    return clades.below(topologies.children, topologies.num_taxa)


def _hanging_choices(topologies: Topologies, below: Numbers, with_sisters: bool) -> Numbers:
    """Return clade, sister and smaller part of each internal node's split, `(internal, topologies, 3)`.

    Unrooted topologies count as rooted at their first taxon; `below` `(topologies, nodes)` numbers each node's clade.
    """
    num_taxa = topologies.num_taxa
    sister = np.full((len(topologies), topologies.children.shape[1]), -1)
    if with_sisters:
        sister[:, :-1] = np.take_along_axis(below, _hang(topologies).sibling[:, num_taxa:-1], axis=1)
    return np.stack([below[:, num_taxa:], sister, _smaller_part(topologies, below)], axis=-1).transpose(1, 0, 2)


def _smaller_part(topologies: Topologies, below: Numbers) -> Numbers:
    """Return the smaller number of the clades of the children of each internal node, `(topologies, internal)`."""
    flat = topologies.children.reshape(len(topologies), -1)
    return np.take_along_axis(below, flat, axis=1).reshape(topologies.children.shape).min(axis=-1)


def one_root(graph: SubsplitGraph, topologies: Topologies) -> OneRoot:
    """Find the options of topologies in a graph of rooted trees."""
    below = graph.find_clade(hanging_sets(topologies))
    choices = _hanging_choices(topologies, below, graph.with_sisters)
    return OneRoot(graph.find_option(*np.moveaxis(choices, -1, 0)), graph.num_options)


#: The six slots of a node. For a root on the node's edge: the root split, and the splits of the clades on both sides.
#: For a root above its parent: the split of the node's clade, with its sibling as sister. For a root on or below
#: the node's edge: the splits of its sibling and of the clade above its parent, which are then sisters.
ROOT, BELOW, ABOVE, CHILD, BESIDE, BEYOND = range(6)


@dataclass(frozen=True)
class EveryRoot:
    """Options of unrooted topologies with their root in every possible position, each stored once per topology."""

    # A topology of `n` taxa has `2n - 3` root positions with `n - 1` options each, but only about `11 n` different
    # options. Sums over the rootings pass twice over the nodes, for all topologies at once: up from the tips for the
    # splits below each node, and down for the splits above it.

    slots: Numbers  # options of the six kinds for every node, (6, nodes, topologies)
    children: Numbers  # of each internal node, as flat positions in (nodes, topologies), (internal, 2, topologies)
    parent: Numbers  # of every node, likewise, (nodes, topologies)
    sibling: Numbers  # of every node, likewise, (nodes, topologies)
    num_options: int  # of the graph

    @cached_property
    def _inner(self) -> range:
        """The internal nodes other than the last."""
        nodes = self.slots.shape[1]
        return range(nodes - len(self.children), nodes - 1)

    def rootings(self, table: Floats) -> Floats:
        """Return the log probability of each topology rooted above each node, `(nodes, topologies)`."""
        # The first taxon's node is not a root position, as its edge is that above the last node: its row is -inf.
        values = table[self.slots]
        below = np.zeros(values.shape[1:])
        above = values[BESIDE] + values[BEYOND]
        hanging, flat_below, flat_above = values[CHILD], below.ravel(), above.ravel()
        flat_hanging = hanging.ravel()
        first = self._inner.start
        for node, (left, right) in enumerate(self.children, start=first):
            np.add(flat_hanging[left], flat_hanging[right], out=below[node])
            hanging[node] += below[node]
        above += flat_below[self.sibling]
        for node in reversed(self._inner):
            above[node] += flat_above[self.parent[node]]
        above[1:first] += flat_above[self.parent[1:first]]
        return values[ROOT] + values[BELOW] + values[ABOVE] + below + above

    def log_prob(self, table: Floats) -> tuple[Floats, Floats]:
        """Return log probabilities summed over the rootings; see `Choices`."""
        rootings = self.rootings(table)
        top = rootings.max(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.nan_to_num(np.exp(rootings - top), nan=0.0)
            total = shares.sum(axis=0)
            log_prob = top + np.log(total)
            return log_prob, np.where(total > 0, shares / total, 0.0)

    def counts(self, saved: Floats, weights: Floats) -> Floats:
        """Return expected counts; see `Choices`."""
        used = self.usage(saved * weights)
        return add_up(self.slots, used, self.num_options + 2)[: self.num_options]

    def equal_rootings(self) -> Floats:
        """Return equal shares of all rootings; see `Choices`."""
        shares = np.full(self.slots.shape[1:], 1 / (self.slots.shape[1] - 1))
        shares[0] = 0.0
        return shares

    def usage(self, rootings: Floats) -> Floats:
        """Return how often each slot is used, `(6, nodes, topologies)`, when rootings count `(nodes, topologies)`."""
        below, above = rootings.copy(), rootings.copy()
        flat_below, flat_above = below.ravel(), above.ravel()
        # For a root at or below a node, the option above it is used; otherwise the option below it.
        for node, (left, right) in zip(self._inner, self.children, strict=False):
            above[node] += flat_above[left] + flat_above[right]
        for node in reversed(self._inner):
            below[node] += flat_below[self.parent[node]] + flat_above[self.sibling[node]]
        used = np.empty(self.slots.shape)
        used[[ROOT, BELOW, ABOVE]] = rootings
        used[CHILD] = flat_below[self.parent]
        used[[BESIDE, BEYOND]] = above
        return used


def _every_root_sets(topologies: Topologies) -> clades.Bits:
    """Return the taxa below every node, then the taxa above every node, `(topologies, 2 * nodes, words)`."""
    below = hanging_sets(topologies)
    return np.concatenate([below, clades.everything(topologies.num_taxa) & ~below], axis=1)


def every_root_choices(topologies: Topologies, numbers: Numbers, everything: int) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the choices of all slots, `(6, nodes, topologies, 3)`, and whether each chooses, `(6, nodes, topologies)`.

    A choice is clade, sister and smaller part; `numbers` `(topologies, 2 * nodes)` are those of `_every_root_sets`.
    """
    count, num_taxa = len(topologies), topologies.num_taxa
    parent, sibling = _hang(topologies)
    nodes = parent.shape[1]
    below, above = numbers[:, :nodes], numbers[:, nodes:]
    beside = np.take_along_axis(below, sibling, axis=1)
    beyond = np.take_along_axis(above, parent, axis=1)
    part_below = np.full((count, nodes), -1)
    part_below[:, num_taxa:] = _smaller_part(topologies, below)
    part_above = np.minimum(beside, beyond)
    part_beside, part_beyond = (np.take_along_axis(part_below, sibling, 1), np.take_along_axis(part_above, parent, 1))
    none = np.full((count, nodes), -1)
    whole = np.full((count, nodes), everything)
    triples = {
        ROOT: (whole, none, np.minimum(below, above)),
        BELOW: (below, above, part_below),
        ABOVE: (above, below, part_above),
        CHILD: (below, beside, part_below),
        BESIDE: (beside, beyond, part_beside),
        BEYOND: (beyond, beside, part_beyond),
    }
    choices = np.stack([np.stack(triples[kind], axis=-1) for kind in range(6)]).transpose(0, 2, 1, 3)
    return choices, _chosen(np.broadcast_to(np.arange(nodes), parent.shape), parent, sibling, num_taxa)


def _chosen(node: Numbers, parent: Numbers, sibling: Numbers, num_taxa: int) -> NDArray[np.bool_]:
    last = node.shape[1] - 1
    hangs = (node != 0) & (node != last)
    inner = node >= num_taxa
    kinds = {
        ROOT: node != 0,
        BELOW: inner,
        ABOVE: hangs,
        CHILD: inner & hangs,
        BESIDE: hangs & (sibling >= num_taxa),
        BEYOND: hangs & (parent != last),
    }
    return np.stack([kinds[kind] for kind in range(6)]).transpose(0, 2, 1)


def every_root(graph: SubsplitGraph, topologies: Topologies) -> EveryRoot:
    """Find the options of unrooted topologies in a graph of their rootings."""
    numbers = graph.find_clade(_every_root_sets(topologies))
    choices, chosen = every_root_choices(topologies, numbers, len(graph.clades) - 1)
    slots = np.where(chosen, graph.find_option(*np.moveaxis(choices, -1, 0)), graph.no_choice)
    # The first taxon's node is not a root position: its edge is that above the last node.
    slots[ROOT, 0] = graph.missing
    count = len(topologies)
    position = np.arange(count)
    parent, sibling = (one.T.copy() for one in _hang(topologies))
    parent[0], sibling[[0, -1]] = parent[-1], 0
    children = topologies.children.transpose(1, 2, 0).astype(np.int64)
    return EveryRoot(
        slots, children * count + position, parent * count + position, sibling * count + position, graph.num_options
    )


# Construction of the graph of given topologies.

#: Number of pairs of clades in one batch of comparisons.
_PAIRS = 4_000_000


def graph_of_hanging(topologies: Topologies, with_sisters: bool) -> SubsplitGraph:
    """Return the graph of choices of rooted topologies, or of unrooted topologies rooted at their first taxon."""
    sets, numbers = clades.identify(hanging_sets(topologies))
    choices = _hanging_choices(topologies, numbers, with_sisters).reshape(-1, 3)
    return SubsplitGraph.from_choices(topologies.taxa, topologies.rooted, with_sisters, sets, choices)


def graph_of_rootings(topologies: Topologies) -> SubsplitGraph:
    """Return the graph of choices of unrooted topologies with their root in every position."""
    met = _every_root_sets(topologies)
    everything = np.broadcast_to(clades.everything(topologies.num_taxa), (len(met), 1, met.shape[-1]))
    sets, numbers = clades.identify(np.concatenate([met, everything], axis=1))
    choices, chosen = every_root_choices(topologies, numbers[:, :-1], len(sets) - 1)
    return SubsplitGraph.from_choices(topologies.taxa, False, True, sets, choices[chosen])


def graph_of_all_splits(topologies: Topologies) -> SubsplitGraph:
    """Return the graph of all splits of a clade of the topologies into two of their clades, observed or not."""
    sets, _ = clades.identify(hanging_sets(topologies)[:, 0 if topologies.rooted else 1 :])
    find = RowNumbers(sets).find
    found = []
    step = max(1, _PAIRS // (len(sets) * sets.shape[-1]))
    for start in range(0, len(sets), step):
        whole = np.arange(start, min(start + step, len(sets)))
        inside = ((sets & ~sets[whole, None]) == 0).all(axis=-1) & (whole[:, None] != np.arange(len(sets)))
        clade, first = np.nonzero(inside)
        clade = whole[clade]
        second = find(sets[clade] & ~sets[first])
        both = first < second
        found.append(np.stack([clade[both], np.full(both.sum(), -1), first[both]], axis=1))
    return SubsplitGraph.from_choices(topologies.taxa, topologies.rooted, False, sets, np.concatenate(found))


# Sums, maxima, marginals and draws over all trees of a graph, by passes over its levels.


def log_sums(graph: SubsplitGraph, values: Floats) -> tuple[Floats, Floats]:
    """Return log sums of weights over all subtrees of each group, `(groups,)`, and log probabilities `(options,)`.

    A tree weighs the product of its options, `values` `(options,)` in logs; the last sum is over all trees.
    """
    sums = np.zeros(graph.num_groups + 1)  # the last entry stands for a part of one taxon
    shares = np.empty(graph.num_options)
    for groups, options in graph.levels:
        totals = values[options] + sums[graph.next_groups[options]].sum(axis=1)
        starts = graph.starts[groups] - options.start
        sums[groups] = np.logaddexp.reduceat(totals, starts)
        shares[options] = totals - sums[graph.group_of[options]]
    return sums[:-1], shares


def reach(graph: SubsplitGraph, probabilities: Floats) -> Floats:
    """Return the probability that a tree has each group, `(groups,)`, from those of the options `(options,)`."""
    reached = np.zeros(graph.num_groups + 1)
    reached[graph.num_groups - 1] = 1.0
    for _, options in graph.down():
        flow = reached[graph.group_of[options]] * probabilities[options]
        below = graph.next_groups[options]
        # Contributions to parts of one taxon are dropped.
        arriving = np.bincount(below.ravel() + 1, np.repeat(flow, 2))[1:]
        reached[: len(arriving)] += arriving
    return reached[:-1]


def clade_probabilities(graph: SubsplitGraph, probabilities: Floats) -> Floats:
    """Return the probability that a tree has each clade with two or more taxa, `(clades,)`, zero for the others."""
    return add_up(graph.group_clade, reach(graph, probabilities), len(graph.clades))


def entropy(graph: SubsplitGraph, log_probabilities: Floats) -> float:
    """Return the entropy in nats of the rooted trees."""
    probabilities = np.exp(log_probabilities)
    surprise = np.where(probabilities > 0, -log_probabilities, 0.0) * probabilities
    return float(reach(graph, probabilities) @ graph.sum_groups(surprise))


def most_probable_tree(graph: SubsplitGraph, log_probabilities: Floats) -> tuple[Topologies, float]:
    """Return the tree with the largest product of option probabilities, and its log; the first tree of a tie."""
    best = np.zeros(graph.num_groups + 1)
    choice = np.empty(graph.num_groups, dtype=np.int64)
    for groups, options in graph.levels:
        totals = log_probabilities[options] + best[graph.next_groups[options]].sum(axis=1)
        starts = graph.starts[groups] - options.start
        best[groups] = np.maximum.reduceat(totals, starts)
        hits = np.where(totals == best[graph.group_of[options]], np.arange(len(totals)), len(totals))
        choice[groups] = np.minimum.reduceat(hits, starts) + options.start
    chosen: list[int] = []
    stack = [graph.num_groups - 1]
    while stack:
        option = int(choice[stack.pop()])
        chosen.append(option)
        stack.extend(group for group in graph.next_groups[option].tolist() if group >= 0)
    return _assemble(graph, np.array([chosen])), float(best[graph.num_groups - 1])


def draw_trees(
    graph: SubsplitGraph, cumulative: Floats, last: Numbers, num_samples: int, generator: torch.Generator | None
) -> Topologies:
    """Draw trees by choosing an option for every group met, level by level; `cumulative, last` are of `cumulate`."""
    uniform = torch.rand(num_samples * graph.num_choices, generator=generator, dtype=torch.float64).numpy()
    tree, group = np.arange(num_samples), np.full(num_samples, graph.num_groups - 1)
    trees, options, used = [tree[:0]], [tree[:0]], 0
    while len(tree):
        base = cumulative[graph.starts[group]]
        target = base + uniform[used : used + len(tree)] * (cumulative[graph.starts[group + 1]] - base)
        # The first option beyond the target; rounding must not lead past the last possible option.
        option = np.minimum(np.searchsorted(cumulative, target, side="right") - 1, last[group])
        used += len(tree)
        trees.append(tree)
        options.append(option)
        below = graph.next_groups[option]
        tree, group = np.repeat(tree, 2)[below.ravel() >= 0], below[below >= 0]
    order = np.argsort(np.concatenate(trees), kind="stable")
    return _assemble(graph, np.concatenate(options)[order].reshape(num_samples, graph.num_choices))


def cumulate(graph: SubsplitGraph, probabilities: Floats) -> tuple[Floats, Numbers]:
    """Return running sums of the probabilities, `(options + 1,)`, and the last possible option of each group."""
    possible = np.where(probabilities > 0, np.arange(graph.num_options), -1)
    return np.append(0.0, np.cumsum(probabilities)), np.maximum.reduceat(possible, graph.starts[:-1])


def _assemble(graph: SubsplitGraph, options: Numbers) -> Topologies:
    """Make topologies from their options `(trees, choices)`, the option of the root first."""
    inner = graph.clades[graph.group_clade[graph.group_of[options]]]
    if graph.of_rootings:
        inner = _without_root(graph, options, inner)
    return Topologies.from_clades(graph.taxa, inner, graph.rooted)


def _without_root(graph: SubsplitGraph, options: Numbers, inner: clades.Bits) -> clades.Bits:
    """Convert the clades of rooted trees, the root's first, to the sets without the first taxon."""
    everything = graph.clades[-1]
    rest = everything & ~clades.single(len(graph.taxa))[0]
    has_first = clades.contains(inner, 0)
    flipped = np.where(has_first[..., None], everything & ~inner, inner)
    # The part of the root split with the first taxon is the complement of the other part, so both become one set. If
    # it has several taxa, its row is free for the set of all taxa but the first; if it is the first taxon alone, that
    # set is there already.
    sides = graph.clades[graph.parts[options[:, 0]]]
    near = np.where(clades.contains(sides[:, 0], 0)[:, None], sides[:, 0], sides[:, 1])
    place = (inner == near[:, None]).all(axis=-1)
    flipped[place] = rest
    # The row of the root is dropped: the unrooted tree has one internal node fewer.
    return flipped[:, 1:]


# Description of the split that excludes a topology from a graph.


def describe_missing(
    graph: SubsplitGraph, choices: Choices, topology: Topologies, log_probabilities: Floats
) -> str | None:
    """Describe the split nearest to the root that one topology has and the graph lacks; None if it has all splits."""
    # Options with probability zero count as absent.
    lacks = graph.table(np.isneginf(log_probabilities).astype(np.float64), missing=1.0)
    if isinstance(choices, EveryRoot):
        sets, triple = _of_best_rooting(choices, lacks, topology)
    else:
        sets, triple = _of_one_root(choices, lacks, topology)  # type: ignore[arg-type]
    if triple is None:
        return None
    clade, sister, part = triple
    one, other = sets[part], sets[clade] & ~sets[part]
    known = graph.find_clade(np.stack([sets[clade], one, other])) >= 0
    for there, each in zip(known, (sets[clade], one, other), strict=True):
        if not there:
            return f"no tree of the support has the clade {graph.describe_clade(each)}"
    split = f"the clade {graph.describe_clade(sets[clade])} split into "
    split += f"{graph.describe_clade(one)} and {graph.describe_clade(other)}"
    beside = f" with the sister {graph.describe_clade(sets[sister])}" if graph.with_sisters and sister >= 0 else ""
    return f"no tree of the support has {split}{beside}"


def _of_one_root(choices: OneRoot, lacks: Floats, topology: Topologies) -> tuple[clades.Bits, Numbers | None]:
    sets = hanging_sets(topology)[0]
    triples = _hanging_choices(topology, np.arange(len(sets))[None], with_sisters=True)[:, 0]
    absent = np.flatnonzero(lacks[choices.slots[:, 0]])
    return sets, triples[absent[-1]] if len(absent) else None


def _of_best_rooting(choices: EveryRoot, lacks: Floats, topology: Topologies) -> tuple[clades.Bits, Numbers | None]:
    found = _every_root_sets(topology)[0]
    everything = clades.everything(topology.num_taxa)
    sets = np.concatenate([found, everything[None]])
    absent = choices.rootings(lacks)
    # The first node's edge is that above the last.
    root = int(absent[1:, 0].argmin()) + 1
    if absent[root, 0] == 0:
        return sets, None
    rooting = np.zeros_like(absent)
    rooting[root] = 1.0
    used = (choices.usage(rooting) > 0) & (lacks[choices.slots] > 0)
    triples, _ = every_root_choices(topology, np.arange(len(found))[None], len(found))
    candidates = triples[used]
    return sets, candidates[clades.size(sets[candidates[:, 0]]).argmax()]
