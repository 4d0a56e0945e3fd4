"""Finite networks with random weights, whose infinite-width limit the kernels describe."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bayeskit.errors import SettingsError
from bayeskit.extend import new_generator, whole_number
from bayeskit.models.wide_networks._layers import Concatenate, Convolution, Dense, LayerNormalization, Variances
from bayeskit.models.wide_networks._reader import INPUT, Graph, Node


class ScaledLinear(nn.Linear):
    """A dense layer whose weights have unit variance and are scaled in the forward pass."""

    weight_scale: float = 1.0
    bias_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``(..., out_features)``."""
        bias = None if self.bias is None else self.bias_scale * self.bias
        return nn.functional.linear(x, self.weight_scale * self.weight, bias)


class _ScaledConvolution(nn.modules.conv._ConvNd):
    """The forward pass of both convolutions."""

    weight_scale: float = 1.0
    bias_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, ``(n, channels, *sites)``."""
        bias = None if self.bias is None else self.bias_scale * self.bias
        return self._conv_forward(x, self.weight_scale * self.weight, bias)


class ScaledConv1d(_ScaledConvolution, nn.Conv1d):
    """A convolution of sequences whose weights have unit variance and are scaled in the forward pass."""


class ScaledConv2d(_ScaledConvolution, nn.Conv2d):
    """A convolution of images whose weights have unit variance and are scaled in the forward pass."""


@dataclass(frozen=True)
class _Channels:
    """Number of channels of a layer in the module, and in the network of another width."""

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
    generator = new_generator(seed, stream="finite network")
    result = copy.deepcopy(module)
    names = {name for name, _ in module.named_modules()}
    widths = _widths(graph, None if width is None else whole_number("width", width, least=1))
    found: dict[str, _Channels] = {}
    for node in graph.nodes:
        sources = [found[name] for name in node.inputs if name in found]
        layer = node.layer
        if isinstance(layer, Dense | Convolution):
            old = result.get_submodule(node.name)
            assert isinstance(old, nn.Linear | nn.Conv1d | nn.Conv2d)
            entering, leaving = _sizes(old)
            if sources:
                entering = entering * sources[0].after // sources[0].before
            leaving = widths.get(node.name, leaving)
            new = _replaced(old, entering, leaving, standard)
            weight, bias = (_number(x[node.name]) for x in (variances.weight, variances.bias))
            _draw(new, weight, bias, standard, generator)
            result.set_submodule(node.name, new)
            found[node.name] = _Channels(_sizes(old)[1], leaving)
        elif isinstance(layer, LayerNormalization):
            channels = sources[0] if sources else _Channels(1, 1)
            # A repeated call of a layer without parameters has a node name to which no module belongs.
            if node.name in names:
                result.set_submodule(node.name, _normalization(result.get_submodule(node.name), channels))
            found[node.name] = channels
        elif isinstance(layer, Concatenate):
            found[node.name] = _Channels(sum(x.before for x in sources), sum(x.after for x in sources))
        elif sources:
            found[node.name] = sources[0]
    return result


def _widths(graph: Graph, width: int | None) -> dict[str, int]:
    """Return the new widths of hidden layers; concatenated layers keep their proportions, which enter the limit."""
    if width is None:
        return {}
    data = {INPUT}
    for node in graph.nodes:
        if not isinstance(node.layer, Dense | Convolution) and not data.isdisjoint(node.inputs):
            if len(node.inputs) > 1:
                raise SettingsError(
                    f"layer {node.name!r} adds or concatenates features of the input itself, whose number does not "
                    "grow with the width; omit width, or put a layer with weights between them"
                )
            data.add(node.name)
    last, _ = last_layers(graph)
    sizes = {
        node.name: (node.layer if isinstance(node.layer, Dense) else node.layer.dense).channels
        for node in graph.nodes
        if isinstance(node.layer, Dense | Convolution) and node.name not in last
    }
    if not any(isinstance(node.layer, Concatenate) for node in graph.nodes):
        return dict.fromkeys(sizes, width)
    largest = max(sizes.values(), default=1)
    if any(width * size % largest for size in sizes.values()):
        raise SettingsError(
            "the network concatenates features, so width is the width of the widest layer and all layers keep their "
            f"proportions, {sorted(set(sizes.values()))}; with width {width} their widths would not be whole numbers"
        )
    return {name: width * size // largest for name, size in sizes.items()}


def last_layers(graph: Graph) -> tuple[frozenset[str], list[Node]]:
    """Return the layers with weights that no other layer with weights follows, and the nodes behind them."""
    wanted, last, behind = {graph.nodes[-1].name}, set(), []
    for node in reversed(graph.nodes):
        if node.name in wanted and isinstance(node.layer, Dense | Convolution):
            last.add(node.name)
        elif node.name in wanted:
            behind.append(node)
            wanted.update(node.inputs)
    return frozenset(last), behind


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
        for parameter, size in ((module.weight, scale), (module.bias, math.sqrt(bias))):
            if parameter is not None:  # the numbers of a seed are the same on all devices
                drawn = torch.empty_like(parameter, device=generator.device).normal_(generator=generator)
                parameter.copy_(drawn).mul_(size if standard else 1.0)
    if not standard:
        module.weight_scale, module.bias_scale = scale, math.sqrt(bias)


def _number(variance: Tensor | float) -> float:
    return float(variance.detach()) if isinstance(variance, Tensor) else variance


def _normalization(old: nn.Module, channels: _Channels) -> nn.LayerNorm | nn.GroupNorm:
    assert isinstance(old, nn.LayerNorm | nn.GroupNorm)
    affine = old.weight is not None
    new: nn.LayerNorm | nn.GroupNorm
    if isinstance(old, nn.GroupNorm):
        new = nn.GroupNorm(1, old.num_channels * channels.after // channels.before, old.eps, affine)
    else:
        shape = list(old.normalized_shape)
        shape[0] = shape[0] * channels.after // channels.before
        new = nn.LayerNorm(shape, old.eps, affine, affine and old.bias is not None)
    if affine:
        new = new.to(old.weight)
        for name, parameter in old.named_parameters():
            getattr(new, name).requires_grad_(parameter.requires_grad)
    return new
