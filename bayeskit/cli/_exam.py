"""``bayeskit exam``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bayeskit._core.texts import with_error
from bayeskit._ctrl_c import give_back
from bayeskit.cli._application import BAD_INPUT, FALSE_COMFORT_FOUND
from bayeskit.cli._folders import opened
from bayeskit.cli._names import checked_cases, checked_methods
from bayeskit.cli._options import OUTPUT, REPEATED, Force, Methods, Seed, numeric
from bayeskit.cli._tables import (
    figure,
    new_console,
    new_table,
    print_calibration,
    print_files,
    print_refusals,
    value_and_error,
)
from bayeskit.errors import SettingsError

if TYPE_CHECKING:
    from bayeskit.workflows._exam import Exam


def exam(
    methods: Methods = "all",
    cases: Annotated[str, typer.Option(help="Exact cases separated by commas, or 'all'.")] = "all",
    generated: Annotated[int | None, typer.Option(min=1, help="Random problems to run instead of the cases.")] = None,
    seed: Seed = 0,
    small: Annotated[bool, typer.Option("--small", help="Use a budget of seconds, for a first try.")] = False,
    table: Annotated[str, typer.Option(help="'answers', or 'calibration' of the error bars.")] = "answers",
    replicates: Annotated[
        int | None, numeric("20", "Runs of each case for --table calibration.", REPEATED, min=2)
    ] = None,
    jobs: Annotated[
        int | None, numeric("1", "Number of replicates or random problems run in parallel.", REPEATED, min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the table.", rich_help_panel=OUTPUT)
    ] = None,
    force: Force = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress bar.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Run every method on every problem whose exact evidence is known.

    The exit status is 1 if a trusted answer is more than three standard errors from the exact evidence, and 2 if there
    is no answer. With --table calibration, every case is run many times on a small budget, and the table compares the
    standard errors with the spread of the estimates. With --out, writes exam.csv, or calibration.csv, calibration.svg
    and a folder for each case.
    With --generated, runs random problems from extreme ranges, whose answers are computed by other means, and prints a
    table by method; the exit status is 1 if more than 0.2 % of the answers are trusted and four standard errors off, or
    if a method failed. With --out, the same command resumes a killed run.
    """
    if table not in ("answers", "calibration"):
        raise SettingsError(f"--table must be 'answers' or 'calibration', not {table!r}")
    which, what = checked_cases(cases), checked_methods(methods)
    calibrated = table == "calibration"
    if generated is not None and (calibrated or cases != "all" or replicates is not None):
        raise SettingsError("--generated makes its own problems; leave out --cases, --replicates, --table calibration")
    for option, given in (("--replicates", replicates), ("--jobs", jobs if generated is None else None)):
        if given is not None and not calibrated:
            raise SettingsError(f"{option} is for --table calibration; the table of answers runs each case once")
    if force and out is None:
        raise SettingsError("--force repeats the run of a folder; pass --out as well")
    replicates, num_jobs = replicates or 20, jobs or 1
    settings = {"methods": what, "cases": which, "generated": generated, "seed": seed, "small": small, "table": table}
    run = None
    if out is not None:
        run = opened("exam", "", out, force, quiet, settings | ({"replicates": replicates} if calibrated else {}))
        if run is None:
            return
    folder = None if run is None else run.path
    from bayeskit.inference.evidence._calibration import SMALL as LESS
    from bayeskit.workflows._calibration import calibrations
    from bayeskit.workflows._exam import (
        FAILED,
        FALSE_COMFORT,
        GENERATED_METHODS,
        MAX_FALSE_COMFORT,
        SMALL,
        run_exam,
        run_generated_exam,
        selected_cases,
    )

    give_back()
    progress = not quiet
    if calibrated:
        chosen, budget = selected_cases(which), SMALL if small else LESS
        found = calibrations(
            what, chosen, folder, replicates, budget=budget, seed=seed, num_jobs=num_jobs, progress=progress
        )
        if run is not None:
            run.finish(f"{replicates} replicates of {len(found)} cases")
        print_calibration(found, folder, one_folder=False)
        return
    small_budget = SMALL if small else None
    if generated is not None:
        result = run_generated_exam(
            generated,
            GENERATED_METHODS if methods == "all" else what,
            seed=seed,
            budget=small_budget,
            progress=progress,
            num_jobs=num_jobs,
            checkpoint=None if folder is None else folder / "generated",
        )
        is_bad = result.count(FALSE_COMFORT) > MAX_FALSE_COMFORT * len(result.rows) or result.count(FAILED)
        status = FALSE_COMFORT_FOUND if is_bad else 0
    else:
        result = run_exam(what, which, seed=seed, budget=small_budget, progress=progress)
        status = FALSE_COMFORT_FOUND if result.has_false_comfort else 0 if result.rows else BAD_INPUT
    if run is not None:
        result.to_csv(run.path / "exam.csv")
        run.finish(str(result), status)
    (_print_exam if generated is None else print_generated_exam)(result, folder)
    if status:
        raise typer.Exit(status)


def print_generated_exam(result: Exam, folder: Path | None) -> None:
    """Print counts by method, and every problem on which a method was trusted and wrong, or failed."""
    console, counts = new_console(), result.by_method()
    table = new_table("method", "right", "right, but flagged", "flagged", "wrong", "failed", "refused", "n/a")
    for row in counts.itertuples(index=False):
        wrong = row[4] + row[5]
        table.add_row(*map(str, row), style="bold red" if wrong else None)
    console.print(table)
    for answer in result.rows:
        if answer.verdict in ("FALSE COMFORT", "failed"):
            e = answer.evidence
            estimate = f"{with_error(e.log_evidence, e.standard_error)}, exact {answer.exact:.4f}"
            said = "; ".join(e.warnings) if answer.verdict == "failed" else estimate
            smallest = f"\n  smallest: {answer.smallest}" if answer.smallest else ""
            console.print(Text(f"{answer.verdict}: {e.method}: {said}\n  {answer.case}{smallest}", style="red"))
    console.print(str(result))
    if folder is not None:
        print_files(folder, ["exam.csv"])


def _print_exam(result: Exam, folder: Path | None) -> None:
    """Print the answers by case, and the methods that do not apply."""
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
            *value_and_error(e.log_evidence, e.standard_error),
            figure(row.z, "+.2f"),
            row.verdict,
            style=styles.get(row.verdict),
        )
    if result.rows:
        console.print(table)
    for row in result.rows:
        if row.verdict == "failed":
            console.print(Text(f"{row.case}: {row.evidence.method}: {'; '.join(row.evidence.warnings)}", style="red"))
    for case, refused in result.refused.items():
        print_refusals(console, refused, f"{case}: ")
    console.print(Text(str(result), style="bold red" if result.has_false_comfort else "bold"))
    if folder is not None:
        print_files(folder, ["exam.csv"])
