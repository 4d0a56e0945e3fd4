"""Data as they come from users: tensors, arrays, lists, columns of tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError


def as_numbers(name: str, value: Any) -> Tensor:
    """Return data of any library as a tensor; a tensor is returned as it is.

    Parameters
    ----------
    name : str
        Of the argument.
    value : Tensor, array, list of numbers, Series or DataFrame
        Python's own numbers become double precision, and arrays keep the precision that they have.

    Raises
    ------
    DataError
        If it has anything but numbers, or rows of different lengths.

    Examples
    --------
    >>> import numpy as np
    >>> from bayeskit._inputs import as_numbers
    >>> as_numbers("x", np.arange(3)), as_numbers("x", [[1.5, 2.0]])
    (tensor([0, 1, 2]), tensor([[1.5000, 2.0000]], dtype=torch.float64))
    """
    if isinstance(value, Tensor):
        return value
    remedy = "give a tensor, an array or a list of numbers"
    try:
        array = np.asarray(value)
        if array.dtype == object and array.ndim:  # columns of several kinds, or with None for what is missing
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} cannot be read as numbers ({error}); {remedy}") from error
    if array.dtype.kind not in "biuf" or array.dtype == np.longdouble:
        raise DataError(f"{name} is {_kind(value, array)}, not numbers; {remedy}")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array, order="C", copy=True, dtype=array.dtype.newbyteorder("=")))


def arrays_as_tensors(data: Any) -> Any:
    """Return arguments of a model with arrays and columns of tables as tensors, and everything else as it is.

    An array that meets a tensor in arithmetic loses the gradient without a word.
    """
    if isinstance(data, (np.ndarray, np.number)) or hasattr(data, "to_numpy"):
        try:
            return as_numbers("data", data)
        except DataError:
            return data  # of strings, for example
    return _within(arrays_as_tensors, data)


def lists_as_tensors(data: Any) -> Any:
    """Return arguments of a model with lists of numbers, nested ones too, as tensors."""
    if isinstance(data, (list, tuple)) and data:
        try:
            return as_numbers("data", data)
        except DataError:
            pass
    return _within(lists_as_tensors, data)


def _within(function: Any, data: Any) -> Any:
    """Apply a function to what plain containers hold; a container in which nothing changes is returned itself."""
    if type(data) is dict:
        changed: Any = {key: function(value) for key, value in data.items()}
        return data if all(changed[key] is data[key] for key in data) else changed
    if type(data) in (list, tuple):
        changed = type(data)(function(value) for value in data)
        return data if all(new is old for new, old in zip(changed, data, strict=True)) else changed
    return data


def _kind(value: Any, array: np.ndarray) -> str:
    return f"of type {type(value).__name__}" if array.ndim == 0 else f"an array of {array.dtype.name}"
