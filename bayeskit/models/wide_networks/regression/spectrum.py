"""The eigenvalues of a kernel matrix, computed once for all training times and noise variances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.errors import DataError, KernelError


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


def spectrum(matrix: Tensor, ridge: float, name: str, max_jitter: float | None = None) -> Spectrum:
    """Return the eigendecomposition of a kernel matrix that a ridge makes positive definite.

    Parameters
    ----------
    matrix : Tensor
        Symmetric, ``(n, n)``.
    ridge : float
        What will be added to its diagonal. It is not part of the eigenvalues returned.
    name : str
        Of the kernel, for errors.
    max_jitter : float, optional
        What may be added beside the ridge, in units of the mean of the diagonal; by default the square root of the
        machine's precision.

    Returns
    -------
    Spectrum

    Raises
    ------
    DataError
        If the matrix is not finite.
    KernelError
        If it is not positive definite even with that.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(2, 2, dtype=torch.float64)  # two equal inputs
    >>> spectrum(one, 0.1, "NNGP").jitter
    0.0
    >>> spectrum(one, 0.0, "NNGP").jitter
    1e-15
    """
    if not bool(torch.isfinite(matrix).all()):
        raise DataError(f"the {name} matrix of the training inputs is not finite")
    values, vectors = torch.linalg.eigh(matrix)
    precision = torch.finfo(matrix.dtype).eps
    scale = float(matrix.diagonal().mean())
    least = len(matrix) * precision * max(float(values[-1]), 0.0)  # what rounding leaves of a zero
    missing = least - (float(values[0]) + ridge)
    if missing <= 0 and scale > 0:
        return Spectrum(values, vectors, 0.0)
    allowed = (precision**0.5 if max_jitter is None else max_jitter) * scale
    jitter = 10.0 ** math.ceil(math.log10(missing)) if missing > 0 else math.inf
    if not jitter <= allowed:
        raise KernelError(
            f"the {name} matrix of the training inputs is not positive definite: its smallest eigenvalue is "
            f"{float(values[0]):.3g}, and up to {allowed:.3g} may be added to its diagonal beside a ridge or noise "
            f"variance of {ridge:g}. Look for repeated inputs, give a ridge or noise variance, or raise max_jitter"
        )
    return Spectrum(values + jitter, vectors, jitter)
