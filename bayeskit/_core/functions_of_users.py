"""Errors of functions of users, shown with the user's own line."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

import numpy as np
from torch import Tensor

from bayeskit.errors import BayeskitError, ModelError

#: Libraries whose lines are no lines of the user, beside Python's own, and folders of the package.
_LIBRARIES = ("torch", "pyro", "numpy", "scipy", "pandas", "polars", "functorch", "opt_einsum")
_AS_TENSORS = "arrays, columns and data frames reach a model as tensors; use the functions of torch"
_OF_PANDAS = frozenset("to_numpy values loc iloc groupby cat map apply nunique rename merge".split())
#: Remedies by words of messages.
_REMEDIES = {
    "Can't call numpy() on Tensor that requires grad": "NumPy cannot compute with sampled values; make its arrays "
    "tensors, or pass them as arguments of the model, and use the functions of torch",
    "Cannot interpret 'torch.": "columns of pandas cannot meet sampled values; pass them as arguments of the model",
    "expected np.ndarray (got Tensor)": _AS_TENSORS,
    "builtin_function_or_method": _AS_TENSORS,
    "Expected mask to be": "a mask is a tensor of booleans, as of mask.bool()",
    "tensors used as indices must be": "indices are whole numbers, as of index.long()",
}
_FOLDERS = ("_core", "_compiler", "_logdensity", "inference")  # models of the package count as the user's


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


@contextmanager
def density_may_fail() -> Iterator[None]:
    """Pass over errors of a density at a distant point, which say nothing against a run; MemoryError for any of memory.

    What a judgement cannot look at for want of memory, it must not count as sound.
    """
    try:
        yield
    except (BayeskitError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if is_for_want_of_memory(error):
            raise MemoryError(str(error)) from error


def is_for_want_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory could not be had, in the words of Python, torch or C++."""
    said = ("allocate memory", "not enough memory", "bad_alloc", "out of memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in said)


def line_of(error: BaseException) -> str:
    """Return the last line outside of libraries that an error has passed: file, line, function and text; or ``""``.

    Lines of installed packages count where there are no others.
    """
    frames = [frame for frame in reversed(extract_tb(error.__traceback__)) if not is_of_a_library(frame.filename)]
    installed = _folders()[2]
    for frame in sorted(frames, key=lambda frame: frame.filename.startswith(installed)):
        text = f" ({frame.line})" if frame.line else ""
        return f" in {frame.filename}, line {frame.lineno}, in {frame.name}{text}"
    return ""


def depth_of(error: BaseException) -> tuple[int, ...]:
    """Return the numbers of the user's lines that an error has passed, which tell how far a function has got."""
    return tuple(frame.lineno or 0 for frame in extract_tb(error.__traceback__) if not is_of_a_library(frame.filename))


_OF_NUMPYRO = "a model of NumPyro becomes a target by bk.Target.from_numpyro(model, *args)"


def words_of(error: BaseException) -> str:
    """Return the type and the message of an error, without the shapes that Pyro adds, and a remedy that is known."""
    message = str(error).partition("Trace Shapes:")[0].strip()
    remedy = remedy_of(error)
    words = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{words}. Remedy: {remedy}" if remedy else words


def remedy_of(error: BaseException) -> str:
    """Return what helps against an error of a library that does not say it, or ``""``."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Tensor):
        return _AS_TENSORS if hasattr(np.ndarray, error.name or "") or error.name in _OF_PANDAS else ""
    if isinstance(error, AssertionError) and (frames := extract_tb(error.__traceback__)):
        return _OF_NUMPYRO if "numpyro" in Path(frames[-1].filename).parts else ""
    return next((remedy for text, remedy in _REMEDIES.items() if text in str(error)), "")


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
