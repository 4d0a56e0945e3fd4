"""Graphs of the choices that make given topologies."""

from __future__ import annotations

import numpy as np

from bayeskit.models.phylogenetics.distributions.choices import (
    every_root_choices,
    every_root_sets,
    hanging_choices,
    hanging_sets,
)
from bayeskit.models.phylogenetics.distributions.rows import RowNumbers
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies

#: How many pairs of clades are compared at a time.
_PAIRS = 4_000_000


def graph_of_hanging(topologies: Topologies, with_sisters: bool) -> SubsplitGraph:
    """Collect the choices of rooted topologies, or of unrooted ones as rooted at their first taxon.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> graph_of_hanging(all_topologies("ABCD", rooted=True), with_sisters=False).num_options
    25
    """
    sets, numbers = clades.identify(hanging_sets(topologies))
    choices = hanging_choices(topologies, numbers, with_sisters).reshape(-1, 3)
    return SubsplitGraph.from_choices(topologies.taxa, topologies.rooted, with_sisters, sets, choices)


def graph_of_rootings(topologies: Topologies) -> SubsplitGraph:
    """Collect the choices of unrooted topologies with their root in every place.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> graph_of_rootings(all_topologies("ABCD")).num_options
    37
    """
    met = every_root_sets(topologies)
    everything = np.broadcast_to(clades.everything(topologies.num_taxa), (len(met), 1, met.shape[-1]))
    sets, numbers = clades.identify(np.concatenate([met, everything], axis=1))
    choices, chosen = every_root_choices(topologies, numbers[:, :-1], len(sets) - 1)
    return SubsplitGraph.from_choices(topologies.taxa, False, True, sets, choices[chosen])


def graph_of_all_splits(topologies: Topologies) -> SubsplitGraph:
    """Collect every split of a clade of hanging topologies into two of these clades, whether met together or not.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> trees = all_topologies("ABCDE", rooted=True)[[0, 104]]
    >>> graph_of_hanging(trees, with_sisters=False).num_options, graph_of_all_splits(trees).num_options
    (8, 10)
    """
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
