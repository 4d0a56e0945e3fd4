"""Layers that add, join or scale what others have made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.covariance import Covariance, Joint
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances


@dataclass(frozen=True)
class Sum:
    """A weighted sum of features that are uncorrelated, such as a residual connection.

    Attributes
    ----------
    scale : tuple of float
        Of each input.
    """

    scale: tuple[float, ...]

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each pair of sites goes by itself."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Add covariances."""
        states = [state if len(inputs) == 1 else state.settled() for _, state in inputs]
        layouts = {(state.channels, state.num_axes, tuple(state.sites)) for state in states}
        if len(layouts) > 1:
            raise ShapeError(f"layer {name!r} adds features of different shapes: {sorted(layouts)}")
        squares = [scale * scale for scale in self.scale]
        return replace(
            states[0],
            nngp=_combined([state.nngp for state in states], squares),
            ntk=_combined_tangents([state.ntk for state in states], squares),
            mean=_combined_tangents([state.mean for state in states], self.scale),
            gap=_gap(inputs, pairs, squares),
            mixed=any(state.mixed for state in states),
        )


@dataclass(frozen=True)
class Concatenate:
    """Channels of several layers side by side."""

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each pair of sites goes by itself."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Average covariances, each with its share of the channels."""
        states = [state.settled() for _, state in inputs]
        layouts = {(state.num_axes, tuple(state.sites)) for state in states}
        if len(layouts) > 1:
            raise ShapeError(f"layer {name!r} joins features on different grids: {sorted(layouts)}")
        channels = sum(state.channels for state in states)
        shares = [state.channels / channels for state in states]
        return replace(
            states[0],
            nngp=_combined([state.nngp for state in states], shares),
            ntk=_combined_tangents([state.ntk for state in states], shares),
            mean=_combined_tangents([state.mean for state in states], shares),
            channels=channels,
            gap=_gap(inputs, pairs, shares),
            mixed=any(state.mixed for state in states),
        )


def _gap(inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, weights: Sequence[float]) -> Tensor | None:
    """Return the gap of a weighted sum of covariances, if those of all are known."""
    total: Joint | None = None
    for (source, state), weight in zip(inputs, weights, strict=True):
        if state.gap is None:
            return None
        term = Joint(state.nngp, *pairs.variances(source, state), state.gap).scaled(weight)
        total = term if total is None else total.plus(term)
    return None if total is None else total.gap


def _combined(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = weights[0] * tensors[0]
    for weight, x in zip(weights[1:], tensors[1:], strict=True):
        total = total + weight * x
    return total


def _combined_tangents(tensors: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    found = [(x, weight) for x, weight in zip(tensors, weights, strict=True) if x is not None]
    return _combined([x for x, _ in found], [weight for _, weight in found]) if found else None
