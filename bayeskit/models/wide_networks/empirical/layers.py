"""Layers whose gradients have factors: what entered the layer, and what arrived at its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayeskit.models.wide_networks.empirical.factors import Gradients, LayerGradients, Sites
from bayeskit.models.wide_networks.finite import ScaledConv1d, ScaledConv2d, ScaledLinear

Calls = list[tuple[Tensor, Tensor]]  # what entered, (n, ...), and what arrived, (k, n, ...), at each call of a layer


def factors(layer: nn.Module, calls: Calls) -> list[LayerGradients]:
    """Return the factors of the gradients with respect to a layer's trainable parameters.

    Parameters
    ----------
    layer : torch.nn.Module
        One for which :func:`has_factors`.
    calls : list of (Tensor, Tensor)
        What entered the layer, ``(n, ...)``, and the gradients at its outputs, ``(k, n, ...)``.
    """
    return FACTORS[type(layer)](layer, calls)


def has_factors(layer: nn.Module) -> bool:
    """Whether a layer is known, as torch has it; of subclasses, and of what a user has put onto it, nothing is."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    if "forward" in layer.__dict__ or any(hooks):
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return False
    return type(layer) in FACTORS and layer._parameters.keys() <= {"weight", "bias"}


def _trains(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _matrix(layer: Any, activations: list[Tensor], gradients: list[Tensor]) -> list[LayerGradients]:
    """Return the factors of a weight matrix, whose sites are those of all calls."""
    g = gradients[0] if len(gradients) == 1 else torch.cat(gradients, 2)
    weight = float(getattr(layer, "weight_scale", 1.0)) ** 2 if _trains(layer.weight) else 0.0
    bias = float(getattr(layer, "bias_scale", 1.0)) ** 2 if _trains(getattr(layer, "bias", None)) else 0.0
    if not weight:
        return [Gradients(g.sum(2) * bias**0.5)]
    a = activations[0] if len(activations) == 1 else torch.cat(activations, 1)
    return [Sites(a, g, weight, bias)]


def _dense(layer: Any, calls: Calls) -> list[LayerGradients]:
    return _matrix(
        layer,
        [a.reshape(len(a), -1, a.shape[-1]) for a, _ in calls],
        [g.reshape(*g.shape[:2], -1, g.shape[-1]) for _, g in calls],
    )


def _embedding(layer: Any, calls: Calls) -> list[LayerGradients]:
    gradients = []
    for a, g in calls:
        if layer.padding_idx is not None:
            g = g * (a != layer.padding_idx)[..., None]
        gradients.append(g.reshape(*g.shape[:2], -1, g.shape[-1]))
    return _matrix(layer, [a.reshape(len(a), -1) for a, _ in calls], gradients)


def _convolution(layer: Any, calls: Calls) -> list[LayerGradients]:
    activations = [_patches(layer, a) for a, _ in calls]
    gradients = [g.flatten(3).mT for _, g in calls]
    if layer.groups == 1:
        return _matrix(layer, activations, gradients)
    parts = zip(
        zip(*(a.chunk(layer.groups, 2) for a in activations), strict=True),
        zip(*(g.chunk(layer.groups, 3) for g in gradients), strict=True),
        strict=True,
    )
    return [x for a, g in parts for x in _matrix(layer, list(a), list(g))]


def _patches(layer: Any, x: Tensor) -> Tensor:
    """Return what a convolution sees at each site of its outputs, ``(n, sites, features)``."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, layer._reversed_padding_repeated_twice, mode)
    size, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if len(size) == 1:
        x, size, stride, dilation = x.unsqueeze(2), (1, *size), (1, *stride), (1, *dilation)
    return functional.unfold(x, size, dilation, 0, stride).mT


def _gain_and_shift(
    layer: Any, calls: Calls, normalized: Callable[[Tensor], Tensor], axis: int
) -> list[LayerGradients]:
    """Return gradients with respect to factors and summands of the features that follow ``axis``, one dimension."""
    result: list[LayerGradients] = []
    size = layer.weight.numel()

    def summed(x: Tensor) -> Tensor:
        flat = x.reshape(*x.shape[:2], -1, size) if axis < 0 else x.flatten(3).mT if x.dim() > 3 else x.unsqueeze(2)
        return flat.sum(2)

    if _trains(layer.weight):
        result.append(Gradients(torch.stack([summed(g * normalized(a)) for a, g in calls]).sum(0)))
    if _trains(layer.bias):
        result.append(Gradients(torch.stack([summed(g) for _, g in calls]).sum(0)))
    return result


def _layer_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    return _gain_and_shift(
        layer, calls, lambda a: functional.layer_norm(a, layer.normalized_shape, eps=layer.eps), axis=-1
    )


def _group_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    return _gain_and_shift(layer, calls, lambda a: functional.group_norm(a, layer.num_groups, eps=layer.eps), axis=1)


def _batch_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    """Return the factors of a batch normalisation that uses the averages that it has learnt."""

    def normalized(a: Tensor) -> Tensor:
        return functional.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)

    return _gain_and_shift(layer, calls, normalized, axis=1)


FACTORS: dict[type[nn.Module], Callable[[Any, Calls], list[LayerGradients]]] = {
    nn.Linear: _dense,
    ScaledLinear: _dense,
    nn.Embedding: _embedding,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    ScaledConv1d: _convolution,
    ScaledConv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
