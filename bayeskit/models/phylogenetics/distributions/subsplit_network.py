"""Subsplit Bayesian networks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints

from bayeskit._torch import new_generator
from bayeskit.errors import AccuracyWarning, SettingsError
from bayeskit.models.phylogenetics.distributions import graph_passes
from bayeskit.models.phylogenetics.distributions.building import graph_of_hanging, graph_of_rootings
from bayeskit.models.phylogenetics.distributions.choices import every_root, one_root
from bayeskit.models.phylogenetics.distributions.fitting import expectation_maximization, prior_counts, simple_average
from bayeskit.models.phylogenetics.distributions.graph_distribution import GraphDistribution
from bayeskit.models.phylogenetics.distributions.rows import Floats
from bayeskit.models.phylogenetics.distributions.subsplit_graph import SubsplitGraph
from bayeskit.models.phylogenetics.distributions.weighted import WeightedTopologies, check_topologies, weighted
from bayeskit.models.phylogenetics.trees.topologies import Topologies

#: Draws among which the most probable unrooted topology is looked for.
_CANDIDATES = 4096


class SubsplitBayesianNetwork(GraphDistribution):
    r"""Topologies built from the root down, where the split of a clade depends on the clade and its sister.

    A rooted topology has the probability of its root split times those of the splits of all other clades,

    .. math:: p(\tau) = p(S_1) \prod_{C} p(C \to A, B \mid C, \mathrm{sister}(C)),

    which are shared by all topologies and all places in them. An unrooted topology is the sum over the `2n - 3` places
    that its root can take; it costs two passes over its nodes. Topologies that the graph cannot make have probability
    zero; `why_not` says why, and `Smoothed` gives them a small one.

    Use `fit` or `from_topologies` to make one.

    **Training by gradient.** `log_prob` is differentiable once by `logits`. Make a network for each step, or keep one:
    it notices when its logits have changed, by whatever means.

    Parameters
    ----------
    graph : SubsplitGraph
        The root splits and parent-child subsplit pairs of the support.
    logits : Tensor, optional
        Log probabilities of the options up to a constant for each group, `(options,)`, any real numbers; zeros by
        default, so that the options of a group are equally probable.

    Attributes
    ----------
    log_likelihoods : ndarray or None
        After `fit`: mean log likelihood per tree before the first iteration and after each, in nats.

    References
    ----------
    Zhang, C., Matsen, F. A. (2018). Generalizing tree probability estimation via Bayesian networks. NeurIPS 31.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
    >>> from bayeskit.models.phylogenetics.distributions import SampleFrequencies
    >>> trees = all_topologies("ABCD")
    >>> network = SubsplitBayesianNetwork.fit(SampleFrequencies.from_topologies(trees[[0, 0, 0, 1]]))
    >>> [round(p, 3) for p in network.log_prob(trees).exp().tolist()]
    [0.75, 0.25, 0.0]
    >>> network.why_not(trees[2])
    'no tree of the support has the clade {C, D}'
    >>> len(network.sample(10, seed=0)), network.sample(torch.Size([5])).shape
    (10, torch.Size([5, 2, 2]))
    """

    arg_constraints = {"logits": constraints.real_vector}
    log_likelihoods: Floats | None = None

    def __init__(self, graph: SubsplitGraph, logits: Tensor | None = None) -> None:
        super().__init__(graph, torch.zeros(graph.num_options, dtype=torch.float64) if logits is None else logits)

    @classmethod
    def from_topologies(cls, topologies: Topologies) -> Self:
        """Make the network whose support is just large enough for given topologies, all options of a group alike.

        Parameters
        ----------
        topologies : Topologies
            Such as those of a sample, or `all_topologies(taxa)` for full support.

        Returns
        -------
        SubsplitBayesianNetwork
            The network.

        Raises
        ------
        TreeError
            If there is no topology, or something else is given.
        """
        check_topologies(topologies)
        if topologies.rooted:
            return cls(graph_of_hanging(topologies, with_sisters=True))
        return cls(graph_of_rootings(topologies))

    @classmethod
    def fit(
        cls,
        sample: WeightedTopologies | Topologies,
        method: Literal["em", "simple_average"] = "em",
        *,
        alpha: float = 0.0,
        max_iterations: int = 2000,
        tolerance: float = 3e-6,
    ) -> Self:
        """Estimate the network from sampled topologies, whose options make its support.

        Parameters
        ----------
        sample : TreeSample
            Topologies and weights, or `Topologies` that count the same each.
        method : {"em", "simple_average"}, default "em"
            For unrooted topologies: maximum likelihood by expectation maximisation, or all places of the root as
            equally probable. For rooted ones both are the maximum of the likelihood, in closed form.
        alpha : float, default 0.0
            Strength of the Dirichlet prior of "em": the size of a pseudo-sample, in units of the sample, that is like
            the simple average at the root, and elsewhere spreads evenly over the splits of each parent subsplit.
        max_iterations : int, default 2000
            When to stop in any case.
        tolerance : float, default 3e-6
            Gain in log likelihood (plus log prior) by a cycle of plain and stretched steps of EM, in nats a tree, below
            which to stop. It bounds this gain, not the distance to the maximum, which can be hundreds of times as far:
            lower it where the last of the likelihood matters.

        Returns
        -------
        SubsplitBayesianNetwork
            The network.

        Raises
        ------
        SettingsError
            If a setting lies outside its domain, or `alpha` comes with "simple_average".

        Warns
        -----
        AccuracyWarning
            If cycles still gain more than the tolerance after `max_iterations`.
        """
        _check_settings(method, alpha, max_iterations, tolerance)
        topologies, weights = weighted(sample)
        graph = cls.from_topologies(topologies).graph
        choices = every_root(graph, topologies) if graph.of_rootings else one_root(graph, topologies)
        if method == "simple_average":
            result = simple_average(graph, choices, weights)
        else:
            prior = prior_counts(graph, choices, weights, alpha)
            result = expectation_maximization(graph, choices, weights, prior, max_iterations, tolerance)
        network = cls(graph, torch.from_numpy(result.log_probabilities))
        network.log_likelihoods = result.log_likelihoods
        return network

    def most_probable_tree(self, seed: int | torch.Generator = 0) -> Topologies:
        """Return the most probable topology as `Topologies` of length one; `.tree(0)` makes an unrooted `Tree`.

        Exact for rooted topologies. An unrooted topology is a sum over its rootings, and the best is looked for among
        4,096 draws and the topology with the best rooting.

        Parameters
        ----------
        seed : int or torch.Generator, default 0
            Source of randomness, not needed for rooted topologies.

        Returns
        -------
        Topologies
            The topology.

        Warns
        -----
        AccuracyWarning
            If it is so improbable that the draws may well have missed a better one.
        """
        best, _ = graph_passes.most_probable(self.graph, self.log_probabilities)
        if not self.graph.of_rootings:
            return best
        drawn = self.sample(_CANDIDATES, seed=new_generator(seed, stream="most probable tree"))
        together = Topologies(self.taxa, np.concatenate([best.children, drawn.children]), self.rooted)
        candidates, _ = together.distinct()
        with torch.no_grad():
            log_prob = self.log_prob(candidates)
        top = int(log_prob.argmax())
        probability = math.exp(float(log_prob[top]))
        # A better tree would have been missed by all draws with at most this chance.
        missed = (1 - min(probability, 1.0)) ** _CANDIDATES
        if missed > 1e-6:
            warnings.warn(
                f"The best topology found has probability {probability:.1e}; {_CANDIDATES} draws miss one that is as "
                f"probable with chance {missed:.1e}, so there may be a better one. Remedy: take it as one of many.",
                AccuracyWarning,
                stacklevel=2,
            )
        return candidates[top]

    def _tensors(self) -> dict[str, Tensor]:
        history = {} if self.log_likelihoods is None else {"log_likelihoods": torch.from_numpy(self.log_likelihoods)}
        return {**super()._tensors(), **history}

    @classmethod
    def _restore(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        network = super()._restore(tensors, facts)
        if "log_likelihoods" in tensors:
            network.log_likelihoods = tensors["log_likelihoods"].numpy()
        return network


def _check_settings(method: str, alpha: float, max_iterations: int, tolerance: float) -> None:
    if method not in ("em", "simple_average"):
        raise SettingsError(f"method: {method!r} is none. Remedy: give 'em' or 'simple_average'.")
    if not 0.0 <= alpha < math.inf:
        raise SettingsError(f"alpha: {alpha} is negative or not finite. Remedy: give a small number such as 1e-4.")
    if alpha and method == "simple_average":
        raise SettingsError("alpha: the simple average has no prior. Remedy: use method='em', or leave alpha out.")
    if max_iterations < 1 or not tolerance >= 0:
        raise SettingsError(
            f"max_iterations={max_iterations}, tolerance={tolerance}: out of their domain. Remedy: give at least one "
            "iteration and a tolerance that is not negative."
        )
