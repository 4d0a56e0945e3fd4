"""Finite networks with random weights of the law whose limit the kernels are."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.models.wide_networks.graph import INPUT, Graph
from bayeskit.models.wide_networks.layers.combine import Concatenate
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.layer import Variances
from bayeskit.models.wide_networks.layers.normalization import LayerNormalization


class ScaledLinear(nn.Linear):
    """A dense layer whose weights have unit variance and are scaled as they are used."""

    weight_scale: float = 1.0
    bias_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``(..., out_features)``."""
        bias = None if self.bias is None else self.bias_scale * self.bias
        return nn.functional.linear(x, self.weight_scale * self.weight, bias)


class ScaledConv1d(nn.Conv1d):
    """A convolution whose weights have unit variance and are scaled as they are used."""

    weight_scale: float = 1.0
    bias_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``(n, channels, length)``."""
        bias = None if self.bias is None else self.bias_scale * self.bias
        return self._conv_forward(x, self.weight_scale * self.weight, bias)


class ScaledConv2d(nn.Conv2d):
    """A convolution whose weights have unit variance and are scaled as they are used."""

    weight_scale: float = 1.0
    bias_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``(n, channels, height, width)``."""
        bias = None if self.bias is None else self.bias_scale * self.bias
        return self._conv_forward(x, self.weight_scale * self.weight, bias)


@dataclass(frozen=True)
class Channels:
    """How many channels a layer has in the module, and in the network of another width."""

    before: int
    after: int


def finite_network(
    module: nn.Module,
    graph: Graph,
    variances: Variances,
    standard: bool,
    width: int | None,
    seed: int | torch.Generator,
) -> nn.Module:
    """Return a copy of a module with other widths and random weights."""
    width = None if width is None else whole_number("width", width, least=1)
    generator = new_generator(seed, stream="finite network")
    result = copy.deepcopy(module)
    last = _last_layers(graph)
    found: dict[str, Channels] = {}
    for node in graph.nodes:
        sources = [found[name] for name in node.inputs if name in found]
        layer = node.layer
        if isinstance(layer, Dense | Convolution):
            old = result.get_submodule(node.name)
            assert isinstance(old, nn.Linear | nn.Conv1d | nn.Conv2d)
            entering, leaving = _sizes(old)
            if sources:
                entering = entering * sources[0].after // sources[0].before
            if width is not None and node.name not in last:
                leaving = width
            new = _replaced(old, entering, leaving, standard)
            _draw(new, float(variances.weight[node.name]), float(variances.bias[node.name]), standard, generator)
            result.set_submodule(node.name, new)
            found[node.name] = Channels(_sizes(old)[1], leaving)
        elif isinstance(layer, LayerNormalization) and sources:
            result.set_submodule(node.name, _normalization(result.get_submodule(node.name), sources[0]))
            found[node.name] = sources[0]
        elif isinstance(layer, Concatenate):
            found[node.name] = Channels(sum(x.before for x in sources), sum(x.after for x in sources))
        elif sources:
            found[node.name] = sources[0]
    return result


def _last_layers(graph: Graph) -> frozenset[str]:
    """Return the layers with weights whose outputs enter no other."""
    behind = {graph.nodes[-1].name}
    last = set()
    for node in reversed(graph.nodes):
        if node.name not in behind:
            continue
        if isinstance(node.layer, Dense | Convolution):
            last.add(node.name)
        else:
            behind.update(name for name in node.inputs if name != INPUT)
    return frozenset(last)


def _sizes(module: nn.Linear | nn.Conv1d | nn.Conv2d) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.in_channels, module.out_channels


def _replaced(old: nn.Linear | nn.Conv1d | nn.Conv2d, entering: int, leaving: int, standard: bool) -> Any:
    bias = old.bias is not None
    like: dict[str, Any] = {"dtype": old.weight.dtype, "device": old.weight.device}
    if isinstance(old, nn.Linear):
        kind: Any = nn.Linear if standard else ScaledLinear
        new = nn.utils.skip_init(kind, entering, leaving, bias=bias, **like)
    else:
        one = isinstance(old, nn.Conv1d)
        kind = (nn.Conv1d if one else nn.Conv2d) if standard else (ScaledConv1d if one else ScaledConv2d)
        new = nn.utils.skip_init(
            kind,
            entering,
            leaving,
            old.kernel_size,
            stride=old.stride,
            padding=old.padding,
            dilation=old.dilation,
            bias=bias,
            padding_mode=old.padding_mode,
            **like,
        )
    for name, parameter in old.named_parameters():
        getattr(new, name).requires_grad_(parameter.requires_grad)
    return new


def _draw(module: Any, weight: float, bias: float, standard: bool, generator: torch.Generator) -> None:
    """Fill a layer with random weights."""
    scale = math.sqrt(weight / module.weight[0].numel())
    with torch.no_grad():
        module.weight.normal_(generator=generator).mul_(scale if standard else 1.0)
        if module.bias is not None:
            module.bias.normal_(generator=generator).mul_(math.sqrt(bias) if standard else 1.0)
    if not standard:
        module.weight_scale, module.bias_scale = scale, math.sqrt(bias)


def _normalization(old: nn.Module, channels: Channels) -> nn.LayerNorm:
    assert isinstance(old, nn.LayerNorm)
    shape = list(old.normalized_shape)
    shape[0] = shape[0] * channels.after // channels.before
    affine = old.weight is not None
    new = nn.LayerNorm(shape, old.eps, affine, affine and old.bias is not None)
    if affine:
        new = new.to(old.weight)
        for name, parameter in old.named_parameters():
            getattr(new, name).requires_grad_(parameter.requires_grad)
    return new
