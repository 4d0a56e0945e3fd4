"""Compiled code of likelihoods and chains, without which they run as tensor operations."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence

from bayeskit.errors import CompilationWarning
from bayeskit.extend import compiler, load_library


def load_or_warn(
    name: str, sources: Mapping[str, str], flags: Sequence[str], argument: tuple[str, int], what: str
) -> ctypes.CDLL | None:
    """Load a library as `load_library`; on failure, warn that `what`, in the plural, is slow, and return None.

    The `argument` of its functions is named by the function that tells its size, and has so many bytes.
    """
    if compiler() is None:
        problem = "no C++ compiler was found; install g++ or clang++"
    else:
        try:
            library = load_library(name, sources, flags)
            if getattr(library, argument[0])() == argument[1]:
                return library
            problem = "the compiled code takes other arguments than this version of bayeskit passes; reinstall bayeskit"
        except subprocess.SubprocessError as error:
            problem = f"{compiler()} failed ({str(getattr(error, 'stderr', '') or error)[:200]})"
        except OSError as error:
            problem = f"the compiled code cannot be stored or loaded ({error})"
    warnings.warn(
        f"{what} run as tensor operations, many times slower than compiled code: {problem}",
        CompilationWarning,
        stacklevel=_level_of_caller(),
    )
    return None


def _level_of_caller() -> int:
    """Return the stack level of the first caller outside bayeskit and torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("bayeskit", "torch"):
        frame, level = frame.f_back, level + 1
    return level
