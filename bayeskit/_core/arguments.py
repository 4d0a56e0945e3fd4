"""Arguments of models as tensors: arrays, lists, columns and data frames of pandas and polars."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.inputs import as_numbers, labels_of
from bayeskit.errors import DataError

_WHOLE = "int8 int16 int32 uint8 uint16 uint32 uint64".split()  # what becomes 64 bits wide


Categories = Mapping[str, tuple[Any, ...]]
"""Labels of categories in the order of their codes, by name of argument, key or column."""


def _is_frame(value: Any) -> bool:
    """Tell whether a value is a data frame of pandas or polars."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


_REDUCTIONS = frozenset("mean std var sum prod median min max amin amax quantile norm".split())
#: Attributes of a tensor that stay what they are where a column has their name.
_OF_TENSORS = frozenset("columns tensors converted of to shape dtype device grad requires_grad data layout dim".split())


class Frame(Tensor):
    """A data frame as a model receives it: a matrix ``(rows, columns)`` whose columns have names.

    ``frame["x"]`` and ``frame.x`` are columns ``(rows,)``, ``frame[["x", "z"]]`` a matrix of two; all else is as for
    any tensor. A column that holds no numbers is refused where it is used, by its name.
    """

    columns: dict[str, Tensor | DataError]

    @staticmethod
    def of(columns: Mapping[str, Tensor | DataError]) -> Frame:
        """Make a frame of columns; those that cannot be read are errors."""
        numbers = [column for column in columns.values() if isinstance(column, Tensor)]
        frame = torch.stack(_of_one_dtype(numbers), -1).as_subclass(Frame)
        frame.columns = dict(columns)
        return frame

    def converted(self, convert: Any) -> Frame:
        """Return the frame with a function applied to its columns."""
        columns = {name: convert(x) if isinstance(x, Tensor) else x for name, x in self.columns.items()}
        changed = any(new is not self.columns[name] for name, new in columns.items())
        return Frame.of(columns) if changed else self

    def __getitem__(self, key: Any) -> Tensor:  # type: ignore[override]
        if isinstance(key, str):
            return self._column(key)
        if isinstance(key, list) and key and all(isinstance(name, str) for name in key):
            return torch.stack(_of_one_dtype([self._column(name) for name in key]), -1)
        if isinstance(key, slice) or (isinstance(key, Tensor) and key.dim() == 1):
            return self.converted(lambda column: column[key])  # rows
        return super().__getitem__(key)

    def to(self, *args: Any, **kwargs: Any) -> Frame:
        """Return the frame with its columns elsewhere or in another dtype, as ``Tensor.to``."""
        return self.converted(lambda column: column.to(*args, **kwargs))

    def __getattribute__(self, name: str) -> Any:
        # A column that is called as an attribute of tensors, such as H, is meant.
        if not name.startswith("_") and name not in _OF_TENSORS and name in self.__dict__.get("columns", ()):
            return self._column(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(f"a data frame has no column {name!r}")

    def __contains__(self, name: object) -> bool:
        return name in self.columns if isinstance(name, str) else super().__contains__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frame:
        return self.converted(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Frame.of, (self.columns,)

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            raise DataError(f"the data frame has no column {name!r}; it has {', '.join(map(repr, self.columns))}")
        column = self.columns[name]
        if isinstance(column, DataError):
            raise column
        return column

    @property
    def tensors(self) -> list[Tensor]:
        """The columns that hold numbers."""
        return [column for column in self.columns.values() if isinstance(column, Tensor)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Compute with the matrix of all columns."""
        frames = list[Frame]()

        def matrix(value: Any) -> Any:
            if isinstance(value, Frame):
                frames.append(value)
                return value.as_subclass(Tensor)
            return type(value)(map(matrix, value)) if type(value) in (list, tuple) else value

        name = getattr(func, "__name__", "")
        if name in _REDUCTIONS and not kwargs and len(args) == 1 and len(getattr(args[0], "columns", ())) > 1:
            raise DataError(
                f".{name}() of a data frame would be one number of all columns; write .{name}(0) for one of each column"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*map(matrix, args), **{name: matrix(value) for name, value in (kwargs or {}).items()})
        refused = [column for frame in frames for column in vars(frame).get("columns", {}).values()]
        for column in refused if isinstance(result, Tensor) else ():
            if isinstance(column, DataError):
                raise column
        return result


def _of_one_dtype(columns: list[Tensor]) -> list[Tensor]:
    """Return columns in one dtype, that of real numbers if there are several."""
    dtypes = {column.dtype for column in columns}
    if len(dtypes) <= 1:
        return columns
    real = [dtype for dtype in dtypes if dtype.is_floating_point]
    common = torch.float64 if not real or torch.float64 in real else torch.float32
    return [column.to(common) for column in columns]


def bare(name: str) -> str:
    """Return the name of an argument from what it is called in messages."""
    return name.removeprefix("argument ").strip("'")


def _as_frame(name: str, value: Any, categories: Categories) -> Frame:
    """Return a data frame as tensors; raise ``DataError`` for columns without names, or of one name."""
    names = list(value.columns)
    if unnamed := [column for column in names if not isinstance(column, str)]:
        raise DataError(
            f"{name} is a data frame whose columns are called {', '.join(map(str, unnamed[:4]))}, which a tensor would "
            "take for rows; give the columns names, or pass a matrix, by .to_numpy()"
        )
    if twice := sorted({column for column in names if names.count(column) > 1}):
        raise DataError(f"{name} is a data frame with several columns called {twice[0]!r}; give each its own name")
    if not names:
        raise DataError(f"{name} is a data frame without columns; give at least one")
    columns: dict[str, Tensor | DataError] = {}
    for column in names:
        try:
            columns[column] = as_numbers(f"column {column!r} of {name}", value[column], categories.get(column))
            if columns[column].dim() != 1:  # type: ignore[union-attr]
                raise DataError(f"column {column!r} of {name} holds arrays, not numbers; give a column to each number")
        except DataError as error:
            columns[column] = error
    if all(isinstance(column, DataError) for column in columns.values()):
        raise next(column for column in columns.values() if isinstance(column, DataError))
    return Frame.of(columns)


def categories_in(arguments: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the labels of categories, in the order of their codes, by argument, or by key or column within one."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found |= categories_in(value)
        elif _is_frame(value):
            found |= categories_in({column: value[column] for column in value.columns})
        elif (labels := labels_of(value)) is not None:
            found[name] = labels
    return found


def arrays_as_tensors(data: Any, name: str = "data", categories: Categories | None = None) -> Any:
    """Return an argument of a model with arrays, columns and data frames as tensors, and everything else as it is.

    Whole numbers become 64 bits wide: torch takes ``uint8`` for a mask. Categories, and texts, have the codes of
    ``categories``, by name of argument, key or column, where these are given.
    """
    known = categories or {}
    if isinstance(data, torch.Tensor):
        return data.long() if str(data.dtype).removeprefix("torch.") in _WHOLE else data
    if _is_frame(data):
        return _as_frame(name, data, known)
    if isinstance(data, Iterator):
        raise DataError(f"{name} is an iterator ({type(data).__name__}), which is used up after one run; give a list")
    # An array that meets a tensor in arithmetic loses the gradient silently.
    if not isinstance(data, Mapping) and labels_of(data, known.get(bare(name))) is not None:
        return as_numbers(name, data, known.get(bare(name)))
    if hasattr(data, "__array__") or hasattr(data, "to_numpy"):
        array = np.asarray(data)
        if array.dtype.kind in "OUST" and any(isinstance(item, (str, bytes)) for item in array.flat):
            return data  # names, which the model may use
        return as_numbers(name, data)
    return _within(lambda item, key=None: arrays_as_tensors(item, key or name, known), data)


def in_precision(data: Any, dtype: torch.dtype) -> Any:
    """Return an argument of a model with tensors of real numbers in a dtype, and everything else as it is."""
    if isinstance(data, Frame):
        return data.converted(lambda column: in_precision(column, dtype))
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    return _within(lambda item, key=None: in_precision(item, dtype), data)


def lists_as_tensors(data: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Any:
    """Return an argument of a model with lists of numbers, nested ones too, as tensors.

    Those of real numbers are in double precision, or of a ``dtype``.
    """
    if (isinstance(data, list) or (isinstance(data, tuple) and data)) and _holds_plain_items(data):
        try:
            numbers = as_numbers("data", data)
            return numbers.to(device, dtype if numbers.is_floating_point() else None)
        except DataError:
            pass
    return _within(lambda item, key=None: lists_as_tensors(item, dtype, device), data)


def _holds_plain_items(data: Any) -> bool:
    """Tell whether a list has no tensors and arrays in it, which are arguments of their own."""
    if isinstance(data, (list, tuple)):
        return not hasattr(data, "_fields") and all(map(_holds_plain_items, data))
    return not isinstance(data, (Tensor, np.ndarray))


def _within(function: Any, data: Any) -> Any:
    """Apply a function to the items of a container, and their keys; an unchanged container is returned itself."""
    if isinstance(data, (list, tuple)):
        changed = [function(value) for value in data]
        if all(new is old for new, old in zip(changed, data, strict=True)):
            return data
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    has_fields = dataclasses.is_dataclass(data) and not inspect.isclass(data) and hasattr(data, "__dict__")
    if has_fields or isinstance(data, (dict, SimpleNamespace)):
        items = data if isinstance(data, dict) else vars(data)
        new_items = {key: function(value, key=key) for key, value in items.items()}
        if all(new_items[key] is items[key] for key in items):
            return data
        found = copy.copy(data)
        (found if isinstance(found, dict) else vars(found)).update(new_items)
        return found
    return data
