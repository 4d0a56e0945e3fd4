"""Conversion and validation of user inputs: array-like data and site values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError
from bayeskit.extend import Draws, as_numbers, real_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Shape = torch.Size | list[int] | tuple[int, ...]


def as_real(name: str, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return array-like data as a float tensor; integers and bools get ``dtype`` or the default dtype."""
    tensor = as_numbers(name, value)
    if tensor.is_complex():
        raise DataError(f"{name} holds complex numbers; give real numbers")
    return tensor if tensor.is_floating_point() else tensor.to(dtype or torch.get_default_dtype())


def finite_values(name: str, values: Tensor) -> Tensor:
    """Return the values, or raise DataError with the number of those that are not finite."""
    bad = ~values.isfinite()
    if bad.any():
        raise DataError(f"{int(bad.sum())} of {bad.numel()} values of {name} are not finite")
    return values


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


def digits_of(numbers: Tensor | int, base: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the digits of whole numbers ``(m,)``, or of ``0, ..., numbers - 1``, lowest first: ``(m, length)``."""
    numbers = torch.arange(numbers, device=device) if isinstance(numbers, int) else numbers
    return numbers.unsqueeze(-1) // base ** torch.arange(length, device=numbers.device) % base


def log_dirichlet_moment(counts: Tensor, concentration: Tensor) -> Tensor:
    """Return the log Dirichlet mean of the product of probabilities to the power of counts (last dimension)."""
    powers = (torch.lgamma(counts + concentration) - torch.lgamma(concentration)).sum(-1)
    total = concentration.sum(-1)
    return powers + torch.lgamma(total) - torch.lgamma(total + counts.sum(-1))


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a new figure, in inches, that is not registered with ``pyplot``."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()
