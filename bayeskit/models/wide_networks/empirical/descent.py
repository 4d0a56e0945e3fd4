"""What training by gradient descent needs, and how far a kernel has moved."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayeskit._settings import real_number
from bayeskit.errors import DataError, ShapeError


def relative_change(kernel: Tensor, first: Tensor) -> Tensor:
    """Return the Frobenius norm of the difference of two kernels, by that of the first."""
    return (kernel - first).double().norm() / first.double().norm()


def as_targets(y: Tensor, outputs: Tensor) -> Tensor:
    """Return targets in the shape and dtype of outputs, ``(n, outputs)``."""
    if not isinstance(y, Tensor) or y.is_complex():
        raise DataError(f"y must be a tensor of real numbers, not {getattr(y, 'dtype', type(y).__name__)}")
    if y.dim() == 0:
        raise ShapeError(f"y must be {tuple(outputs.shape)}, like outputs, not one number")
    y = y[:, None] if y.dim() == 1 else y.flatten(1)
    if y.shape != outputs.shape:
        raise ShapeError(f"y must be {tuple(outputs.shape)}, like outputs, not {tuple(y.shape)}")
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
    return real_number("learning_rate", learning_rate, between=(0.0, math.inf))


def largest_eigenvalue(kernel: Tensor) -> float:
    """Return the largest eigenvalue of a kernel, ``(n, n)`` or ``(n, n, outputs, outputs)``."""
    if kernel.dim() == 4:
        kernel = kernel.transpose(1, 2).flatten(2).flatten(0, 1)  # one row an input and output
    return float(torch.linalg.eigvalsh(kernel.double())[-1])
