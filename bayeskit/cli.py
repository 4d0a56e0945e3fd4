"""The command line: ``bayeskit evidence``, ``trees``, ``compare``, ``sbn``, ``vi``, ``run``, ``exam`` and ``list``."""

from __future__ import annotations

import ast
import functools
import hashlib
import math
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from bayeskit._ctrl_c import give_back
from bayeskit.core.folders import RunFolder
from bayeskit.core.inputs import unknown_name
from bayeskit.core.progress import without_bars
from bayeskit.core.texts import number_and_error, with_error
from bayeskit.errors import (
    AlignmentError,
    BayeskitError,
    BayeskitWarning,
    SettingsError,
    TreeError,
    UnknownNameError,
    _place_of,
)

if TYPE_CHECKING:
    import pandas as pd

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
    if comparison.results:
        console.print(Text(f"{title}: {_by_option(str(comparison.verdict))}", style="bold"), soft_wrap=True)
    if reference is not None:
        console.print(f"reference {with_error(reference, reference_error or math.nan)}")
    table = _new_table("", "method", "log evidence", "std. error", "evaluations", "seconds", "trusted")
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
            console.print(Text(f"{answer.method}: {_by_option(warning)}", style="yellow"))
    _print_refusals(console, comparison.refused)
    for note in comparison.notes:
        console.print(Text(note, style="dim"))


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
        files = ["replicates.csv", "calibration.csv", "calibration.svg"]
        _print_files(out, files if one_folder else [*files[1:], "and for each case a folder with all three"])


def _print_refusals(console: Console, refused: Mapping[str, str], case: str = "") -> None:
    """Print each reason once, with all methods that share it."""
    from bayeskit.inference.evidence.tables import by_reason

    for reason, methods in by_reason(refused).items():
        console.print(Text(f"{case}{', '.join(methods)}: does not apply: {reason}", style="dim"))


def _print_files(folder: Path, names: Iterable[str]) -> None:
    """Print the names of the result files in a folder."""
    typer.echo(f"written to {folder}: {', '.join(names)}")


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
        _print_files(folder, ["exam.csv"])


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
        _print_files(folder, ["exam.csv"])


def _measured(value: float, error: float) -> tuple[str, str]:
    """Return a number and its error for two columns, to two digits of the error."""
    number, spread = number_and_error(value, error)
    return number if math.isfinite(value) else "-", spread or "-"


def _figure(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else "-"


# Usage errors are one line, with the nearest names and the page that explains the command line.

_PAGE = _place_of("how_to/command_line")
# depending on its version, typer contains click or imports it
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Print a usage error as one line."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        message = error.format_message().removesuffix(".")
        if (option := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
            known = [name for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts]
            message = str(unknown_name("option", option, [name for name in known if name.startswith("--")]))
        _print_error(f"{message} (See {_PAGE})")
        raise typer.Exit(BAD_INPUT) from error
    except UnknownNameError as error:
        _print_error(f"{error} (See {_PAGE})")
        raise typer.Exit(BAD_INPUT) from error


def _print_error(message: str) -> None:
    Console(stderr=True, highlight=False).print(Text(f"error: {message}", style="bold red"), soft_wrap=True)


#: The folder that the command writes to.
_OPENED: ContextVar[RunFolder | None] = ContextVar("opened", default=None)
#: What was typed behind the program's name, for reports.
_TYPED: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


class _Commands(TyperGroup):
    """Commands whose usage errors are one line."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **kwargs: Any) -> Any:
        _TYPED.set(tuple(args))
        _OPENED.set(None)
        with _said_plainly():
            return super().make_context(info_name, args, *rest, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _said_plainly():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown_name("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


# Torch and Pyro are imported inside the commands, so that help and refusals do not wait for them.
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

BAD_INPUT, _FALSE_COMFORT_FOUND, _INTERRUPTED = 2, 1, 130

_OUTPUT, _POSTERIOR, _LADDER = "Output", "Posterior run", "Ladder of temperatures"
_OTHERS, _REPEATED = "Sequential Monte Carlo and nested sampling", "Repetitions"


def _number(default: str, help: str, panel: str, **limits: Any) -> Any:
    """Return an option whose default is that of the budget, or of the model if it has one."""
    return typer.Option(show_default=default, help=help, rich_help_panel=panel, **limits)


Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for table, draws and report.",
        show_default="results/COMMAND-NAME",
        rich_help_panel=_OUTPUT,
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Repeat a finished run, and replace results of another.", rich_help_panel=_OUTPUT),
]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")]
Methods = Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")]
Replicates = Annotated[
    int, typer.Option(min=1, help="Number of runs, each with another seed.", rich_help_panel=_REPEATED)
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of replicates run in parallel.", rich_help_panel=_REPEATED)]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress bars and no table.", rich_help_panel=_OUTPUT)
]
Chains = Annotated[int | None, _number("64", "Chains.", _POSTERIOR, min=1)]
Warmup = Annotated[int | None, _number("400", "Warm-up iterations of each chain.", _POSTERIOR, min=20)]
Samples = Annotated[int | None, _number("400", "Draws of each chain.", _POSTERIOR, min=1)]
Acceptance = Annotated[float | None, _number("0.8", "Target acceptance rate.", _POSTERIOR, min=0.1, max=0.999)]
Temperatures = Annotated[int | None, _number("50", "Number of steps.", _LADDER, min=2)]
LadderChains = Annotated[int | None, _number("32", "Chains at each temperature.", _LADDER, min=1)]
LadderWarmup = Annotated[int | None, _number("150", "Warm-up iterations.", _LADDER, min=20)]
LadderSamples = Annotated[int | None, _number("1000", "Draws of each chain.", _LADDER, min=1)]
ReferenceTemperatures = Annotated[
    int | None, _number("10", "Number of steps of the generalised stepping stone from a reference.", _LADDER, min=2)
]
Particles = Annotated[int | None, _number("64", "Particles of each population.", _OTHERS, min=2)]
SMCReplicates = Annotated[int | None, _number("32", "Populations of sequential Monte Carlo.", _OTHERS, min=1)]
LivePoints = Annotated[int | None, _number("500", "Live points of nested sampling.", _OTHERS, min=4)]

AlignmentFile = Annotated[Path, typer.Option("--alignment", help="FASTA, NEXUS or PHYLIP file.")]
Substitution = Annotated[
    str | None,
    typer.Option(help="Such as JC69, HKY85, GTR+I+G4 or LG+F+R3; by default the file's MrBayes block, or JC69."),
]
BurnIn = Annotated[
    float | None,
    typer.Option(
        min=0,
        show_default="0.25 of a chain, else 0",
        help="Trees to leave out at the start of each file: a share below 1, or a number.",
    ),
]


#: Settings of the library whose option is called neither as they are nor so without `num_`.
_CALLED = {"num_replicates": "smc_replicates", "num_live": "live_points"}
#: The options of the command.
_OPTIONS: ContextVar[frozenset[str]] = ContextVar("options", default=frozenset())


def _by_option(message: str) -> str:
    """Return a message of the library with the command's options in place of settings, as `--samples` for num_samples.

    A setting is known by its `num_` or an equals sign; other words stay as they are.
    """

    def option(found: re.Match[str]) -> str:
        name, equals = found[1], found[2]
        called = _CALLED.get(name, name.removeprefix("num_"))
        if called not in _OPTIONS.get() or (name == called and not equals):
            return found[0]
        return f"--{called.replace('_', '-')}" + (
            " " if equals and not message[found.end() :].startswith((" ", ",", ")")) else ""
        )

    return re.sub(r"(?<![\w-])([a-z]\w*)(=?)", option, message)


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Print the package's errors and warnings as one message each, without traceback or source line."""
    console = Console(stderr=True, highlight=False)
    show_as_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, BayeskitWarning):
            console.print(Text(f"warning: {_by_option(str(message))}", style="yellow"), soft_wrap=True)
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
            if isinstance(error, AlignmentError | TreeError | SettingsError) and (folder := _OPENED.get()):
                folder.leave_if_empty()
            pages = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            _print_error(f"{_by_option(str(error))}{pages}")
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as interrupt:
            message = (
                "interrupted; the same command resumes the run of a model, 'bayeskit trees', 'bayeskit compare' and "
                "'bayeskit vi', and begins anything else anew"
            )
            console.print(Text(message, style="yellow"), soft_wrap=True)
            raise typer.Exit(_INTERRUPTED) from interrupt


def _command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose errors are printed plainly."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            _OPTIONS.set(frozenset(kwargs))
            with _plain_messages(), without_bars(bool(kwargs.get("quiet"))):
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
    substitution: Substitution = None,
    methods: Methods = "all",
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
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
) -> None:
    """Estimate the log evidence of a named model, of an alignment on a tree, or of an alignment over all trees.

    Writes evidence.csv, report.html and, if a method needed draws, posterior.nc; a killed run resumes with the same
    command, and a finished one is not repeated. With --replicates, repeats the run with other seeds, compares the
    spread of the estimates with their standard errors, and writes replicates.csv, calibration.csv and calibration.svg
    instead. A model may have other default numbers than these. The exit status is 2 if no method applies.
    """
    _check_choice(name, alignment, tree)
    if name is None and alignment is not None and tree is None:
        _only_of_trees(methods, replicates, chains, particles, live_points, ladder_chains, reference_temperatures)
        numbers_of_trees = (warmup, samples, temperatures, jobs)
        _infer_trees("evidence", alignment, substitution, True, seed, out, force, quiet, *numbers_of_trees)
        return
    if jobs > 1 and replicates == 1:
        raise SettingsError("--jobs is the number of replicates run in parallel; pass --replicates as well")
    chosen = _checked_methods(methods)
    title = _checked_model(name) if name is not None else _checked_files(alignment, tree, substitution)
    given = {
        "num_chains": chains,
        "num_warmup": warmup,
        "num_samples": samples,
        "num_temperatures": temperatures,
        "ladder_chains": ladder_chains,
        "ladder_warmup": ladder_warmup,
        "ladder_samples": ladder_samples,
        "num_reference_temperatures": reference_temperatures,
        "num_particles": particles,
        "num_replicates": smc_replicates,
        "num_live": live_points,
        "target_acceptance": target_acceptance,
    }
    numbers = {key: value for key, value in given.items() if value is not None}
    called = substitution or "default"
    what = {"model": name} if name is not None else _named_files(alignment, tree) | {"substitution": called}
    folder = _opened(
        "evidence" if replicates == 1 else "replicates",
        Path(title).stem,
        out,
        force,
        quiet,
        {**what, "methods": chosen, "seed": seed, "replicates": replicates, **numbers},
    )
    if folder is None:
        return
    from bayeskit.gallery import get_model, mrbayes_block, tree_target
    from bayeskit.inference.evidence import Budget
    from bayeskit.inference.evidence.tables import by_reason
    from bayeskit.workflows import evidence_in_folder

    give_back()
    entry = None if name is None else get_model(name)
    budget = Budget(**((dict(entry.budget) if entry is not None else {}) | numbers))  # type: ignore[arg-type]
    block = mrbayes_block(alignment) if alignment is not None and substitution is None else None
    if block is not None and not quiet:
        typer.echo(str(block), err=True)
    if replicates > 1:
        problem = _problem(entry, alignment, tree, substitution)
        _say_where(folder, out, quiet)
        found = _calibrated(problem, chosen, replicates, budget, seed, jobs, folder.path, quiet)
        folder.finish(f"{replicates} replicates of {', '.join(found.estimates) or 'no method'}")
        if not quiet:
            _print_calibration([found], folder.path)
        return
    reference, reference_error = None, 0.0
    settings: dict[str, Any]
    if entry is not None:
        target = entry.build()
        reference, reference_error = entry.reference, entry.reference_error
        settings = {"model": entry.description}
        if entry.reference_source:
            settings["reference from"] = entry.reference_source
    elif alignment is not None and tree is not None:
        target = tree_target(alignment, tree, substitution, block)
        used = substitution or ("JC69" if block is None else str(block))
        settings = {"alignment": alignment, "tree": tree, "substitution": used}
    _say_where(folder, out, quiet)
    comparison = evidence_in_folder(
        target,
        folder.path,
        title=f"Evidence of {title}",
        methods=chosen,
        seed=seed,
        budget=budget,
        reference=reference,
        reference_error=reference_error,
        settings=settings,
        progress=not quiet,
    )
    if comparison.results or comparison.scores:
        scores = [f"{score.method} {score.predictive_score:.4f}" for score in comparison.scores.values()]
        folder.finish(f"{title}: {comparison.verdict if comparison.results else ', '.join(scores)}")
    if not quiet:
        _print_evidence(comparison, title, reference, reference_error)
        _print_files(folder.path, folder.files())
    if not comparison.results and not comparison.scores:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason(comparison.refused).items())
        raise SettingsError(f"no method gave an answer: {reasons}")


@_command("trees")
def _trees_of_alignment(
    alignment: AlignmentFile,
    substitution: Substitution = None,
    evidence: Annotated[bool, typer.Option(help="Estimate the evidence over all topologies, in three ways.")] = True,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    runs: Annotated[int, typer.Option(min=1, help="Independent runs.", rich_help_panel=_POSTERIOR)] = 2,
    warmup: Annotated[int | None, _number("1000", "Warm-up rounds of each run.", _POSTERIOR, min=0)] = None,
    samples: Annotated[int | None, _number("4000", "Rounds of each run, one tree each.", _POSTERIOR, min=8)] = None,
    temperatures: Annotated[int | None, _number("by taxa", "Temperatures of each run.", _POSTERIOR, min=2)] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which the search ends early; the same command goes on.",
            rich_help_panel=_POSTERIOR,
        ),
    ] = None,
    steps: Annotated[int | None, _number("20000", "Steps of variational inference.", _POSTERIOR, min=1)] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Threads.", rich_help_panel=_POSTERIOR)] = 1,
) -> None:
    """Sample trees from an alignment alone, and estimate the evidence over all topologies.

    Writes report.html, consensus.nwk and consensus.svg (majority rule, with supports), run1.trees, ...,
    split_frequencies.csv, parameters.csv, posterior.nc and evidence.csv; a killed run resumes with the same command,
    and a finished one is not repeated. The evidence needs two runs or more.
    """
    more: dict[str, Any] = {"num_runs": runs, "time_budget": time_budget, "num_steps": steps}
    numbers = (warmup, samples, temperatures)
    _infer_trees("trees", alignment, substitution, evidence, seed, out, force, quiet, *numbers, jobs, **more)


def _infer_trees(
    command: str,
    alignment: Path,
    substitution: str | None,
    evidence: bool,
    seed: int,
    out: Path | None,
    force: bool,
    quiet: bool,
    warmup: int | None,
    samples: int | None,
    temperatures: int | None,
    jobs: int,
    **more: Any,
) -> None:
    """Search for topologies in a folder and print what was found."""
    title = _checked_files(alignment, None, substitution)
    if evidence and more.get("num_runs", 2) < 2:
        raise SettingsError("the evidence in three ways needs two runs; pass --runs 2 or more, or --no-evidence")
    given = {"num_warmup": warmup, "num_samples": samples, "num_temperatures": temperatures, **more}
    numbers = {key: value for key, value in given.items() if value is not None}
    what = _named_files(alignment, None) | {"substitution": substitution or "default", "evidence": evidence}
    folder = _opened(command, Path(title).stem, out, force, quiet, {**what, "seed": seed, **numbers})
    if folder is None:
        return
    from bayeskit.workflows.phylogenetics.topology_folder import infer_topologies_in_folder

    facts = {"command": shlex.join(["bayeskit", *_TYPED.get()])} if _TYPED.get() else {}
    facts |= _begun(alignment, substitution, folder, out, quiet)
    search, found = infer_topologies_in_folder(
        alignment,
        folder.path,
        substitution=substitution,
        evidence=evidence,
        seed=seed,
        num_jobs=jobs,
        facts=facts,
        progress=not quiet,
        **numbers,
    )
    if search.ending != "time budget":
        folder.finish(str(search.verdict if found is None else found.verdict))
    if quiet:
        return
    console = _new_console()
    console.print(Text(_by_option(search.verdict)), soft_wrap=True)
    if found is not None:
        _print_evidence(found.table, title, None, 0.0)
    _print_files(folder.path, folder.files())


def _begun(
    alignment: Path, substitution: str | None, folder: RunFolder, out: Path | None, quiet: bool
) -> dict[str, str]:
    """Say what a MrBayes block asks for and where results go; return the text of the block by name."""
    from bayeskit.gallery import mrbayes_block

    give_back()
    block = mrbayes_block(alignment) if substitution is None else None
    if block is not None and not quiet:
        typer.echo(str(block), err=True)
    _say_where(folder, out, quiet)
    return {} if block is None else {"MrBayes block": str(block)}


@_command("compare")
def _compare_trees(
    alignment: AlignmentFile,
    trees: Annotated[
        list[Path],
        typer.Option(
            "--trees", help="Newick or NEXUS file: a list of trees, or the sample of a run. Once for each run."
        ),
    ],
    substitution: Substitution = None,
    most: Annotated[int, typer.Option(min=2, help="Compare so many topologies at most, the most frequent ones.")] = 100,
    draws: Annotated[
        int | None, _number("10000", "Draws of each topology; fewer for the improbable ones.", _POSTERIOR, min=1)
    ] = None,
    burn_in: BurnIn = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Compare given topologies by the evidence of each, on an alignment.

    Roots are removed and weights of trees only choose what is compared. Writes topologies.csv, topologies.trprobs and
    bayes_factors.svg. With --trees for two independent runs or more, the mass of the compared topologies in the runs
    gives the evidence over all topologies with its error, in evidence.csv. A killed run resumes with the same command,
    and a finished one is not repeated.
    """
    title = _checked_files(alignment, None, substitution)
    given = {"num_draws": draws, "burn_in": _checked_burn_in(burn_in)}
    numbers: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    what = {**_named_files(alignment), "trees": _checked_trees(trees), "substitution": substitution or "default"}
    folder = _opened("compare", Path(title).stem, out, force, quiet, {**what, "most": most, "seed": seed, **numbers})
    if folder is None:
        return
    from bayeskit.workflows.phylogenetics.tree_folders import compare_topologies_in_folder

    _begun(alignment, substitution, folder, out, quiet)
    found = compare_topologies_in_folder(
        alignment,
        trees,
        folder.path,
        substitution=substitution,
        most=most,
        seed=seed,
        progress=not quiet,
        **numbers,
    )
    comparison = found.comparison
    frame, count = comparison.to_pandas(), len(comparison.topologies)
    first = frame.iloc[0]
    probability = with_error(first["posterior_probability"], first["posterior_probability_error"])
    said = [f"{title}: {first['topology']} is the most probable of {count} topologies, with probability {probability}"]
    if count < found.num_topologies:
        said.append(
            f"the files have {found.num_topologies}; those compared are {found.shares.sum():.4f} of their trees"
        )
    said.append(
        "log evidence, summed over them under a uniform prior of all topologies, "
        f"{with_error(*comparison.total_log_evidence)}"
    )
    if found.total is not None:
        said.append(
            f"log evidence of all topologies {with_error(found.total.log_evidence, found.total.standard_error)}"
        )
    folder.finish("; ".join(said))
    if quiet:
        return
    console = _new_console()
    for line in said:
        console.print(Text(line, style="bold"), soft_wrap=True)
    shares = dict(zip((f"tree {place + 1}" for place in range(count)), found.shares.tolist(), strict=True))
    table = _new_table("", "topology", "log evidence", "std. error", "probability", "std. error", "in files", "trusted")
    for row in frame.head(_MOST_TREES).to_dict("records"):
        table.add_row(
            row["topology"],
            *_measured(row["log_evidence"], row["standard_error"]),
            *_measured(row["posterior_probability"], row["posterior_probability_error"]),
            f"{shares[row['topology']]:.4f}",
            "yes" if row["trusted"] else "no",
            style=None if row["trusted"] else "yellow",
        )
    console.print(table)
    if count > _MOST_TREES:
        console.print(f"... and {count - _MOST_TREES} more in topologies.csv")
    _print_files(folder.path, folder.files())


@_command("sbn")
def _fit_network(
    trees: Annotated[
        list[Path],
        typer.Option("--trees", help="Newick or NEXUS file with a sample of trees. Several files are pooled."),
    ],
    reference: Annotated[
        list[Path] | None, typer.Option("--reference", help="Trees to compare with, such as those of longer runs.")
    ] = None,
    method: Annotated[str, typer.Option(help="'em' (maximum likelihood) or 'simple_average'.")] = "em",
    alpha: Annotated[float, typer.Option(min=0, help="Strength of the prior of 'em', such as 0.0001.")] = 0.0,
    burn_in: BurnIn = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Fit a subsplit Bayesian network to a sample of trees: a probability for each topology, the unsampled included.

    Writes network.safetensors, trees.csv (probable topologies, with their shares in the files), splits.csv and
    measures.csv (entropy, and divergences from the sample and from the reference, in nats). A killed run begins anew
    with the same command; a finished one is not repeated.
    """
    if method not in _NETWORK_METHODS:
        raise unknown_name("method", method, _NETWORK_METHODS)
    references, burn_in = reference or [], _checked_burn_in(burn_in)
    settings = {"trees": _checked_trees(trees), "reference": _checked_trees(references), "method": method}
    settings |= {"alpha": alpha, "seed": seed, "burn_in": burn_in}  # type: ignore[dict-item]
    folder = _opened("sbn", trees[0].stem, out, force, quiet, settings)
    if folder is None:
        return
    from bayeskit.workflows.phylogenetics.tree_folders import fit_network_in_folder

    give_back()
    _say_where(folder, out, quiet)
    found = fit_network_in_folder(
        trees,
        folder.path,
        reference=references,
        method=method,
        alpha=alpha,
        burn_in=burn_in,
        seed=seed,
        progress=not quiet,
    )
    divergence = found.measures["divergence from the sample"].value
    said = f"{found.network} of {found.sample}; divergence from the sample {divergence:z.4f} nats"
    folder.finish(said)
    if quiet:
        return
    console = _new_console()
    console.print(Text(said, style="bold"), soft_wrap=True)
    for name, (value, error) in found.measures.items():
        console.print(Text(f"{name} {with_error(value, error or math.nan)}"), soft_wrap=True)
    _print_trees(found.trees, ["probability", "in_sample", *(["in_reference"] if references else [])], "trees.csv")
    _print_files(folder.path, folder.files())


_NETWORK_METHODS = ("em", "simple_average")
#: Rows of a table of topologies that are printed.
_MOST_TREES = 20


@_command("vi")
def _approximate_trees(
    alignment: AlignmentFile,
    trees: Annotated[
        list[Path] | None,
        typer.Option(
            "--trees", help="Trees whose topologies and their recombinations are the support; else it is searched for."
        ),
    ] = None,
    substitution: Substitution = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.", rich_help_panel=_POSTERIOR)] = 20_000,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of training, over which annealing is spread; the same command goes on.",
            rich_help_panel=_POSTERIOR,
        ),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=2, help="Draws for the evidence and the trees.", rich_help_panel=_POSTERIOR)
    ] = 10_000,
    burn_in: BurnIn = None,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Approximate the posterior of trees by variational inference, with the evidence and its error.

    Writes posterior.safetensors, trees.trprobs, consensus.nwk, consensus.svg, evidence.csv and, if the model has any,
    parameters.csv; a killed run resumes with the same command, and a finished one is not repeated.
    """
    title, support = _checked_files(alignment, None, substitution), trees or []
    if burn_in is not None and not support:
        raise SettingsError("--burn-in is for the trees of a file; pass --trees FILE as well")
    given = {"time_budget": time_budget, "burn_in": _checked_burn_in(burn_in)}
    numbers: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    what = {**_named_files(alignment), "trees": _checked_trees(support), "substitution": substitution or "default"}
    settings = {**what, "steps": steps, "draws": draws, "seed": seed, **numbers}
    folder = _opened("vi", Path(title).stem, out, force, quiet, settings)
    if folder is None:
        return
    from bayeskit.inference.evidence import EvidenceComparison
    from bayeskit.workflows.phylogenetics.tree_folders import variational_inference_in_folder

    _begun(alignment, substitution, folder, out, quiet)
    posterior, z, sample = variational_inference_in_folder(
        alignment,
        folder.path,
        trees=support,
        substitution=substitution,
        num_steps=steps,
        num_draws=draws,
        seed=seed,
        progress=not quiet,
        **numbers,
    )
    if posterior.ending != "time budget":
        folder.finish(str(z))
    if quiet:
        return
    _print_evidence(EvidenceComparison({z.method: z}, None, None), title, None)
    bound = posterior.lower_bound(seed=seed)
    typer.echo(f"lower bound {with_error(*bound)}, after {posterior.num_steps} steps in {posterior.seconds:.0f} s")
    table = sample.to_pandas().rename(columns={"weight": "probability"})
    _print_trees(table, ["probability", "cumulative"], "trees.trprobs")
    _print_files(folder.path, folder.files())


def _print_trees(table: pd.DataFrame, columns: Sequence[str], file: str) -> None:
    """Print the first rows of a table of topologies, and the first topology itself."""
    shown = _new_table("", "topology", *(column.replace("_", " ") for column in columns))
    for place, row in enumerate(table.head(_MOST_TREES).to_dict("records"), start=1):
        shown.add_row(str(place), *(f"{row[column]:.4f}" for column in columns))
    console = _new_console()
    console.print(shown)
    if len(table) > _MOST_TREES:
        console.print(f"... and {len(table) - _MOST_TREES} more in {file}")
    console.print(Text(f"topology 1: {table['newick'].iloc[0]}"), soft_wrap=True)


def _checked_trees(paths: Sequence[Path]) -> list[str]:
    """Return the digests of files of trees; TreeError if one is missing."""
    for path in paths:
        if not path.is_file():
            raise TreeError(f"{path}: there is no such file")
    return [_digest(path) for path in paths]


def _checked_burn_in(burn_in: float | None) -> float | None:
    """Return a share, or a whole number of trees."""
    if burn_in is not None and burn_in >= 1 and burn_in != int(burn_in):
        raise SettingsError(f"--burn-in must be a share below 1 or a whole number of trees, not {burn_in}")
    return burn_in if burn_in is None or burn_in < 1 else int(burn_in)


def _only_of_trees(methods: str, replicates: int, *numbers: int | None) -> None:
    """Refuse options that the evidence over all topologies does not have."""
    if methods != "all" or replicates > 1 or any(number is not None for number in numbers):
        raise SettingsError(
            "--alignment without --tree sums over all topologies, by methods and with numbers of its own; pass --tree "
            "FILE, or only --substitution, --warmup, --samples, --temperatures, --seed and --jobs"
        )


@_command("run")
def run_model_or_page(
    name: Annotated[str, typer.Argument(help="A model or a page listed by 'bayeskit list'.")],
    seed: Annotated[int | None, typer.Option(show_default="0", help="Random seed.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Run a page with a budget of seconds.")] = False,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    chains: Annotated[int | None, _number("4", "Chains.", _POSTERIOR, min=1)] = None,
    warmup: Annotated[int | None, _number("500", "Warm-up iterations of each chain.", _POSTERIOR, min=0)] = None,
    samples: Annotated[int | None, _number("1000", "Draws of each chain.", _POSTERIOR, min=4)] = None,
    target_acceptance: Acceptance = None,
) -> None:
    """Draw from the posterior of a named model, or run a page of the gallery.

    Models write summary.csv, posterior.nc and report.html; pages write their printed output and their figures. A killed
    run of a model resumes with the same command, and a finished one is not repeated.
    """
    from bayeskit import gallery

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
        page = gallery.page(name)
        page.require()
        script = {"page": name, "script": _digest(page.path), "small": small}
        folder = _opened("run", name, out, force, quiet, script)
        if folder is not None:
            _say_where(folder, out, quiet)
            files = gallery.run_page(name, folder.path, small=small, quiet=quiet)
            folder.finish(page.title)
            _print_files(folder.path, [file.name for file in files])
        return
    if small:
        raise SettingsError(f"--small is for pages of the gallery; {name!r} accepts --chains, --warmup and --samples")
    numbers = {"seed": 0, "num_chains": 4, "num_warmup": 500, "num_samples": 1000, "target_acceptance": 0.8} | settings
    folder = _opened("run", name, out, force, quiet, {"model": name, **numbers})
    if folder is None:
        return
    from bayeskit.report import posterior_summary
    from bayeskit.workflows import posterior_in_folder

    entry = gallery.get_model(name)

    give_back()
    target = entry.build()
    _say_where(folder, out, quiet)
    draws = posterior_in_folder(
        target,
        folder.path,
        title=f"Posterior of {entry.name}",
        settings={"model": entry.description},
        progress=not quiet,
        **numbers,
    )
    summary = posterior_summary(draws)
    worst = f"{summary['ess'].min():.0f} effective draws or more, r-hat at most {summary['r_hat'].max():.3f}"
    folder.finish(f"{entry.name}: {draws.num_chains} chains of {draws.num_draws} draws, {worst}")
    if quiet:
        return
    table = _new_table(entry.name, "parameter", *(str(c).replace("_", "-") for c in summary.columns))
    for parameter, row in summary.head(40).iterrows():
        shown = [f"{row[c]:.4g}" for c in ("mean", "mcse", "sd", "5 %", "95 %")]
        table.add_row(Text(str(parameter)), *shown, f"{row['ess']:.0f}", f"{row['r_hat']:.3f}")
    console = _new_console()
    console.print(table)
    if len(summary) > 40:
        console.print(f"... and {len(summary) - 40} more in summary.csv")
    _print_files(folder.path, folder.files())


@_command("exam")
def exam(
    methods: Methods = "all",
    cases: Annotated[str, typer.Option(help="Exact cases separated by commas, or 'all'.")] = "all",
    generated: Annotated[int | None, typer.Option(min=1, help="Random problems to run instead of the cases.")] = None,
    seed: Seed = 0,
    small: Annotated[bool, typer.Option("--small", help="Use a budget of seconds, for a first try.")] = False,
    table: Annotated[str, typer.Option(help="'answers', or 'calibration' of the error bars.")] = "answers",
    replicates: Annotated[
        int | None, _number("20", "Runs of each case for --table calibration.", _REPEATED, min=2)
    ] = None,
    jobs: Annotated[
        int | None, _number("1", "Number of replicates or random problems run in parallel.", _REPEATED, min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the table.", rich_help_panel=_OUTPUT)
    ] = None,
    force: Force = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress bar.", rich_help_panel=_OUTPUT)
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
    which, what = _checked_cases(cases), _checked_methods(methods)
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
        run = _opened("exam", "", out, force, quiet, settings | ({"replicates": replicates} if calibrated else {}))
        if run is None:
            return
    folder = None if run is None else run.path
    from bayeskit.inference.evidence.calibration import SMALL as LESS
    from bayeskit.workflows.calibration import calibrations
    from bayeskit.workflows.exam import (
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
        _print_calibration(found, folder, one_folder=False)
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
        status = _FALSE_COMFORT_FOUND if is_bad else 0
    else:
        result = run_exam(what, which, seed=seed, budget=small_budget, progress=progress)
        status = _FALSE_COMFORT_FOUND if result.has_false_comfort else 0 if result.rows else BAD_INPUT
    if run is not None:
        result.to_csv(run.path / "exam.csv")
        run.finish(str(result), status)
    (_print_exam if generated is None else print_generated_exam)(result, folder)
    if status:
        raise typer.Exit(status)


@_command("list")
def _list_models() -> None:
    """List the models and the pages of the gallery that can be run by name."""
    from bayeskit import gallery

    console = _new_console()
    table = _plain_table("model", "log evidence", "with 'bayeskit evidence NAME' or 'bayeskit run NAME'")
    for name, known, description in gallery.listed():
        table.add_row(name, "" if known is None else f"{known:.4f}", Text(description))
    console.print(table)
    for group, heading in gallery.GROUPS.items():
        table = _plain_table("page", "", f"{heading}, with 'bayeskit run NAME [--small]'")
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


def _problem(entry: Entry | None, alignment: Path | None, tree: Path | None, substitution: str | None) -> Problem:
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
    out: Path,
    quiet: bool,
) -> Calibration:
    from bayeskit.workflows import calibration_in_folder

    common: dict[str, Any] = {"budget": budget, "seed": seed, "num_jobs": jobs, "progress": not quiet}
    common["skip_refused"] = True  # like a single run, which reports such methods and goes on
    return calibration_in_folder(methods, problem, out, replicates, **common)


# -- input ----------------------------------------------------------------------------------


def _check_choice(name: str | None, alignment: Path | None, tree: Path | None) -> None:
    if name is not None and (alignment is not None or tree is not None):
        raise SettingsError("pass either a name or --alignment with --tree, not both")
    if name is None and alignment is None and tree is None:
        raise SettingsError("no model was named; pass a name of 'bayeskit list', or --alignment FILE --tree FILE")
    if name is None and alignment is None:
        raise SettingsError("--tree needs --alignment FILE, the sequences at its tips")


def _checked_model(name: str) -> str:
    """Return the name of a model; a page is refused."""
    from bayeskit import gallery

    if gallery.is_page(name):
        raise SettingsError(f"{name!r} is a page of the gallery, not a model; use 'bayeskit run {name}'")
    return name


def _checked_files(alignment: Path | None, tree: Path | None, substitution: str | None) -> str:
    """Return the title of the run of an alignment on a tree."""
    from bayeskit.gallery import check_substitution

    if substitution is not None:
        check_substitution(substitution)
    for path, kind in ((alignment, AlignmentError), (tree, TreeError)):
        if path is not None and not path.is_file():
            raise kind(f"{path}: there is no such file")
    return "" if alignment is None else alignment.name


def _named_files(*paths: Path | None) -> dict[str, str]:
    return {path.name: _digest(path) for path in paths if path is not None}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _evidence_methods() -> set[str]:
    """Return the estimators in the package's source, so that a misspelt name is refused without torch."""
    files = (Path(__file__).parent / "inference" / "evidence").glob("*.py")
    functions = [
        node for file in files for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)
    ]
    return {f.name for f in functions if any(ast.unparse(mark).startswith("estimator(") for mark in f.decorator_list)}


def _checked_methods(text: str) -> str | list[str]:
    """Return the methods of the option, 'all' or names, each of which is known."""
    chosen = _names(text)
    if not chosen:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    if chosen == "all":
        return chosen
    # Where the command line is called from Python, other packages may have registered methods.
    loaded = sys.modules.get("bayeskit.inference.evidence")
    return _all_known("evidence method", chosen, _evidence_methods() if loaded is None else loaded.METHODS)


def _checked_cases(text: str) -> str | list[str]:
    from bayeskit import gallery

    loaded = sys.modules.get("bayeskit.exact")
    return _all_known("exact case", _names(text), gallery.EXACT_CASES if loaded is None else loaded.CASES)


def _all_known(what: str, chosen: str | list[str], known: Collection[str]) -> str | list[str]:
    for name in [] if isinstance(chosen, str) else chosen:
        if name not in known:
            raise unknown_name(what, name, known)
    return chosen


def _names(text: str) -> str | list[str]:
    return text if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


def _say_where(folder: RunFolder, out: Path | None, quiet: bool) -> None:
    if out is None and not quiet:
        typer.echo(f"results go to {folder.path}", err=True)


def _opened(
    command: str, name: str, out: Path | None, force: bool, quiet: bool, settings: Mapping[str, Any]
) -> RunFolder | None:
    """Return the folder of a run, or None if the run is finished, which is said."""
    default = Path("results") / f"{command}-{name}"
    folder = RunFolder(out, {"command": command, **settings}, default=default, force=force)
    if folder.finished is None:
        _OPENED.set(folder)
        return folder
    said, status = folder.finished
    if not quiet:
        _new_console().print(Text(f"finished before: {said}", style="bold"), soft_wrap=True)
        _print_files(folder.path, folder.files())
        typer.echo("pass --force to run it again")
    if status:
        raise typer.Exit(status)
    return None


if __name__ == "__main__":
    main()
