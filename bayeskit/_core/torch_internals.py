"""Undocumented parts of torch, but those of the compiler; tested with torch 2.13 and 2.14."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch._functorch.utils import unwrap_dead_wrappers
from torch.distributions import Distribution, MultivariateNormal
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "batching_level",
    "current_dispatch_modes",
    "disable_current_modes",
    "gradient_and_rest",
    "has_forward_derivative",
    "is_batched",
    "is_concrete",
    "is_wrapped",
    "normal_of_factor",
    "standard_gamma",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "unwrap_dead_wrappers",
    "without_idle_gradients",
    "without_transform",
    "without_overrides",
]


#: The ``__torch_function__`` of a tensor's subclass whose results are plain tensors.
without_overrides: Any = torch._C._disabled_torch_function_impl


def standard_gamma(concentration: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw gamma variables of rate one, of any shape; unlike torch's distributions, with a generator."""
    return torch._standard_gamma(concentration, generator=generator)


def normal_of_factor(mean: Tensor, factor: Tensor) -> MultivariateNormal:
    """Return the normal distribution ``(d,)`` whose covariance has a Cholesky factor.

    The constructor of torch imports SymPy (0.7 s) to compare shapes.
    """
    made = object.__new__(MultivariateNormal)
    made.loc, made.scale_tril, made._unbroadcasted_scale_tril = mean, factor, factor
    Distribution.__init__(made, torch.Size(), mean.shape, validate_args=False)
    return made


def batching_level() -> int | None:
    """Return the number of active transforms of ``torch.func``, or None if there is none."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return level


def has_forward_derivative() -> bool:
    """Tell whether a forward derivative is being taken, by ``torch.func`` or without it."""
    kinds = [layer.key() for layer in torch._C._functorch.get_interpreter_stack() or ()]
    return torch._C._functorch.TransformType.Jvp in kinds or torch.autograd.forward_ad._current_level >= 0


def gradient_and_rest(
    function: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], u: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """Return a scalar's gradient by ``u`` and the function's other results, as ``torch.func.grad`` does.

    Unlike that, it does not import torch's compiler, which takes 1.5 s.
    """
    with eager_transforms.grad_increment_nesting() as level, torch.enable_grad():
        u, *others = eager_transforms._wrap_all_tensors((u, *others), level)  # type: ignore[assignment]
        eager_transforms._create_differentiable(u, level)
        value, rest = function(u, *others)
        found = torch.autograd.grad(value, u, create_graph=True, allow_unused=True) if value.requires_grad else (None,)
        gradient = torch.zeros_like(u) if found[0] is None else found[0]
        results: tuple[Tensor, ...] = eager_transforms._undo_create_differentiable((gradient, *rest), level)
    return results


def is_batched(x: Tensor) -> bool:
    """Tell whether a tensor is batched by ``vmap``."""
    return bool(torch._C._functorch.is_batchedtensor(x))


def is_wrapped(x: Tensor) -> bool:
    """Tell whether a tensor is wrapped by a transform of ``torch.func``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def without_idle_gradients(x: Tensor) -> Tensor:
    """Return a tensor without the transforms of ``torch.func.grad`` that do not differentiate it.

    They wrap what is made inside of them, such as ``torch.arange(5)``.
    """
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(x) and not x.requires_grad:
        x = functorch.get_unwrapped(x)
    return x


def is_concrete(x: Tensor) -> bool:
    """Tell whether a tensor has values that are differentiated, batched and recorded by nothing."""
    return not (x.requires_grad or x.is_meta or is_wrapped(x) or current_dispatch_modes())


def without_transform(x: Tensor) -> Tensor:
    """Return the tensor that the innermost transform has wrapped."""
    inner: Tensor = torch._C._functorch.get_unwrapped(x)
    return inner
