"""The pieces of a self-contained HTML page: tables, style and the script that sorts."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["cell", "escape", "number", "pairs", "table", "whole_page"]


def escape(text: object) -> str:
    """Return text that a page shows as it is."""
    return html.escape(str(text), quote=True)


def cell(text: str) -> str:
    """Return one cell of text."""
    return f"<td>{escape(text)}</td>"


def number(value: Any, spec: str) -> str:
    """Return one right-aligned cell; a dash where ``value`` is not finite."""
    finite = math.isfinite(value)
    text = format(value, spec) if finite else "–"
    return f'<td class="number" data-sort="{value if finite else ""}">{text}</td>'


def table(header: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """Return a table that sorts itself by the column whose head is clicked; rows are ``(class, cells)``."""
    head = "".join(f'<th scope="col" tabindex="0">{escape(h.replace("_", "-"))}</th>' for h in header)
    body = "".join(f'<tr class="{flag}">{"".join(cells)}</tr>' for flag, cells in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table class="sortable">{inner}</table></div>'


def pairs(facts: Mapping[str, Any]) -> str:
    """Return a table of two columns."""
    rows = "".join(
        f'<tr><th scope="row">{escape(k.replace("_", " "))}</th>{cell(str(v))}</tr>' for k, v in facts.items()
    )
    return f'<div class="wide"><table>{rows}</table></div>'


def whole_page(title: str, sections: Iterable[str]) -> str:
    """Return the document; ``title`` is plain text, the sections are HTML."""
    return _PAGE.format(title=escape(title), style=_STYLE, script=_SCRIPT, body="\n".join(sections))


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; max-width: 56rem;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; }
.headline { border-left: .3rem solid #0072B2; padding-left: 1rem; }
.headline h2 { margin-top: 0; }
.value { font-size: 2.2rem; font-weight: 600; margin: 0; font-variant-numeric: tabular-nums; }
.value .error { font-size: 1.3rem; font-weight: 400; white-space: nowrap; }
.bad { color: #A63600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top; }
.sortable th { cursor: pointer; border-bottom: 2px solid #444; }
.sortable th[aria-sort=ascending]::after { content: " \\2191"; }
.sortable th[aria-sort=descending]::after { content: " \\2193"; }
.number { text-align: right; white-space: nowrap; }
tr.untrusted td { color: #A63600; }
figure { margin: 1rem 0; }
figure svg, figure img { max-width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #555; }
@media (max-width: 40rem) {
  figure { overflow-x: auto; }
  figure svg, figure img { max-width: none; width: 36rem; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  .wide { overflow: visible; }
  figure, tr, .headline { break-inside: avoid; }
}
"""

_SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(h => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script>{script}</script>
</body>
</html>
"""
