"""What commands print: tables of evidence, of calibration and of refusals."""

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

from bayeskit._core.texts import number_and_error, with_error
from bayeskit.cli._application import by_option

if TYPE_CHECKING:
    import pandas as pd

    from bayeskit.inference.evidence import Calibration, EvidenceComparison


def new_console() -> Console:
    """Return the console of standard output."""
    # A file or a pipe has no width; without one, rich would cut lines at 80 characters.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table, whose columns after the first are aligned right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_evidence(
    comparison: EvidenceComparison, title: str, reference: float | None, reference_error: float = 0.0
) -> None:
    """Print estimates, scores, their warnings, methods that do not apply, and the verdict."""
    console = new_console()
    if comparison.results:
        console.print(Text(f"{title}: {by_option(str(comparison.verdict))}", style="bold"), soft_wrap=True)
    if reference is not None:
        console.print(f"reference {with_error(reference, reference_error or math.nan)}")
    table = new_table("", "method", "log evidence", "std. error", "evaluations", "seconds", "trusted")
    for z in comparison:
        table.add_row(
            z.method,
            *value_and_error(z.log_evidence, z.standard_error),
            f"{z.num_evaluations}",
            f"{z.seconds:.1f}",
            "yes" if z.trusted else "no",
            style=None if z.trusted else "yellow",
        )
    if comparison.results:
        console.print(table)
    scores = comparison.scores.values()
    for score in scores:
        text = f"{score.method}: predictive score {with_error(score.predictive_score, score.standard_error)}"
        console.print(Text(text, style="" if score.trusted else "yellow"))
    for answer in (*comparison, *scores):
        for warning in answer.warnings:
            console.print(Text(f"{answer.method}: {by_option(warning)}", style="yellow"))
    print_refusals(console, comparison.refused)
    for note in comparison.notes:
        console.print(Text(note, style="dim"))


def print_calibration(found: list[Calibration], out: Path | None, one_folder: bool = True) -> None:
    """Print a table for each case, and the names of the files."""
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
        print_refusals(console, one.refused, f"{one.case}: ")
        if not one.estimates:
            continue
        known = "" if math.isnan(one.log_evidence) else f", log evidence {one.log_evidence:.4f}"
        table = new_table(f"{one.case}{known}", "method", *(heading for heading, _ in columns.values()))
        for _, row in one.to_pandas().iterrows():
            style = "bold red" if row["false_comfort"] > _MAX_FALSE_COMFORT else None
            table.add_row(row["method"], *(figure(row[name], spec) for name, (_, spec) in columns.items()), style=style)
        console.print(table)
    if out is None:
        typer.echo("pass --out DIR to save replicates, table and plot")
    else:
        files = ["replicates.csv", "calibration.csv", "calibration.svg"]
        print_files(out, files if one_folder else [*files[1:], "and for each case a folder with all three"])


_MAX_FALSE_COMFORT, _MOST_ROWS = 0.01, 40


def print_refusals(console: Console, refused: Mapping[str, str], case: str = "") -> None:
    """Print each reason once, with all methods that share it."""
    from bayeskit.inference.evidence._tables import by_reason

    for reason, methods in by_reason(refused).items():
        console.print(Text(f"{case}{', '.join(methods)}: does not apply: {reason}", style="dim"))


def print_summary(summary: pd.DataFrame, title: str) -> None:
    """Print the first rows of a posterior's summary."""
    table = new_table(title, "parameter", *(str(c).replace("_", "-") for c in summary.columns))
    for parameter, row in summary.head(_MOST_ROWS).iterrows():
        shown = [f"{row[c]:.4g}" for c in ("mean", "mcse", "sd", "5 %", "95 %")]
        table.add_row(Text(str(parameter)), *shown, f"{row['ess']:.0f}", f"{row['r_hat']:.3f}")
    console = new_console()
    console.print(table)
    if len(summary) > _MOST_ROWS:
        console.print(f"... and {len(summary) - _MOST_ROWS} more in summary.csv")


def print_files(folder: Path, names: Iterable[str]) -> None:
    """Print the names of the result files in a folder."""
    typer.echo(f"written to {folder}: {', '.join(names)}")


def value_and_error(value: float, error: float) -> tuple[str, str]:
    """Return a number and its error for two columns, to two digits of the error."""
    number, spread = number_and_error(value, error)
    return number if math.isfinite(value) else "-", spread or "-"


def figure(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"
