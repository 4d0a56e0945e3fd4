"""Checks and conversions of settings and data from users."""

from __future__ import annotations

import datetime
import difflib
import operator
import os
import sys
import warnings
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit.errors import DataError, SettingsError, UnknownNameError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

# Settings from users.

#: Number of names beyond which an error with a suggestion does not list them, and of suggestions.
_MANY, _NEAREST = 8, 3

#: Bytes of a number in double precision.
_BYTES = 8

#: Steps that take a year at three microseconds each.
_MOST_STEPS = 10**13

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def warn_user(message: str, category: type[Warning]) -> None:
    """Issue a warning at the line of the caller outside the package, however deep inside it is found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any library as ``int``; raise ``SettingsError`` for others, and below ``least``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise SettingsError(f"{name} must be a whole number such as {max(least or 0, 4)}, not {value!r}")
    if least is not None and number < least:
        raise SettingsError(f"{name} must be at least {least}, not {number}")
    return number


def affordable(name: str, steps: int) -> int:
    """Return a number of steps; raise ``SettingsError`` for more than any machine takes in a year."""
    if steps > _MOST_STEPS:
        raise SettingsError(f"{name} = {float(steps):.1e} steps would take more than a year; ask for fewer")
    return steps


def check_memory(name: str, count: int, each: int = _BYTES) -> None:
    """Raise ``SettingsError`` if so many things, of so many bytes each, do not fit into the memory of the machine."""
    if count * each > _memory():
        raise SettingsError(
            f"{name}={count:.3g} needs at least {count * each / 1e9:,.0f} GB, and this machine has "
            f"{_memory() / 1e9:,.0f} GB; ask for fewer"
        )


@cache
def _memory() -> float:
    """Return the bytes of memory of the machine, or infinity where that is not known."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return float("inf")


def real_number(name: str, value: Any, domain: str = "") -> float:
    """Return a number of any library as ``float``; raise ``SettingsError`` for others, and outside of a domain.

    The domain is an interval such as ``"(0, 1]"``, without its ends where they have round brackets.
    """
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(getattr(value, "detach", lambda: value)())
    except (OverflowError, TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise SettingsError(f"{name} must be a number{f' in {domain}' if domain else ''}, not {value!r}")
    if domain:
        low, high = map(float, domain[1:-1].split(","))
        above = low < number or (domain[0] == "[" and low == number)
        if not (above and (number < high or (domain[-1] == "]" and number == high))):
            raise SettingsError(f"{name} must lie in {domain}, not {number:g}")
    return number


def unknown_name(what: str, name: str, known: Collection[str]) -> UnknownNameError:
    """Return the error for a name that a registry lacks, with the nearest names that it has."""
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, _NEAREST, 0.4)
    likely = difflib.get_close_matches(str(name).lower(), by_lower, _NEAREST, 0.7)
    nearest = [repr(by_lower[k]) for k in likely or close[:1]]
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    listed = "" if nearest and len(known) > _MANY else f" Known names: {', '.join(known)}"
    return UnknownNameError(f"no {what} is called {name!r}{hint}{listed}")


# Data from users: tensors, arrays, lists, columns of tables.


def as_numbers(name: str, value: Any, labels: tuple[Any, ...] | None = None) -> Tensor:
    """Return data of any library as a tensor, and tensors as they are; raise ``DataError`` if not numbers.

    Whole numbers become 64 bits wide. Categories become their codes, or places among ``labels`` if these are given.
    Missing numbers, and masked elements, are NaN.
    """
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value
    remedy = "give a tensor, an array or a list of numbers"
    try:
        array = _as_array(name, value, labels)
        if array.dtype == object and array.size and (kind := _not_a_number(array.flat)):
            raise DataError(f"{name} {kind}")
        if array.dtype == object and array.ndim:  # columns of several types, or with None for missing values
            whole = all(isinstance(item, (bool, np.bool_)) for item in array.flat)
            array = array.astype(np.bool_ if whole else np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} cannot be read as numbers ({error}); {remedy}") from error
    if array.dtype.kind in "mM":
        raise DataError(f"{name} holds dates or times ({array.dtype.name}), {_DAYS}")
    if array.dtype.kind in "SU" and array.ndim and array.size:
        raise DataError(f"{name} {_texts(array.flat[0])}")
    if array.dtype.kind not in "biuf" or array.dtype == np.longdouble:
        raise DataError(f"{name} is {_kind(value, array)}, not numbers; {remedy}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(f"{name} has {array.max()}, above the whole numbers of torch; give a tensor of real numbers")
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array, order="C", copy=True, dtype=array.dtype.newbyteorder("=")))


_DAYS = "not numbers; give a tensor, an array or a list of numbers, such as the days since the first"


def _texts(example: Any) -> str:
    words = f"is an array of texts, such as {str(example)!r}, not numbers"
    return f"{words}; make them categories, by .astype('category'), whose codes are indices"


def _not_a_number(items: Iterable[Any]) -> str:
    """Return what the first text or date among objects is, and the remedy, or ""."""
    for item in items:
        if isinstance(item, (str, bytes)):
            return _texts(item)
        if isinstance(item, (datetime.date, datetime.timedelta)) or type(item).__name__ == "Period":
            return f"holds dates or times ({type(item).__name__}), {_DAYS}"
    return ""


def _as_array(name: str, value: Any, known: tuple[Any, ...] | None = None) -> np.ndarray:
    """Return data of NumPy, pandas, polars or Python as an array, with NaN for what is missing."""
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(value)
        return np.where(missing, np.nan, value.data) if missing.any() else value.data
    if (labels := labels_of(value, known)) is not None:
        place = {label: code for code, label in enumerate(labels if known is None else known)}
        used = set(value)
        if new := [label for label in labels if label not in place and label in used]:
            raise DataError(f"{name} has the category {new[0]!r}, and the model knows {', '.join(map(repr, place))}")
        codes = np.asarray([place.get(label, -1) for label in value], dtype=np.int64)
        if (missing := codes < 0).any():
            raise DataError(
                f"{name} has {int(missing.sum())} missing categories, the first in row {int(missing.argmax())}; leave "
                "out these rows, or make missing a category of its own"
            )
        return codes
    nullable = getattr(getattr(value, "dtype", None), "numpy_dtype", None)  # of pandas
    if nullable is not None and nullable.kind in "biuf":
        missing = value.isna()
        return value.to_numpy(dtype=float, na_value=np.nan) if missing.any() else value.to_numpy(dtype=nullable)
    return np.asarray(value)


def remedy_for_model(value: Any) -> str:
    """Return how an object that is no Pyro model becomes a target, if it is a model of another package."""
    package = type(value).__module__.partition(".")[0]
    if package in ("pymc", "bambi"):
        return "a model of PyMC or Bambi becomes a target by bk.Target.from_pymc(model)"
    return "make a target by bk.Target.from_pyro(model, *args)"


def labels_of(value: Any, known: tuple[Any, ...] | None = None) -> tuple[Any, ...] | None:
    """Return the categories of a column of pandas or polars in the order of their codes; None if it has none.

    Where labels are ``known``, texts of an array, a column or a list are categories as well.
    """
    dtype = getattr(value, "dtype", None)
    kind = type(dtype).__name__
    if kind in ("CategoricalDtype", "Enum"):
        return tuple(dtype.categories)  # type: ignore[union-attr]
    if kind == "Categorical":
        return tuple(sorted(set(value) - {None}))
    if known is None or isinstance(value, str) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) != 1:
        return None
    return tuple(dict.fromkeys(str(item) for item in value if isinstance(item, str))) or None


def _kind(value: Any, array: np.ndarray) -> str:
    return f"of type {type(value).__name__}" if array.ndim == 0 else f"an array of {array.dtype.name}"
