"""Affine recurrences ``x[t] = A[t] x[t - 1] + b[t]``, all times at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

LoopStep = Callable[..., tuple[Tensor, ...]]
"""``(*states, *inputs, *others) -> states`` of one time."""


def affine_paths(step: LoopStep, times: int, num_states: int, num_inputs: int, *operands: Tensor) -> tuple[Tensor, ...]:
    """Compute all states from the matrices and offsets of all times."""
    i = num_states + num_inputs
    first = operands[:num_states]
    over_time = torch.func.vmap(step, in_dims=(*(0,) * i, *(None,) * (len(operands) - i)))
    zeros = [x.new_zeros(times, *x.shape) for x in first]
    offsets, pull = torch.func.vjp(lambda *x: over_time(*x, *operands[num_states:]), *zeros)  # type: ignore[misc]
    offset, shapes = packed(offsets), [x.shape for x in first]
    start = torch.cat([x.reshape(-1) for x in first])
    return tuple(unpacked(prefix(jacobians(lambda *e: pull(e), shapes, offset), offset, start), shapes))


def prefix(matrices: Tensor, offsets: Tensor, first: Tensor) -> Tensor:
    """Return ``x[t] = A[t] x[t - 1] + b[t]`` for all times, ``(T, k, k), (T, k), (k,) -> (T, k)``."""
    times, k = offsets.shape
    offset = torch.cat([(matrices[0] @ first + offsets[0]).unsqueeze(0), offsets[1:]])
    # The first matrix is zero, because the first offset already contains the first state.
    matrix = torch.cat([torch.zeros_like(matrices[:1]), matrices[1:]])
    if k == 1:
        matrix = matrix.squeeze(-1)
    # Each round doubles the number of earlier times that every state includes.
    reach = 1
    while reach < times:
        earlier = _later(offset, reach)
        before = _later(matrix, reach)
        if k == 1:
            offset, matrix = offset + matrix * earlier, matrix * before
        else:
            offset, matrix = offset + (matrix @ earlier.unsqueeze(-1)).squeeze(-1), matrix @ before
        reach *= 2
    return offset


def _later(x: Tensor, times: int) -> Tensor:
    """Return ``x`` delayed by ``times`` steps and padded with zeros, ``(T, ...) -> (T, ...)``."""
    return pad(x[:-times], (0, 0) * (x.dim() - 1) + (times, 0))


def jacobians(pull: Callable[..., Sequence[Tensor]], shapes: Sequence[torch.Size], like: Tensor) -> Tensor:
    """Return the Jacobian matrices of all times, ``(T, k, k)``, from a vector-Jacobian product over all times."""
    times, k = like.shape
    identity = torch.eye(k, dtype=like.dtype, device=like.device)
    rows: Tensor = torch.func.vmap(lambda e: packed(pull(*unpacked(e.expand(times, k), shapes))))(identity)
    return rows.movedim(0, 1)


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of all times as one, ``[(T, *shape)] -> (T, k)``."""
    return torch.cat([x.reshape(len(x), -1) for x in parts], -1)


def unpacked(x: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the parts of the last dimension in their own shapes, ``(T, k) -> [(T, *shape)]``."""
    parts = x.split([shape.numel() for shape in shapes], -1)
    return [part.reshape(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
