"""Self-contained HTML pages from templates."""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["rendered", "template_source"]


def rendered(template: str, **facts: Any) -> str:
    """Return a template filled with facts; every text is escaped."""
    return _environment().get_template(template).render(**facts)


def template_source(name: str) -> str:
    """Return the source of a template, a style sheet or a script."""
    return (files("bayeskit.core") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("bayeskit.core"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["formatted"] = _formatted
    environment.tests["finite"] = math.isfinite
    return environment


def _formatted(value: Any, spec: str) -> str:
    """Return a number as text, a dash if it is not finite."""
    return format(value, spec) if math.isfinite(value) else "–"
