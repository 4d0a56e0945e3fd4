"""Packages whose modules and names are imported when they are first used, so that a script loads what it needs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def imported_when_used(package: str, modules: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package: of its own modules, and of names that stand in ``{name: module}``."""

    def __getattr__(name: str) -> Any:
        if modules is not None and name in modules and modules[name] != package:
            found = getattr(import_module(modules[name]), name)
        elif not name.startswith("_") and _has_module(package, name):
            found = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    return __getattr__


def _has_module(package: str, name: str) -> bool:
    return "__path__" in vars(sys.modules[package]) and find_spec(f"{package}.{name}") is not None


def names_of_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module from its stub, the one list of its names.

    The stub ``file`` with the suffix ``.pyi`` consists of lines ``from module import name as name``, which type
    checkers read as well. A name is imported when it is first used.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    names = sorted(modules)
    return imported_when_used(package, modules), lambda: names, names
