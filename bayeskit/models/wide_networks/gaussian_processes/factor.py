"""Cholesky factors of kernel matrices, with the jitter that they needed."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import ConversionWarning, KernelError, SettingsError, ShapeError


class Factor(NamedTuple):
    """A Cholesky factor.

    Attributes
    ----------
    lower : Tensor
        The triangle, ``(n, n)``.
    jitter : float
        What was added to the diagonal, zero if the matrix was positive definite as it came.
    """

    lower: Tensor
    jitter: float


def factorize(matrix: Tensor, name: str = "the kernel matrix", max_jitter: float = 1e-6) -> Factor:
    """Return the Cholesky factor of a covariance matrix, adding to its diagonal only what it needs.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``. Gradients flow through it.
    name : str
        What errors and warnings call it.
    max_jitter : float, default 1e-6
        The most that may be added to the diagonal, relative to the diagonal's mean.

    Returns
    -------
    Factor

    Raises
    ------
    KernelError
        If the matrix is not finite, or not positive definite even with the largest jitter.
    ShapeError, SettingsError
        If the matrix is not square, or ``max_jitter`` negative.

    Warns
    -----
    ConversionWarning
        If jitter was added, saying how much.

    Examples
    --------
    >>> import torch
    >>> factorize(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
    Factor(lower=tensor([[2., 0.],
            [1., 2.]]), jitter=0.0)
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"{name} must be (n, n), not {tuple(matrix.shape)}")
    if not max_jitter >= 0:
        raise SettingsError(f"max_jitter must not be negative, not {max_jitter!r}")
    if not bool(torch.isfinite(matrix.detach()).all()):
        raise KernelError(f"{name} has entries that are not finite; make the variances of weights smaller")
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed):
        return Factor(lower, 0.0)
    scale = float(matrix.detach().diagonal().mean())
    relative = len(matrix) * torch.finfo(matrix.dtype).eps
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    while True:
        relative = min(relative, max_jitter)
        jitter = relative * scale
        lower, failed = torch.linalg.cholesky_ex(matrix + jitter * identity)
        if not bool(failed) and jitter > 0:
            warnings.warn(
                f"{name} is not positive definite to rounding; {jitter:.3g} was added to its diagonal "
                f"({relative:.3g} times its mean)",
                ConversionWarning,
                stacklevel=2,
            )
            return Factor(lower, jitter)
        if relative >= max_jitter:
            break
        relative *= 10
    smallest = float(torch.linalg.eigvalsh(matrix.detach())[0])
    raise KernelError(
        f"{name} is not positive definite even with {max_jitter:.3g} times its mean diagonal added to it (smallest "
        f"eigenvalue {smallest:.3g}, mean diagonal {scale:.3g}); remove repeated inputs, give the data a noise "
        "variance, compute in float64, or raise the jitter that is allowed"
    )
