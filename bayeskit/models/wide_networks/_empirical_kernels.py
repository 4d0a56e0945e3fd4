"""Empirical neural tangent kernels of finite networks at their current parameters."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.extend import (
    Recording,
    along,
    call_with,
    check_finite,
    check_module_inputs,
    first_trainable,
    flattened,
    plain_attention,
    progress_bar,
    real_number,
    record_calls,
    trial_run,
    whole_number,
)
from bayeskit.models.wide_networks import _covariance as tiles
from bayeskit.models.wide_networks._finite import ScaledConv1d, ScaledConv2d, ScaledLinear

# Step sizes of gradient descent, and the relative change of a kernel.


def relative_change(kernel: Tensor, first: Tensor) -> Tensor:
    """Return the Frobenius norm of the difference of two kernels, relative to the norm of ``first``."""
    return (kernel - first).double().norm() / first.double().norm()


def as_targets(y: Tensor, outputs: Tensor) -> Tensor:
    """Return targets in the shape and dtype of outputs, ``(n, outputs)``."""
    if not isinstance(y, Tensor) or y.is_complex():
        raise DataError(f"y must be a tensor of real numbers, not {getattr(y, 'dtype', type(y).__name__)}")
    if y.dim() == 0:
        raise ShapeError(f"y must be {tuple(outputs.shape)}, the shape of the outputs, not one number")
    y = y[:, None] if y.dim() == 1 else y.flatten(1)
    if y.shape != outputs.shape:
        raise ShapeError(f"y must be {tuple(outputs.shape)}, the shape of the outputs, not {tuple(y.shape)}")
    if not bool(torch.isfinite(y).all()):
        raise DataError("y has values that are not finite")
    return y.detach().to(outputs)


def flat_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return outputs as ``(n, outputs)``."""
    found: Tensor = model(x)
    return found[:, None] if found.dim() == 1 else found.flatten(1)


def descent_rate(learning_rate: float | None, largest: Callable[[], float]) -> float:
    """Return the learning rate, by default half of one over the largest eigenvalue of the kernel."""
    if learning_rate is None:
        return 0.5 / float(largest())
    return real_number("learning_rate", learning_rate, "(0, inf)")


def largest_eigenvalue(kernel: Tensor) -> float:
    """Return the largest eigenvalue of a kernel, ``(n, n)`` or ``(n, n, outputs, outputs)``."""
    if kernel.dim() == 4:
        kernel = kernel.transpose(1, 2).flatten(2).flatten(0, 1)  # one row per input and output
    return float(torch.linalg.eigvalsh(kernel.double())[-1])


# Gradients with respect to one layer's parameters, in factors whose products are cheap.

CHUNK = 1 << 22  # largest number of entries of an intermediate result


class _Outputs(Enum):
    """Pairs of a network's outputs that a kernel contains."""

    FULL = "full"  # all pairs, (k, n1, k, n2)
    TRACE = "trace"  # each output with itself, summed, (n1, n2)
    DIAGONAL = "diagonal"  # each output with itself, (k, n1, n2)


@dataclass(frozen=True)
class _Gradients:
    """Gradients of each output at each input."""

    values: Tensor  # (k, n, parameters)


@dataclass(frozen=True)
class _Sites:
    """Gradients of a weight matrix applied at several sites: sums over sites of outer products."""

    activations: Tensor  # the layer's inputs, (n, sites, features); or integer row indices, (n, sites)
    gradients: Tensor  # with respect to the layer's outputs, (k, n, sites, channels)
    weight: float = 1.0  # squared factor of the weights in the forward pass, zero if absent or frozen
    bias: float = 0.0  # the same for the bias

    def rows(self, start: int, end: int) -> _Sites:
        """Return the factors of inputs ``start`` to ``end``."""
        return _Sites(self.activations[start:end], self.gradients[:, start:end], self.weight, self.bias)


LayerGradients = _Gradients | _Sites


def _squared_length(gradients: LayerGradients, weights: Tensor) -> Tensor:
    """Return the squared norm of the gradient of the outputs' weighted sum, ``weights`` ``(n, k)`` -> ``()``."""
    if isinstance(gradients, _Gradients):
        return torch.einsum("nk,knp->p", weights, gradients.values).square().sum()
    a = gradients.activations
    g = torch.einsum("nk,knsc->nsc", weights, gradients.gradients)
    if a.dim() == 2:
        by_row = g.new_zeros(int(a.max()) + 1, g.shape[2]).index_add_(0, a.flatten(), g.flatten(0, 1))
        return gradients.weight * by_row.square().sum()
    of_weights = g.flatten(0, 1).mT @ a.flatten(0, 1)
    return gradients.weight * of_weights.square().sum() + gradients.bias * g.sum((0, 1)).square().sum()


def _add_products(
    result: Tensor, first: LayerGradients, second: LayerGradients, outputs: _Outputs, upper: bool
) -> None:
    """Add products of gradients of one type to a kernel; ``upper`` omits pairs of outputs below the diagonal."""
    if isinstance(first, _Gradients) and isinstance(second, _Gradients):
        _add_gram(result, first.values, second.values, None, outputs, upper)
        return
    assert isinstance(first, _Sites) and isinstance(second, _Sites)
    num_sites = max(first.gradients.shape[2], second.gradients.shape[2])
    if num_sites == 1:
        a = _activation_products(first, second)
        _add_gram(result, first.gradients.squeeze(2), second.gradients.squeeze(2), a, outputs, upper)
    elif _by_sites(first, second, outputs):
        _add_by_sites(result, first, second, outputs, upper)
    else:
        _add_by_gradients(result, first, second, outputs, upper)


def _add_gram(result: Tensor, g1: Tensor, g2: Tensor, factor: Tensor | None, outputs: _Outputs, upper: bool) -> None:
    """Add products of ``(k, n1, f)`` with ``(k, n2, f)``, times ``(n1, n2)``."""
    k, n2 = g2.shape[:2]
    if outputs is _Outputs.DIAGONAL:
        if factor is None:
            result += g1 @ g2.mT
        else:
            result.addcmul_(g1 @ g2.mT, factor)
    elif outputs is _Outputs.TRACE:
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


def _activation_products(first: _Sites, second: _Sites) -> Tensor:
    """Return products of activations of all pairs of sites, ``(n1 * sites1, n2 * sites2)``, biases included."""
    a1, a2 = first.activations.flatten(0, 1), second.activations.flatten(0, 1)
    if a1.dim() == 1:
        return (a1[:, None] == a2).to(first.gradients.dtype) * first.weight
    return torch.addmm(a1.new_full((1, 1), first.bias), a1, a2.mT, alpha=first.weight)


def _by_sites(first: _Sites, second: _Sites, outputs: _Outputs) -> bool:
    """Whether products of all pairs of sites are cheaper than gradients with respect to weights."""
    if first.activations.dim() == 2:
        return True
    (k, n1, p1, channels), (_, n2, p2, _) = first.gradients.shape, second.gradients.shape
    features = first.activations.shape[2]
    pairs = n1 * n2 * (k * k if outputs is _Outputs.FULL else k)
    by_sites = p1 * p2 * (n1 * n2 * features + pairs * (channels + 1))
    by_gradients = channels * features * (k * (n1 * p1 + n2 * p2) + pairs)
    return by_sites < by_gradients


def _add_by_sites(result: Tensor, first: _Sites, second: _Sites, outputs: _Outputs, upper: bool) -> None:
    k, n1, p1, _ = first.gradients.shape
    n2, p2 = second.gradients.shape[1:3]
    others = second.gradients.flatten(1, 2)
    step = max(CHUNK // (p1 * p2 * n2), 1)
    for start in range(0, n1, step):
        part = first.rows(start, start + step)
        rows = slice(start, start + part.gradients.shape[1])
        activations = _activation_products(part, second)
        for c, one in enumerate(part.gradients.flatten(1, 2)):
            for d in range(c if upper else 0, k) if outputs is _Outputs.FULL else (c,):
                products = (one @ others[d].mT).mul_(activations).view(-1, p1, n2, p2).sum((1, 3))
                if outputs is _Outputs.FULL:
                    result[c, rows, d] += products
                elif outputs is _Outputs.DIAGONAL:
                    result[c, rows] += products
                else:
                    result[rows] += products


def _add_by_gradients(result: Tensor, first: _Sites, second: _Sites, outputs: _Outputs, upper: bool) -> None:
    """Form gradients with respect to weights, for a block of the layer's channels at a time."""
    k, n1, _, channels = first.gradients.shape
    n2, features = second.gradients.shape[1], first.activations.shape[2]
    step = max(CHUNK // (k * max(n1, n2) * features), 1)
    for start in range(0, channels, step):
        parts = [_weight_gradients(x, start, start + step) for x in (first, second)[: 1 if second is first else 2]]
        _add_gram(result, parts[0], parts[-1], None, outputs, upper)
    if first.bias:
        sums = [x.gradients.sum(2) * x.bias**0.5 for x in (first, second)]
        _add_gram(result, sums[0], sums[1], None, outputs, upper)


def _weight_gradients(sites: _Sites, start: int, end: int) -> Tensor:
    """Return ``(k, n, channels * features)`` for channels ``start`` to ``end``."""
    chosen = sites.gradients[..., start:end]
    return (chosen.mT @ (sites.activations * sites.weight**0.5)).flatten(2)


# Layers whose parameter gradients factorise into the layer's inputs and the gradients at its outputs.

Calls = list[tuple[Tensor, Tensor]]  # at each call of a layer: its input, (n, ...), and output gradients, (k, n, ...)


def factors(layer: nn.Module, calls: Calls) -> list[LayerGradients]:
    """Return the factors of a layer's gradients, for layers with :func:`_has_factors`.

    ``calls`` are pairs of inputs ``(n, ...)`` and gradients at outputs ``(k, n, ...)``.
    """
    return _FACTORS[type(layer)](layer, calls)


def _has_factors(layer: nn.Module) -> bool:
    """Whether a layer is a supported torch layer without changes: no subclass, hooks or further parameters."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    if "forward" in layer.__dict__ or any(hooks):
        return False
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return False
    return type(layer) in _FACTORS and layer._parameters.keys() <= {"weight", "bias"}


def _trains(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _matrix(layer: Any, activations: list[Tensor], gradients: list[Tensor]) -> list[LayerGradients]:
    """Return the factors of a weight matrix, with the sites of all calls."""
    g = gradients[0] if len(gradients) == 1 else torch.cat(gradients, 2)
    weight = float(getattr(layer, "weight_scale", 1.0)) ** 2 if _trains(layer.weight) else 0.0
    bias = float(getattr(layer, "bias_scale", 1.0)) ** 2 if _trains(getattr(layer, "bias", None)) else 0.0
    if not weight:
        return [_Gradients(g.sum(2) * bias**0.5)]
    a = activations[0] if len(activations) == 1 else torch.cat(activations, 1)
    return [_Sites(a, g, weight, bias)]


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
    """Return the input patch of a convolution at each site of its outputs, ``(n, sites, features)``."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, layer._reversed_padding_repeated_twice, mode)
    size, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if len(size) == 1:
        x, size, stride, dilation = x.unsqueeze(2), (1, *size), (1, *stride), (1, *dilation)
    return functional.unfold(x, size, dilation, 0, stride).mT


def _gain_and_shift(
    layer: Any, calls: Calls, normalized: Callable[[Tensor], Tensor], axis: int
) -> list[LayerGradients]:
    """Return gradients with respect to the gains and shifts of normalised features, which lie along ``axis``."""
    result: list[LayerGradients] = []
    size = layer.weight.numel()

    def summed(x: Tensor) -> Tensor:
        flat = x.reshape(*x.shape[:2], -1, size) if axis < 0 else x.flatten(3).mT if x.dim() > 3 else x.unsqueeze(2)
        return flat.sum(2)

    if _trains(layer.weight):
        result.append(_Gradients(torch.stack([summed(g * normalized(a)) for a, g in calls]).sum(0)))
    if _trains(layer.bias):
        result.append(_Gradients(torch.stack([summed(g) for _, g in calls]).sum(0)))
    return result


def _layer_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    return _gain_and_shift(
        layer, calls, lambda a: functional.layer_norm(a, layer.normalized_shape, eps=layer.eps), axis=-1
    )


def _group_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    return _gain_and_shift(layer, calls, lambda a: functional.group_norm(a, layer.num_groups, eps=layer.eps), axis=1)


def _batch_norm(layer: Any, calls: Calls) -> list[LayerGradients]:
    """Return the gradients of a batch normalisation that uses its running averages."""

    def normalized(a: Tensor) -> Tensor:
        return functional.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)

    return _gain_and_shift(layer, calls, normalized, axis=1)


_FACTORS: dict[type[nn.Module], Callable[[Any, Calls], list[LayerGradients]]] = {
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


# Choice of the layers whose gradients factorise, and the memory for a kernel.

_COPIES = 4  # copies of per-input gradients in memory: torch's own, two reordered, and one in a product


@dataclass(frozen=True)
class GradientPlan:
    """Method of computing the gradients of each of a module's parameters.

    Attributes
    ----------
    module : torch.nn.Module
    layers : tuple of torch.nn.Module
        Layers whose gradients are held as factors.
    rest : tuple of str
        Names of all other parameters.
    num_outputs : int
    num_numbers : int
        Number of values held for each input.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    rest: tuple[str, ...]
    num_outputs: int
    num_numbers: int

    @property
    def parameter(self) -> nn.Parameter:
        """First parameter that requires gradients; the kernel has its dtype and device."""
        return first_trainable(self.module)

    def by_single_inputs(self) -> GradientPlan:
        """Return a plan that computes the gradient of each input separately."""
        names = {name: p.numel() for name, p in self.module.named_parameters() if p.requires_grad}
        numbers = self.num_numbers + _COPIES * self.num_outputs * sum(names.values())
        return GradientPlan(self.module, (), tuple(names), self.num_outputs, numbers)


def make_gradient_plan(module: nn.Module, x: Tensor) -> GradientPlan:
    """Return the plan for a module's gradients, found by a trial on the first two inputs of ``x`` ``(n, ...)``.

    It raises ``ModelError`` if outputs are random, mix inputs, or do not depend on a trainable parameter.
    """
    trial = trial_run(module, x, _candidates)
    used, uses = trial.nodes, trial.uses
    layers = tuple(
        m
        for m in trial.layers
        if m not in trial.opaque
        and m not in trial.mixed
        and all(uses[id(p)] == sum(c.left.node in used for c in trial.calls if c.layer is m) for p in _trainable(m))
    )
    known = {id(p) for m in layers for p in m.parameters()}
    rest = [name for name, p in module.named_parameters() if p.requires_grad and id(p) in uses and id(p) not in known]
    sizes = dict(module.named_parameters())
    k = trial.outputs.shape[1]
    numbers = _COPIES * k * sum(sizes[name].numel() for name in rest) + x[:1].numel()
    for call in trial.calls:
        # Convolutions hold the input unfolded and scaled; gradients are held, with two more copies during computation.
        numbers += call.entered.numel() // 2 * (1 + 2 * _patch(call.layer)) + call.size // 2 * (1 + 3 * k)
    return GradientPlan(module, layers, tuple(rest), k, numbers)


def _check_second_inputs(module: nn.Module, x1: Tensor, x2: Tensor) -> None:
    """Raise a ``DataError`` or ``ShapeError`` unless a second set of inputs fits the module and the first set."""
    check_module_inputs(module, x2, "x2")
    if x1.shape[1:] != x2.shape[1:] or x1.dtype != x2.dtype:
        raise ShapeError(f"x1 and x2 must have inputs of one shape and dtype, not {x1.shape[1:]} and {x2.shape[1:]}")


def _candidates(module: nn.Module) -> list[nn.Module]:
    """Return the supported layers that do not share parameters."""
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
    return [
        m
        for m in module.modules()
        if _has_factors(m) and _trainable(m) and all(owners[id(p)] == 1 for p in m.parameters())
    ]


def _trainable(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer._parameters.values() if p is not None and p.requires_grad]


def _patch(layer: nn.Module) -> int:
    """Return the largest number of sites at which a convolution uses an entry of its input; zero for other layers."""
    return math.prod(getattr(layer, "kernel_size", (0,)))


# Products of a neural tangent kernel with a vector, without forming the kernel.


@torch.inference_mode(False)
def ntk_vector_product(
    module: nn.Module, x1: Tensor, x2: Tensor | None, v: Tensor, *, block_size: int | None = None
) -> Tensor:
    r"""Return a module's neural tangent kernel times a vector.

    The product :math:`J_1 (J_2^\top v)` takes one backward pass at ``x2`` and one forward-mode pass at ``x1``. Time and
    memory are linear in the number of inputs.

    Parameters
    ----------
    module : torch.nn.Module
        As in :func:`empirical_ntk`.
    x1 : Tensor
        Inputs, ``(n1, ...)``.
    x2 : Tensor or None
        Second set of inputs, ``(n2, ...)``; None for ``x1``.
    v : Tensor
        ``(n2, k)``, one row per input of ``x2``, one column per output.
    block_size : int, optional
        Number of inputs per pass; by default all.

    Returns
    -------
    Tensor
        ``(n1, k)``; entry ``[i, a]`` is the sum of ``empirical_ntk(module, x1, x2)[i, j, a, b] * v[j, b]`` over ``j``
        and ``b``.

    Raises
    ------
    ModelError, DataError
        As in :func:`empirical_ntk`, and if ``v`` is not finite.
    ShapeError
        If inputs differ in shape, or ``v`` is not ``(n2, k)``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks._empirical_kernels import ntk_vector_product
    >>> network = torch.nn.Linear(3, 1)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> ntk_vector_product(network, x, None, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 0.],
            [-1.]])
    """
    x2 = x1 if x2 is None else x2
    plan = make_gradient_plan(module, x1)
    _check_second_inputs(module, x1, x2)
    if not isinstance(v, Tensor) or tuple(v.shape) != (len(x2), plan.num_outputs):
        found = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
        raise ShapeError(f"v must be {(len(x2), plan.num_outputs)}, one entry per input and output, not {found}")
    check_finite(v, "v")
    length = max(len(x1), len(x2)) if block_size is None else whole_number("block_size", block_size, least=1)
    network = flattened(module)
    total = torch.zeros_like(network.vector)
    for x, weights in zip(x2.detach().split(length), v.detach().split(length), strict=True):
        total += network.pull(x, weights)
    return torch.cat([network.push(x, total) for x in x1.detach().split(length)])


# The empirical neural tangent kernel: inner products of gradients.

_GIB = 1 << 30


@torch.inference_mode(False)
def empirical_ntk(
    module: nn.Module,
    x1: Tensor,
    x2: Tensor | None = None,
    *,
    outputs: Literal["full", "trace", "diagonal"] = "full",
    block_size: int | None = None,
    max_memory: int = _GIB,
) -> Tensor:
    r"""Return the neural tangent kernel of a module at its current parameters.

    The kernel is :math:`\Theta_{ij}^{ab} = \sum_p \partial_p f_a(x_i) \, \partial_p f_b(x_j)`; the sum is over all
    parameters that require gradients. See Notes for the algorithm and for the relation to the infinite-width kernel.

    Parameters
    ----------
    module : torch.nn.Module
        Maps ``(n, ...)`` to ``(n, ...)``; each output row depends on its own input only. It is not changed. Outputs
        are flattened to ``(n, k)``; ``(n,)`` is one output.
    x1 : Tensor
        Inputs, ``(n1, ...)``.
    x2 : Tensor, optional
        Second set of inputs, ``(n2, ...)``; by default ``x1``, and the kernel is then exactly symmetric.
    outputs : {"full", "trace", "diagonal"}, default "full"
        ``"full"``: all pairs of outputs. ``"diagonal"``: each output with itself. ``"trace"``: the mean of the
        diagonal over outputs (``trace_axes=(-1,)`` in `neural-tangents`).
    block_size : int, optional
        Number of inputs per pass; by default as many as ``max_memory`` allows.
    max_memory : int, default 2**30
        Approximate memory in addition to the result, in bytes; at least 40 MB.

    Returns
    -------
    Tensor
        ``(n1, n2, k, k)``, ``(n1, n2)`` for the trace, or ``(n1, n2, k)`` for the diagonal, without an autograd graph.
        The dtype is that of the first parameter that requires gradients.

    Raises
    ------
    ModelError
        If the output at one input depends on other inputs (``BatchNorm`` in training mode) or is random
        (``Dropout``), if no parameter requires gradients, or if the module changes a layer's inputs in place.
    ShapeError, DataError
        If inputs do not fit the module or each other, or are not finite.
    SettingsError
        If ``outputs``, ``block_size`` or ``max_memory`` lies outside its domain.

    Notes
    -----
    Algorithm: for dense layers, convolutions, embeddings and normalisations the kernel is computed from the layer's
    inputs and the backpropagated gradients at its outputs. For other parameters (shared weights, unknown layers, layers
    with hooks) the gradient of each input is computed. Both are checked against an ordinary gradient of all inputs. If
    they differ, for example because a module sorts its inputs or routes them to different layers, all inputs are
    processed separately. Hooks on parameters are not part of the module's function; do not rely on them.

    Limit: as ``width`` grows, ``"trace"`` and each entry of ``"diagonal"`` of ``infinite_width(module).network(width)``
    converge to ``infinite_width(module).ntk``, in which weights have unit variance and are scaled in the forward pass.
    A newly built torch module has the standard parametrisation instead, and ``Linear`` draws weights and biases with
    variance ``1 / (3 fan_in)``. Its kernel grows with the width, approximately as

    .. code-block:: python

        linear = {name: m for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}
        biases = {name: 1 / (3 * m.in_features) for name, m in linear.items()}
        infinite_width(module, "standard", weight_variance=1 / 3, bias_variance=biases).ntk(x1, x2)

    This formula is for normal weights; torch's weights are uniform, which matters for layers with few inputs.

    References
    ----------
    .. [1] A. Jacot, F. Gabriel, C. Hongler. Neural tangent kernel: convergence and generalization in neural networks.
       NeurIPS 2018.
    .. [2] R. Novak, J. Sohl-Dickstein, S. Schoenholz. Fast finite width neural tangent kernel. ICML 2022.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks._empirical_kernels import empirical_ntk
    >>> network = torch.nn.Linear(3, 2)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> empirical_ntk(network, x, outputs="trace")  # x @ x.T + 1
    tensor([[2., 2.],
            [2., 3.]])
    >>> empirical_ntk(network, x).shape
    torch.Size([2, 2, 2, 2])
    """
    try:
        which = _Outputs(outputs)
    except ValueError:
        names = ", ".join(repr(x.value) for x in _Outputs)
        raise SettingsError(f"outputs must be one of {names}, not {outputs!r}") from None
    plan = make_gradient_plan(module, x1)
    symmetric = x2 is None or x2 is x1
    x2 = x1 if x2 is None else x2
    if not symmetric:
        _check_second_inputs(module, x1, x2)
    length = _block_size(plan, which, x1, block_size, max_memory)
    try:
        result = _fill(plan, x1.detach(), x2.detach(), which, symmetric, length)
    except _Disagreement:  # the module treats these inputs differently from the two inputs of the trial
        plan = plan.by_single_inputs()
        length = _block_size(plan, which, x1, block_size, max_memory)
        result = _fill(plan, x1.detach(), x2.detach(), which, symmetric, length)
    if which is _Outputs.FULL:
        return result.permute(1, 3, 0, 2)
    return result.permute(1, 2, 0) if which is _Outputs.DIAGONAL else result.div_(plan.num_outputs)


def _block_size(plan: GradientPlan, outputs: _Outputs, x: Tensor, block_size: int | None, max_memory: int) -> int:
    """Return the number of rows and columns per block such that both factors and a product fit in memory."""
    if block_size is not None:
        return whole_number("block_size", block_size, least=1)
    allowed = whole_number("max_memory", max_memory, least=1) / plan.parameter.element_size()
    allowed -= min(3 * CHUNK, allowed / 2)  # reserve for intermediate results of products
    # Solve square b^2 + linear b = allowed.
    square = 1 if outputs is _Outputs.TRACE else 2 * plan.num_outputs
    linear = 2 * plan.num_numbers
    return max(int((math.sqrt(linear**2 + 4 * square * allowed) - linear) / (2 * square)), 1)


def _fill(plan: GradientPlan, x1: Tensor, x2: Tensor, outputs: _Outputs, symmetric: bool, length: int) -> Tensor:
    """Compute the kernel block by block; a symmetric kernel is computed by halves and mirrored."""
    k, n1, n2 = plan.num_outputs, len(x1), len(x2)
    shape = {_Outputs.FULL: (k, n1, k, n2), _Outputs.TRACE: (n1, n2), _Outputs.DIAGONAL: (k, n1, n2)}[outputs]
    result = torch.zeros(shape, dtype=plan.parameter.dtype, device=plan.parameter.device)
    blocks = list(tiles.matrix_blocks(n1, n2, symmetric, length))
    held: tuple[slice, list[LayerGradients]] | None = None
    with torch.no_grad(), progress_bar("kernel", len(blocks)) as bar:
        for i, (rows, columns, mirrored) in enumerate(blocks):
            if held is None or held[0] != rows:
                held = rows, gradient_factors(plan, x1[rows])
            on_diagonal = symmetric and not mirrored
            second = held[1] if on_diagonal else gradient_factors(plan, x2[columns])
            block = result[:, rows, :, columns] if outputs is _Outputs.FULL else result[..., rows, columns]
            for one, other in zip(held[1], second, strict=True):
                _add_products(block, one, other, outputs, upper=on_diagonal)
            if on_diagonal:
                _mirror(block, outputs)
            elif mirrored and outputs is _Outputs.FULL:
                result[:, columns, :, rows] = block.permute(2, 3, 0, 1)
            elif mirrored:
                result[..., columns, rows] = block.mT
            bar.update(i + 1)
    return result


def _mirror(block: Tensor, outputs: _Outputs) -> None:
    """Make a block on the diagonal exactly symmetric."""
    if outputs is not _Outputs.FULL:
        block.copy_(block.triu() + block.triu(1).mT)
        return
    for c in range(len(block)):
        for d in range(c):
            block[c, :, d] = block[d, :, c].mT
        block[c, :, c] = block[c, :, c].triu() + block[c, :, c].triu(1).mT


def gradient_factors(plan: GradientPlan, x: Tensor) -> list[LayerGradients]:
    """Return the factors of the gradients of all outputs at inputs ``(n, ...)``."""
    trial = record_calls(plan.module, plan.layers, x)
    if trial.opaque or trial.outputs.shape[1] != plan.num_outputs:
        raise _Disagreement
    calls: dict[torch.nn.Module, Calls] = {layer: [] for layer in plan.layers}
    arrived = trial.gradients() if plan.layers else []
    for call, gradient in zip(trial.calls, arrived, strict=True):
        if gradient is not None:  # otherwise outputs do not depend on the call
            if len(call.entered) != len(x) or gradient.shape[1] != len(x):
                raise _Disagreement
            calls[call.layer].append((call.entered, gradient))
    found = {layer: factors(layer, made) for layer, made in calls.items() if made}
    rest = _rest(plan, x)
    _check(plan, trial, found, rest)
    return [*(factor for layer in plan.layers for factor in found.get(layer, [])), *rest]


class _Disagreement(Exception):
    """The factors of gradients do not give the module's gradients at these inputs."""


def _check(
    plan: GradientPlan,
    trial: Recording,
    found: dict[torch.nn.Module, list[LayerGradients]],
    rest: list[LayerGradients],
) -> None:
    """Raise an error unless gradients at single inputs add up to the gradient of a weighted sum of all outputs."""
    # Hooks cannot assign rows to inputs if a module sorts or routes the rows that enter a layer.
    weights = _weights(trial.outputs)
    named = {name: p for name, p in plan.module.named_parameters() if p.requires_grad}
    total = torch.autograd.grad(trial.outputs, list(named.values()), weights, allow_unused=True, retain_graph=True)
    lengths = {id(p): 0.0 if g is None else float(g.square().sum()) for p, g in zip(named.values(), total, strict=True)}
    owned = {layer: [id(p) for p in layer.parameters() if p.requires_grad] for layer in plan.layers}
    pairs = [
        (sum(float(_squared_length(f, weights)) for f in found.get(layer, [])), sum(lengths.pop(p) for p in ids))
        for layer, ids in owned.items()
    ]
    pairs.append((sum(float(_squared_length(g, weights)) for g in rest), sum(lengths.values())))
    accuracy = torch.finfo(weights.dtype).eps ** 0.5
    noise = accuracy**1.5 * sum(right for _, right in pairs)
    if all(abs(value - right) <= accuracy * right + noise for value, right in pairs):
        return
    if plan.layers:
        raise _Disagreement
    raise ModelError(
        "gradients at single inputs do not add up to the gradient at all inputs, because outputs at one input depend "
        "on other inputs; let each row of outputs depend only on the same row of inputs"
    )


def _weights(outputs: Tensor) -> Tensor:
    """Return fixed, irregular weights for all outputs, in their shape."""
    return torch.arange(1.0, outputs.numel() + 1, dtype=torch.float64).cos().to(outputs).view_as(outputs)


def _rest(plan: GradientPlan, x: Tensor) -> list[LayerGradients]:
    """Return gradients with respect to the parameters without factors."""
    if not plan.rest:
        return []
    network = flattened(plan.module, plan.rest)
    sizes = [p.numel() for p in network.parameters.values()]
    return [_Gradients(g) for g in network.jacobian(x).transpose(0, 1).split(sizes, 2)]


# A network's first-order expansion in its parameters.


class Linearized(nn.Module):
    r"""The first-order expansion of a module in its parameters; made by :func:`linearize`.

    Outputs are :math:`f(x; \theta_0) + \partial_\theta f(x; \theta_0) (\theta - \theta_0)`.

    Attributes
    ----------
    network : torch.nn.Module
        Copy of the module; its parameters are :math:`\theta`, and can be trained.
    """

    network: nn.Module

    def __init__(self, module: nn.Module):
        super().__init__()
        self.network = copy.deepcopy(module)
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        if not self._names:
            raise ModelError(
                "the module has no trainable parameter; call requires_grad_(True) on parameters to include"
            )
        for i, name in enumerate(self._names):
            self.register_buffer(f"start_{i}", module.get_parameter(name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs, in the shape of the module's outputs."""
        start = {name: self.get_buffer(f"start_{i}") for i, name in enumerate(self._names)}
        step = {name: attrgetter(name)(self.network) - value for name, value in start.items()}

        def network(parameters: dict[str, Tensor]) -> Tensor:
            result: Tensor = call_with(self.network, parameters, x)
            return result

        with plain_attention():
            value, change = along(network, start, step)
        result: Tensor = value + change
        return result


def linearize(module: nn.Module) -> Linearized:
    r"""Return a module's first-order Taylor expansion in its parameters, at their current values.

    The expansion is linear in the parameters, so its neural tangent kernel is constant during training. In the NTK
    parametrisation a network approaches its linearisation as the width grows [1]_.

    Parameters
    ----------
    module : torch.nn.Module
        It is copied, and not changed by training. Parameters that do not require gradients stay fixed.

    Returns
    -------
    Linearized
        A module with the same parameters, under ``network``.

    Raises
    ------
    ModelError
        If no parameter is trainable.

    References
    ----------
    .. [1] J. Lee, L. Xiao, S. Schoenholz, Y. Bahri, R. Novak, J. Sohl-Dickstein, J. Pennington. Wide neural networks of
       any depth evolve as linear models under gradient descent. NeurIPS 2019.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks._empirical_kernels import linearize
    >>> network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> x = torch.ones(2, 3)
    >>> torch.equal(linearize(network)(x), network(x))
    True
    """
    return Linearized(module)
