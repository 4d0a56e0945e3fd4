"""Saying what keeps a topology out of a graph."""

from __future__ import annotations

import numpy as np

from bayeskit.models.phylogenetics.distributions.choices import (
    Choices,
    EveryRoot,
    OneRoot,
    every_root_choices,
    every_root_sets,
    hanging_choices,
    hanging_sets,
)
from bayeskit.models.phylogenetics.distributions.rows import Floats, Numbers
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies


def describe_missing(
    graph: SubsplitGraph, choices: Choices, topology: Topologies, log_probabilities: Floats
) -> str | None:
    """Name the split nearest to the root that a topology has and the graph lacks; None if there is none.

    Parameters
    ----------
    graph : SubsplitGraph
        The graph.
    choices : Choices
        The options of the topology.
    topology : Topologies
        One topology.
    log_probabilities : ndarray
        Of the options; those with probability zero are missing too.

    Returns
    -------
    str or None
        A sentence.
    """
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
    beside = f" beside {graph.describe_clade(sets[sister])}" if graph.with_sisters and sister >= 0 else ""
    return f"no tree of the support has {split}{beside}"


def _of_one_root(choices: OneRoot, lacks: Floats, topology: Topologies) -> tuple[clades.Bits, Numbers | None]:
    sets = hanging_sets(topology)[0]
    triples = hanging_choices(topology, np.arange(len(sets))[None], with_sisters=True)[:, 0]
    absent = np.flatnonzero(lacks[choices.slots[:, 0]])
    return sets, triples[absent[-1]] if len(absent) else None


def _of_best_rooting(choices: EveryRoot, lacks: Floats, topology: Topologies) -> tuple[clades.Bits, Numbers | None]:
    found = every_root_sets(topology)[0]
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
