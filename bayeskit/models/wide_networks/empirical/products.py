"""Products of a neural tangent kernel with a vector, without the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayeskit._settings import whole_number
from bayeskit.errors import ShapeError
from bayeskit.models.wide_networks.empirical.plan import check_module_inputs, make_plan
from bayeskit.models.wide_networks.empirical.recording import run
from bayeskit.models.wide_networks.forward_mode import along
from bayeskit.models.wide_networks.inputs import check_finite

Parameters = Mapping[str, Tensor]


@torch.inference_mode(False)
def ntk_vector_product(
    module: nn.Module, x1: Tensor, x2: Tensor | None, v: Tensor, *, block_size: int | None = None
) -> Tensor:
    r"""Return a module's neural tangent kernel times a vector.

    One backward pass at ``x2`` and one forward pass with tangents at ``x1``, :math:`J_1 (J_2^\top v)`: time and memory
    grow with the number of inputs, not with that of pairs.

    Parameters
    ----------
    module : torch.nn.Module
        As in :func:`empirical_ntk`.
    x1 : Tensor
        Inputs, ``(n1, ...)``.
    x2 : Tensor or None
        Others, ``(n2, ...)``; None for the same.
    v : Tensor
        ``(n2, k)``, a number for each output at each of ``x2``.
    block_size : int, optional
        How many inputs are worked on at once; by default all.

    Returns
    -------
    Tensor
        ``(n1, k)``, the sum over ``j`` and ``b`` of ``empirical_ntk(module, x1, x2)[i, j, a, b] * v[j, b]``.

    Raises
    ------
    ModelError, DataError
        As in :func:`empirical_ntk`, and if ``v`` is not finite.
    ShapeError
        If inputs differ in shape, or ``v`` does not have a row for each of ``x2`` and a column for each output.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.empirical import ntk_vector_product
    >>> network = torch.nn.Linear(3, 1)
    >>> x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    >>> ntk_vector_product(network, x, None, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 0.],
            [-1.]])
    """
    x2 = x1 if x2 is None else x2
    plan = make_plan(module, x1)
    check_module_inputs(module, x2, "x2")
    if x1.shape[1:] != x2.shape[1:] or x1.dtype != x2.dtype:
        raise ShapeError(f"x1 and x2 must have inputs of one shape and dtype, not {x1.shape[1:]} and {x2.shape[1:]}")
    if not isinstance(v, Tensor) or tuple(v.shape) != (len(x2), plan.num_outputs):
        found = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
        raise ShapeError(f"v must be {(len(x2), plan.num_outputs)}, inputs and outputs, not {found}")
    check_finite(v, "v")
    length = max(len(x1), len(x2)) if block_size is None else whole_number("block_size", block_size, least=1)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
    for x, weights in zip(x2.detach().split(length), v.detach().split(length), strict=True):
        for name, part in zip(total, _backward(module, parameters, x, weights), strict=True):
            total[name] += part
    return torch.cat([_change(module, parameters, x, total, bool(plan.rest)) for x in x1.detach().split(length)])


def _backward(module: nn.Module, parameters: Parameters, x: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of a weighted sum of outputs."""
    with torch.enable_grad():
        y = run(module, {}, x)
        if not y.requires_grad:
            return tuple(torch.zeros_like(p) for p in parameters.values())
        return torch.autograd.grad(y, list(parameters.values()), weights, materialize_grads=True)


def _change(module: nn.Module, parameters: Parameters, x: Tensor, total: Parameters, shared: bool) -> Tensor:
    """Return the change of outputs as parameters change.

    Where parameters are shared, torch's forward mode is not always the transpose of its gradients: it knows nothing of
    the row of an embedding that gets none.
    """
    if shared:
        return _twice_or_by_rows(module, parameters, x, total)
    start = {name: p.detach() for name, p in parameters.items()}
    try:
        with torch.no_grad():
            result: Tensor = along(lambda changed: run(module, changed, x), start, dict(total))[1]
    except (RuntimeError, NotImplementedError):  # a function of the module has no forward mode
        return _twice_or_by_rows(module, parameters, x, total)
    return result.detach()


def _twice_or_by_rows(module: nn.Module, parameters: Parameters, x: Tensor, total: Parameters) -> Tensor:
    """Return the change of outputs by gradients, of gradients where torch has them."""
    try:
        return _twice_backward(module, parameters, x, total)
    except (RuntimeError, NotImplementedError):  # the gradient of a function of the module has none
        return torch.cat([_of_one(module, parameters, row, total) for row in x.split(1)])


def _of_one(module: nn.Module, parameters: Parameters, row: Tensor, total: Parameters) -> Tensor:
    """Return the change of outputs at one input, ``(1, k)``, by a gradient of each."""
    with torch.enable_grad():
        y = run(module, {}, row)[0]
        if not y.requires_grad:
            return torch.zeros_like(y)[None]
        chosen, changes = list(parameters.values()), [total[name] for name in parameters]
        found = [torch.autograd.grad(v, chosen, retain_graph=True, materialize_grads=True) for v in y]
    return torch.stack(
        [sum(((g * c).sum() for g, c in zip(gs, changes, strict=True)), y.new_zeros(())) for gs in found]
    )[None].detach()


def _twice_backward(module: nn.Module, parameters: Parameters, x: Tensor, total: Parameters) -> Tensor:
    """Return the change of outputs by the gradient of a gradient, which is linear in the weights of outputs."""
    with torch.enable_grad():
        y = run(module, {}, x)
        weights = torch.zeros_like(y, requires_grad=True)
        graph: dict[str, Any] = {"create_graph": True, "materialize_grads": True}
        found = torch.autograd.grad(y, list(parameters.values()), weights, **graph)
        product = sum(((g * total[name]).sum() for name, g in zip(parameters, found, strict=True)), weights.sum() * 0)
        return torch.autograd.grad(product, weights)[0].detach()
