"""Sums, maxima, marginals and draws over all trees of a graph, by passes over its levels."""

from __future__ import annotations

import numpy as np
import torch

from bayeskit.models.phylogenetics.distributions.rows import Floats, Numbers, add_up
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies


def log_sums(graph: SubsplitGraph, values: Floats) -> tuple[Floats, Floats]:
    """Sum over all trees the product of the weights of their options.

    Parameters
    ----------
    graph : SubsplitGraph
        The choices.
    values : ndarray
        Log weight of each option, `(options,)`; not all of a group are zero weights.

    Returns
    -------
    sums : ndarray
        Log of the sum over everything that can hang below each group, `(groups,)`; the last is that of all trees.
    log_probabilities : ndarray
        Log probability of each option among those of its group when trees are as probable as their products.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.distributions import SubsplitBayesianNetwork
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> graph = SubsplitBayesianNetwork.from_topologies(all_topologies("ABCD", rooted=True)).graph
    >>> round(float(np.exp(log_sums(graph, np.zeros(graph.num_options))[0][-1])))
    15
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
        # What goes to parts of one taxon is dropped.
        arriving = np.bincount(below.ravel() + 1, np.repeat(flow, 2))[1:]
        reached[: len(arriving)] += arriving
    return reached[:-1]


def clade_probabilities(graph: SubsplitGraph, probabilities: Floats) -> Floats:
    """Return the probability that a tree has each clade with two or more taxa, `(clades,)`, zero for the others."""
    return add_up(graph.group_clade, reach(graph, probabilities), len(graph.clades))


def entropy(graph: SubsplitGraph, log_probabilities: Floats) -> float:
    """Return the entropy in nats of the trees that the options make, their roots counted."""
    probabilities = np.exp(log_probabilities)
    surprise = np.where(probabilities > 0, -log_probabilities, 0.0) * probabilities
    return float(reach(graph, probabilities) @ graph.sum_groups(surprise))


def most_probable(graph: SubsplitGraph, log_probabilities: Floats) -> tuple[Topologies, float]:
    """Return the tree whose product is largest, and its log; the first of those that tie."""
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
    return assemble(graph, np.array([chosen])), float(best[graph.num_groups - 1])


def draw(
    graph: SubsplitGraph, cumulative: Floats, last: Numbers, num_samples: int, generator: torch.Generator | None
) -> Topologies:
    """Draw trees by choosing an option for every group that is met, level by level for all trees at once.

    Parameters
    ----------
    graph : SubsplitGraph
        The choices.
    cumulative, last : ndarray
        From `cumulate`.
    num_samples : int
        How many trees.
    generator : torch.Generator, optional
        Source of randomness; torch's global one by default.

    Returns
    -------
    Topologies
        The trees.
    """
    uniform = torch.rand(num_samples * graph.num_choices, generator=generator, dtype=torch.float64).numpy()
    tree, group = np.arange(num_samples), np.full(num_samples, graph.num_groups - 1)
    trees, options, used = [tree[:0]], [tree[:0]], 0
    while len(tree):
        base = cumulative[graph.starts[group]]
        target = base + uniform[used : used + len(tree)] * (cumulative[graph.starts[group + 1]] - base)
        # The first option that lies beyond the target; rounding must not lead past the last possible one.
        option = np.minimum(np.searchsorted(cumulative, target, side="right") - 1, last[group])
        used += len(tree)
        trees.append(tree)
        options.append(option)
        below = graph.next_groups[option]
        tree, group = np.repeat(tree, 2)[below.ravel() >= 0], below[below >= 0]
    order = np.argsort(np.concatenate(trees), kind="stable")
    return assemble(graph, np.concatenate(options)[order].reshape(num_samples, graph.num_choices))


def cumulate(graph: SubsplitGraph, probabilities: Floats) -> tuple[Floats, Numbers]:
    """Return running sums of the probabilities, `(options + 1,)`, and the last possible option of each group."""
    possible = np.where(probabilities > 0, np.arange(graph.num_options), -1)
    return np.append(0.0, np.cumsum(probabilities)), np.maximum.reduceat(possible, graph.starts[:-1])


def assemble(graph: SubsplitGraph, options: Numbers) -> Topologies:
    """Make topologies from the options chosen for them, the root's first: `(trees, choices)`."""
    inner = graph.clades[graph.group_clade[graph.group_of[options]]]
    if graph.of_rootings:
        inner = _without_root(graph, options, inner)
    return Topologies.from_clades(graph.taxa, inner, graph.rooted)


def _without_root(graph: SubsplitGraph, options: Numbers, inner: clades.Bits) -> clades.Bits:
    """Turn the clades of rooted trees, the root's first, into those that hang from the first taxon."""
    everything = graph.clades[-1]
    rest = everything & ~clades.single(len(graph.taxa))[0]
    has_first = clades.contains(inner, 0)
    flipped = np.where(has_first[..., None], everything & ~inner, inner)
    # The part of the root split that holds the first taxon says the same as the other part. So, if it is a clade of
    # its own, the two are one set, and its place is free for the set of all taxa but the first; if it is that taxon
    # alone, this set is there already.
    sides = graph.clades[graph.parts[options[:, 0]]]
    near = np.where(clades.contains(sides[:, 0], 0)[:, None], sides[:, 0], sides[:, 1])
    place = (inner == near[:, None]).all(axis=-1)
    flipped[place] = rest
    # The root's own place is free too; what it would hold is one taxon fewer.
    return flipped[:, 1:]
