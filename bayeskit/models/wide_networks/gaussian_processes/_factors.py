"""Factors of kernel matrices, with jitter where rounding needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import AccuracyWarning, DataError, JitterWarning, KernelError
from bayeskit.extend import real_number, warn_user

_ROUNDING = 10  # rounding error of a zero eigenvalue, in machine precisions of the largest eigenvalue
_INACCURATE = 0.25  # power of the machine precision: relative error of a mean above which to warn


def _check_finite_matrix(matrix: Tensor, name: str) -> None:
    """Raise a ``DataError`` if a kernel matrix is not finite."""
    if not bool(torch.isfinite(matrix.detach()).all()):
        raise DataError(f"the {name} matrix of the training inputs is not finite; reduce the weight variances")


def needed_jitter(
    eigenvalues: Tensor, diagonal: Tensor, ridge: float, name: str, max_jitter: float | None = None
) -> float:
    """Return the jitter that a kernel matrix plus ridge needs to be numerically positive definite; usually zero.

    ``eigenvalues`` ``(n,)`` are ascending and without the ridge, as is ``diagonal`` ``(n,)``. The jitter is a power of
    ten, at most ``max_jitter`` times the mean of the diagonal. Jitter warns with ``JitterWarning``; a matrix that needs
    more than allowed raises ``KernelError``.
    """
    precision = torch.finfo(eigenvalues.dtype).eps
    smallest, largest, scale = float(eigenvalues[0]), float(eigenvalues[-1]), float(diagonal.mean())
    rounding = _ROUNDING * precision * max(largest, 0.0)
    missing = rounding - (smallest + ridge)
    if missing <= 0 and scale > 0:
        return 0.0
    if max_jitter is None:
        # The computed value of a zero eigenvalue may be negative or positive, by the rounding error.
        allowed = max(precision**0.5 * scale, 2 * rounding)
    else:
        allowed = real_number("max_jitter", max_jitter, "[0, inf]") * scale
    if not missing <= allowed or scale <= 0:
        raise KernelError(
            f"the {name} matrix of the training inputs is not positive definite to working precision: its smallest "
            f"eigenvalue is {smallest:.3g}, its largest {largest:.3g}; with a ridge or noise variance of {ridge:g} the "
            f"jitter needed is {max(missing, 0.0):.3g}, and the largest jitter allowed is {allowed:.3g}. Remedy: "
            "remove repeated inputs, give a ridge or noise variance, use float64, or raise max_jitter"
        )
    jitter = min(10.0 ** math.ceil(math.log10(missing)), allowed)
    warn_user(
        f"the {name} matrix of the training inputs is not positive definite to working precision; jitter {jitter:.0e} "
        "was added to its diagonal (attribute jitter). Remedy: remove repeated inputs, or give a ridge or noise "
        "variance",
        JitterWarning,
    )
    return jitter


def check_accuracy(coefficients: Tensor, y: Tensor, largest: float, name: str) -> None:
    """Warn with ``AccuracyWarning`` if rounding errors of the mean may be large relative to the targets.

    ``coefficients`` and ``y`` are ``(n, outputs)``, both rotated or neither; ``largest`` bounds the eigenvalues.
    """
    size = float(y.detach().norm())
    precision = torch.finfo(y.dtype).eps
    error = precision * largest * float(coefficients.detach().norm())
    if not error <= precision**_INACCURATE * size:
        warn_user(
            f"means computed from the {name} matrix may have errors of about {error / size:.0e} relative to the "
            "targets, because equal or nearly equal inputs have different targets without noise. Remedy: give a ridge "
            "or noise variance, or use float64 if the inputs are not equal",
            AccuracyWarning,
        )


class Cholesky(NamedTuple):
    """Cholesky factor of the covariance of observations; gradients flow through it."""

    lower: Tensor  # (n, n)
    jitter: float = 0.0  # added to the diagonal; usually zero

    def whitened(self, columns: Tensor) -> Tensor:
        """Return whitened columns, ``L^{-1} columns``, ``(n, m)``."""
        return torch.linalg.solve_triangular(self.lower, columns, upper=False)

    def solved(self, columns: Tensor) -> Tensor:
        """Return the inverse covariance times columns, ``(n, m)``."""
        return torch.cholesky_solve(columns, self.lower)

    def conditional(self, cross: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(*outputs, m)`` and reductions of variances ``(m,)`` at new inputs.

        ``cross`` has their covariances with observations, ``(n, m)``; ``white`` is whitened, ``(*outputs, n)``.
        """
        half = self.whitened(cross)
        return white @ half, half.square().sum(0)

    def log_density(self, y: Tensor) -> Tensor:
        """Return the joint log density, ``()``, of independent columns ``(n, outputs)`` with mean zero."""
        log_determinant = 2 * self.lower.diagonal().log().sum() + len(y) * math.log(2 * math.pi)
        return -0.5 * (self.whitened(y).square().sum() + y.shape[1] * log_determinant)


def cholesky(matrix: Tensor, ridge: float | Tensor, name: str, max_jitter: float | None = None) -> Cholesky:
    """Return the Cholesky factor of a kernel matrix ``(n, n)`` plus ridge, with jitter if it needs any."""
    _check_finite_matrix(matrix, name)
    diagonal = matrix.diagonal()
    shifted = torch.diagonal_scatter(matrix, diagonal + ridge)
    lower, failed = torch.linalg.cholesky_ex(shifted)
    rounding = _ROUNDING * torch.finfo(matrix.dtype).eps * float(diagonal.detach().sum())
    if not bool(failed) and float(lower.detach().diagonal().square().min()) > rounding:
        return Cholesky(lower)
    # Pivots are at least the smallest eigenvalue: a small pivot means that the eigenvalue may be too small.
    eigenvalues = torch.linalg.eigvalsh(matrix.detach())
    added = float(ridge.detach()) if isinstance(ridge, Tensor) else ridge
    jitter = needed_jitter(eigenvalues, diagonal.detach(), added, name, max_jitter)
    lower, failed = torch.linalg.cholesky_ex(torch.diagonal_scatter(matrix, diagonal + ridge + jitter))
    if bool(failed):
        raise KernelError(
            f"the Cholesky factorisation of the {name} matrix of the training inputs failed; use float64, or a ridge"
        )
    return Cholesky(lower, jitter)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigendecomposition of a kernel matrix, computed once for all training times and noise variances."""

    eigenvalues: Tensor  # ascending, jitter included, (n,)
    eigenvectors: Tensor  # as columns, (n, n)
    jitter: float  # added to the diagonal; usually zero

    def rotated(self, rows: Tensor) -> Tensor:
        """Return the rows of a matrix in the basis of the eigenvectors, ``(m, n)``."""
        return rows @ self.eigenvectors

    def solved(self, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """Return ``(K + ridge)^{-1} y`` and ``y``, both in the basis of the eigenvectors."""
        targets = self.rotated(y.reshape(len(y), -1).mT).mT
        return targets / (self.eigenvalues + ridge)[:, None], targets


def spectrum(matrix: Tensor, ridge: float, name: str, max_jitter: float | None = None) -> Spectrum:
    """Return the eigendecomposition of a kernel matrix ``(n, n)``, with jitter if it needs any beside the ridge."""
    _check_finite_matrix(matrix, name)
    values, vectors = torch.linalg.eigh(matrix)
    jitter = needed_jitter(values, matrix.diagonal(), ridge, name, max_jitter)
    return Spectrum(values + jitter, vectors, jitter)
