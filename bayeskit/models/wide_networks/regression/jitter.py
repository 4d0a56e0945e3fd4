"""What may be added to the diagonal of a kernel matrix, and how it is reported."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError, JitterWarning, KernelError, SettingsError

ROUNDING = 10  # machine precisions of the largest eigenvalue that rounding may leave of one that is zero


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
        precision.

    Returns
    -------
    float
        A power of ten, or zero.

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
    missing = ROUNDING * precision * max(largest, 0.0) - (smallest + ridge)
    if missing <= 0 and scale > 0:
        return 0.0
    allowed = (precision**0.5 if max_jitter is None else not_negative("max_jitter", max_jitter)) * scale
    jitter = 10.0 ** math.ceil(math.log10(missing)) if missing > 0 else math.inf
    if not jitter <= allowed:
        raise KernelError(
            f"the {name} matrix of the training inputs is not positive definite: its smallest eigenvalue is "
            f"{smallest:.3g}, and up to {allowed:.3g} may be added to its diagonal beside a ridge or noise "
            f"variance of {ridge:g}. Look for repeated inputs, give a ridge or noise variance, or raise max_jitter"
        )
    warnings.warn(
        f"the {name} matrix of the training inputs is not positive definite to rounding; {jitter:.0e} was added to its "
        "diagonal, as the attribute jitter tells. Look for repeated inputs, or give a ridge or noise variance",
        JitterWarning,
        stacklevel=5,  # of who asks for a posterior
    )
    return jitter
