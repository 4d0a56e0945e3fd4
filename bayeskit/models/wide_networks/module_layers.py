"""Which layer of infinite width a torch module is."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from bayeskit.models.wide_networks.layers.combine import Sum
from bayeskit.models.wide_networks.layers.dense import Convolution, Dense
from bayeskit.models.wide_networks.layers.grid import AveragePool, Flatten, GlobalAverage
from bayeskit.models.wide_networks.layers.layer import Layer
from bayeskit.models.wide_networks.layers.normalization import Dropout, LayerNormalization
from bayeskit.models.wide_networks.refusals import Refusal, check_plain, reason_against

IDENTITY = Sum((1.0,))
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.GroupNorm)


def layer_of(name: str, module: nn.Module, standard: bool) -> Layer:
    """Return the layer that a module is; nonlinearities are not among them.

    Raises
    ------
    ModelError
        If there is none.
    """
    place = place_of_module(name, module)
    check_plain(place, module)
    if isinstance(module, nn.Linear):
        return _dense(module, module.in_features, module.out_features, standard)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return _convolution(place, module, standard)
    if isinstance(module, nn.Flatten):
        if module.start_dim != 1 or module.end_dim != -1:
            raise Refusal(place, "only a Flatten of all but the first dimension has a limit here")
        return Flatten()
    if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
        return average_pool(place, module)
    if isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
        return global_average(place, 1 if isinstance(module, nn.AdaptiveAvgPool1d) else 2, module.output_size)
    if isinstance(module, nn.LayerNorm):
        return LayerNormalization(tuple(module.normalized_shape), module.eps, *_trained(module))
    if isinstance(module, nn.GroupNorm) and module.num_groups == 1:
        return LayerNormalization((module.num_channels,), module.eps, *_trained(module), any_sites=True)
    if isinstance(module, nn.Dropout):
        if module.training and module.p == 1:
            raise Refusal(place, "it drops everything; give it a rate below one")
        return Dropout(module.p) if module.training and module.p else IDENTITY
    if isinstance(module, nn.Identity):
        return IDENTITY
    raise Refusal(place, reason_against(module))


def place_of_module(name: str, module: nn.Module) -> str:
    """Return how messages call a module."""
    return f"layer {name!r} ({type(module).__name__})"


def average_pool(place: str, module: nn.AvgPool1d | nn.AvgPool2d) -> AveragePool:
    """Return averages over windows."""
    axes = 1 if isinstance(module, nn.AvgPool1d) else 2
    padding = whole_tuple(module.padding, axes)
    if getattr(module, "divisor_override", None) is not None:
        raise Refusal(place, "averages with a divisor of their own have no limit here; scale the output")
    if module.ceil_mode:
        raise Refusal(place, "averages with ceil_mode=True have no limit here")
    if any(padding) and not module.count_include_pad:
        raise Refusal(place, "averages whose padding does not count have no limit here")
    stride = module.stride if module.stride is not None else module.kernel_size
    return AveragePool(
        whole_tuple(module.kernel_size, axes), whole_tuple(stride, axes), tuple((size, size) for size in padding)
    )


def global_average(place: str, num_axes: int, output_size: Any) -> GlobalAverage:
    """Return an adaptive average, which must be over the whole grid."""
    if any(size != 1 for size in (output_size if isinstance(output_size, list | tuple) else (output_size,))):
        raise Refusal(place, "of adaptive averages only those over the whole grid have a limit here")
    return GlobalAverage(num_axes, keeps_grid=True)


def whole_tuple(x: Any, axes: int) -> tuple[int, ...]:
    """Return one whole number an axis."""
    return tuple(int(y) for y in x) if isinstance(x, list | tuple) else (int(x),) * axes


def _trained(module: nn.LayerNorm | nn.GroupNorm) -> tuple[bool, bool]:
    """Return whether gains and shifts take part in gradients."""
    gain, shift = module.weight, getattr(module, "bias", None)
    return gain is not None and gain.requires_grad, shift is not None and shift.requires_grad


def _dense(module: nn.Linear | nn.Conv1d | nn.Conv2d, fan_in: int, channels: int, standard: bool) -> Dense:
    weight, bias = module.weight, module.bias
    return Dense(
        fan_in,
        channels,
        bias is not None,
        standard,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
    )


def _convolution(place: str, module: nn.Conv1d | nn.Conv2d, standard: bool) -> Convolution:
    if module.groups != 1:
        raise Refusal(place, "convolutions in groups have no limit here; use groups=1")
    window = tuple(module.kernel_size)
    if isinstance(module.padding, str):
        total = [d * (k - 1) if module.padding == "same" else 0 for d, k in zip(module.dilation, window, strict=True)]
        padding = tuple((size // 2, size - size // 2) for size in total)
    else:
        padding = tuple((size, size) for size in module.padding)
    dense = _dense(module, module.in_channels * math.prod(window), module.out_channels, standard)
    return Convolution(dense, window, tuple(module.stride), tuple(module.dilation), padding, module.padding_mode)
