"""Gradients with respect to one layer's parameters, in factors whose products are cheap."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

CHUNK = 1 << 22  # numbers that an intermediate result of a product may hold


class Outputs(Enum):
    """Which pairs of a network's outputs a kernel is of."""

    FULL = "full"  # all pairs, (k, n1, k, n2)
    TRACE = "trace"  # each with itself, summed, (n1, n2)
    DIAGONAL = "diagonal"  # each with itself, (k, n1, n2)


@dataclass(frozen=True)
class Gradients:
    """Gradients themselves.

    Attributes
    ----------
    values : Tensor
        ``(k, n, parameters)``, of each output at each input.
    """

    values: Tensor


@dataclass(frozen=True)
class Sites:
    """Gradients of a weight matrix that is applied at several sites: sums over sites of outer products.

    Attributes
    ----------
    activations : Tensor
        What enters the layer, ``(n, sites, features)``; or which row of the matrix, integers ``(n, sites)``.
    gradients : Tensor
        What arrives at its outputs, ``(k, n, sites, channels)``.
    weight, bias : float
        Squared factors of weights and biases in the forward pass, zero for those that are not there or frozen.
    """

    activations: Tensor
    gradients: Tensor
    weight: float = 1.0
    bias: float = 0.0

    def rows(self, start: int, end: int) -> Sites:
        """Return the factors of some of the inputs."""
        return Sites(self.activations[start:end], self.gradients[:, start:end], self.weight, self.bias)


LayerGradients = Gradients | Sites


def squared_length(gradients: LayerGradients, weights: Tensor) -> Tensor:
    """Return the squared length of the gradient of a weighted sum of all outputs.

    Parameters
    ----------
    gradients : Gradients or Sites
    weights : Tensor
        ``(n, k)``.
    """
    if isinstance(gradients, Gradients):
        return torch.einsum("nk,knp->p", weights, gradients.values).square().sum()
    a = gradients.activations
    g = torch.einsum("nk,knsc->nsc", weights, gradients.gradients)
    if a.dim() == 2:
        by_row = g.new_zeros(int(a.max()) + 1, g.shape[2]).index_add_(0, a.flatten(), g.flatten(0, 1))
        return gradients.weight * by_row.square().sum()
    of_weights = g.flatten(0, 1).mT @ a.flatten(0, 1)
    return gradients.weight * of_weights.square().sum() + gradients.bias * g.sum((0, 1)).square().sum()


def add_products(result: Tensor, first: LayerGradients, second: LayerGradients, outputs: Outputs, upper: bool) -> None:
    """Add the products of two sets of gradients to a kernel.

    Parameters
    ----------
    result : Tensor
        The kernel, of the shape that ``outputs`` names.
    first, second : Gradients or Sites
        Both of one kind.
    outputs : Outputs
    upper : bool
        For all pairs of outputs, whether to leave out those with the second before the first.
    """
    if isinstance(first, Gradients) and isinstance(second, Gradients):
        _add_gram(result, first.values, second.values, None, outputs, upper)
        return
    assert isinstance(first, Sites) and isinstance(second, Sites)
    num_sites = max(first.gradients.shape[2], second.gradients.shape[2])
    if num_sites == 1:
        a = _activation_products(first, second)
        _add_gram(result, first.gradients.squeeze(2), second.gradients.squeeze(2), a, outputs, upper)
    elif _by_sites(first, second, outputs):
        _add_by_sites(result, first, second, outputs, upper)
    else:
        _add_by_gradients(result, first, second, outputs, upper)


def _add_gram(result: Tensor, g1: Tensor, g2: Tensor, factor: Tensor | None, outputs: Outputs, upper: bool) -> None:
    """Add products of ``(k, n1, f)`` with ``(k, n2, f)``, times ``(n1, n2)``."""
    k, n2 = g2.shape[:2]
    if outputs is Outputs.DIAGONAL:
        if factor is None:
            result += g1 @ g2.mT
        else:
            result.addcmul_(g1 @ g2.mT, factor)
    elif outputs is Outputs.TRACE:
        total = g1.new_zeros(result.shape) if factor is not None else result
        for one, other in zip(g1, g2, strict=True):
            total.addmm_(one, other.mT)
        if factor is not None:
            result.addcmul_(total, factor)
    else:
        for c, one in enumerate(g1):
            start = c if upper else 0
            products = (one @ g2[start:].flatten(0, 1).mT).view(len(one), k - start, n2)
            if factor is None:
                result[c, :, start:] += products
            else:
                result[c, :, start:].addcmul_(products, factor[:, None])


def _activation_products(first: Sites, second: Sites) -> Tensor:
    """Return products of activations of all pairs of sites, ``(n1 * sites1, n2 * sites2)``, biases included."""
    a1, a2 = first.activations.flatten(0, 1), second.activations.flatten(0, 1)
    if a1.dim() == 1:
        return (a1[:, None] == a2).to(first.gradients.dtype) * first.weight
    return torch.addmm(a1.new_full((1, 1), first.bias), a1, a2.mT, alpha=first.weight)


def _by_sites(first: Sites, second: Sites, outputs: Outputs) -> bool:
    """Whether products of all pairs of sites are cheaper than gradients with respect to weights."""
    if first.activations.dim() == 2:
        return True
    (k, n1, p1, channels), (_, n2, p2, _) = first.gradients.shape, second.gradients.shape
    features = first.activations.shape[2]
    pairs = n1 * n2 * (k * k if outputs is Outputs.FULL else k)
    by_sites = p1 * p2 * (n1 * n2 * features + pairs * (channels + 1))
    by_gradients = channels * features * (k * (n1 * p1 + n2 * p2) + pairs)
    return by_sites < by_gradients


def _add_by_sites(result: Tensor, first: Sites, second: Sites, outputs: Outputs, upper: bool) -> None:
    k, n1, p1, _ = first.gradients.shape
    n2, p2 = second.gradients.shape[1:3]
    others = second.gradients.flatten(1, 2)
    step = max(CHUNK // (p1 * p2 * n2), 1)
    for start in range(0, n1, step):
        part = first.rows(start, start + step)
        rows = slice(start, start + part.gradients.shape[1])
        activations = _activation_products(part, second)
        for c, one in enumerate(part.gradients.flatten(1, 2)):
            for d in range(c if upper else 0, k) if outputs is Outputs.FULL else (c,):
                products = (one @ others[d].mT).mul_(activations).view(-1, p1, n2, p2).sum((1, 3))
                if outputs is Outputs.FULL:
                    result[c, rows, d] += products
                elif outputs is Outputs.DIAGONAL:
                    result[c, rows] += products
                else:
                    result[rows] += products


def _add_by_gradients(result: Tensor, first: Sites, second: Sites, outputs: Outputs, upper: bool) -> None:
    """Form gradients with respect to weights, for some of the layer's channels at a time."""
    k, n1, _, channels = first.gradients.shape
    n2, features = second.gradients.shape[1], first.activations.shape[2]
    step = max(CHUNK // (k * max(n1, n2) * features), 1)
    for start in range(0, channels, step):
        parts = [_weight_gradients(x, start, start + step) for x in (first, second)[: 1 if second is first else 2]]
        _add_gram(result, parts[0], parts[-1], None, outputs, upper)
    if first.bias:
        sums = [x.gradients.sum(2) * x.bias**0.5 for x in (first, second)]
        _add_gram(result, sums[0], sums[1], None, outputs, upper)


def _weight_gradients(sites: Sites, start: int, end: int) -> Tensor:
    """Return ``(k, n, channels * features)`` for some of the channels."""
    chosen = sites.gradients[..., start:end]
    return (chosen.mT @ (sites.activations * sites.weight**0.5)).flatten(2)
