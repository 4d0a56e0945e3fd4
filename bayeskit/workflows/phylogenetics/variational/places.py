"""Where topologies stand in a subsplit Bayesian network, kept for those that are drawn again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies
from bayeskit.models.phylogenetics.distributions.choices import ABOVE, BELOW, ROOT, EveryRoot
from bayeskit.models.phylogenetics.distributions.rows import Numbers
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph

#: Size of what is kept, in bytes.
_MEMORY = 2**26
_KINDS = 6
#: What is kept of a topology takes about so many times the room of its children.
_COLUMN = 10


class Found(NamedTuple):
    """Where some topologies stand.

    Attributes
    ----------
    choices : EveryRoot
        The options of the network that make them, for `log_prob_of_choices`.
    features : Tensor
        The features of every edge, `(topologies, edges, features of an edge)`, int64: its split and, on request, the
        primary subsplit pairs on both sides of it. `Places.num_features` stands for a side that has none, a tip.
    """

    choices: EveryRoot
    features: Tensor


class Places:
    """Look topologies up in a network, each distinct one once.

    A primary subsplit pair is the split of an edge together with how one side of it is split further. Both are options
    of the network: with its root on the edge, the split is a root split, and the pairs are those of the root's
    children. So every topology that the network can draw has features that trees of its support have, too.

    Parameters
    ----------
    network : SubsplitBayesianNetwork
        Over unrooted topologies.
    with_pairs : bool
        Whether primary subsplit pairs are features.

    Attributes
    ----------
    num_features : int
        Number of different features.

    Raises
    ------
    TreeError
        If the network is over rooted topologies.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import all_topologies
    >>> topologies = all_topologies("ABCD")
    >>> places = Places(SubsplitBayesianNetwork.from_topologies(topologies), with_pairs=True)
    >>> places.num_features, places.look_up(topologies).features.shape
    (25, torch.Size([3, 5, 3]))
    """

    def __init__(self, network: SubsplitBayesianNetwork, with_pairs: bool) -> None:
        if not network.graph.of_rootings:
            raise TreeError(
                "The support is a network over rooted topologies. Remedy: give a sample of unrooted ones, such as "
                "sample.unrooted(), or the network made from it."
            )
        self._network = SubsplitBayesianNetwork(network.graph)
        self._kinds = [ROOT, BELOW, ABOVE] if with_pairs else [ROOT]
        self._feature_of, self.num_features = _features(network.graph, with_pairs)
        self._nodes = 2 * len(network.taxa) - 2
        # The first taxon's edge is that above the last node.
        self._edges = np.array([self._nodes - 1, *range(1, self._nodes - 1)])
        self._known: dict[bytes, np.ndarray] = {}

    def look_up(self, topologies: Topologies) -> Found:
        """Find topologies of the network's support.

        Parameters
        ----------
        topologies : Topologies
            Over the same taxa in the same order.

        Returns
        -------
        Found
            Their options and features.

        Raises
        ------
        TreeError
            If an edge of a topology is in no tree of the support.
        """
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
        """Keep a column of numbers for each topology, from which `_assemble` makes arrays for any number of them."""
        choices = self._network.choices(topologies)
        if not isinstance(choices, EveryRoot):
            raise TypeError("a network of rootings has options of every rooting")
        count = len(topologies)
        parts = [choices.slots, *(one // count for one in (choices.parent, choices.sibling, choices.children))]
        columns = np.concatenate([part.reshape(-1, count) for part in parts]).astype(np.int32).T
        self._known.update(zip(keys, np.ascontiguousarray(columns), strict=True))

    def _assemble(self, columns: Numbers) -> Found:
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
        features = self._feature_of[slots[self._kinds][:, self._edges]]
        if (features[0] == self.num_features).any():
            raise TreeError("A topology has an edge that no tree of the support has. Remedy: give the support it.")
        return Found(choices, torch.from_numpy(np.ascontiguousarray(features.transpose(2, 1, 0))))


def _features(graph: SubsplitGraph, with_pairs: bool) -> tuple[Numbers, int]:
    """Return the feature that each option of a graph is, `(options + 2,)`, and the number of features."""
    everything = graph.clades[-1]
    root = graph.group_sister < 0
    # The two children of a root make up all taxa.
    pair = ~root & ((graph.clades[graph.group_clade] | graph.clades[graph.group_sister]) == everything).all(axis=-1)
    used = np.flatnonzero((root | pair if with_pairs else root)[graph.group_of])
    table = np.full(graph.num_options + 2, len(used))
    table[used] = np.arange(len(used))
    return table, len(used)
