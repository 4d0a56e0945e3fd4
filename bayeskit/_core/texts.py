"""Short texts: numbers to the digits that their errors leave, and objects without the contents of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

_SIGNIFICANT = 15  # decimal digits that a float holds
_DECIMALS = 8  # at most; more are noise to a reader
_LONGEST = 60  # characters of a value in a short text


def with_error(value: float, error: float, sign: str = "+-") -> str:
    """Return a number and its standard error, both to two digits of the error and the number to eight decimals at most.

    Parameters
    ----------
    value, error : float
        An unknown (NaN) or infinite error leaves four decimals, and an unknown one is left out.
    sign : str, default "+-"
        Stands between the two.

    Examples
    --------
    >>> with_error(-6468.90443, 0.0027), with_error(-7.65190123, 3.1e-14), with_error(-6468.1155, 12.3)
    ('-6468.9044 +- 0.0027', '-7.65190123 +- 3.1e-14', '-6468 +- 12')
    >>> with_error(-2.5, 0.0), with_error(-2.5, float("nan"))
    ('-2.5000 +- 0', '-2.5000')
    """
    number, spread = number_and_error(value, error)
    return f"{number} {sign} {spread}" if spread else number


def number_and_error(value: float, error: float) -> tuple[str, str]:
    """Return the texts of a number and of its standard error, the latter empty if it is unknown."""
    if not math.isfinite(value):
        return str(value), ""
    if value == error == 0:
        return "0", ""
    if not (math.isfinite(error) and error > 0):
        number = f"{value:z.4f}" if value == 0 or 0.01 <= abs(value) < 1e12 else f"{value:.4g}"
        return number, "" if math.isnan(error) else f"{error:g}"
    decimals = max(0, 1 - int(f"{error:.1e}".partition("e")[2]))  # of the error as rounded: 0.0996 is 0.10
    spread = f"{error:.{decimals}f}" if decimals <= 5 and error < 1e6 else f"{error:.1e}"
    if abs(value) >= 1e12:
        return f"{value:.{_SIGNIFICANT}g}", spread
    if error < abs(value) < 10.0**-_DECIMALS:
        return f"{value:.1e}", spread
    before_the_point = max(1, math.floor(math.log10(abs(value))) + 1) if value else 1
    return f"{value:z.{min(decimals, _DECIMALS, _SIGNIFICANT - before_the_point)}f}", spread


def short_repr(self: Any) -> str:
    """Return the name and the fields of a dataclass in one line, tensors by their shapes."""
    shown = ", ".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self) if f.repr)
    return f"{type(self).__name__}({shown})"


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        # One number is shown; more of them are counted.
        return f"{value.item():.6g}" if value.ndim == 0 else f"{type(value).__name__}{tuple(value.shape)}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    text = repr(value) if isinstance(value, str | bool | int | type(None)) else ""
    if not text and isinstance(value, Mapping):
        return f"{{{', '.join(map(str, list(value)[:5]))}{', ...' if len(value) > 5 else ''}}}"
    if not text and isinstance(value, list | tuple | set | frozenset):
        inside = ", ".join(_short(one) for one in value)
        return f"({inside})" if len(inside) <= _LONGEST else f"{len(value)} items"
    text = text or repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
