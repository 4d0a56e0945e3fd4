"""The index of the gallery by question: titles, links and seconds of the pages that ``docs/questions.md`` names."""

from __future__ import annotations

import ast
import csv
import importlib
import re
from pathlib import Path
from typing import Any

import reference

from bayeskit import gallery

DOCNAME, MARK = "questions", "<!-- systems -->"
NAMED = re.compile(r"\[\[(\w+)\]\]")
MOST = 4  # pages shown of one module
TOPS = ("bayeskit.inference", "bayeskit.models", "bayeskit.workflows")


def seconds_of(table: Path) -> dict[str, str]:
    """Return the seconds of the pages that were timed, from the table that ``benchmarks/gallery_pages.py`` saves."""
    with table.open(newline="", encoding="utf-8") as file:
        return {row["page"]: f"{float(row['seconds']):.0f} s" for row in csv.DictReader(file) if row["seconds"]}


def link(name: str) -> str:
    """Return a link to a page of the gallery, by its title."""
    page = gallery.page(name)
    return f"[{page.title}](/gallery/{page.group}/{page.name})"


def names_used(path: Path) -> set[str]:
    """Return the identifiers of a script."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
    return found


def systems() -> dict[str, list[str]]:
    """Return the pages that use each module with public names, those that use most of its names first."""
    used = {page.name: names_used(page.path) for page in gallery.pages()}
    found = {}
    for room in (room for top in TOPS for room in reference.rooms_below(top)):
        names = set(reference.public_names(importlib.import_module(room)))
        found[room] = sorted((page for page in used if used[page] & names), key=lambda page: -len(used[page] & names))
    return found


def written(text: str, table: Path) -> str:
    """Return the text with a link and the seconds for each named page, and the table of modules."""
    seconds = seconds_of(table)

    def row(match: re.Match[str]) -> str:
        return ", ".join(filter(None, (link(match[1]), seconds.get(match[1]))))

    rows = [f"| `{room}` | {'; '.join(map(link, pages[:MOST]))} |" for room, pages in systems().items() if pages]
    return NAMED.sub(row, text).replace(MARK, "\n".join(["| module | pages |", "|---|---|", *rows]))


def connect(app: Any, table: Path) -> None:
    """Let a build write the index."""

    def write(app: Any, docname: str, source: list[str]) -> None:
        if docname == DOCNAME:
            source[0] = written(source[0], table)

    app.connect("source-read", write)
