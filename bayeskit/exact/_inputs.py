"""Reading the shipped tables and checking what a user passes to a case builder."""

from __future__ import annotations

import csv
import math
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError


def read_table(file_name: str) -> dict[str, Tensor]:
    """Read a shipped comma-separated table.

    Parameters
    ----------
    file_name : str
        Name of a file in the folder ``bayeskit/exact/data``.

    Returns
    -------
    dict of str to Tensor
        One float64 tensor of shape ``(rows,)`` per column, in file order.
    """
    resource = files("bayeskit.exact").joinpath("data", file_name)
    header, *rows = list(csv.reader(resource.read_text(encoding="utf-8").splitlines()))
    columns = zip(*rows, strict=True)
    return {
        name: torch.tensor([float(entry) for entry in column], dtype=torch.float64)
        for name, column in zip(header, columns, strict=True)
    }


def finite_tensor(name: str, values: ArrayLike | Tensor, ndim: int) -> Tensor:
    """Return a float64 copy of ``values`` on the CPU, checked for shape and finiteness.

    Raises
    ------
    DataError
        If an entry is missing, infinite or no number, or there is none.
    ShapeError
        If the number of dimensions is not ``ndim``.
    """
    try:
        if isinstance(values, Tensor):
            tensor = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
        else:
            # By way of NumPy: torch would round a list of Python floats to its default dtype first.
            tensor = torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} cannot be read as an array of numbers: {error}") from error
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {ndim} dimension(s).")
    if tensor.numel() == 0:
        raise DataError(f"{name} is empty; pass at least one observation.")
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        position = tuple((~finite).nonzero()[0].tolist())
        raise DataError(f"{name} is not finite at index {position}; remove or impute that entry.")
    return tensor


def positive_scalar(name: str, value: float) -> Tensor:
    """Return ``value`` as a float64 tensor of shape ``()``.

    Raises
    ------
    SettingsError
        If it is not a finite number above zero.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} is {value!r}; it must be a number above zero.") from error
    if not (math.isfinite(number) and number > 0.0):
        raise SettingsError(f"{name} is {value}; it must be finite and above zero.")
    return torch.tensor(number, dtype=torch.float64)
