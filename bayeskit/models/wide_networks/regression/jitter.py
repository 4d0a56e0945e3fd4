"""What may be added to the diagonal of a kernel matrix, and how it is reported."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import AccuracyWarning, DataError, JitterWarning, KernelError, SettingsError

ROUNDING = 10  # machine precisions of the largest eigenvalue that rounding may leave of one that is zero
INACCURATE = 0.25  # power of the machine precision: share of the targets at which errors of a mean are worth a warning


def not_negative(name: str, value: float | Tensor) -> float:
    """Return a number, or say that it must not be negative."""
    number = real_number(name, value.detach() if isinstance(value, Tensor) else value)
    if not number >= 0:
        raise SettingsError(f"{name} must not be negative, but is {value!r}")
    return number


def check_finite_matrix(matrix: Tensor, name: str) -> None:
    """Refuse a kernel matrix with entries that are not finite."""
    if not bool(torch.isfinite(matrix.detach()).all()):
        raise DataError(f"the {name} matrix of the training inputs is not finite; make variances of weights smaller")


def needed_jitter(
    eigenvalues: Tensor, diagonal: Tensor, ridge: float, name: str, max_jitter: float | None = None
) -> float:
    """Return what rounding makes it necessary to add to a diagonal beside a ridge; mostly nothing.

    Parameters
    ----------
    eigenvalues : Tensor
        Of the kernel matrix without the ridge, ascending, ``(n,)``.
    diagonal : Tensor
        Of the same matrix, ``(n,)``.
    ridge : float
        What is added to the diagonal anyway.
    name : str
        Of the kernel, for errors and warnings.
    max_jitter : float, optional
        The most that may be added, in units of the diagonal's mean; by default the square root of the machine's
        precision, or the rounding error of a zero eigenvalue where that is more.

    Returns
    -------
    float
        Zero, or a power of ten, or less where that is more than is allowed.

    Raises
    ------
    KernelError
        If more would be needed.
    SettingsError
        If ``max_jitter`` is negative.

    Warns
    -----
    JitterWarning
        If it is not zero.

    Examples
    --------
    >>> import torch
    >>> needed_jitter(torch.tensor([0.0, 2.0]), torch.ones(2), 0.1, "NNGP")
    0.0
    """
    precision = torch.finfo(eigenvalues.dtype).eps
    smallest, largest, scale = float(eigenvalues[0]), float(eigenvalues[-1]), float(diagonal.mean())
    rounding = ROUNDING * precision * max(largest, 0.0)
    missing = rounding - (smallest + ridge)
    if missing <= 0 and scale > 0:
        return 0.0
    if max_jitter is None:
        # An eigenvalue that is zero may come out as far below zero as above.
        allowed = max(precision**0.5 * scale, 2 * rounding)
    else:
        allowed = not_negative("max_jitter", max_jitter) * scale
    if not missing <= allowed or scale <= 0:
        raise KernelError(
            f"the {name} matrix of the training inputs is not positive definite to rounding: its smallest eigenvalue "
            f"is {smallest:.3g}, its largest {largest:.3g}; beside a ridge or noise variance of {ridge:g}, "
            f"{max(missing, 0.0):.3g} is missing on its diagonal, and {allowed:.3g} may be added. Look for repeated "
            "inputs, give a ridge or noise variance, take float64, or raise max_jitter"
        )
    jitter = min(10.0 ** math.ceil(math.log10(missing)), allowed)
    warnings.warn(
        f"the {name} matrix of the training inputs is not positive definite to rounding; {jitter:.0e} was added to its "
        "diagonal, as the attribute jitter tells. Look for repeated inputs, or give a ridge or noise variance",
        JitterWarning,
        stacklevel=5,  # of who asks for a posterior
    )
    return jitter


def check_accuracy(coefficients: Tensor, y: Tensor, largest: float, name: str) -> None:
    """Warn where coefficients of a kernel's columns are so large that little is left of their sum.

    Parameters
    ----------
    coefficients, y : Tensor
        What the kernel matrix turns into targets, and these, both ``(n, outputs)``, or both rotated.
    largest : float
        Eigenvalue of the kernel matrix, or what bounds it.
    name : str
        Of the kernel.

    Warns
    -----
    AccuracyWarning
        If rounding errors of the mean may be more than the fourth root of the machine's precision, beside targets.

    Examples
    --------
    >>> import torch
    >>> check_accuracy(torch.tensor([[2.0]]), torch.tensor([[4.0]]), 2.0, "NNGP")
    """
    size = float(y.detach().norm())
    precision = torch.finfo(y.dtype).eps
    error = precision * largest * float(coefficients.detach().norm())
    if not error <= precision**INACCURATE * size:
        warnings.warn(
            f"means by the {name} matrix may be off by about {error / size:.0e} of the targets' size, for inputs that "
            "are equal or nearly so have different targets and no noise to explain it. Give a ridge or noise variance, "
            "or take float64 if they are not equal",
            AccuracyWarning,
            stacklevel=4,
        )
