"""Old import paths, which answer for one release with a warning that names the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["answer_to_old_paths"]


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


def answer_to_old_paths() -> None:
    """Let old paths be imported; a line of ``moved_modules.txt`` has the new modules, a colon, and the old ones."""
    for line in Path(__file__).with_name("moved_modules.txt").read_text(encoding="utf-8").splitlines():
        new, old = (["bayeskit." + name for name in part.split()] for part in line.split(":"))
        for name in old:
            sys.modules.setdefault(name, _Moved(name, new))
