"""Score matching (Hyvarinen 2005): a loss of a density that needs no normalising constant."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit.errors import ShapeError


def own_derivatives(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of a function at ``x (n, ...)`` and the diagonal of each datum's Jacobian, ``(n, ...)``."""
    value, pull = torch.func.vjp(function, x)[:2]
    if value.shape != x.shape:
        raise ShapeError(f"expected a function that keeps the shape {tuple(x.shape)}, not one to {tuple(value.shape)}")
    size = x[0].numel()
    directions = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *x.shape[1:])
    rows = torch.func.vmap(lambda e: pull(e.expand_as(x))[0] * e)(directions)
    return value, rows.sum(0)


def score_matching(score: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return half the squared score plus its divergence at each datum of ``x (n, ...)``, shape ``(n,)``."""
    value, derivative = own_derivatives(score, x)
    each = value.square() / 2 + derivative
    return each.flatten(1).sum(-1) if each.dim() > 1 else each
