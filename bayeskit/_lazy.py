"""Packages whose modules and names are imported when they are first used, so that a script loads what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["imported_when_used"]


def imported_when_used(package: str, modules: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package: of its own modules, and of names that stand in ``{name: module}``."""

    def __getattr__(name: str) -> Any:
        if modules is not None and name in modules:
            found = getattr(import_module(modules[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__
