"""Which options of a graph make a topology: those of its one root, or those of every place that a root can take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bayeskit.models.phylogenetics.distributions.rows import Floats, Numbers, add_up
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies


class Choices(Protocol):
    """Options that make topologies, and the sums over them."""

    def log_prob(self, table: Floats) -> tuple[Floats, Floats]:
        """Return log probabilities `(topologies,)` from those of the options, and what `counts` needs.

        `table` comes from `SubsplitGraph.table`.
        """

    def counts(self, saved: Floats, weights: Floats) -> Floats:
        """Return how often each option is expected to be used, `(options,)`, when topologies count `(topologies,)`.

        This is also the derivative of the weighted sum of log probabilities by those of the options.
        """

    def equal_rootings(self) -> Floats:
        """Return in place of what `log_prob` saves that every place of a root is equally probable."""


@dataclass(frozen=True)
class OneRoot:
    """Options of topologies with one place for the root.

    Attributes
    ----------
    slots : ndarray
        Option of each internal node, shape `(internal, topologies)`.
    num_options : int
        Number of options of the graph.
    """

    slots: Numbers
    num_options: int

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
        """Return that there is nothing to average; see `Choices`."""
        return np.zeros(self.slots.shape[1])


class Hanging(NamedTuple):
    """Neighbours of every node: shapes `(topologies, nodes)`; nodes without one name themselves."""

    parent: Numbers
    sibling: Numbers


def hang(topologies: Topologies) -> Hanging:
    """Return parent and sibling of every node of topologies as they hang in their canonical form."""
    count, internal = topologies.children.shape[:2]
    nodes = topologies.num_taxa + internal
    parent = np.broadcast_to(np.arange(nodes), (count, nodes)).copy()
    sibling = parent.copy()
    children = topologies.children.reshape(count, -1)
    above = np.repeat(np.arange(topologies.num_taxa, nodes), 2)
    np.put_along_axis(parent, children, np.broadcast_to(above, children.shape), axis=1)
    np.put_along_axis(sibling, children, topologies.children[..., ::-1].reshape(count, -1), axis=1)
    return Hanging(parent, sibling)


def hanging_sets(topologies: Topologies) -> clades.Bits:
    """Return the taxa below every node, the last one included: `(topologies, nodes, words)`."""
    return clades.below(topologies.children, topologies.num_taxa)


def hanging_choices(topologies: Topologies, below: Numbers, with_sisters: bool) -> Numbers:
    """Return clade, sister and smaller part of the split of every internal node.

    Parameters
    ----------
    topologies : Topologies
        Rooted ones, or unrooted ones that are taken as rooted at their first taxon.
    below : ndarray
        Number of the clade below every node, `(topologies, nodes)`.
    with_sisters : bool
        Whether the sister is asked for; -1 otherwise.

    Returns
    -------
    ndarray
        Shape `(internal, topologies, 3)`.
    """
    num_taxa = topologies.num_taxa
    sister = np.full((len(topologies), topologies.children.shape[1]), -1)
    if with_sisters:
        sister[:, :-1] = np.take_along_axis(below, hang(topologies).sibling[:, num_taxa:-1], axis=1)
    return np.stack([below[:, num_taxa:], sister, smaller_part(topologies, below)], axis=-1).transpose(1, 0, 2)


def smaller_part(topologies: Topologies, below: Numbers) -> Numbers:
    """Return the smaller number of the clades of the children of each internal node, `(topologies, internal)`."""
    flat = topologies.children.reshape(len(topologies), -1)
    return np.take_along_axis(below, flat, axis=1).reshape(topologies.children.shape).min(axis=-1)


def one_root(graph: SubsplitGraph, topologies: Topologies) -> OneRoot:
    """Find the options of topologies in a graph of rooted trees."""
    below = graph.find_clade(hanging_sets(topologies))
    choices = hanging_choices(topologies, below, graph.with_sisters)
    return OneRoot(graph.find_option(*np.moveaxis(choices, -1, 0)), graph.num_options)


#: What the six kinds of slots of a node choose, when the root is placed somewhere: the split of the root on its edge;
#: of the clades on both sides of such a root; of the clade below it under its sibling, when the root is above its
#: parent; and, when the root is inside it, of its sibling and of what is above its parent, which are then sisters.
ROOT, BELOW, ABOVE, CHILD, BESIDE, BEYOND = range(6)


@dataclass(frozen=True)
class EveryRoot:
    """Options of unrooted topologies with their root in every possible place, each option listed once a topology.

    A topology of `n` taxa has `2n - 3` places for its root, which need `n - 1` options each, but only about `11 n`
    different ones. Sums over the rootings pass twice over the nodes, for all topologies at once: up from the tips for
    what is below each node, and down for what is above it.

    Attributes
    ----------
    slots : ndarray
        Options of the six kinds for every node; shape `(6, nodes, topologies)`.
    children : ndarray
        Both children of each internal node, as positions in an array `(nodes, topologies)`; shape
        `(internal, 2, topologies)`.
    parent, sibling : ndarray
        Likewise, of every node, shape `(nodes, topologies)`.
    num_options : int
        Number of options of the graph.
    """

    slots: Numbers
    children: Numbers
    parent: Numbers
    sibling: Numbers
    num_options: int

    @cached_property
    def _inner(self) -> range:
        """The internal nodes below the last one, which hang from others."""
        nodes = self.slots.shape[1]
        return range(nodes - len(self.children), nodes - 1)

    def rootings(self, table: Floats) -> Floats:
        """Return the log probability of each topology with its root above each node, shape `(nodes, topologies)`.

        The first taxon's node has none: its edge is that above the last node.
        """
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
        # With the root somewhere at or below a node, what is above it is used; else what is below it is.
        for node, (left, right) in zip(self._inner, self.children, strict=False):
            above[node] += flat_above[left] + flat_above[right]
        for node in reversed(self._inner):
            below[node] += flat_below[self.parent[node]] + flat_above[self.sibling[node]]
        used = np.empty(self.slots.shape)
        used[[ROOT, BELOW, ABOVE]] = rootings
        used[CHILD] = flat_below[self.parent]
        used[[BESIDE, BEYOND]] = above
        return used


def every_root_sets(topologies: Topologies) -> clades.Bits:
    """Return the taxa below every node and, behind, those above it, shape `(topologies, 2 * nodes, words)`."""
    below = hanging_sets(topologies)
    return np.concatenate([below, clades.everything(topologies.num_taxa) & ~below], axis=1)


def every_root_choices(topologies: Topologies, numbers: Numbers, everything: int) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return clade, sister and smaller part of each slot of unrooted topologies, and which slots choose anything.

    Parameters
    ----------
    topologies : Topologies
        Unrooted ones.
    numbers : ndarray
        Numbers of the clades of `every_root_sets`, `(topologies, 2 * nodes)`.
    everything : int
        Number of the set of all taxa.

    Returns
    -------
    choices : ndarray
        Shape `(6, nodes, topologies, 3)`.
    chosen : ndarray
        Shape `(6, nodes, topologies)`.
    """
    count, num_taxa = len(topologies), topologies.num_taxa
    parent, sibling = hang(topologies)
    nodes = parent.shape[1]
    below, above = numbers[:, :nodes], numbers[:, nodes:]
    beside = np.take_along_axis(below, sibling, axis=1)
    beyond = np.take_along_axis(above, parent, axis=1)
    part_below = np.full((count, nodes), -1)
    part_below[:, num_taxa:] = smaller_part(topologies, below)
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
    numbers = graph.find_clade(every_root_sets(topologies))
    choices, chosen = every_root_choices(topologies, numbers, len(graph.clades) - 1)
    slots = np.where(chosen, graph.find_option(*np.moveaxis(choices, -1, 0)), graph.no_choice)
    # The node of the first taxon is no place for a root: its edge is that above the last node.
    slots[ROOT, 0] = graph.missing
    count = len(topologies)
    position = np.arange(count)
    parent, sibling = (one.T.copy() for one in hang(topologies))
    parent[0], sibling[[0, -1]] = parent[-1], 0
    children = topologies.children.transpose(1, 2, 0).astype(np.int64)
    return EveryRoot(
        slots, children * count + position, parent * count + position, sibling * count + position, graph.num_options
    )
