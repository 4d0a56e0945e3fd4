"""Options and features of topologies in a subsplit Bayesian network, kept once they are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies
from bayeskit.models.phylogenetics._distributions._graphs import ABOVE, BELOW, ROOT, EveryRoot, Numbers, SubsplitGraph

#: Size of the cache in bytes.
_MEMORY = 2**26
_KINDS = 6
#: Memory of a cached topology, as a multiple of that of its children.
_COLUMN = 10


class FoundTopologies(NamedTuple):
    """Options and features of topologies in a network."""

    choices: EveryRoot  # for `log_prob_of_choices`
    # For each edge, (topologies, edges, features of an edge), int64: its split and, optionally, the primary subsplit
    # pairs on both sides of it. `Places.num_features` stands for the missing pair of a tip.
    features: Tensor


class Places:
    """Cache of the options and features of topologies in a network; TreeError if the network is over rooted topologies.

    A primary subsplit pair is the split of an edge together with the further split of one side of it.
    """

    # Both are options of the network: with the root on the edge, the split is a root split, and the pairs are options
    # of the root's children. Therefore all features of the topologies that the network can draw occur in its support.

    def __init__(self, network: SubsplitBayesianNetwork, with_pairs: bool) -> None:
        if not network.graph.of_rootings:
            raise TreeError(
                "The support is a network over rooted topologies. Remedy: give a sample of unrooted topologies, such "
                "as sample.unrooted(), or the network made from this sample."
            )
        self._network = SubsplitBayesianNetwork(network.graph)
        self._kinds = [ROOT, BELOW, ABOVE] if with_pairs else [ROOT]
        self.feature_of, self.num_features = _features(network.graph, with_pairs)
        self._nodes = 2 * len(network.taxa) - 2
        # The first taxon's edge is that above the last node.
        self._edges = np.array([self._nodes - 1, *range(1, self._nodes - 1)])
        self._known: dict[bytes, np.ndarray] = {}

    def look_up(self, topologies: Topologies) -> FoundTopologies:
        """Return options and features of topologies over the network's taxa; TreeError for an edge not in its trees."""
        width = topologies.children[0].nbytes
        text = np.ascontiguousarray(topologies.children).tobytes()
        keys = [text[start : start + width] for start in range(0, len(text), width)]
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        if new:
            if width * _COLUMN * (len(self._known) + len(new)) > _MEMORY:
                self._known = {key: self._known[key] for key in keys if key in self._known}
            self._learn(list(new), topologies[list(new.values())])
        return self._assemble(np.stack([self._known[key] for key in keys], axis=-1).astype(np.int64))

    def _learn(self, keys: list[bytes], topologies: Topologies) -> None:
        """Cache a column of integers for each topology, from which `_assemble` makes arrays."""
        choices = self._network.choices(topologies)
        if not isinstance(choices, EveryRoot):
            raise TypeError("a network of rootings has options of every rooting")
        count = len(topologies)
        parts = [choices.slots, *(one // count for one in (choices.parent, choices.sibling, choices.children))]
        columns = np.concatenate([part.reshape(-1, count) for part in parts]).astype(np.int32).T
        self._known.update(zip(keys, np.ascontiguousarray(columns), strict=True))

    def _assemble(self, columns: Numbers) -> FoundTopologies:
        count, nodes = columns.shape[1], self._nodes
        slots, parent, sibling, children = np.split(columns, np.cumsum([_KINDS * nodes, nodes, nodes]))
        slots = slots.reshape(_KINDS, nodes, count)
        position = np.arange(count)
        choices = EveryRoot(
            slots,
            children.reshape(-1, 2, count) * count + position,
            parent * count + position,
            sibling * count + position,
            self._network.graph.num_options,
        )
        features = self.feature_of[slots[self._kinds][:, self._edges]]
        if (features[0] == self.num_features).any():
            raise TreeError("A topology has an edge that no tree of the support has. Remedy: add it to the support.")
        return FoundTopologies(choices, torch.from_numpy(np.ascontiguousarray(features.transpose(2, 1, 0))))


def _features(graph: SubsplitGraph, with_pairs: bool) -> tuple[Numbers, int]:
    """Return the feature index of each option of a graph, `(options + 2,)`, and the number of features."""
    everything = graph.clades[-1]
    root = graph.group_sister < 0
    # The two children of a root contain all taxa.
    pair = ~root & ((graph.clades[graph.group_clade] | graph.clades[graph.group_sister]) == everything).all(axis=-1)
    used = np.flatnonzero((root | pair if with_pairs else root)[graph.group_of])
    table = np.full(graph.num_options + 2, len(used))
    table[used] = np.arange(len(used))
    return table, len(used)
