"""The variational family: a network of topologies, branch lengths, and parameters, described by one vector."""

from __future__ import annotations

from typing import NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, Topologies
from bayeskit.models.phylogenetics.workflows._parameter_guide import ParameterGuide
from bayeskit.models.phylogenetics.workflows._topology_comparison import defended_draws, defended_log_prob
from bayeskit.models.phylogenetics.workflows._variational._length_families import LengthFamily
from bayeskit.models.phylogenetics.workflows._variational._topology_features import Places


class DrawnTrees(NamedTuple):
    """Trees drawn from an approximation."""

    topologies: Topologies
    lengths: Tensor  # (trees, edges)
    parameters: dict[str, Tensor]  # of substitution and site rates, one value for each tree, (trees, *event_shape)
    log_topology: Tensor  # log probability of each topology, (trees,)
    log_lengths: Tensor  # log density of its branch lengths, (trees,)
    log_parameters: Tensor  # log density of its parameters, (trees,)
    part: Tensor  # mixture component of each tree, zero without a mixture, (trees,)

    @property
    def log_guide(self) -> Tensor:
        """Log density of each tree, `(trees,)`."""
        return self.log_topology + self.log_lengths + self.log_parameters


class TreeFamily:
    """A network, branch lengths given the topology, and a normal distribution of parameters, described by one vector.

    The vector holds the logits of the network, the parameters of branch lengths and those of the normal distribution.
    """

    def __init__(
        self, network: SubsplitBayesianNetwork, lengths: LengthFamily, guide: ParameterGuide | None = None
    ) -> None:
        self.network, self.lengths = network, lengths
        self.guide = ParameterGuide({}) if guide is None else guide
        self.places = Places(network, lengths.with_pairs)
        self.num_logits = network.graph.num_options

    def start(self, generator: torch.Generator) -> Tensor:
        """Return the first parameters, a vector."""
        logits = self.network.logits.detach().to("cpu", torch.float64)
        normal = torch.zeros(self.guide.num_parameters, dtype=torch.float64)
        return torch.cat([logits, self.lengths.start(self.places.num_features, generator), normal])

    def topologies(self, parameters: Tensor) -> SubsplitBayesianNetwork:
        """Return the distribution of topologies."""
        return SubsplitBayesianNetwork(self.network.graph, parameters[: self.num_logits])

    def medians(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the medians of the parameters of substitution and site rates."""
        return self.guide.medians(self._parts(parameters)[1])

    def _parts(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameters of branch lengths and of the normal distribution."""
        end = len(parameters) - self.guide.num_parameters
        return parameters[self.num_logits : end], parameters[end:]

    def draw(
        self, parameters: Tensor, num_trees: int, generator: torch.Generator, *, reparameterized: bool = True
    ) -> DrawnTrees:
        """Draw trees, differentiable by the parameters, or, if not `reparameterized`, with a differentiable density."""
        network, (of_lengths, of_normal) = self.topologies(parameters), self._parts(parameters)
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        log_topology = network.log_prob_of_choices(choices)
        with torch.set_grad_enabled(torch.is_grad_enabled() and reparameterized):
            lengths = self.lengths.rsample(of_lengths, features, generator)
            drawn = self.guide.rsample(of_normal, num_trees, generator)
        if not reparameterized:
            lengths = lengths._replace(log_prob=self.lengths.log_prob(of_lengths, features, lengths.value))
            drawn = drawn._replace(log_prob=self.guide.log_prob(of_normal, drawn.values))
        part = torch.zeros(num_trees, dtype=torch.int64, device=log_topology.device)
        return DrawnTrees(
            topologies=topologies,
            lengths=lengths.value,
            parameters=drawn.values,
            log_topology=log_topology,
            log_lengths=lengths.log_prob,
            log_parameters=drawn.log_prob,
            part=part,
        )

    def draw_defensive(
        self, prior: dist.TorchDistribution, parameters: Tensor, num_trees: int, generator: torch.Generator
    ) -> DrawnTrees:
        """Draw trees for importance sampling, lengths and parameters defended by priors and heavy tails."""
        network, (of_lengths, of_normal) = self.topologies(parameters), self._parts(parameters)
        topologies = network.sample(num_trees, seed=generator)
        choices, features = self.places.look_up(topologies)
        lengths, part = defended_draws(self.lengths.rsample(of_lengths, features, generator).value, prior, generator)
        # Edges are independent, so the density of one edge is that of a tree with one edge.
        alone = self.lengths.log_prob(of_lengths, features.flatten(0, 1)[:, None], lengths.flatten()[:, None])
        log_lengths = defended_log_prob(alone.reshape(lengths.shape), lengths, prior)
        values, log_values = self.guide.draw_defensive(of_normal, num_trees, generator)
        return DrawnTrees(
            topologies=topologies,
            lengths=lengths,
            parameters=values,
            log_topology=network.log_prob_of_choices(choices),
            log_lengths=log_lengths,
            log_parameters=log_values,
            part=part,
        )
