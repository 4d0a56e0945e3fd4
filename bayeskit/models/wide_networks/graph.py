"""A network as a list of layers, each of which knows which others feed it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.covariance import Covariance, Profile
from bayeskit.models.wide_networks.inputs import cross_covariance, own_covariance
from bayeskit.models.wide_networks.layers.layer import Layer, Pairs, Variances

INPUT = "input"


@dataclass(frozen=True)
class Node:
    """One layer.

    Attributes
    ----------
    name : str
        Its own, as in the torch module.
    layer : Layer
        What it does.
    inputs : tuple of str
        The nodes that feed it.
    """

    name: str
    layer: Layer
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A network: nodes in an order in which each comes after those that feed it; the last one is its output.

    Attributes
    ----------
    nodes : tuple of Node
        All layers.
    num_axes : int or None
        Of the grid on which inputs lie; None if the layers do not tell.
    """

    nodes: tuple[Node, ...]
    num_axes: int | None

    @property
    def all_pairs(self) -> frozenset[str]:
        """The nodes of which covariances between different sites are needed."""
        wanted: set[str] = set()
        for node in reversed(self.nodes):
            if node.layer.needs_all_pairs(node.name in wanted):
                wanted.update(node.inputs)
        return frozenset(wanted)

    def profile(self, x: Tensor, variances: Variances, ntk: bool) -> tuple[Profile, Covariance]:
        """Return what layers need to know of single inputs, and the covariance of each with itself."""
        state = own_covariance(x, INPUT in self.all_pairs, ntk)
        states = self._run(state, Pairs(None, None, outer=False), variances)
        return (
            Profile(
                {name: state.variance() for name, state in states.items()},
                {name: state.mean for name, state in states.items() if state.mean is not None},
            ),
            states[self.nodes[-1].name],
        )

    def cross(
        self, x1: Tensor, x2: Tensor, profiles: tuple[Profile, Profile], variances: Variances, ntk: bool
    ) -> Covariance:
        """Return the covariances of the network's output between all inputs of two sets."""
        own = profiles[0].variance[INPUT], profiles[1].variance[INPUT]
        state = cross_covariance(x1, x2, own, INPUT in self.all_pairs, ntk)
        return self._run(state, Pairs(*profiles, outer=True), variances)[self.nodes[-1].name]

    def _run(self, state: Covariance, pairs: Pairs, variances: Variances) -> dict[str, Covariance]:
        states = {INPUT: state}
        keep, all_pairs = pairs.first is None, self.all_pairs
        last = {name: i for i, node in enumerate(self.nodes) for name in node.inputs}
        for i, node in enumerate(self.nodes):
            wide = node.layer.needs_all_pairs(node.name in all_pairs)
            inputs = [(name, states[name] if wide else states[name].same_sites()) for name in node.inputs]
            states[node.name] = node.layer.propagate(node.name, inputs, pairs, variances)
            if not keep:
                for name in node.inputs:
                    if last[name] == i and name in states:
                        del states[name]
        output = states[self.nodes[-1].name]
        if output.num_axes:
            raise ShapeError(
                f"the network ends in features on a grid {tuple(output.sites)}; end it with Flatten or an average over "
                "the grid, and a dense layer"
            )
        return states
