"""Whether a network's layers fit together, and have the limit that their kernels assume."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bayeskit.errors import ModelError, ShapeError
from bayeskit.models.wide_networks.graph import INPUT, Graph, Node, axes_before
from bayeskit.models.wide_networks.layers.combine import Concatenate, Sum
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.grid import Flatten, GlobalAverage
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity
from bayeskit.models.wide_networks.layers.normalization import Dropout, LayerNormalization


@dataclass(frozen=True)
class Features:
    """What the layers before have made of some features.

    Attributes
    ----------
    normal : bool
        Whether they are jointly normal, given the input.
    alike : bool
        Whether all channels have one law.
    terms : frozenset of str or None
        The layers with weights in which they are linear, one a term; None for a term that is linear in none.
    ancestors : frozenset of str
        All layers with weights on which they depend.
    channels, num_axes : int or None
        How many channels there are, and axes of the grid on which they lie, where layers before tell.
    """

    normal: bool
    alike: bool
    terms: frozenset[str | None]
    ancestors: frozenset[str]
    channels: int | None = None
    num_axes: int | None = None


def check_limit(graph: Graph) -> Features:
    """Refuse networks whose layers do not fit together, or whose limit is not the one that kernels assume.

    Returns
    -------
    Features
        Of the output.

    Raises
    ------
    ShapeError, ModelError
        Naming the layer.
    """
    start = Features(normal=False, alike=True, terms=frozenset({None}), ancestors=frozenset(), num_axes=graph.num_axes)
    found = {INPUT: start}
    for node in graph.nodes:
        inputs = [found[name] for name in node.inputs]
        channels, num_axes = _shape(node, inputs)
        found[node.name] = replace(_features(node, inputs), channels=channels, num_axes=num_axes)
    return found[graph.nodes[-1].name]


def _shape(node: Node, inputs: list[Features]) -> tuple[int | None, int | None]:
    """Return the number of channels and of axes that a layer makes, if it can take its inputs."""
    layer, first = node.layer, inputs[0]
    channels, wanted = first.channels, axes_before(layer)
    match layer:
        case Dense():
            _check_channels(node, layer.fan_in, first)
            channels = layer.channels
        case Convolution():
            _check_channels(node, layer.dense.fan_in // math.prod(layer.window), first)
            channels = layer.dense.channels
        case LayerNormalization():
            _check_channels(node, layer.shape[0], first)
            channels = layer.shape[0]
        case Flatten():
            return channels if first.num_axes == 0 else None, 0
        case Sum() | Concatenate():
            return _joined_shape(node, inputs)
    if wanted is None:
        return channels, first.num_axes
    if first.num_axes is not None and first.num_axes != wanted:
        raise ShapeError(
            f"layer {node.name!r}{node.place} needs {_grid(wanted)} and receives {_grid(first.num_axes)} from "
            f"{_called(node.inputs[0])}" + ("; put Flatten or an average over the grid before it" if not wanted else "")
        )
    return channels, 0 if isinstance(layer, GlobalAverage) and not layer.keeps_grid else wanted


def _joined_shape(node: Node, inputs: list[Features]) -> tuple[int | None, int | None]:
    axes = {x.num_axes for x in inputs if x.num_axes is not None}
    if len(axes) > 1:
        raise ShapeError(f"layer {node.name!r}{node.place} joins {' and '.join(_grid(x) for x in sorted(axes))}")
    channels = [x.channels for x in inputs if x.channels is not None]
    if isinstance(node.layer, Sum):
        if len(set(channels)) > 1:
            raise ShapeError(
                f"layer {node.name!r}{node.place} adds features of different numbers of channels: {channels}"
            )
        total = channels[0] if channels else None
    else:
        total = sum(channels) if len(channels) == len(inputs) else None
    return total, axes.pop() if axes else None


def _check_channels(node: Node, wanted: int, features: Features) -> None:
    if features.channels is not None and features.channels != wanted:
        raise ShapeError(
            f"layer {node.name!r} expects {wanted} channels and receives {features.channels} from "
            f"{_called(node.inputs[0])}"
        )


def _called(name: str) -> str:
    return "the input" if name == INPUT else repr(name)


def _grid(num_axes: int) -> str:
    return {0: "vectors", 1: "features along a line", 2: "images"}[num_axes]


def _features(node: Node, inputs: list[Features]) -> Features:
    ancestors = frozenset[str]().union(*(x.ancestors for x in inputs))
    first = inputs[0]
    if isinstance(node.layer, Dense | Convolution):
        return Features(True, True, frozenset({node.name}), ancestors | {node.name})
    if isinstance(node.layer, Nonlinearity):
        _check_nonlinearity(node, first)
        return Features(False, True, frozenset({None}), ancestors)
    if isinstance(node.layer, Sum | Concatenate):
        if isinstance(node.layer, Sum):
            _check_sum(node, inputs)
        joined = isinstance(node.layer, Concatenate)
        return Features(
            all(x.normal for x in inputs),
            not joined and all(x.alike for x in inputs),
            frozenset[str | None]().union(*(x.terms for x in inputs)),
            ancestors,
        )
    normal = first.normal and not isinstance(node.layer, Dropout)
    alike = first.alike and not isinstance(node.layer, Flatten)
    return Features(normal, alike, first.terms, ancestors)


def _check_nonlinearity(node: Node, features: Features) -> None:
    if not features.normal:
        raise ModelError(
            f"layer {node.name!r}{node.place} is a nonlinearity of features that are not normal in the limit; put a "
            "layer with weights before it, or apply it to the data; behind a residual sum, x + f(x), put one on the "
            "shortcut, too, or let the block begin with its nonlinearity, x + Conv2d(relu(x))"
        )
    if not features.alike:
        raise ModelError(
            f"layer {node.name!r}{node.place} is a nonlinearity of channels with different laws; apply it before they "
            "are joined or flattened"
        )


def _check_sum(node: Node, inputs: list[Features]) -> None:
    """Refuse sums of features that are correlated."""
    for i, one in enumerate(inputs):
        for other in inputs[:i]:
            # A term drops out of a product if it is linear in weights that the other does not know.
            free = all(
                (x is not None and x not in other.ancestors) or (y is not None and y not in one.ancestors)
                for x in one.terms
                for y in other.terms
            )
            if not free:
                raise ModelError(
                    f"layer {node.name!r}{node.place} adds features that are correlated, such as h + f(h); put a "
                    "layer with weights at the end of one branch, h + Linear(f(h))"
                )
