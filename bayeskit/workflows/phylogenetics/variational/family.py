"""The approximation of a posterior of trees, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies
from bayeskit.models.phylogenetics.branch_length_priors import log_prior_of_lengths
from bayeskit.models.phylogenetics.distributions.uniform import log_num_topologies
from bayeskit.models.phylogenetics.forest.forest_likelihood import ForestLikelihood
from bayeskit.workflows.phylogenetics.defence import defended_draws, defended_log_prob
from bayeskit.workflows.phylogenetics.variational.lengths import LengthFamily, Lengths
from bayeskit.workflows.phylogenetics.variational.places import Places


@dataclass(frozen=True, eq=False)
class TreeTarget:
    """The joint density of data, branch lengths and topology, all topologies equally probable before the data.

    Parameters
    ----------
    likelihood : ForestLikelihood
    branch_length_prior : TorchDistribution
        Over one branch length or over the vector of all.
    """

    likelihood: ForestLikelihood
    branch_length_prior: dist.TorchDistribution

    def log_densities(self, topologies: Topologies, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood `(topologies,)` of trees with branch lengths `(topologies, edges)`."""
        log_prior = log_prior_of_lengths(self.branch_length_prior, lengths)
        log_likelihood = self.likelihood.log_likelihood(topologies, lengths)
        return log_prior - log_num_topologies(topologies.num_taxa), log_likelihood


class DrawnTrees(NamedTuple):
    """Trees drawn from an approximation.

    Attributes
    ----------
    topologies : Topologies
    lengths : Tensor
        Shape `(trees, edges)`.
    log_topology, log_lengths : Tensor
        Log probability of each topology, and log density of its branch lengths: `(trees,)`.
    part : Tensor
        Which part of a mixture each tree is from, `(trees,)`; zero where there is no mixture.
    """

    topologies: Topologies
    lengths: Tensor
    log_topology: Tensor
    log_lengths: Tensor
    part: Tensor


class TreeFamily:
    """A subsplit Bayesian network with branch lengths given the topology, all parameters in one vector.

    Parameters
    ----------
    network : SubsplitBayesianNetwork
        The support, and the logits at the start.
    lengths : LengthFamily
        The distributions of branch lengths.

    Attributes
    ----------
    num_logits : int
        How many of the parameters, the first ones, are logits of the network.
    """

    def __init__(self, network: SubsplitBayesianNetwork, lengths: LengthFamily) -> None:
        self.network, self.lengths = network, lengths
        self.places = Places(network, lengths.with_pairs)
        self.num_logits = network.graph.num_options

    def start(self, generator: torch.Generator) -> Tensor:
        """Return the first parameters, a vector."""
        logits = self.network.logits.detach().to("cpu", torch.float64)
        return torch.cat([logits, self.lengths.start(self.places.num_features, generator)])

    def topologies(self, parameters: Tensor) -> SubsplitBayesianNetwork:
        """Return the distribution of topologies."""
        return SubsplitBayesianNetwork(self.network.graph, parameters[: self.num_logits])

    def draw(
        self, parameters: Tensor, num_trees: int, generator: torch.Generator, *, reparameterized: bool = True
    ) -> DrawnTrees:
        """Draw trees.

        Parameters
        ----------
        parameters : Tensor
        num_trees : int
        generator : torch.Generator
        reparameterized : bool, default True
            Whether branch lengths are differentiable by the parameters. If not, their density is, as that of given
            numbers.

        Returns
        -------
        DrawnTrees
        """
        network = self.topologies(parameters)
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        log_topology = network.log_prob_of_choices(choices)
        if reparameterized:
            lengths = self.lengths.rsample(parameters[self.num_logits :], features, generator)
        else:
            with torch.no_grad():
                value = self.lengths.rsample(parameters[self.num_logits :], features, generator).value
            lengths = Lengths(value, self.lengths.log_prob(parameters[self.num_logits :], features, value))
        part = torch.zeros(num_trees, dtype=torch.int64, device=log_topology.device)
        return DrawnTrees(topologies, lengths.value, log_topology, lengths.log_prob, part)

    def draw_defended(
        self, prior: dist.TorchDistribution, parameters: Tensor, num_trees: int, generator: torch.Generator
    ) -> DrawnTrees:
        """Draw trees with a little of the prior and of a heavy tail in branch lengths, for importance sampling.

        Parameters
        ----------
        prior : TorchDistribution
            Of one branch length or of the vector of all.
        parameters : Tensor
        num_trees : int
        generator : torch.Generator

        Returns
        -------
        DrawnTrees
            Whose densities are those of the mixture.
        """
        network, of_lengths = self.topologies(parameters), parameters[self.num_logits :]
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        lengths, part = defended_draws(self.lengths.rsample(of_lengths, features, generator).value, prior, generator)
        # Edges are independent, so that the density of one is that of a tree with no other.
        alone = self.lengths.log_prob(of_lengths, features.flatten(0, 1)[:, None], lengths.flatten()[:, None])
        log_lengths = defended_log_prob(alone.reshape(lengths.shape), lengths, prior)
        return DrawnTrees(topologies, lengths, network.log_prob_of_choices(choices), log_lengths, part)


#: Log prior and log likelihood of trees, given topologies and branch lengths.
LogDensities = Callable[[Topologies, Tensor], tuple[Tensor, Tensor]]
