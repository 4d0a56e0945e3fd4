"""A comparison of estimates as pieces of an HTML page."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from bayeskit._page import cell, escape, number, table, whole_page
from bayeskit._settings import real_number
from bayeskit.errors import SettingsError

if TYPE_CHECKING:
    from bayeskit.inference.evidence.comparison import EvidenceComparison

_CAPTION = "Estimates with 95 % intervals; hollow ones are not trusted, arrows lie beyond the axis."
_FOOTNOTE = (
    "Standard errors are Monte Carlo errors of the log evidence, in nats. Evaluations and seconds include the shared "
    "draws: what each estimate would have cost alone."
)


def comparison_page(
    comparison: EvidenceComparison, reference: float | None = None, reference_error: float = 0.0
) -> str:
    """Return a whole page of one comparison.

    Examples
    --------
    >>> from bayeskit.inference.evidence import Evidence, EvidenceComparison
    >>> estimate = Evidence("bridge_sampling", -94.08, 0.004, 8000)
    >>> comparison_page(EvidenceComparison({"bridge_sampling": estimate}, None, None)).startswith("<!doctype html>")
    True
    """
    return whole_page("Log evidence", evidence_sections(comparison, reference, reference_error))


def evidence_sections(
    comparison: EvidenceComparison, reference: float | None = None, reference_error: float = 0.0
) -> list[str]:
    """Return the verdict, if there is anything to judge, and the tables, if there is anything to show.

    Examples
    --------
    >>> from bayeskit.inference.evidence import EvidenceComparison
    >>> evidence_sections(EvidenceComparison({}, None, None))
    []
    """
    sections = [verdict_section(comparison, reference, reference_error)] if comparison.results else []
    if comparison.results or comparison.scores or comparison.refused:
        sections.append(estimates_section(comparison, reference))
    return sections


def verdict_section(
    comparison: EvidenceComparison, reference: float | None = None, reference_error: float = 0.0
) -> str:
    """Return the agreed value in large figures, and what stands behind it."""
    verdict = comparison.verdict
    if verdict.best is None:
        value = '<p class="value bad">unknown</p>'
    else:
        spread = f'<span class="error">± {verdict.standard_error:.4f}</span>'
        value = f'<p class="value">{verdict.log_evidence:.4f} {spread}</p>'
    note = ""
    if reference is not None:
        reference = real_number("reference", reference)
        reference_error = real_number("reference_error", reference_error)
        if not (math.isfinite(reference) and 0 <= reference_error < math.inf):
            raise SettingsError(
                f"reference and reference_error must be finite, the error at least zero, not {reference} and "
                f"{reference_error}; leave them out where nothing is known"
            )
        known = f"{reference:.4f} ± {reference_error:.4f}" if reference_error > 0 else f"{reference:.4f}"
        note = f" Reference value: {known}."
        error = math.hypot(verdict.standard_error, reference_error)
        if verdict.best is not None and error > 0:
            z = (verdict.log_evidence - reference) / error
            note += f" The estimate is {z:+.2f} standard errors away from it."
    text = f"<p>{escape(str(verdict))}.{note}</p>"
    text += "".join(f"<p>{escape(remark)}</p>" for remark in verdict.notes)
    return f'<section class="headline"><h2>Log evidence</h2>{value}{text}</section>'


def estimates_section(comparison: EvidenceComparison, reference: float | None = None) -> str:
    """Return table and plot of the estimates if there are, why some are not trusted, scores, and what did not apply."""
    parts = ["<section><h2>Estimates</h2>"]
    if comparison.results:
        parts.append(estimates_table(comparison))
    else:
        parts.append("<p>No method gave an estimate of the log evidence.</p>")
        parts += [f"<p>{escape(note)}</p>" for note in comparison.notes]  # elsewhere they stand beside the verdict
    parts += _beside_the_estimates(comparison)
    if comparison.results or comparison.scores:
        parts.append(f"<p>{_FOOTNOTE}</p>")
    if comparison.results:
        parts.append(f"<figure>{_figure(comparison, reference)}<figcaption>{_CAPTION}</figcaption></figure>")
    parts.append("</section>")
    return "".join(parts)


def notebook_view(comparison: EvidenceComparison) -> str:
    """Return verdict, tables and remarks without heading or plot, as a notebook shows them below a cell."""
    parts = []
    if comparison.results:
        parts += [f"<p><b>{escape(str(comparison.verdict))}</b></p>", estimates_table(comparison)]
    parts += [f"<p>{escape(note)}</p>" for note in comparison.notes]
    return "".join([*parts, *_beside_the_estimates(comparison)])


def _beside_the_estimates(comparison: EvidenceComparison) -> list[str]:
    """Return why some are not trusted, the scores, and what did not apply."""
    parts = []
    doubtful = [z for z in (*comparison, *comparison.scores.values()) if z.warnings]
    if doubtful:
        items = [f"<li><b>{escape(z.method)}</b>: {escape('; '.join(z.warnings))}</li>" for z in doubtful]
        parts.append(f"<h3>Why some are not trusted</h3><ul>{''.join(items)}</ul>")
    if comparison.scores:
        header = ["score", "value", "standard error", "seconds", "trusted"]
        rows = [
            (
                "" if s.trusted else "untrusted",
                [
                    cell(s.method),
                    number(s.predictive_score, ".4f"),
                    number(s.standard_error, ".4f"),
                    number(s.seconds, ".1f"),
                    cell("yes" if s.trusted else "no"),
                ],
            )
            for s in comparison.scores.values()
        ]
        parts.append("<h3>Predictive scores</h3><p>They say how well single observations are foretold.</p>")
        parts.append(table(header, rows))
    if comparison.refused:
        from bayeskit.inference.evidence.comparison import by_reason

        items = [
            f"<li><b>{escape(', '.join(names))}</b>: {escape(why)}</li>"
            for why, names in by_reason(comparison.refused).items()
        ]
        parts.append(f"<h3>What does not apply</h3><ul>{''.join(items)}</ul>")
    return parts


def estimates_table(comparison: EvidenceComparison) -> str:
    """Return the table of estimates alone."""
    header = ["method", "log evidence", "standard error", "evaluations", "seconds", "trusted"]
    rows = []
    for z in comparison:
        cells = [
            cell(z.method),
            number(z.log_evidence, ".4f"),
            number(z.standard_error, ".4f"),
            number(z.num_evaluations, "d"),
            number(z.seconds, ".1f"),
            cell("yes" if z.trusted else "no"),
        ]
        rows.append(("" if z.trusted else "untrusted", cells))
    return table(header, rows)


def own_seconds(comparison: EvidenceComparison) -> float:
    """Return the time of the estimators without that of the parts they share."""
    spent = comparison.part_seconds
    shared = {name: math.fsum(spent.get(part, 0.0) for part in parts) for name, parts in comparison.sources.items()}
    return math.fsum(max(0.0, z.seconds - shared.get(z.method, 0.0)) for z in comparison)


def _figure(comparison: EvidenceComparison, reference: float | None) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.5 + 0.4 * len(comparison.results)), layout="constrained")
    comparison.plot(reference, figure.subplots())
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    # Inside a page the XML declaration and document type before the element are not allowed.
    svg = text[text.index("<svg") :]
    return svg.replace("<svg", '<svg role="img" aria-label="Estimates of the log evidence"', 1)
