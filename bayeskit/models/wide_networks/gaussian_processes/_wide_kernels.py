"""Interface of kernels for Gaussian processes, and kernels held as matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bayeskit.errors import DataError, KernelError, ModelError, ShapeError
from bayeskit.models.wide_networks._kernels import InfiniteWidth, Kernels

_CHUNK = 32  # inputs per block; only the diagonal of the block's covariance is used

Matrix = Callable[..., Tensor]
"""``(x1, x2) -> (n1, n2)``, or ``x -> (n, n)``."""


class WideKernel(Protocol):
    """Interface of kernels for regression, such as :class:`~bayeskit.models.wide_networks.InfiniteWidth`.

    A method is required only if the regression uses it.
    """

    def nngp(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return the covariance of a network's outputs at initialisation, ``(n1, n2)``."""
        ...

    def ntk(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return inner products of gradients with respect to all trained parameters, ``(n1, n2)``."""
        ...


@dataclass(frozen=True, eq=False)
class PrecomputedKernel:
    """Precomputed kernel matrices; inputs are row indices.

    Parameters
    ----------
    nngp_matrix : Tensor
        Covariance of outputs at all inputs (training and new), ``(n, n)``.
    ntk_matrix : Tensor, optional
        Tangent kernel at all inputs, ``(n, n)``.

    Raises
    ------
    ShapeError
        If a matrix is not square, or the matrices have different sizes.
    DataError
        If a matrix is not finite.
    KernelError
        If a matrix is not symmetric.

    Examples
    --------
    >>> import torch
    >>> matrix = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 1.0], [0.5, 1.0, 2.0]])
    >>> kernel = PrecomputedKernel(matrix)
    >>> kernel.nngp(torch.tensor([2]), torch.tensor([0, 1]))
    tensor([[0.5000, 1.0000]])
    """

    nngp_matrix: Tensor
    ntk_matrix: Tensor | None = None

    def __post_init__(self) -> None:
        for name, matrix in (("nngp_matrix", self.nngp_matrix), ("ntk_matrix", self.ntk_matrix)):
            if matrix is not None:
                _check_matrix(name, matrix)
        if self.ntk_matrix is not None and self.ntk_matrix.shape != self.nngp_matrix.shape:
            raise ShapeError(
                f"both matrices must have one shape, not {tuple(self.nngp_matrix.shape)} and "
                f"{tuple(self.ntk_matrix.shape)}"
            )

    def __repr__(self) -> str:
        kinds = "covariance" if self.ntk_matrix is None else "covariance and tangent kernel"
        return f"PrecomputedKernel({kinds} of {len(self.nngp_matrix)} inputs)"

    @classmethod
    def of(cls, kernel: WideKernel, x: Tensor) -> PrecomputedKernel:
        """Compute both kernel matrices at all inputs."""
        return cls(*both(kernel, x))

    def nngp(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return rows ``x1`` and columns ``x2`` of the covariance, ``(n1, n2)``."""
        return _chosen(self.nngp_matrix, x1, x2)

    def ntk(self, x1: Tensor, x2: Tensor | None = None) -> Tensor:
        """Return rows ``x1`` and columns ``x2`` of the tangent kernel, ``(n1, n2)``."""
        if self.ntk_matrix is None:
            raise DataError("the tangent kernel is needed, but ntk_matrix is missing; pass ntk_matrix")
        return _chosen(self.ntk_matrix, x1, x2)


def both(kernel: WideKernel, x1: Tensor, x2: Tensor | None = None) -> Kernels:
    """Return both kernels, in one pass if the kernel supports it."""
    if isinstance(kernel, InfiniteWidth):
        return kernel.both(x1, x2)
    return Kernels(kernel.nngp(x1, x2), kernel.ntk(x1, x2))


def refuse_module(kernel: object) -> None:
    """Raise a ``ModelError`` if a torch module without a kernel method is given as a kernel."""
    if isinstance(kernel, nn.Module) and not any(callable(getattr(kernel, name, None)) for name in ("nngp", "ntk")):
        raise ModelError(
            f"{type(kernel).__name__} is a torch module, not a kernel; wrap it: infinite_width(module, "
            "weight_variance=..., bias_variance=...)"
        )


def kernel_diagonal(matrix: Matrix, x1: Tensor, x2: Tensor | None = None) -> Tensor:
    """Return the diagonal of a kernel matrix, ``(n,)``; of ``x1`` and ``x2`` row by row, if both are given."""
    blocks = [x.split(_CHUNK) for x in (x1, x2) if x is not None]
    return torch.cat([matrix(*block).diagonal() for block in zip(*blocks, strict=True)])


def _check_matrix(name: str, matrix: Tensor) -> None:
    if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
        raise DataError(f"{name} must be a tensor of floating-point numbers")
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"{name} must be (n, n), not {tuple(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise DataError(f"{name} has values that are not finite")
    asymmetry = float((matrix - matrix.mT).abs().max()) if matrix.numel() else 0.0
    if asymmetry > torch.finfo(matrix.dtype).eps ** 0.5 * float(matrix.abs().max()):
        raise KernelError(f"{name} must be symmetric; entries differ from their mirror images by up to {asymmetry:.3g}")


def _chosen(matrix: Tensor, x1: Tensor, x2: Tensor | None) -> Tensor:
    x2 = x1 if x2 is None else x2
    for name, x in (("x1", x1), ("x2", x2)):
        if x.dim() != 1 or x.is_floating_point() or x.dtype == torch.bool:
            raise DataError(f"{name} must be row indices of the matrix, a vector of integers such as arange(4)")
        if len(x) and not 0 <= int(x.min()) <= int(x.max()) < len(matrix):
            raise ShapeError(f"{name} has row indices outside 0 to {len(matrix) - 1}")
    return matrix[x1[:, None], x2]
