"""Names that are typed, checked without an import of torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from pathlib import Path

from bayeskit._core.inputs import unknown_name
from bayeskit.errors import SettingsError


def evidence_methods() -> set[str]:
    """Return the estimators in the package's source, so that a misspelt name is refused without torch."""
    files = (Path(__file__).parents[1] / "inference" / "evidence").glob("*.py")
    functions = [
        node for file in files for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)
    ]
    return {f.name for f in functions if any(ast.unparse(mark).startswith("estimator(") for mark in f.decorator_list)}


def checked_methods(text: str) -> str | list[str]:
    """Return the methods of the option, 'all' or names, each of which is known."""
    chosen = _names(text)
    if not chosen:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    if chosen == "all":
        return chosen
    # Where the command line is called from Python, other packages may have registered methods.
    loaded = sys.modules.get("bayeskit.inference.evidence")
    return _all_known("evidence method", chosen, evidence_methods() if loaded is None else loaded.METHODS)


def checked_cases(text: str) -> str | list[str]:
    from bayeskit.gallery._registry import EXACT_CASES

    loaded = sys.modules.get("bayeskit.exact")
    return _all_known("exact case", _names(text), EXACT_CASES if loaded is None else loaded.CASES)


def _all_known(what: str, chosen: str | list[str], known: Collection[str]) -> str | list[str]:
    for name in [] if isinstance(chosen, str) else chosen:
        if name not in known:
            raise unknown_name(what, name, known)
    return chosen


def _names(text: str) -> str | list[str]:
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
