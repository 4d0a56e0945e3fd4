"""The command line: ``bayeskit evidence``, ``run``, ``exam`` and ``list``."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from bayeskit.core.texts import number_and_error, with_error
from bayeskit.errors import BayeskitError, BayeskitWarning, SettingsError, _place_of

if TYPE_CHECKING:
    from bayeskit.gallery import Entry
    from bayeskit.inference.evidence import Budget, Calibration, EvidenceComparison, Problem
    from bayeskit.workflows import Exam

__all__ = [
    "Acceptance",
    "BAD_INPUT",
    "Chains",
    "Jobs",
    "LadderChains",
    "LadderSamples",
    "LadderWarmup",
    "LivePoints",
    "Methods",
    "Out",
    "Particles",
    "Quiet",
    "ReferenceTemperatures",
    "Replicates",
    "SMCReplicates",
    "Samples",
    "Seed",
    "Temperatures",
    "Warmup",
    "app",
    "evidence",
    "exam",
    "main",
    "print_generated_exam",
    "run_model_or_page",
]


# Output of the command line.

_MAX_FALSE_COMFORT = 0.01


def _new_console() -> Console:
    """Return the console of standard output."""
    # A file or a pipe has no width; without one, rich would cut lines at 80 characters.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _new_table(title: str, *columns: str) -> Table:
    """Return an empty table, whose columns after the first are aligned right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_evidence(
    comparison: EvidenceComparison, title: str, reference: float | None, reference_error: float = 0.0
) -> None:
    """Print estimates, scores, their warnings, methods that do not apply, and the verdict."""
    console = _new_console()
    table = _new_table(title, "method", "log evidence", "std. error", "evaluations", "seconds", "trusted")
    for z in comparison:
        table.add_row(
            z.method,
            *_measured(z.log_evidence, z.standard_error),
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
            console.print(Text(f"{answer.method}: {warning}", style="yellow"))
    _print_refusals(console, comparison.refused)
    for note in comparison.notes:
        console.print(Text(note, style="dim"))
    if comparison.results:
        console.print(Text(str(comparison.verdict), style="bold"))
    if reference is not None:
        console.print(f"reference {with_error(reference, reference_error or math.nan)}")


def _print_calibration(found: list[Calibration], out: Path | None, one_folder: bool = True) -> None:
    """Print a table for each case, and the names of the files."""
    console = _new_console()
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
        table = _new_table(f"{one.case}{known}", "method", *(heading for heading, _ in columns.values()))
        for _, row in one.to_pandas().iterrows():
            style = "bold red" if row["false_comfort"] > _MAX_FALSE_COMFORT else None
            table.add_row(
                row["method"], *(_figure(row[name], spec) for name, (_, spec) in columns.items()), style=style
            )
        console.print(table)
    if out is None:
        typer.echo("pass --out DIR to save replicates, table and plot")
    else:
        files = "replicates.csv, calibration.csv, calibration.svg"
        typer.echo(
            f"written to {out}: "
            + (files if one_folder else f"calibration.csv, calibration.svg; for each case: {files}")
        )


def _print_refusals(console: Console, refused: Mapping[str, str], case: str = "") -> None:
    """Print each reason once, with all methods that share it."""
    from bayeskit.inference.evidence.tables import by_reason

    for reason, methods in by_reason(refused).items():
        console.print(Text(f"{case}{', '.join(methods)}: does not apply: {reason}", style="dim"))


def _print_files(out: Path | None, files: Iterable[Path] | None = None) -> None:
    """Print the result files in a folder: ``files``, or all files with the name of a result."""
    if out is None:
        typer.echo("pass --out DIR to save the table, the draws and a report")
    else:
        found = sorted(p for p in out.iterdir() if _is_result(p)) if files is None else files
        typer.echo(f"written to {out}: {', '.join(p.name for p in found)}")


def _is_result(path: Path) -> bool:
    return path.name in {"evidence.csv", "summary.csv", "posterior.nc", "report.html"}


def print_generated_exam(result: Exam, folder: Path | None) -> None:
    """Print counts by method, and every problem on which a method was trusted and wrong, or failed."""
    console, counts = _new_console(), result.by_method()
    table = _new_table("method", "right", "right, but flagged", "flagged", "wrong", "failed", "refused", "n/a")
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
        _print_files(folder, [folder / "exam.csv"])


def _print_exam(result: Exam, folder: Path | None) -> None:
    """Print the answers by case, and the methods that do not apply."""
    console = _new_console()
    styles = {"self-flagged": "yellow", "FALSE COMFORT": "bold red", "failed": "red"}
    table = _new_table("", "method", "estimate", "std. error", "z", "verdict")
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
            *_measured(e.log_evidence, e.standard_error),
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


def _measured(value: float, error: float) -> tuple[str, str]:
    """Return a number and its error for two columns, to two digits of the error."""
    number, spread = number_and_error(value, error)
    return number if math.isfinite(value) else "-", spread or "-"


def _figure(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"


# Messages about misspelt options and commands end with the page that explains them.

_PAGE = _place_of("how_to/command_line")
# depending on its version, typer contains click or imports it
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


@contextmanager
def _explained() -> Iterator[None]:
    """Append the page on the command line to the message of a usage error."""
    try:
        yield
    except _UsageError as error:
        if _PAGE not in error.message:
            before = error.message and error.message + ("" if error.message.endswith((".", "?")) else ".")
            error.message = f"{before} See {_PAGE}.".lstrip()
        raise


class _ExplainedCommands(TyperGroup):
    """Commands whose usage errors name the page on the command line."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _explained():
            return super().invoke(ctx)


# Torch and Pyro are imported inside the commands, so that help does not wait for them.
app = typer.Typer(
    cls=_ExplainedCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BAD_INPUT, _FALSE_COMFORT_FOUND, _INTERRUPTED = 2, 1, 130

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for table, draws and report.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")]
Methods = Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")]
Replicates = Annotated[int, typer.Option(min=1, help="Number of runs, each with another seed.")]
Jobs = Annotated[int, typer.Option(min=1, help="Number of replicates run in parallel.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress bars and no table.")]
Chains = Annotated[int | None, typer.Option(min=1, help="Chains of the posterior run.")]
Warmup = Annotated[int | None, typer.Option(min=20, help="Warm-up iterations of each chain of the posterior run.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draws of each chain of the posterior run.")]
Acceptance = Annotated[float | None, typer.Option(min=0.1, max=0.999, help="Target acceptance rate.")]
Temperatures = Annotated[int | None, typer.Option(min=2, help="Number of steps of the tempered ladder.")]
LadderChains = Annotated[int | None, typer.Option(min=1, help="Chains at each temperature.")]
LadderWarmup = Annotated[int | None, typer.Option(min=20, help="Warm-up iterations of the ladder.")]
LadderSamples = Annotated[int | None, typer.Option(min=1, help="Draws of each chain of the ladder.")]
ReferenceTemperatures = Annotated[
    int | None, typer.Option(min=2, help="Number of steps of the generalised stepping stone from a reference.")
]
Particles = Annotated[int | None, typer.Option(min=2, help="Particles of each population of sequential Monte Carlo.")]
SMCReplicates = Annotated[int | None, typer.Option(min=1, help="Populations of sequential Monte Carlo.")]
LivePoints = Annotated[int | None, typer.Option(min=4, help="Live points of nested sampling.")]


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Print the package's errors and warnings as one message each, without traceback or source line."""
    console = Console(stderr=True, highlight=False)
    show_as_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, BayeskitWarning):
            console.print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)
        else:
            show_as_before(message, category, *rest, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("default", BayeskitWarning)
        # ArviZ 0.23 announces 1.x when it is imported; users of the command line cannot act on it.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        warnings.showwarning = show
        try:
            yield
        except BayeskitError as error:
            pages = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            console.print(Text(f"error: {error}{pages}", style="bold red"), soft_wrap=True)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as interrupt:
            message = "interrupted; with --out, the same command resumes the run, but not a page or the plain exam"
            console.print(Text(message, style="yellow"), soft_wrap=True)
            raise typer.Exit(_INTERRUPTED) from interrupt


def _command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose errors are printed plainly."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            with _plain_messages():
                function(*args, **kwargs)

        return app.command(name)(guarded)

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bayeskit {version('bayeskit')}")
        raise typer.Exit


@app.callback()
def _bayeskit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Posterior draws and marginal likelihoods with standard errors."""


@_command("evidence")
def evidence(
    name: Annotated[str | None, typer.Argument(help="A model listed by 'bayeskit list'.")] = None,
    alignment: Annotated[Path | None, typer.Option(help="FASTA, NEXUS or PHYLIP file.")] = None,
    tree: Annotated[Path | None, typer.Option(help="Newick or NEXUS file with the topology.")] = None,
    substitution: Annotated[str, typer.Option(help="Substitution model.")] = "JC69",
    methods: Methods = "all",
    out: Out = None,
    seed: Seed = 0,
    chains: Chains = None,
    warmup: Warmup = None,
    samples: Samples = None,
    temperatures: Temperatures = None,
    ladder_chains: LadderChains = None,
    ladder_warmup: LadderWarmup = None,
    ladder_samples: LadderSamples = None,
    reference_temperatures: ReferenceTemperatures = None,
    particles: Particles = None,
    smc_replicates: SMCReplicates = None,
    live_points: LivePoints = None,
    target_acceptance: Acceptance = None,
    replicates: Replicates = 1,
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Estimate the log evidence of a named model, or of an alignment on a tree.

    With --out, writes evidence.csv, report.html and, if a method needed draws, posterior.nc; a killed run resumes with
    the same command. With --replicates, repeats the run with other seeds and compares the spread of the estimates with
    their standard errors; with --out, it then writes replicates.csv, calibration.csv and calibration.svg. The exit
    status is 2 if no method applies.
    """
    _check_choice(name, alignment, tree)
    if jobs > 1 and replicates == 1:
        raise SettingsError("--jobs is the number of replicates run in parallel; pass --replicates as well")
    from bayeskit.core.storage import as_output_folder
    from bayeskit.gallery import get_model, is_page, tree_target
    from bayeskit.inference.evidence import compare, select
    from bayeskit.inference.evidence.tables import by_reason
    from bayeskit.workflows import evidence_in_folder

    chosen = _names(methods)
    if not chosen:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    select(chosen)
    if name is not None and is_page(name):
        raise SettingsError(f"{name!r} is a page of the gallery, not a model; use 'bayeskit run {name} --out DIR'")
    entry = None if name is None else get_model(name)
    if out is not None:
        as_output_folder(out)  # refused before a model is built and run
    budget = _budget(
        {} if entry is None else entry.budget,
        num_chains=chains,
        num_warmup=warmup,
        num_samples=samples,
        num_temperatures=temperatures,
        ladder_chains=ladder_chains,
        ladder_warmup=ladder_warmup,
        ladder_samples=ladder_samples,
        num_reference_temperatures=reference_temperatures,
        num_particles=particles,
        num_replicates=smc_replicates,
        num_live=live_points,
        target_acceptance=target_acceptance,
    )
    if replicates > 1:
        problem = _problem(entry, alignment, tree, substitution)
        found = _calibrated(problem, chosen, replicates, budget, seed, jobs, out, quiet)
        if not quiet:
            _print_calibration([found], out)
        return
    reference, reference_error = None, 0.0
    settings: dict[str, Any]
    if entry is not None:
        title, target = entry.name, entry.build()
        reference, reference_error = entry.reference, entry.reference_error
        settings = {"model": entry.description}
        if entry.reference_source:
            settings["reference from"] = entry.reference_source
    elif alignment is not None and tree is not None:
        title, target = alignment.name, tree_target(alignment, tree, substitution)
        settings = {"alignment": alignment, "tree": tree, "substitution": substitution}
    progress = not quiet
    if out is None:
        comparison = compare(target, chosen, seed=seed, budget=budget, progress=progress)
    else:
        comparison = evidence_in_folder(
            target,
            out,
            title=f"Evidence of {title}",
            methods=chosen,
            seed=seed,
            budget=budget,
            reference=reference,
            reference_error=reference_error,
            settings=settings,
            progress=progress,
        )
    if not quiet:
        _print_evidence(comparison, title, reference, reference_error)
        _print_files(out)
    if not comparison.results and not comparison.scores:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason(comparison.refused).items())
        raise SettingsError(f"no method gave an answer: {reasons}")


@_command("run")
def run_model_or_page(
    name: Annotated[str, typer.Argument(help="A model or a page listed by 'bayeskit list'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the output files.")],
    seed: Annotated[int | None, typer.Option(help="Random seed; 0 by default.")] = None,
    chains: Annotated[int | None, typer.Option(min=1, help="Chains; 4 by default.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Warm-up iterations; 500 by default.")] = None,
    samples: Annotated[int | None, typer.Option(min=4, help="Draws of each chain; 1000 by default.")] = None,
    target_acceptance: Annotated[
        float | None, typer.Option(min=0.1, max=0.999, help="Target acceptance rate; 0.8 by default.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Run a page with a budget of seconds.")] = False,
    quiet: Quiet = False,
) -> None:
    """Draw from the posterior of a named model, or run a page of the gallery.

    Models write summary.csv, posterior.nc and report.html; pages write their printed output and their figures.
    """
    from bayeskit import gallery
    from bayeskit.core.storage import as_output_folder
    from bayeskit.report import posterior_summary
    from bayeskit.workflows import posterior_in_folder

    given = {
        "seed": seed,
        "num_chains": chains,
        "num_warmup": warmup,
        "num_samples": samples,
        "target_acceptance": target_acceptance,
    }
    settings: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if gallery.is_page(name):
        if settings:
            options = ", ".join(f"--{key.removeprefix('num_').replace('_', '-')}" for key in settings)
            raise SettingsError(f"{name!r} is a page with its own settings; it accepts --small, not {options}")
        _print_files(out, gallery.run_page(name, out, small=small, quiet=quiet))
        return
    if small:
        raise SettingsError(f"--small is for pages of the gallery; {name!r} accepts --chains, --warmup and --samples")
    entry = gallery.get_model(name)
    as_output_folder(out)
    draws = posterior_in_folder(
        entry.build(),
        out,
        title=f"Posterior of {entry.name}",
        settings={"model": entry.description},
        progress=not quiet,
        **({"seed": 0, "num_chains": 4, "num_warmup": 500, "num_samples": 1000, "target_acceptance": 0.8} | settings),
    )
    if quiet:
        return
    summary = posterior_summary(draws)
    table = _new_table(entry.name, "parameter", *(str(c).replace("_", "-") for c in summary.columns))
    for parameter, row in summary.head(40).iterrows():
        shown = [f"{row[c]:.4g}" for c in ("mean", "mcse", "sd", "5 %", "95 %")]
        table.add_row(Text(str(parameter)), *shown, f"{row['ess']:.0f}", f"{row['r_hat']:.3f}")
    console = _new_console()
    console.print(table)
    if len(summary) > 40:
        console.print(f"... and {len(summary) - 40} more in summary.csv")
    _print_files(out)


@_command("exam")
def exam(
    methods: Methods = "all",
    cases: Annotated[str, typer.Option(help="Exact cases separated by commas, or 'all'.")] = "all",
    seed: Seed = 0,
    small: Annotated[bool, typer.Option("--small", help="Use a budget of seconds, for a first try.")] = False,
    table: Annotated[str, typer.Option(help="'answers', or 'calibration' of the error bars.")] = "answers",
    replicates: Annotated[
        int | None, typer.Option(min=2, help="Runs of each case for --table calibration; 20 by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of replicates or random problems run in parallel; 1 by default.")
    ] = None,
    generated: Annotated[int | None, typer.Option(min=1, help="Random problems to run instead of the cases.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress bar.")] = False,
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
    from bayeskit.core.storage import as_output_folder
    from bayeskit.workflows.exam import (
        FAILED,
        FALSE_COMFORT,
        GENERATED_METHODS,
        MAX_FALSE_COMFORT,
        SMALL,
        run_exam,
        run_generated_exam,
    )

    if table not in ("answers", "calibration"):
        raise SettingsError(f"--table must be 'answers' or 'calibration', not {table!r}")
    which, what = _names(cases), _names(methods)
    if not what:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    if generated is not None and (table == "calibration" or cases != "all" or replicates is not None):
        raise SettingsError("--generated makes its own problems; leave out --cases, --replicates, --table calibration")
    if table == "calibration":
        from bayeskit.inference.evidence.calibration import SMALL as LESS
        from bayeskit.workflows.calibration import calibrations
        from bayeskit.workflows.exam import selected_cases

        found = calibrations(
            what,
            selected_cases(which),
            out,
            20 if replicates is None else replicates,
            budget=SMALL if small else LESS,
            seed=seed,
            num_jobs=1 if jobs is None else jobs,
            progress=not quiet,
        )
        _print_calibration(found, out, one_folder=False)
        return
    for option, given in (("--replicates", replicates), ("--jobs", jobs if generated is None else None)):
        if given is not None:
            raise SettingsError(f"{option} is for --table calibration; the table of answers runs each case once")
    folder = None if out is None else as_output_folder(out)
    if generated is not None:
        answers = run_generated_exam(
            generated,
            GENERATED_METHODS if methods == "all" else what,
            seed=seed,
            budget=SMALL if small else None,
            progress=not quiet,
            num_jobs=1 if jobs is None else jobs,
            checkpoint=None if folder is None else folder / "generated",
        )
        if folder is not None:
            answers.to_csv(folder / "exam.csv")
        print_generated_exam(answers, folder)
        if answers.count(FALSE_COMFORT) > MAX_FALSE_COMFORT * len(answers.rows) or answers.count(FAILED):
            raise typer.Exit(_FALSE_COMFORT_FOUND)
        return
    result = run_exam(what, which, seed=seed, budget=SMALL if small else None, progress=not quiet)
    if folder is not None:
        result.to_csv(folder / "exam.csv")
    _print_exam(result, folder)
    if not result.rows:
        raise typer.Exit(BAD_INPUT)
    if result.has_false_comfort:
        raise typer.Exit(_FALSE_COMFORT_FOUND)


@_command("list")
def _list_models() -> None:
    """List the models and the pages of the gallery that can be run by name."""
    from bayeskit import gallery

    console = _new_console()
    table = _plain_table("model", "log evidence", "with 'bayeskit evidence NAME' or 'bayeskit run NAME --out DIR'")
    for entry in gallery.entries():
        known = "" if entry.reference is None else f"{entry.reference:.4f}"
        table.add_row(entry.name, known, Text(entry.description))
    console.print(table)
    for group, heading in gallery.GROUPS.items():
        table = _plain_table("page", "", f"{heading}, with 'bayeskit run NAME --out DIR [--small]'")
        for page in gallery.pages():
            if page.group == group:
                table.add_row(page.name, "", Text(page.title))
        console.print()
        console.print(table)


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0], style="bold", no_wrap=True)
    table.add_column(columns[1], justify="right")
    table.add_column(columns[2])
    return table


def main() -> None:
    """Run the command line."""
    app()


def _names(text: str) -> str | list[str]:
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def _problem(entry: Entry | None, alignment: Path | None, tree: Path | None, substitution: str) -> Problem:
    from bayeskit.gallery import tree_target
    from bayeskit.inference.evidence import Problem

    if entry is not None:
        known = math.nan if entry.reference is None else entry.reference
        return Problem(entry.name, entry.build, known, entry.reference_error)
    build = functools.partial(tree_target, str(alignment), str(tree), substitution)
    return Problem(Path(str(alignment)).name, build)


def _calibrated(
    problem: Problem,
    methods: str | list[str],
    replicates: int,
    budget: Budget,
    seed: int,
    jobs: int,
    out: Path | None,
    quiet: bool,
) -> Calibration:
    from bayeskit.inference.evidence import calibrate
    from bayeskit.workflows import calibration_in_folder

    common: dict[str, Any] = {"budget": budget, "seed": seed, "num_jobs": jobs, "progress": not quiet}
    common["skip_refused"] = True  # like a single run, which reports such methods and goes on
    if out is None:
        return calibrate(methods, problem, replicates, **common)
    return calibration_in_folder(methods, problem, out, replicates, **common)


# -- input ----------------------------------------------------------------------------------


def _check_choice(name: str | None, alignment: Path | None, tree: Path | None) -> None:
    if name is not None and (alignment is not None or tree is not None):
        raise SettingsError("pass either a name or --alignment with --tree, not both")
    if name is None and alignment is None and tree is None:
        raise SettingsError("no model was named; pass a name of 'bayeskit list', or --alignment FILE --tree FILE")
    if name is None and alignment is None:
        raise SettingsError("--tree needs --alignment FILE, the sequences at its tips")
    if name is None and tree is None:
        raise SettingsError("--alignment needs --tree FILE, the topology on which it evolved")


def _budget(suited: Mapping[str, int], **given: float | None) -> Budget:
    from bayeskit.inference.evidence import Budget

    chosen = {name: value for name, value in given.items() if value is not None}
    return Budget(**(dict(suited) | chosen))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
