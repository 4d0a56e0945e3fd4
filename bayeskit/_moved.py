"""Old import paths, which answer for one release with a warning that names the new one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["answer_to_old_paths", "present_names"]


class _Moved(ModuleType):
    """A module that has moved; its names may lie in several new ones, and may have become private."""

    def __init__(self, name: str, places: list[str]) -> None:
        super().__init__(name)
        self.__dict__["_places"] = places

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # whoever looks through all modules asks for such names, and uses nothing
            for place in self.__dict__["_places"]:
                module = importlib.import_module(place)
                for found in (name, f"_{name}"):
                    if hasattr(module, found):
                        message = f"{self.__name__} has moved; import {found} from {place}"
                        warnings.warn(message, DeprecationWarning, stacklevel=2)
                        return getattr(module, found)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


@functools.cache
def _places() -> dict[str, list[str]]:
    """Read ``moved_modules.txt``: a line has the new modules, a colon, and the old ones."""
    places: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("moved_modules.txt").read_text(encoding="utf-8").splitlines():
        new, old = (["bayeskit." + name for name in part.split()] for part in line.split(":"))
        places |= dict.fromkeys(old, new)
    return places


def present_names(name: str) -> list[str]:
    """Return what an old name, module included, may be called now, private names last; nothing is imported.

    Examples
    --------
    >>> present_names("bayeskit.target.Target")
    ['bayeskit.logdensity.target.Target', 'bayeskit.logdensity.target._Target']
    """
    module, _, last = name.rpartition(".")
    return [f"{place}.{found}" for found in (last, f"_{last}") for place in _places().get(module, ())]


def answer_to_old_paths() -> None:
    """Let old paths of modules be imported."""
    for name, places in _places().items():
        sys.modules.setdefault(name, _Moved(name, places))
