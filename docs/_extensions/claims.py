"""The page of claims that were checked: a table and the scripts, from the headers of the scripts alone."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

#: What a header has beside the claim, in this order; the page of the gallery may be missing.
FIELDS = ("Title", "Subject", "Made in", "Verdict", "Number", "Page")
#: The parts of the page, in this order.
SUBJECTS = (
    "Evidence and model choice",
    "Marginal likelihoods of trees",
    "Monte Carlo and calibration",
    "Models without a normaliser",
    "Variational inference and discrete choices",
    "Likelihoods of images and outliers",
    "Neural networks and sparse priors",
    "Information and generalisation",
    "Causes and related tasks",
    "Differential equations",
)
KINDS = ("fails", "holds", "holds if")
MARKS = ("<!-- claims -->", "<!-- scripts -->")


class Claim(NamedTuple):
    """One claim: the header of its script in ``docs/claims``, and the lines below."""

    name: str
    claim: str
    title: str
    subject: str
    made_in: str
    verdict: str
    number: str
    page: str
    code: str


def read(path: Path) -> Claim:
    """Return the claim of a script, which names the script where its header is not as it should be."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n\n")
    fields = dict(re.findall(r"^([A-Z][a-z ]+): (.+(?:\n    .+)*)$", rest, re.MULTILINE))
    unknown, missing = set(fields) - set(FIELDS), set(FIELDS[:5]) - set(fields)
    if unknown or missing or "\n" in first or not first.endswith("."):
        raise ValueError(f"{path.name}: a header is one sentence and the fields {FIELDS}; found {[first, *fields]}")
    title, subject, made_in, verdict, number, page = (re.sub(r"\s+", " ", fields.get(field, "")) for field in FIELDS)
    if not re.fullmatch(r"holds|fails|holds if .+", verdict):
        raise ValueError(f"{path.name}: the verdict is 'holds', 'holds if ...' or 'fails', not {verdict!r}")
    if subject not in SUBJECTS:
        raise ValueError(f"{path.name}: the subject is one of {SUBJECTS}, not {subject!r}")
    code = "\n".join(text.splitlines()[tree.body[0].end_lineno :]).strip()
    return Claim(path.stem, first, title, subject, made_in, verdict, number, page, code)


def read_all(folder: Path) -> list[Claim]:
    """Return the claims of a folder in the order of their subjects and names."""
    claims = [read(path) for path in sorted(folder.glob("*.py"))]
    return sorted(claims, key=lambda claim: SUBJECTS.index(claim.subject))


def _row(claim: Claim) -> str:
    page = f"[page](/gallery/{claim.page})" if claim.page else ""
    links = ", ".join(filter(None, (f"[script](#claim-{claim.name.replace('_', '-')})", page)))
    cells = (claim.claim, claim.made_in, claim.verdict, claim.number, links)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(claims: list[Claim]) -> str:
    """Return a table of the claims for each subject, with a count of the verdicts above them."""
    fail, all_hold, condition = (sum(claim.verdict.startswith(kind) for claim in claims) for kind in KINDS)
    said = f"{fail} fail, {condition} hold under a condition, and {all_hold - condition} hold."
    lines = [f"Of {len(claims)} claims {said}"]
    for subject, rows in groupby(claims, key=lambda claim: claim.subject):
        head = "| claim | made in | verdict | number | see |"
        lines += ["", f"## {subject}", "", head, "|---|---|---|---|---|", *map(_row, rows)]
    return "\n".join(lines)


def scripts(claims: list[Claim]) -> str:
    """Return every script below its title and its claim."""
    found = []
    for claim in claims:
        target = f"(claim-{claim.name.replace('_', '-')})="
        found += [target, f"### {claim.title}", "", f"{claim.claim} (`{claim.name}.py`)", "", "```python"]
        found += [claim.code, "```", ""]
    return "\n".join(found)


def connect(app: Any, folder: Path) -> None:
    """Let a build write the claims of a folder where a page has the marks."""

    def write(app: Any, docname: str, source: list[str]) -> None:
        if all(mark in source[0] for mark in MARKS):
            claims = read_all(folder)
            for mark, text in zip(MARKS, (table(claims), scripts(claims)), strict=True):
                source[0] = source[0].replace(mark, text)

    app.connect("source-read", write)
