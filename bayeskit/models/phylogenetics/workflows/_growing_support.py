"""Search for the support of a network: trees of neighbour joining, and neighbours scored by their maxima."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import adam_path, new_generator, real_number, whole_number
from bayeskit.models.phylogenetics import Alignment, Partition, SubsplitBayesianNetwork, Topologies
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._distributions._graphs import Numbers, SubsplitGraph
from bayeskit.models.phylogenetics._neighbour_joining import joined_neighbours
from bayeskit.models.phylogenetics._partitions import subsets_of


@dataclass(frozen=True)
class SupportGrowth:
    """How the support of a network grows: from neighbours of its probable topologies by nearest-neighbour interchange.

    In each round, topologies are drawn from the network, and neighbours of the probable ones are tried, and their
    neighbours, until none is probable. A topology is scored by the maximum of its posterior density over the logarithms
    of its branch lengths, which estimates its share of the mass of all trees tried (Whidden et al. 2020).

    Parameters
    ----------
    rounds : int, default 5
        Number of rounds, evenly spaced up to `until`; a first search comes before training.
    until : float, default 0.5
        Share of the steps at which the last round takes place, above 0 and at most 1.
    mass : float, default 1e-4
        Least estimated share of a topology whose neighbours are tried, and whose subsplits are added.
    max_expanded : int, default 300
        Largest number of topologies whose neighbours are tried in one round.
    num_draws : int, default 500
        Number of topologies drawn from the network in a round.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Whidden, C., Claywell, B. C., Fisher, T., Magee, A. F., Fourment, M., Matsen, F. A. (2020). Systematic exploration
    of the high likelihood set of phylogenetic tree topologies. Systematic Biology 69, 280-293.

    Examples
    --------
    >>> SupportGrowth(rounds=2).positions(100)
    [25, 50]
    """

    rounds: int = 5
    until: float = 0.5
    mass: float = 1e-4
    max_expanded: int = 300
    num_draws: int = 500

    def __post_init__(self) -> None:
        for name, least in (("rounds", 0), ("max_expanded", 1), ("num_draws", 1)):
            whole_number(name, getattr(self, name), least)
        for name in ("until", "mass"):
            if not 0 < real_number(name, getattr(self, name)) <= 1:
                raise SettingsError(
                    f"growth: {name}={getattr(self, name)} lies outside (0, 1]. Remedy: give a number such as "
                    f"{getattr(SupportGrowth, name)}."
                )

    def positions(self, num_steps: int) -> list[int]:
        """Return the step before which each round takes place."""
        places = {int(num_steps * self.until * (number + 1) / self.rounds) for number in range(self.rounds)}
        return sorted(place for place in places if 0 < place < num_steps)


# Topologies to start from, and their neighbours.


def nearest_neighbours(topologies: Topologies, lengths: Tensor) -> tuple[Topologies, Tensor]:
    """Return all neighbours of unrooted topologies by nearest-neighbour interchange, and branch lengths to start from.

    Each of the `n - 3` internal edges has two neighbours; all lengths `(topologies, edges)` are kept by split, and the
    new edge takes that of the edge it replaces.
    """
    taxa, nodes = topologies.num_taxa, topologies.num_edges
    below, children, parents = topologies.below, topologies.children, topologies.parents
    inner = np.arange(taxa, nodes)
    rows = np.arange(len(topologies))[:, None]
    above = children[rows, parents[:, inner] - taxa]  # both children of the parent, one of which is the node
    beside = above.sum(axis=-1) - inner
    found, order, origins = [], [], []
    for child in (0, 1):
        kept = children[:, : len(inner), child]
        # The node's other child changes places with its sibling.
        replaced = below[rows, kept] | below[rows, beside]
        for place, node in enumerate(inner):
            sets = below.copy()
            sets[:, node] = replaced[:, place]
            made, edges = Topologies.from_edges(topologies.taxa, sets, rooted=False)
            found.append(made.children)
            order.append(edges)
            origins.append(lengths)
    moved = torch.cat(origins).take_along_dim(torch.from_numpy(np.concatenate(order)), dim=1)
    return Topologies(topologies.taxa, np.concatenate(found)), moved


def starting_topologies(data: Alignment | Partition, num_bootstraps: int, seed: int) -> Topologies:
    """Return distinct topologies of neighbour joining, from the data and from resampled columns."""
    subsets = list(subsets_of(data).values())
    generator = new_generator(seed, stream="bootstrap of an alignment")
    trees = [joined_neighbours(subsets)]
    for _ in range(num_bootstraps):
        sites = [torch.randint(one.num_sites, (one.num_sites,), generator=generator).numpy() for one in subsets]
        trees.append(joined_neighbours([one.select_sites(chosen) for one, chosen in zip(subsets, sites, strict=True)]))
    return Topologies.from_trees(trees, data.taxa).distinct()[0]


# Topologies with the maximum of their density.

#: Starting length of an edge, margin in nats below the best within which a maximum is sought, and step sizes.
_LENGTH, _MARGIN, _RATE, _QUICK, _LONG = 0.05, 25.0, 0.15, 8, 40
_AT_ONCE = 500


class ScoredTrees:
    """Distinct topologies with their best branch lengths and the log posterior density there.

    `log_density` maps topologies and branch lengths `(topologies, edges)` to log posterior densities, up to a constant.
    """

    def __init__(self, log_density: Callable[[Topologies, Tensor], Tensor], taxa: tuple[str, ...]) -> None:
        self.log_density = log_density
        edges = 2 * len(taxa) - 3
        self.topologies = Topologies(taxa, np.zeros((0, len(taxa) - 2, 2), dtype=np.int32))
        self.lengths, self.scores = torch.zeros(0, edges, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        self._known: set[bytes] = set()
        self._expanded = torch.zeros(0, dtype=torch.bool)

    @property
    def shares(self) -> Tensor:
        """Estimated share of each topology in the posterior mass of all of them."""
        return self.scores.softmax(0)

    def probable(self, mass: float) -> Numbers:
        """Return the rows of the topologies with at least this share."""
        return np.flatnonzero(self.shares.numpy() >= mass)

    def add(self, topologies: Topologies, lengths: Tensor | None = None) -> None:
        """Score topologies that are not known, by a search from branch lengths `(topologies, edges)`."""
        keys = [row.tobytes() for row in topologies.children]
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        if not new:
            return
        rows = list(new.values())
        topologies = topologies[rows]
        if lengths is None:
            start = torch.full((len(rows), topologies.num_edges), _LENGTH, dtype=torch.float64)
        else:
            start = lengths[rows]
        start, score = self._maximized(topologies, start, _LONG if lengths is None else _QUICK)
        best = max(float(self.scores.max()) if len(self.scores) else -torch.inf, float(score.max()))
        close = torch.nonzero(score > best - _MARGIN)[:, 0]
        start[close], score[close] = self._maximized(topologies[close.numpy()], start[close], _LONG)
        self._known.update(new)
        children = np.concatenate([self.topologies.children, topologies.children])
        self.topologies = Topologies(self.topologies.taxa, children)
        self.lengths, self.scores = torch.cat([self.lengths, start]), torch.cat([self.scores, score])
        self._expanded = torch.cat([self._expanded, torch.zeros(len(rows), dtype=torch.bool)])

    def expand(self, mass: float, max_expanded: int, tell: Callable[[int, str], None] | None = None) -> None:
        """Add the neighbours of all topologies with at least this share, the most probable first.

        `tell` is called with the number of topologies whose neighbours were tried, and a note.
        """
        tried = 0
        while tried < max_expanded:
            shares = self.shares
            waiting = torch.nonzero((shares >= mass) & ~self._expanded)[:, 0]
            # A few at a time: better trees may appear, beside which others are negligible.
            rows = waiting[shares[waiting].argsort(descending=True)][: min(10, max_expanded - tried)]
            if not len(rows):
                return
            self._expanded[rows] = True
            tried += len(rows)
            self.add(*nearest_neighbours(self.topologies[rows.numpy()], self.lengths[rows]))
            if tell is not None:
                tell(tried, f"best {float(self.scores.max()):.2f}")

    def _maximized(self, topologies: Topologies, lengths: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
        """Return branch lengths near the maximum of the density of their logarithms, and this density."""
        found = [
            self._maximum(topologies[first : first + _AT_ONCE], lengths[first : first + _AT_ONCE], num_steps)
            for first in range(0, len(topologies), _AT_ONCE)
        ]
        if not found:
            return lengths, lengths.new_zeros(0)
        lengths, scores = (torch.cat(parts) for parts in zip(*found, strict=True))
        return lengths, scores

    def _maximum(self, topologies: Topologies, lengths: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
        start = lengths.clamp(min=1e-8).log()
        best, at = torch.full((len(start),), -torch.inf, dtype=start.dtype), start

        def gradient(position: Tensor) -> Tensor:
            """Return the gradient, and keep the best positions of all steps."""
            nonlocal best, at
            with torch.enable_grad():
                leaf = position.requires_grad_(True)
                value = self.log_density(topologies, leaf.exp()) + leaf.sum(-1)
                (found,) = torch.autograd.grad(value.sum(), leaf)
            value = value.detach().nan_to_num(nan=-torch.inf)
            better = value > best
            best, at = torch.where(better, value, best), torch.where(better[:, None], leaf.detach(), at)
            return found.nan_to_num(0.0, 0.0, 0.0)

        for _ in adam_path(gradient, start, num_steps + 1, _RATE, betas=(0.8, 0.9), eps=1e-3):
            pass
        return at.exp(), best


# Graphs that grow.


def _choices_of(graph: SubsplitGraph, sets: Callable[[clades.Bits], Numbers]) -> Numbers:
    """Return clade, sister and smaller part of each option, `(options, 3)`, with clades numbered by `sets`."""
    number = sets(graph.clades)
    sister = np.where(graph.group_sister < 0, -1, number[graph.group_sister])
    return np.stack(
        [number[graph.group_clade][graph.group_of], sister[graph.group_of], number[graph.parts].min(axis=1)], axis=1
    )


def joined_graphs(one: SubsplitGraph, other: SubsplitGraph) -> SubsplitGraph:
    """Return the graph of all options of two graphs over the same taxa."""
    sets, index = clades.identify(np.concatenate([one.clades, other.clades]))
    split = len(one.clades)
    choices = [_choices_of(one, lambda _: index[:split]), _choices_of(other, lambda _: index[split:])]
    return SubsplitGraph.from_choices(one.taxa, one.rooted, one.with_sisters, sets, np.concatenate(choices))


def options_in(graph: SubsplitGraph, other: SubsplitGraph) -> Numbers:
    """Return the number in `graph` of each option of `other`, `(options of other,)`, `graph.missing` where absent."""
    return graph.find_option(*_choices_of(other, graph.find_clade).T)


def with_new_options(
    network: SubsplitBayesianNetwork, topologies: Topologies, shares: np.ndarray
) -> SubsplitBayesianNetwork:
    """Return a network with the options of further topologies, each with its share `(topologies,)` of all mass.

    New options start at the conditional probability that the shares imply, old ones keep their ratios.
    """
    old = network.graph
    graph = joined_graphs(old, SubsplitBayesianNetwork.from_topologies(topologies).graph)
    grown = SubsplitBayesianNetwork(graph)
    choices = grown.choices(topologies)
    added = choices.counts(choices.equal_rootings(), shares)
    place = options_in(graph, old)
    counts = np.zeros(graph.num_options)
    # Of the old network: what its trees use, in the mass that the new topologies leave.
    counts[place] = network.option_probabilities() * (1 - min(float(shares.sum()), 0.5))
    held = graph.sum_groups(counts)[graph.group_of]
    is_old = np.zeros(graph.num_options, dtype=bool)
    is_old[place] = True
    logits = np.full(graph.num_options, _RAREST)
    logits[place] = np.maximum(network.log_probabilities, _RAREST)
    in_old_group = np.bincount(graph.group_of[place], minlength=graph.num_groups).astype(bool)[graph.group_of]
    with np.errstate(divide="ignore"):
        implied = np.log(added) - np.where(in_old_group, np.log(np.maximum(held, np.exp(_RAREST))), 0.0)
    logits[~is_old] = np.clip(implied[~is_old], _RAREST, 0.0)
    return SubsplitBayesianNetwork(graph, torch.from_numpy(logits))


#: Least log probability, relative to its group, of an option at its start.
_RAREST = -12.0
