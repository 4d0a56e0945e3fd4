"""What users hand over: numbers of any library, and values of a model's sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit.draws import Draws
from bayeskit.errors import DataError, SettingsError


def as_real(name: str, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of any library in floating point.

    Parameters
    ----------
    name : str
        Of the argument.
    value : Tensor or array
    dtype : torch.dtype, optional
        Of integers and booleans; by default torch's default.

    Raises
    ------
    DataError
        If it has anything but real numbers.

    Examples
    --------
    >>> from bayeskit.models.discrete.inputs import as_real
    >>> as_real("x", [1.5, 2.0]), as_real("x", [1, 0])
    (tensor([1.5000, 2.0000], dtype=torch.float64), tensor([1., 0.]))
    """
    tensor = as_numbers(name, value)
    if tensor.is_complex():
        raise DataError(f"{name} holds complex numbers; give real ones")
    return tensor if tensor.is_floating_point() else tensor.to(dtype or torch.get_default_dtype())


def site_values(values: Draws | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the values of the sites, ``{site: (*batch, *shape)}``, which draws have as ``(chains, draws)``.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.inputs import site_values
    >>> site_values({"mean": torch.zeros(3, 2)})["mean"].shape
    torch.Size([3, 2])
    """
    return values.values(deterministic=False) if isinstance(values, Draws) else values


def check_part(name: str, value: Any, method: str, remedy: str) -> None:
    """Raise SettingsError unless a part of a model is an object that has a method; a class is none.

    Examples
    --------
    >>> from bayeskit.models.discrete.inputs import check_part
    >>> check_part("prior", 3, "largest", "NumberOfChanges.up_to(3)")
    Traceback (most recent call last):
    bayeskit.errors.SettingsError: prior is 3; give NumberOfChanges.up_to(3)
    """
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise SettingsError(f"{name} is {value!r:.80}; give {remedy}")
