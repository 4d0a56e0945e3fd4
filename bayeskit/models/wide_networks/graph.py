"""A network as a list of layers, each of which knows which others feed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.covariance import Covariance, Profile
from bayeskit.models.wide_networks.inputs import cross_covariance, own_covariance
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.grid import AveragePool, Flatten, GlobalAverage
from bayeskit.models.wide_networks.layers.layer import Layer, Pairs, Variances
from bayeskit.models.wide_networks.layers.normalization import LayerNormalization

INPUT = ".input"  # no layer can be called so


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
    place : str
        Where it stands in the user's code, for messages.
    """

    name: str
    layer: Layer
    inputs: tuple[str, ...]
    place: str = field(default="", compare=False)


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
        return self.propagate(cross_covariance(x1, x2, own, INPUT in self.all_pairs, ntk), profiles, variances)

    def propagate(self, state: Covariance, profiles: tuple[Profile, Profile], variances: Variances) -> Covariance:
        """Return the covariances of the network's output, given those of all inputs of two sets."""
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


def axes_before(layer: Layer) -> int | None:
    """Return how many axes the grid has on which a layer's inputs lie, where the layer tells."""
    match layer:
        case Dense():
            return 0
        case Convolution() | AveragePool():
            return len(layer.window)
        case GlobalAverage():
            return layer.num_axes
        case LayerNormalization(any_sites=False):
            return len(layer.shape) - 1
    return None


def axes_behind(name: str, nodes: Mapping[str, Node], of_input: int | None) -> int | None:
    """Return how many axes the grid has on which a node's features lie, where it or those before it tell."""
    if name == INPUT:
        return of_input
    layer = nodes[name].layer
    if isinstance(layer, Flatten) or (isinstance(layer, GlobalAverage) and not layer.keeps_grid):
        return 0
    wanted = axes_before(layer)
    if wanted is not None:
        return wanted
    known = (axes_behind(source, nodes, of_input) for source in nodes[name].inputs)
    return next((axes for axes in known if axes is not None), None)
