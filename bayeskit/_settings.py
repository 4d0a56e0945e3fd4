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
