"""The support of a variational family: topologies that are given, or found by a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from bayeskit.extend import Control, one_thread, progress_bar
from bayeskit.models.phylogenetics import Alignment, Partition, SubsplitBayesianNetwork, Topologies, Tree, TreeSample
from bayeskit.models.phylogenetics._trees import check_same_taxa
from bayeskit.models.phylogenetics.workflows._growing_support import ScoredTrees, SupportGrowth, starting_topologies
from bayeskit.models.phylogenetics.workflows._topology_comparison import unrooted_topologies

#: Number of resampled alignments whose trees a search starts from.
_BOOTSTRAPS = 20


#: Topologies, or the network that they make.
Support = TreeSample | Topologies | Sequence[Tree] | SubsplitBayesianNetwork


@runtime_checkable
class SupportSearch(Protocol):
    """Result of a search for topologies."""

    @property
    def sample(self) -> TreeSample:
        """Topologies, such as those of a Markov chain."""


def expand_support(trees: ScoredTrees, growth: SupportGrowth, progress: bool) -> None:
    """Score neighbours of the probable topologies until the settings of growth are met."""
    with torch.no_grad(), one_thread(), progress_bar("searching topologies", None, progress) as bar:
        trees.expand(growth.mass, growth.max_expanded, bar.update)


def searched_network(
    trees: ScoredTrees, alignment: Alignment | Partition, growth: SupportGrowth, seed: int, control: Control
) -> SubsplitBayesianNetwork:
    """Return the network of topologies that a search from trees of neighbour joining finds probable."""
    trees.add(starting_topologies(alignment, _BOOTSTRAPS, seed))
    expand_support(trees, growth, control.progress)
    probable = trees.probable(growth.mass)
    sample = TreeSample.from_topologies(trees.topologies[probable], trees.shares[probable])
    return SubsplitBayesianNetwork.fit(sample, "simple_average")


def network_of_support(
    support: Support | SupportSearch | Callable[[Any], Support | SupportSearch], alignment: Alignment | Partition
) -> SubsplitBayesianNetwork:
    """Return the network of a support."""
    if callable(support) and not isinstance(support, SubsplitBayesianNetwork):  # Pyro's distributions are callable
        support = support(alignment)
    if isinstance(support, SubsplitBayesianNetwork):
        check_same_taxa(alignment.taxa, support.taxa, "the alignment", "the support")
        return support
    if isinstance(support, SupportSearch) and isinstance(support.sample, TreeSample):
        support = support.sample
    return SubsplitBayesianNetwork.from_topologies(unrooted_topologies(support, alignment))  # type: ignore[arg-type]
