"""Settings as they come from users."""

from __future__ import annotations

import operator
from typing import Any

from bayeskit.errors import SettingsError


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any library as Python's own.

    Parameters
    ----------
    name : str
        Of the setting.
    value : int
        NumPy's integers and a tensor of one are fine.
    least : int, optional

    Raises
    ------
    SettingsError
        If ``value`` is no integer, not even ``4.0``, or below ``least``.

    Examples
    --------
    >>> import numpy as np
    >>> from bayeskit._settings import whole_number
    >>> whole_number("num_chains", np.int64(4), least=1)
    4
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise SettingsError(f"{name} must be a whole number such as {max(least or 0, 4)}, not {value!r}")
    if least is not None and number < least:
        raise SettingsError(f"{name} must be at least {least}, not {number}")
    return number


def real_number(name: str, value: Any, between: tuple[float, float] | None = None) -> float:
    """Return a number of any library as Python's own.

    Parameters
    ----------
    name : str
        Of the setting.
    value : float
        Integers, NumPy's numbers and a tensor of one are fine.
    between : (float, float), optional
        The number must lie between these, both excluded.

    Raises
    ------
    SettingsError
        If ``value`` is no number, not even ``"0.8"``, or does not lie there.

    Examples
    --------
    >>> import numpy as np
    >>> from bayeskit._settings import real_number
    >>> real_number("target_acceptance", np.float32(0.75), between=(0, 1))
    0.75
    """
    where = "" if between is None else f" in ({between[0]:g}, {between[1]:g})"
    try:
        number = None if isinstance(value, (bool, str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise SettingsError(f"{name} must be a number{where}, not {value!r}")
    if between is not None and not between[0] < number < between[1]:
        raise SettingsError(f"{name} must lie{where}, not {number:g}")
    return number
