"""Conversion and validation of user inputs: array-like data and site values."""

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
    """Return array-like data as a float tensor; integers and bools get ``dtype`` or the default dtype."""
    tensor = as_numbers(name, value)
    if tensor.is_complex():
        raise DataError(f"{name} holds complex numbers; give real numbers")
    return tensor if tensor.is_floating_point() else tensor.to(dtype or torch.get_default_dtype())


def site_values(values: Draws | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the values of the sites, ``{site: (*batch, *shape)}``, with batch ``(chains, draws)`` for draws."""
    return values.values(deterministic=False) if isinstance(values, Draws) else values


def check_part(name: str, value: Any, method: str, remedy: str) -> None:
    """Raise SettingsError unless the object is an instance (not a class) with the method."""
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise SettingsError(f"{name} is {value!r:.80}; give {remedy}")


def prior_probabilities_of(sizes: Sequence[int], given: Mapping[int, float] | None) -> dict[int, float]:
    """Return normalized prior probabilities of the numbers of components in ``sizes``, default equal."""
    weights = dict.fromkeys(sizes, 1.0) if given is None else given
    if not isinstance(weights, Mapping) or weights.keys() != set(sizes):
        raise SettingsError(f"prior_probabilities must give each of {sizes} a nonnegative number, not {weights}")
    numbers = {size: real_number(f"prior_probabilities[{size}]", weights[size]) for size in sizes}
    total = sum(numbers.values())
    if not all(0 <= number < math.inf for number in numbers.values()) or not 0 < total < math.inf:
        raise SettingsError(f"prior_probabilities must be finite and nonnegative, one above zero, not {numbers}")
    return {size: number / total for size, number in numbers.items()}
