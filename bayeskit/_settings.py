"""Settings as they come from users."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection
from typing import Any

from bayeskit.errors import SettingsError, UnknownNameError

#: More names than these are not listed beside a suggestion.
_MANY = 30


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


def unknown_name(what: str, name: str, known: Collection[str]) -> UnknownNameError:
    """Return the error for a name that a registry lacks, with the nearest one that it has.

    Examples
    --------
    >>> from bayeskit._settings import unknown_name
    >>> print(unknown_name("fruit", "aple", ["apple", "pear"]).args[0])
    no fruit is called 'aple'; did you mean 'apple'? Known are: apple, pear
    """
    nearest = difflib.get_close_matches(str(name).lower(), [k.lower() for k in known], 1, 0.4)
    hint = next((f"; did you mean {k!r}?" for k in known if nearest and k.lower() == nearest[0]), ".")
    listed = "" if nearest and len(known) > _MANY else f" Known are: {', '.join(known)}"
    return UnknownNameError(f"no {what} is called {name!r}{hint}{listed}")
