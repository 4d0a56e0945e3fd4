"""What users hand to a mixture: observations, and values of its sites."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit.draws import Draws
from bayeskit.errors import DataError, ShapeError


def as_real(name: str, value: Tensor) -> Tensor:
    """Return data of any library as a floating tensor; integers and booleans take the default dtype.

    Raises
    ------
    DataError
        If it has anything but real numbers.

    Examples
    --------
    >>> as_real("x", [1.5, 2.0])
    tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    tensor = as_numbers(name, value)
    if tensor.is_complex():
        raise DataError(f"{name} holds complex numbers; give real ones")
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())


def as_observations(y: Tensor) -> Tensor:
    """Return observations as a floating tensor, shape ``(n,)`` or ``(n, D)``.

    Parameters
    ----------
    y : Tensor or array

    Raises
    ------
    DataError
        If they are no real numbers, there are none, or some are not finite.
    ShapeError
        If they are neither a vector nor a matrix.

    Examples
    --------
    >>> import numpy as np
    >>> as_observations(np.array([1.5, 2.0]))
    tensor([1.5000, 2.0000], dtype=torch.float64)
    """
    y = as_real("y", y)
    if y.dim() not in (1, 2):
        raise ShapeError(f"y must have shape (n,) or (n, D), not {tuple(y.shape)}")
    if y.numel() == 0:
        raise DataError(f"y has shape {tuple(y.shape)}, so it holds no observations")
    if not bool(y.isfinite().all()):
        raise DataError(f"y holds {int((~y.isfinite()).sum())} values that are NaN or infinite; leave them out")
    return y


def site_values(values: Draws | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the values of the sites, ``{site: (*batch, *shape)}``, which draws have as ``(chains, draws)``.

    Examples
    --------
    >>> import torch
    >>> site_values({"mean": torch.zeros(3, 2)})["mean"].shape
    torch.Size([3, 2])
    """
    return values.values(deterministic=False) if isinstance(values, Draws) else values
