"""What the command line prints."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from bayeskit.inference.evidence import Calibration, EvidenceComparison
    from bayeskit.workflows import Exam

MAX_FALSE_COMFORT = 0.01


def new_console() -> Console:
    """Return what writes to standard output."""
    # A file or a pipe has no width; without one, rich would cut lines at 80 characters.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table; numbers stand right of its first column."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_evidence(
    comparison: EvidenceComparison, title: str, reference: float | None, reference_error: float = 0.0
) -> None:
    """Print estimates, what they say against themselves, scores, what does not apply, and the verdict."""
    console = new_console()
    table = new_table(title, "method", "log evidence", "std. error", "evaluations", "seconds", "trusted")
    for z in comparison:
        table.add_row(
            z.method,
            _figure(z.log_evidence, ".4f"),
            _figure(z.standard_error, ".4f"),
            f"{z.num_evaluations}",
            f"{z.seconds:.1f}",
            "yes" if z.trusted else "no",
            style=None if z.trusted else "yellow",
        )
    if comparison.results:
        console.print(table)
    scores = comparison.scores.values()
    for score in scores:
        text = f"{score.method}: predictive score {score.predictive_score:.4f} +- {score.standard_error:.4f}"
        console.print(Text(text, style="" if score.trusted else "yellow"))
    for answer in (*comparison, *scores):
        for warning in answer.warnings:
            console.print(Text(f"{answer.method}: {warning}", style="yellow"))
    _print_refusals(console, comparison.refused)
    for note in comparison.notes:
        console.print(Text(note, style="dim"))
    if comparison.results:
        console.print(Text(str(comparison.verdict), style="bold"))
    if reference is not None:
        error = f" ± {reference_error:.4f}" if reference_error > 0 else ""
        console.print(f"reference {reference:.4f}{error}")


def print_calibration(found: list[Calibration], out: Path | None, one_folder: bool = True) -> None:
    """Print a table a case, and where the files are."""
    console = new_console()
    columns = {
        "bias": ("bias", ".4f"),
        "sd_of_estimate": ("sd of\nestimate", ".4f"),
        "mean_standard_error": ("mean\nstd. error", ".4f"),
        "sd_of_z": ("sd of z", ".2f"),
        "coverage_95": ("coverage\nof 95 %", ".2f"),
        "trusted": ("trusted", ".2f"),
        "false_comfort": ("false\ncomfort", ".3f"),
        "failed": ("failed", ".2f"),
    }
    for one in found:
        _print_refusals(console, one.refused, f"{one.case}: ")
        if not one.estimates:
            continue
        known = "" if math.isnan(one.log_evidence) else f", log evidence {one.log_evidence:.4f}"
        table = new_table(f"{one.case}{known}", "method", *(heading for heading, _ in columns.values()))
        for _, row in one.to_pandas().iterrows():
            style = "bold red" if row["false_comfort"] > MAX_FALSE_COMFORT else None
            table.add_row(
                row["method"], *(_figure(row[name], spec) for name, (_, spec) in columns.items()), style=style
            )
        console.print(table)
    if out is None:
        typer.echo("give --out DIR to keep replicates, table and plot")
    else:
        files = "replicates.csv, calibration.csv, calibration.svg"
        typer.echo(
            f"written to {out}: "
            + (files if one_folder else f"calibration.csv, calibration.svg; of each case: {files}")
        )


def _print_refusals(console: Console, refused: Mapping[str, str], case: str = "") -> None:
    """Say each reason once, for several methods may share it."""
    from bayeskit.inference.evidence.comparison import by_reason

    for reason, methods in by_reason(refused).items():
        console.print(Text(f"{case}{', '.join(methods)}: does not apply: {reason}", style="dim"))


def print_files(out: Path | None, files: Iterable[Path] | None = None) -> None:
    """Print which results lie in a folder: those named, or all that are known by their names."""
    if out is None:
        typer.echo("give --out DIR to keep the table, the draws and a report")
    else:
        found = sorted(p for p in out.iterdir() if _is_result(p)) if files is None else files
        typer.echo(f"written to {out}: {', '.join(p.name for p in found)}")


def _is_result(path: Path) -> bool:
    return path.name in {"evidence.csv", "summary.csv", "posterior.nc", "report.html"}


def print_generated_exam(result: Exam, folder: Path | None) -> None:
    """Print counts by method, and every problem on which a method was trusted and wrong, or failed."""
    console, counts = new_console(), result.by_method()
    table = new_table("method", "right", "refused, though right", "flagged", "wrong", "failed", "refused", "n/a")
    for row in counts.itertuples(index=False):
        wrong = row[4] + row[5]
        table.add_row(*map(str, row), style="bold red" if wrong else None)
    console.print(table)
    for answer in result.rows:
        if answer.verdict in ("FALSE COMFORT", "failed"):
            e = answer.evidence
            estimate = f"{e.log_evidence:.4f} +- {e.standard_error:.4f}, exact {answer.exact:.4f}"
            said = "; ".join(e.warnings) if answer.verdict == "failed" else estimate
            smallest = f"\n  smallest: {answer.smallest}" if answer.smallest else ""
            console.print(Text(f"{answer.verdict}: {e.method}: {said}\n  {answer.case}{smallest}", style="red"))
    console.print(str(result))
    if folder is not None:
        print_files(folder, [folder / "exam.csv"])


def print_exam(result: Exam, folder: Path | None) -> None:
    """Print the answers case by case, and what does not apply."""
    console = new_console()
    styles = {"self-flagged": "yellow", "FALSE COMFORT": "bold red", "failed": "red"}
    table = new_table("", "method", "estimate", "std. error", "z", "verdict")
    case = ""
    for row in result.rows:
        if row.case != case:
            case = row.case
            if table.row_count:
                table.add_row("")
            table.add_row(case, f"{row.exact:.4f}", "exact", style="bold")
        e = row.evidence
        table.add_row(
            f"  {e.method}",
            _figure(e.log_evidence, ".4f"),
            _figure(e.standard_error, ".4f"),
            _figure(row.z, "+.2f"),
            row.verdict,
            style=styles.get(row.verdict),
        )
    if result.rows:
        console.print(table)
    for row in result.rows:
        if row.verdict == "failed":
            console.print(Text(f"{row.case}: {row.evidence.method}: {'; '.join(row.evidence.warnings)}", style="red"))
    for case, refused in result.refused.items():
        _print_refusals(console, refused, f"{case}: ")
    console.print(Text(str(result), style="bold red" if result.has_false_comfort else "bold"))
    if folder is not None:
        typer.echo(f"written to {folder}: exam.csv")


def _figure(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"
