"""Removal of units without effect from a chain of layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeskit.errors import ModelError
from bayeskit.models.sparse_networks._layers import CONVOLUTIONS, plain, recipe_of

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardtanh),
    *(nn.Hardsigmoid, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Softshrink),
    *(nn.Hardshrink, nn.Threshold, nn.Identity, nn.Dropout),
)
# Layers that treat channels one by one.
_BY_CHANNEL = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.AdaptiveMaxPool3d, nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d),
    *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)


class SelectedFeatures(nn.Module):
    """Layer that passes on some of the features: ``(..., d)`` to ``(..., k)``.

    Parameters
    ----------
    index : Tensor
        Numbers of the features, ``(k,)``.

    Examples
    --------
    >>> import torch
    >>> SelectedFeatures(torch.tensor([2, 0]))(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[3., 1.]])
    """

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        """Return the selected features."""
        return x.index_select(-1, self.index)

    def extra_repr(self) -> str:
        """Return the number of features."""
        return f"{len(self.index)} features"


@dataclass
class _Weights:
    """Weight ``(out, in, *kernel)`` and bias of a layer, and its place in the chain."""

    place: int
    layer: Any
    weight: Tensor
    bias: Tensor | None

    @property
    def is_linear(self) -> bool:
        return self.weight.dim() == 2

    def read_by(self, units: int) -> Tensor:
        """Return which of ``units`` units before this layer have a weight other than zero, ``(units,)``."""
        used: Tensor = (self._inputs(units) != 0).flatten(1).any(1)
        return used

    def keep_inputs(self, kept: Tensor) -> None:
        """Leave out the inputs of units that are not kept."""
        inputs = self._inputs(len(kept))[kept]
        self.weight = inputs.flatten(0, 1).movedim(0, 1)

    def _inputs(self, units: int) -> Tensor:
        """Return the weights by unit, ``(units, inputs of a unit, out, *kernel)``."""
        return self.weight.movedim(1, 0).unflatten(0, (units, -1))

    def keep_outputs(self, kept: Tensor) -> None:
        """Leave out units of this layer."""
        self.weight = self.weight[kept]
        self.bias = None if self.bias is None else self.bias[kept]


@torch.no_grad()
def compress(module: nn.Module) -> nn.Sequential:
    """Return a smaller chain with the same outputs; ModelError for a module that is no chain."""
    chain = [copy.deepcopy(part) for part in _chain(module)]
    layers = [
        _Weights(i, part, *_parameters(part))
        for i, part in enumerate(chain)
        if type(part) in (nn.Linear, *CONVOLUTIONS) and getattr(part, "groups", 1) == 1
    ]
    pairs = list(zip(layers, layers[1:], strict=False))
    for before, after in pairs:
        _fold_constants(before, after, chain[before.place + 1 : after.place])
    for before, after in reversed(pairs):
        if _is_by_unit(chain[before.place + 1 : after.place], before, after):
            kept = after.read_by(len(before.weight))
            kept[0] |= not bool(kept.any())  # a layer needs a unit
            before.keep_outputs(kept)
            after.keep_inputs(kept)
    result: list[nn.Module] = []
    found = {layer.place: layer for layer in layers}
    for place, part in enumerate(chain):
        if place not in found:
            result.append(part)
            continue
        layer = found[place]
        if layer is layers[0] and layer.is_linear:
            kept = layer.read_by(layer.weight.shape[1])
            kept[0] |= not bool(kept.any())
            if not bool(kept.all()):
                layer.keep_inputs(kept)
                result.append(SelectedFeatures(kept.nonzero()[:, 0]))
        result.append(plain(recipe_of(part), layer.weight, layer.bias))
    return nn.Sequential(*result)


def _parameters(layer: Any) -> tuple[Tensor, Tensor | None]:
    return layer.weight, layer.bias


def _chain(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a chain in the order in which they act."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from _chain(part)
    elif next(module.children(), None) is None:
        yield module
    else:
        raise ModelError(
            f"{type(module).__name__} is not a Sequential, so that it is unknown what follows what; write the network "
            "as a Sequential, or take pruned(), which keeps the architecture"
        )


def _fold_constants(before: _Weights, after: _Weights, between: list[nn.Module]) -> None:
    """Move units whose weights are all zero into the bias of the next layer."""
    if not (before.is_linear and after.is_linear and all(isinstance(part, _ELEMENTWISE) for part in between)):
        return
    constant = ~(before.weight != 0).any(1) & (after.weight != 0).any(0)
    if not bool(constant.any()):
        return
    values = torch.zeros_like(before.weight[:, 0]) if before.bias is None else before.bias
    for part in between:
        values = part(values) if not isinstance(part, nn.Dropout) else values
    values = torch.where(constant, values, 0.0)
    shift = after.weight @ values
    after.bias = shift if after.bias is None else after.bias + shift
    after.weight = torch.where(constant, 0.0, after.weight)


def _is_by_unit(between: list[nn.Module], before: _Weights, after: _Weights) -> bool:
    """Tell whether what is between two layers maps each unit to inputs of its own."""
    flattened = [part for part in between if isinstance(part, nn.Flatten)]
    plain = all(isinstance(part, (*_ELEMENTWISE, *_BY_CHANNEL, nn.Flatten)) for part in between)
    if before.is_linear:  # units are the last axis, along which pools and paddings act
        return after.is_linear and all(isinstance(part, _ELEMENTWISE) for part in between)
    if not after.is_linear:
        return plain and not flattened
    # Channels become blocks of features.
    return plain and len(flattened) == 1 and (flattened[0].start_dim, flattened[0].end_dim) == (1, -1)
