"""Results as HTML, from templates: fragments of notebooks and self-contained pages."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from bayeskit._core.texts import number_and_error

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Environment


class Number(NamedTuple):
    """A number as it is shown, and its value, by which a table sorts."""

    text: str
    value: float


Cell = str | Number


class PageTable(NamedTuple):
    """A table; grey if it holds what should not be relied on."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    is_grey: bool = False
    note: str = ""


class Listed(NamedTuple):
    """Remarks under one heading, folded until they are asked for; each with the name of what it is about."""

    heading: str
    remarks: Sequence[tuple[str, str]]


def number(value: float, spec: str) -> Number:
    """Return a number to be shown in a format, as a dash if it is not finite."""
    return Number(format(value, spec) if math.isfinite(value) else "–", value)


def measured(value: float, error: float) -> tuple[Number, Number]:
    """Return a number and its standard error to be shown in neighbouring columns, to two digits of the error."""
    shown, spread = number_and_error(value, error)
    return Number(shown if math.isfinite(value) else "–", value), Number(spread or "–", error)


def warnings_listed(about: str, warnings: Sequence[str]) -> list[Listed]:
    """Return warnings of one result as remarks that unfold, nothing without any."""
    heading = f"{len(warnings)} warning{'s' * (len(warnings) > 1)}"
    return [Listed(heading, [(about, why) for why in warnings])] if warnings else []


def frame_table(caption: str, frame: pd.DataFrame, **formats: str) -> PageTable:
    """Return a data frame as a table, its numbers in the formats of their columns, by default to three digits."""
    rows: list[list[Cell]] = [
        [
            number(cast(float, value), formats.get(column, ".3g"))
            if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
            else {True: "yes", False: "no"}.get(value, str(value))
            for column, value in zip(frame.columns, row, strict=True)
        ]
        for row in frame.itertuples(index=False)
    ]
    return PageTable(caption, [str(column).replace("_", " ") for column in frame.columns], rows)


def result_html(
    headline: str,
    tables: Sequence[PageTable] = (),
    folded: Sequence[Listed] = (),
    *,
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return a result as a fragment for a notebook: what it says, tables, and remarks that unfold."""
    return rendered(
        "notebook.html", headline=headline, tables=tables, folded=folded, facts=facts or {}, notes=list(notes)
    )


def rendered(template: str, home: str = "bayeskit._core", **facts: Any) -> str:
    """Return a template filled with facts, one of a package that is its home or of this one; every text is escaped."""
    return _environment(home).get_template(template).render(**facts)


def template_source(name: str) -> str:
    """Return the source of a template, a style sheet or a script."""
    return (files("bayeskit._core") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment(home: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in dict.fromkeys((home, "bayeskit._core"))]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["sign"] = lambda text: str(text).replace("+-", "±")
    environment.tests["finite"] = math.isfinite
    return environment
