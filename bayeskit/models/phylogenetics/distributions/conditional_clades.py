"""Conditional clade distributions."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
import torch

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics.distributions import graph_passes
from bayeskit.models.phylogenetics.distributions.building import graph_of_all_splits, graph_of_hanging
from bayeskit.models.phylogenetics.distributions.choices import hanging_sets, one_root
from bayeskit.models.phylogenetics.distributions.graph_distribution import GraphDistribution
from bayeskit.models.phylogenetics.distributions.rows import Floats, add_up
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.distributions.weighted import WeightedTopologies, weighted
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.topologies import Topologies

Order = Literal[0, 1, 2]


class ConditionalCladeDistribution(GraphDistribution):
    r"""Topologies built by splitting clades independently of each other, from the root down.

    The order says what the parameters are:

    - 1, the conditional clade distribution of Hoehna and Drummond (2012) and Larget (2013):
      :math:`p(\tau) = \prod_{C} f(C \to A, B) / f(C)`, with the sample's frequencies `f` of the splits
      :math:`C \to A, B` and of their clades;
    - 0: :math:`p(\tau) \propto \prod_{C} f(C)`, over all trees that can be made from the clades of the sample, also
      from clades that were never met as sisters (Berling et al., 2025);
    - 2: a split depends on the sister of the clade that it splits too. For rooted topologies this is the subsplit
      Bayesian network with its closed-form fit.

    **Unrooted topologies** are taken as rooted at their first taxon; the distribution depends on which taxon is first.

    Use `fit` to make one.

    References
    ----------
    Hoehna, S., Drummond, A. J. (2012). Guided tree topology proposals for Bayesian phylogenetic inference. Systematic
    Biology 61, 1-11.

    Larget, B. (2013). The estimation of tree posterior probabilities using conditional clade probability
    distributions. Systematic Biology 62, 501-511.

    Berling, L., Klawitter, J., Bouckaert, R., Xie, D., Gavryushkin, A., Drummond, A. J. (2025). Accurate Bayesian
    phylogenetic point estimation using a tree distribution parameterized by clade probabilities. PLOS Computational
    Biology 21.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> from bayeskit.models.phylogenetics.distributions import SampleFrequencies
    >>> trees = all_topologies("ABCDE")
    >>> sample = SampleFrequencies.from_topologies(trees[[0, 0, 0, 7]])
    >>> clades = ConditionalCladeDistribution.fit(sample)
    >>> clades.log_prob(trees[[0, 7]]).exp()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    @classmethod
    def fit(cls, sample: WeightedTopologies | Topologies, order: Order = 1) -> Self:
        """Estimate the distribution in closed form.

        Parameters
        ----------
        sample : TreeSample
            Topologies and weights, or `Topologies` that count the same each.
        order : {0, 1, 2}, default 1
            What the parameters are; see the class.

        Returns
        -------
        ConditionalCladeDistribution
            The distribution.

        Raises
        ------
        SettingsError
            If there is no such order.
        """
        if order not in (0, 1, 2):
            raise SettingsError(f"order: {order!r} is none. Remedy: give 0, 1 or 2.")
        topologies, weights = weighted(sample)
        if order == 0:
            graph = graph_of_all_splits(topologies)
            log_probabilities = _by_clades(graph, topologies, weights)
        else:
            graph = graph_of_hanging(topologies, with_sisters=order == 2)
            choices = one_root(graph, topologies)
            log_probabilities = graph.shares(choices.counts(np.zeros(len(weights)), weights))
        return cls(graph, torch.from_numpy(log_probabilities))


def _by_clades(graph: SubsplitGraph, topologies: Topologies, weights: Floats) -> Floats:
    """Return the log probabilities of options when trees are as probable as the product of their clades' shares."""
    met = graph.find_clade(hanging_sets(topologies)[:, topologies.num_taxa :])
    each = np.broadcast_to(weights[:, None], met.shape)
    frequencies = add_up(met, each, len(graph.clades))
    frequencies[clades.size(graph.clades) == 1] = 1.0
    return graph_passes.log_sums(graph, np.log(frequencies[graph.parts]).sum(axis=1))[1]
