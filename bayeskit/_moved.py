"""Old import paths and names, which work for one release with a warning that gives the new name."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["answer_to_old_names", "answer_to_old_paths", "present_names"]


class _Moved(ModuleType):
    """A module that has moved; its names may be in several new modules, and may be private now."""

    def __init__(self, name: str, places: list[str]) -> None:
        super().__init__(name)
        self.__dict__["_places"] = places

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # tools that inspect all modules ask for such names, but use none
            for place in self.__dict__["_places"]:
                module = importlib.import_module(place)
                for found in (name, f"_{name}", _renamed().get((place, name), name)):
                    # Not what the module has imported: pickle asks all modules for such names.
                    if hasattr(module, found) and not isinstance(getattr(module, found), ModuleType):
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


@functools.cache
def _renamed() -> dict[tuple[str, str], str]:
    """Read ``renamed_names.txt``: a line has the module that defined a name, its old name, and its new one.

    The new name stands with its module if that is another one.
    """
    lines = Path(__file__).with_name("renamed_names.txt").read_text(encoding="utf-8").splitlines()
    return {(f"bayeskit.{module}", old): new for module, old, new in map(str.split, lines)}


def answer_to_old_names(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module, or for a package that exports names of the modules inside."""

    def __getattr__(name: str) -> Any:
        here = sys.modules[module]
        for (place, old), new in _renamed().items():
            if old == name and (place == module or place.startswith(f"{module}.")):
                home, _, last = new.rpartition(".")
                holder = importlib.import_module(f"bayeskit.{home}") if home else here
                if last in vars(holder):
                    change = f"is called {last} now" if last != name else "has moved"
                    message = f"{name} {change}; import {last} from {holder.__name__}"
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    return vars(holder)[last]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def present_names(name: str) -> list[str]:
    """Return the present names of an old name, module included, private ones last; nothing is imported."""
    module, _, last = name.rpartition(".")
    places = _places().get(module, [])
    renamed = [
        f"bayeskit.{new}" if "." in new else f"{place}.{new}"
        for place in [module, *places]
        for new in [_renamed().get((place, last))]
        if new is not None
    ]
    return [*renamed, *(f"{place}.{found}" for found in (last, f"_{last}") for place in places)]


def answer_to_old_paths() -> None:
    """Let old paths of modules be imported."""
    for name, places in _places().items():
        sys.modules.setdefault(name, _Moved(name, places))
