"""The Cholesky factor of the covariance of data, through which gradients flow."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import KernelError
from bayeskit.models.wide_networks.regression.jitter import ROUNDING, check_finite_matrix, needed_jitter


class Cholesky(NamedTuple):
    """A covariance of data as the product of a triangle with its transpose.

    Attributes
    ----------
    lower : Tensor
        The triangle, ``(n, n)``.
    jitter : float
        What rounding made it necessary to add to the diagonal; mostly 0.
    """

    lower: Tensor
    jitter: float = 0.0

    def whitened(self, columns: Tensor) -> Tensor:
        """Return columns ``(n, m)`` in units in which the data are independent and have variance one."""
        return torch.linalg.solve_triangular(self.lower, columns, upper=False)

    def solved(self, columns: Tensor) -> Tensor:
        """Return the inverse of the covariance times columns ``(n, m)``."""
        return torch.cholesky_solve(columns, self.lower)

    def log_density(self, y: Tensor) -> Tensor:
        """Return the log density of independent columns ``(n, outputs)`` with mean zero, together, ``()``."""
        log_determinant = 2 * self.lower.diagonal().log().sum() + len(y) * math.log(2 * math.pi)
        return -0.5 * (self.whitened(y).square().sum() + y.shape[1] * log_determinant)


def cholesky(matrix: Tensor, ridge: float | Tensor, name: str, max_jitter: float | None = None) -> Cholesky:
    """Return the Cholesky factor of a kernel matrix with a ridge on its diagonal.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``.
    ridge : float or Tensor
        What is added to its diagonal.
    name, max_jitter
        As in :func:`~bayeskit.models.wide_networks.regression.jitter.needed_jitter`.

    Returns
    -------
    Cholesky

    Raises
    ------
    DataError
        If the matrix is not finite.
    KernelError
        If it is not positive definite even with jitter.

    Warns
    -----
    JitterWarning
        If jitter was added.

    Examples
    --------
    >>> import torch
    >>> cholesky(torch.tensor([[3.0, 2.0], [2.0, 4.0]]), 1.0, "NNGP")
    Cholesky(lower=tensor([[2., 0.],
            [1., 2.]]), jitter=0.0)
    """
    check_finite_matrix(matrix, name)
    diagonal = matrix.diagonal()
    shifted = torch.diagonal_scatter(matrix, diagonal + ridge)
    lower, failed = torch.linalg.cholesky_ex(shifted)
    rounding = ROUNDING * torch.finfo(matrix.dtype).eps * float(diagonal.detach().sum())
    if not bool(failed) and float(lower.detach().diagonal().square().min()) > rounding:
        return Cholesky(lower)
    # No pivot is below the smallest eigenvalue: only here can that be too small.
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    added = float(ridge.detach()) if isinstance(ridge, Tensor) else ridge
    jitter = needed_jitter(eigenvalues, diagonal.detach(), added, name, max_jitter)
    lower, failed = torch.linalg.cholesky_ex(torch.diagonal_scatter(matrix, diagonal + ridge + jitter))
    if bool(failed):
        raise KernelError(f"the {name} matrix of the training inputs has no Cholesky factor; take float64, or a ridge")
    return Cholesky(lower, jitter)
