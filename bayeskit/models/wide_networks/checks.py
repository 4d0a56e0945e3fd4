"""Whether a network's layers have the limit that their kernels assume."""

from __future__ import annotations

from dataclasses import dataclass

from bayeskit.errors import ModelError
from bayeskit.models.wide_networks.graph import INPUT, Graph, Node
from bayeskit.models.wide_networks.layers.combine import Concatenate, Sum
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.grid import Flatten
from bayeskit.models.wide_networks.layers.nonlinearity import Nonlinearity
from bayeskit.models.wide_networks.layers.normalization import Dropout


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
    """

    normal: bool
    alike: bool
    terms: frozenset[str | None]
    ancestors: frozenset[str]


def check_limit(graph: Graph) -> None:
    """Refuse networks whose limit is not the one that kernels assume.

    Raises
    ------
    ModelError
        Naming the layer.
    """
    found = {INPUT: Features(normal=False, alike=True, terms=frozenset({None}), ancestors=frozenset())}
    for node in graph.nodes:
        found[node.name] = _features(node, [found[name] for name in node.inputs])


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
            f"layer {node.name!r} is a nonlinearity of features that are not normal in the limit; put a layer with "
            "weights before it, or apply it to the data"
        )
    if not features.alike:
        raise ModelError(
            f"layer {node.name!r} is a nonlinearity of channels with different laws; apply it before they are joined "
            "or flattened"
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
                    f"layer {node.name!r} adds features that are correlated, such as h + f(h); put a layer with "
                    "weights at the end of one branch, h + Linear(f(h))"
                )
