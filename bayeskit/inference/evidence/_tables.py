"""Estimates in groups, as text and as tables: trusted by error, not trusted, approximations, scores, refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bayeskit._core.page import Cell, Listed, PageTable, measured, number
from bayeskit._core.texts import number_and_error
from bayeskit.inference.evidence._result import Evidence, PredictiveScore


class EstimateGroup(NamedTuple):
    """Estimates that are read together."""

    title: str
    value: str  # what their numbers are
    members: tuple[Evidence | PredictiveScore, ...]
    is_grey: bool = False
    has_errors: bool = True


def groups_of(results: Iterable[Evidence], scores: Iterable[PredictiveScore] = ()) -> list[EstimateGroup]:
    """Return the groups that have members."""
    trusted: list[Evidence] = []
    doubtful: list[Evidence] = []
    unknown: list[Evidence] = []
    for z in results:
        # Approximations, maxima and bounds have no standard error.
        without = math.isfinite(z.log_evidence) and math.isnan(z.standard_error)
        (trusted if z.trusted else unknown if without else doubtful).append(z)
    trusted.sort(key=lambda z: z.standard_error)
    groups = [
        EstimateGroup("Estimates, the most precise first", "log evidence", tuple(trusted)),
        EstimateGroup("Not trusted", "log evidence", tuple(doubtful), is_grey=True),
        EstimateGroup("Approximations, bounds and maxima", "value", tuple(unknown), is_grey=True, has_errors=False),
        EstimateGroup("Predictive scores", "score", tuple(scores)),
    ]
    return [group for group in groups if group.members]


def text_lines(groups: Iterable[EstimateGroup], refused: Mapping[str, str]) -> list[str]:
    """Return the groups as lines with aligned numbers, and last the methods that do not apply."""
    groups = list(groups)
    members = [z for group in groups for z in group.members]
    width = max((len(z.method) for z in members), default=0)
    shown = {id(z): _shown(z) for z in members}
    # Points below each other, and errors.
    before = max((len(value.partition(".")[0]) for value, _ in shown.values()), default=0)
    behind = max((len(value) - len(value.partition(".")[0]) for value, _ in shown.values()), default=0)
    lines = []
    for group in groups:
        lines.append(group.title + ("" if group.has_errors else ", without an error"))
        for z in group.members:
            value, error = shown[id(z)]
            start = " " * (before - len(value.partition(".")[0])) + value
            doubt = "  NOT TRUSTED" if not z.trusted and isinstance(z, PredictiveScore) else ""
            aligned = f"{start:{before + behind}} +- {error}" if error else start
            lines.append(f"  {z.method:{width}}  {aligned}{doubt}")
    if refused:
        lines.append("Do not apply")
        lines += [f"  {', '.join(names)}: {why}" for why, names in by_reason(refused).items()]
    return lines


def html_tables(groups: Iterable[EstimateGroup]) -> list[PageTable]:
    """Return each group as a table with the cost of its members."""
    tables = []
    for group in groups:
        rows: list[list[Cell]] = []
        columns = ["method", group.value, *(["standard error"] if group.has_errors else []), "evaluations", "seconds"]
        for z in group.members:
            value, error = measured(z.value, z.standard_error)
            cost = (number(z.num_evaluations, "d"), number(z.seconds, ".1f"))
            rows.append([z.method, value, *([error] if group.has_errors else []), *cost])
        title, note = group.title, ""
        if group.value == "score":
            note = "Log predictive densities of single observations; they do not estimate the log evidence."
            doubtful = [z.method for z in group.members if not z.trusted]
            note += f" Not trusted: {', '.join(doubtful)}." if doubtful else ""
        tables.append(PageTable(title, columns, rows, group.is_grey, note))
    return tables


def folded(answers: Iterable[Evidence | PredictiveScore], refused: Mapping[str, str]) -> list[Listed]:
    """Return the warnings, and the reasons why methods do not apply."""
    remarks = [(z.method, warning) for z in answers for warning in z.warnings]
    reasons = [(", ".join(names), why) for why, names in by_reason(refused).items()]
    listed = []
    if remarks:
        methods = len({name for name, _ in remarks})
        listed.append(Listed(f"Warnings of {methods} method{'s' * (methods > 1)}", remarks))
    if reasons:
        apply = "1 method does not apply" if len(refused) == 1 else f"{len(refused)} methods do not apply"
        listed.append(Listed(apply, reasons))
    return listed


def by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of refused methods, grouped by the reason."""
    together: dict[str, list[str]] = {}
    for method, reason in refused.items():
        together.setdefault(reason, []).append(method)
    return together


def _shown(z: Evidence | PredictiveScore) -> tuple[str, str]:
    return ("failed", "") if math.isnan(z.value) else number_and_error(z.value, z.standard_error)
