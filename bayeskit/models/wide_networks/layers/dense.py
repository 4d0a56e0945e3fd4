"""Layers with random weights: dense ones, and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.covariance import Covariance, excess, root
from bayeskit.models.wide_networks.layers.layer import Pairs, Variances


@dataclass(frozen=True)
class Dense:
    """A dense layer.

    Attributes
    ----------
    fan_in, channels : int
        Numbers of inputs and outputs of the finite layer.
    bias : bool
        Whether it has one.
    standard : bool
        Whether gradients are those of the weights themselves (standard parametrisation) or of weights with unit
        variance (NTK parametrisation).
    trains_weight, trains_bias : bool
        Whether they take part in gradients.
    """

    fan_in: int
    channels: int
    bias: bool
    standard: bool
    trains_weight: bool = True
    trains_bias: bool = True

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Each site goes by itself."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Scale by the variance of the weights, and add that of the bias."""
        ((source, state),) = inputs
        if state.num_axes:
            raise ShapeError(
                f"layer {name!r}: a dense layer needs vectors, not features on a grid with {state.num_axes} axes; put "
                "Flatten or an average over the grid before it"
            )
        state = state.settled()
        if state.channels != self.fan_in:
            raise ShapeError(f"layer {name!r} expects {self.fan_in} features and receives {state.channels}")
        gap = None
        weight, bias = variances.weight[name], variances.bias[name] if self.bias else 0.0
        if state.gap is not None:
            gap = _gap(state, *pairs.variances(source, state), weight, bias)
        return self.weigh(state, state.nngp, state.ntk, weight, bias, gap)

    def weigh(
        self,
        state: Covariance,
        nngp: Tensor,
        ntk: Tensor | None,
        weight: Tensor | float,
        bias: Tensor | float,
        gap: Tensor | None,
    ) -> Covariance:
        """Return what random weights make of averages over all that enters an output."""
        result = weight * nngp
        tangent: Tensor | None = None
        if ntk is not None:
            if self.trains_weight:
                tangent = _plus(self.fan_in * nngp if self.standard else result, ntk, weight)
            else:
                tangent = weight * ntk
        if self.bias:
            result = result + bias
            if tangent is not None and self.trains_bias:
                tangent = tangent + (1.0 if self.standard else bias)
        return replace(state, nngp=result, ntk=tangent, channels=self.channels, gap=gap, mean=None, mixed=False)


def _gap(state: Covariance, a: Tensor, b: Tensor, weight: Tensor | float, bias: Tensor | float) -> Tensor:
    """Return the gap of covariances that are scaled and shifted."""
    assert state.gap is not None
    gap = weight * weight * state.gap
    if isinstance(bias, float) and bias == 0:
        return gap
    apart = torch.add((root(a) - root(b)).square(), excess(state.nngp, state.gap, a, b), alpha=2)
    return _plus(gap, apart, weight * bias)


def _plus(x: Tensor, y: Tensor, factor: Tensor | float) -> Tensor:
    """Return ``x + factor * y``, in one operation where that is possible."""
    return x + factor * y if isinstance(factor, Tensor) else torch.add(x, y, alpha=factor)


@dataclass(frozen=True)
class Convolution:
    """A convolution over one or two axes.

    Attributes
    ----------
    dense : Dense
        Whose inputs are all numbers beneath the window.
    window, stride, dilation : tuple of int
        An entry an axis.
    padding : tuple of tuple of int
        Sites added before and after, an entry an axis.
    mode : str
        How they are filled: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.
    """

    dense: Dense
    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    mode: str = "zeros"

    def needs_all_pairs(self, wanted: bool) -> bool:
        """Pass on what is wanted: the window moves over both inputs alike, and sites stay as far apart as they are."""
        return wanted

    def propagate(
        self, name: str, inputs: Sequence[tuple[str, Covariance]], pairs: Pairs, variances: Variances
    ) -> Covariance:
        """Average covariances over the window, scale and shift."""
        ((_, state),) = inputs
        state = state.settled()
        if state.num_axes != len(self.window):
            raise ShapeError(f"layer {name!r} moves over {len(self.window)} axes, and its input has {state.num_axes}")
        entering = state.channels * math.prod(self.window)
        if entering != self.dense.fan_in:
            raise ShapeError(
                f"layer {name!r} expects {self.dense.fan_in // math.prod(self.window)} channels and receives "
                f"{state.channels}"
            )
        nngp = self.average(state, state.nngp, name)
        ntk = None if state.ntk is None else self.average(state, state.ntk, name)
        bias = variances.bias[name] if self.dense.bias else 0.0
        return self.dense.weigh(state, nngp, ntk, variances.weight[name], bias, None)

    def average(self, state: Covariance, x: Tensor, name: str = "") -> Tensor:
        """Return averages over windows about each site, or about both of each pair of sites."""
        first = x.dim() - state.num_axes * (2 if state.all_pairs else 1)
        for axis in range(state.num_axes):
            axes = (first + axis, first + state.num_axes + axis) if state.all_pairs else (first + axis,)
            width = self.padding[axis]
            if self.mode != "zeros":
                most = x.shape[axes[0]] - (self.mode == "reflect")
                if self.mode != "replicate" and max(width) > most:
                    raise ShapeError(
                        f"layer {name!r} adds {max(width)} sites to {x.shape[axes[0]]}; {self.mode} padding can add "
                        f"{most} at most"
                    )
                for one in axes:
                    x = padded(x, one, width, self.mode)
                width = (0, 0)
            x = self._slide(x, axes, axis, width, name)
        return x.div_(math.prod(self.window))

    def _slide(self, x: Tensor, axes: tuple[int, ...], axis: int, width: tuple[int, int], name: str) -> Tensor:
        """Return sums over one axis of the window, which moves along one axis of each site of a pair."""
        window, stride, dilation = self.window[axis], self.stride[axis], self.dilation[axis]
        entering = x.shape[axes[0]]
        size = (entering + sum(width) - dilation * (window - 1) - 1) // stride + 1
        if size < 1:
            raise ShapeError(
                f"layer {name!r}: its window is larger than its input, {entering + sum(width)} with padding"
            )
        total = _zeros_like(x, [size if i in axes else length for i, length in enumerate(x.shape)])
        for step in range(window):
            # Zeros beside the input are not added: only sites whose window has this part inside of it gain.
            shift = step * dilation - width[0]
            first = max(-(shift // stride), 0)
            count = min((entering - 1 - shift) // stride + 1, size) - first
            if count < 1:
                continue
            part, gains = x, total
            for one in axes:
                part = part.narrow(one, first * stride + shift, (count - 1) * stride + 1)
                part = part if stride == 1 else part[(slice(None),) * one + (slice(None, None, stride),)]
                gains = gains.narrow(one, first, count)
            gains.add_(part)
        return total


def padded(x: Tensor, axis: int, width: tuple[int, int], mode: str) -> Tensor:
    """Return a tensor with copies of its sites added along one axis."""
    before, after = width
    if not (before or after):
        return x
    size = x.shape[axis]
    index = torch.arange(-before, size + after, device=x.device)
    if mode == "circular":
        index = index.remainder(size)
    elif mode == "replicate":
        index = index.clamp(0, size - 1)
    else:
        index = size - 1 - (size - 1 - index.abs()).abs()
    return x.index_select(axis, index)


def _zeros_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return zeros whose dimensions lie in memory in the order of another tensor's."""
    order = sorted(range(x.dim()), key=lambda i: -x.stride()[i])
    zeros = x.new_zeros([shape[i] for i in order])
    return zeros.permute(sorted(range(x.dim()), key=order.__getitem__))
