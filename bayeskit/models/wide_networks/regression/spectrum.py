"""The eigenvalues of a kernel matrix, computed once for all training times and noise variances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.models.wide_networks.regression.jitter import check_finite_matrix, needed_jitter


@dataclass(frozen=True, eq=False)
class Spectrum:
    """An eigendecomposition of a kernel matrix with what was added to its diagonal.

    Attributes
    ----------
    eigenvalues : Tensor
        Ascending, with the jitter, ``(n,)``.
    eigenvectors : Tensor
        As columns, ``(n, n)``.
    jitter : float
        What rounding made it necessary to add to the diagonal; mostly 0.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    jitter: float

    def rotated(self, rows: Tensor) -> Tensor:
        """Return rows of a matrix ``(m, n)`` in the basis of the eigenvectors, ``(m, n)``."""
        return rows @ self.eigenvectors

    def solved(self, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """Return coefficients that the matrix with a ridge turns into targets, and these, in the same basis."""
        targets = self.rotated(y.reshape(len(y), -1).mT).mT
        return targets / (self.eigenvalues + ridge)[:, None], targets


def spectrum(matrix: Tensor, ridge: float, name: str, max_jitter: float | None = None) -> Spectrum:
    """Return the eigendecomposition of a kernel matrix that a ridge makes positive definite.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``.
    ridge : float
        What will be added to its diagonal. It is not part of the eigenvalues returned.
    name, max_jitter
        As in :func:`~bayeskit.models.wide_networks.regression.jitter.needed_jitter`.

    Returns
    -------
    Spectrum

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
    >>> spectrum(torch.ones(2, 2, dtype=torch.float64), 0.1, "NNGP").jitter  # two equal inputs
    0.0
    """
    check_finite_matrix(matrix, name)
    values, vectors = torch.linalg.eigh(matrix)
    jitter = needed_jitter(values, matrix.diagonal(), ridge, name, max_jitter)
    return Spectrum(values + jitter, vectors, jitter)
