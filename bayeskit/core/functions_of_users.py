"""Errors of functions of users, shown with the user's own line."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from bayeskit.errors import BayeskitError, ModelError

__all__ = ["is_of_a_library", "line_of", "lines_named", "words_of"]

#: Libraries whose lines are no lines of the user, beside Python's own, and folders of the package.
_LIBRARIES = ("torch", "pyro", "numpy", "scipy", "pandas", "polars", "functorch", "opt_einsum")
_FOLDERS = ("core", "logdensity", "inference")  # models of the package count as the user's


@contextmanager
def lines_named(what: str) -> Iterator[None]:
    """Raise an error of the user's function ``what`` as a ``ModelError`` that shows it with file and line.

    Errors of the package pass, and those that no line of the user has led to.
    """
    try:
        yield
    except BayeskitError:
        raise
    except Exception as error:
        place = line_of(error)
        if not place:
            raise
        raise ModelError(f"{what} fails{place}: {words_of(error)}") from error


def line_of(error: BaseException) -> str:
    """Return the last line outside of libraries that an error has passed: file, line, function and text; or ``""``."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if not is_of_a_library(frame.filename):
            text = f" ({frame.line})" if frame.line else ""
            return f" in {frame.filename}, line {frame.lineno}, in {frame.name}{text}"
    return ""


def words_of(error: BaseException) -> str:
    """Return the type and the message of an error, without the shapes of all sites that Pyro adds."""
    message = str(error).partition("Trace Shapes:")[0].strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_of_a_library(filename: str) -> bool:
    """Tell whether a line of code belongs to Python, to a library that models are made of, or to the package."""
    if filename.startswith(("<frozen", "<eval_with_key", "<__array_function__")):
        return True
    libraries, python, packages = _folders()
    return filename.startswith(libraries) or (filename.startswith(python) and not filename.startswith(packages))


@cache
def _folders() -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the folders of libraries, of Python, and those inside of Python's where packages are installed."""
    found = [spec.submodule_search_locations for name in _LIBRARIES if (spec := find_spec(name)) is not None]
    own = [str(Path(__file__).parents[1] / folder) for folder in _FOLDERS]
    packages = (sysconfig.get_path("purelib"), "site-packages", "dist-packages")
    python = sysconfig.get_path("stdlib")
    inside = (packages[0], *(f"{python}/{name}" for name in packages[1:]))
    return (*(folder for folders in found for folder in folders or ()), *own), python, inside
