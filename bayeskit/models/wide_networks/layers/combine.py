"""Layers that add, join or scale what others have made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bayeskit.errors import ModelError, ShapeError
from bayeskit.models.wide_networks.covariance import Covariance
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
        states = [state for _, state in inputs]
        _check_gains(name, states)
        layouts = {(state.channels, state.num_axes, tuple(state.sites)) for state in states}
        if len(layouts) > 1:
            raise ShapeError(f"layer {name!r} adds features of different shapes: {sorted(layouts)}")
        squares = [scale * scale for scale in self.scale]
        return replace(
            states[0],
            nngp=_combined([state.nngp for state in states], squares),
            ntk=_combined_tangents([state.ntk for state in states], squares),
            mean=_combined_tangents([state.mean for state in states], self.scale),
            gap=None if len(states) > 1 or states[0].gap is None else squares[0] ** 2 * states[0].gap,
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
        states = [state for _, state in inputs]
        _check_gains(name, states)
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
            gap=None,
        )


def _check_gains(name: str, states: Sequence[Covariance]) -> None:
    if len(states) > 1 and any(state.gain and state.ntk is not None for state in states):
        raise ModelError(
            f"layer {name!r} combines the output of a LayerNorm with trainable gains, whose tangent kernel has no "
            "limit here; give that LayerNorm elementwise_affine=False, or a layer with weights behind it"
        )


def _combined(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = weights[0] * tensors[0]
    for weight, x in zip(weights[1:], tensors[1:], strict=True):
        total = total + weight * x
    return total


def _combined_tangents(tensors: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    found = [(x, weight) for x, weight in zip(tensors, weights, strict=True) if x is not None]
    return _combined([x for x, _ in found], [weight for _, weight in found]) if found else None
