"""What users hand over: numbers of any library, and values of a model's sites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayeskit.core.inputs import as_numbers, real_number
from bayeskit.draws import Draws
from bayeskit.errors import DataError, SettingsError

__all__ = ["as_real", "check_part", "prior_probabilities_of", "site_values"]


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
    See docs/how_to/errors.md
    """
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise SettingsError(f"{name} is {value!r:.80}; give {remedy}")


def prior_probabilities_of(sizes: Sequence[int], given: Mapping[int, float] | None) -> dict[int, float]:
    """Return the prior probability of each number of components, adding up to one; all the same by default.

    Raises
    ------
    SettingsError
        If they are not given for just these numbers, or are negative, infinite, or all zero.

    Examples
    --------
    >>> from bayeskit.models.discrete.inputs import prior_probabilities_of
    >>> prior_probabilities_of([2, 3], {2: 1, 3: 3})
    {2: 0.25, 3: 0.75}
    """
    weights = dict.fromkeys(sizes, 1.0) if given is None else given
    if not isinstance(weights, Mapping) or weights.keys() != set(sizes):
        raise SettingsError(f"prior_probabilities must give each of {sizes} a nonnegative number, not {weights}")
    numbers = {size: real_number(f"prior_probabilities[{size}]", weights[size]) for size in sizes}
    total = sum(numbers.values())
    if not all(0 <= number < math.inf for number in numbers.values()) or not 0 < total < math.inf:
        raise SettingsError(f"prior_probabilities must be finite and nonnegative, one above zero, not {numbers}")
    return {size: number / total for size, number in numbers.items()}
