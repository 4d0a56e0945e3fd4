"""The command line: ``bayeskit evidence``, ``run``, ``exam`` and ``list``."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayeskit._console import (
    new_console,
    new_table,
    print_calibration,
    print_evidence,
    print_exam,
    print_files,
    print_generated_exam,
)
from bayeskit._usage import ExplainedCommands
from bayeskit.errors import BayeskitError, BayeskitWarning, SettingsError

if TYPE_CHECKING:
    from bayeskit.gallery import Entry
    from bayeskit.inference.evidence import Budget, Calibration, Problem

# Torch and Pyro are imported inside the commands: asking for help should not wait for them.
app = typer.Typer(cls=ExplainedCommands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

BAD_INPUT, FALSE_COMFORT_FOUND, INTERRUPTED = 2, 1, 130

Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for table, draws and report.")]
Seed = Annotated[int, typer.Option(help="Seed; the same seed gives the same result.")]
Methods = Annotated[str, typer.Option(help="Names separated by commas, or 'all'.")]
Replicates = Annotated[int, typer.Option(min=1, help="How often to repeat everything, each time with another seed.")]
Jobs = Annotated[int, typer.Option(min=1, help="Replicates under way at a time.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars, and no table.")]
Chains = Annotated[int | None, typer.Option(min=1, help="Chains of the posterior run.")]
Warmup = Annotated[int | None, typer.Option(min=20, help="Adapting iterations of the posterior run.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Draws of each chain of the posterior run.")]
Acceptance = Annotated[float | None, typer.Option(min=0.1, max=0.999, help="Acceptance rate to aim at.")]
Temperatures = Annotated[int | None, typer.Option(min=2, help="Steps of the tempered ladder.")]
LadderChains = Annotated[int | None, typer.Option(min=1, help="Chains at each temperature.")]
LadderWarmup = Annotated[int | None, typer.Option(min=20, help="Adapting iterations of the ladder.")]
LadderSamples = Annotated[int | None, typer.Option(min=1, help="Draws of each chain of the ladder.")]
ReferenceTemperatures = Annotated[
    int | None, typer.Option(min=2, help="Steps of the generalised stepping stone, from a reference distribution.")
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
        # ArviZ 0.23 announces 1.x when it is imported; nothing that a user of a command could act on.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        warnings.showwarning = show
        try:
            yield
        except BayeskitError as error:
            pages = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            console.print(Text(f"error: {error}{pages}", style="bold red"), soft_wrap=True)
            raise typer.Exit(BAD_INPUT) from error
        except KeyboardInterrupt as interrupt:
            message = "interrupted; with --out the same command resumes, unless it runs a page or the plain exam"
            console.print(Text(message, style="yellow"), soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from interrupt


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
    """Posterior draws and marginal likelihoods with honest error bars."""


@_command("evidence")
def evidence(
    name: Annotated[str | None, typer.Argument(help="A model of 'bayeskit list'.")] = None,
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
    the same command. With --replicates, repeats everything with other seeds and says how far apart the estimates lie,
    beside the errors that they claim; with --out, it writes replicates.csv, calibration.csv and calibration.svg. Exits
    with 2 where no method applies.
    """
    _check_choice(name, alignment, tree)
    if jobs > 1 and replicates == 1:
        raise SettingsError("--jobs says how many replicates are under way at a time; give --replicates as well")
    from bayeskit._files import as_output_folder
    from bayeskit.gallery import get, is_page, tree_target
    from bayeskit.inference.evidence import compare, select
    from bayeskit.inference.evidence.comparison import by_reason
    from bayeskit.workflows import evidence_in_folder

    chosen = _names(methods)
    if not chosen:
        raise SettingsError("--methods names no method; separate names by commas, or say 'all'")
    select(chosen)
    if name is not None and is_page(name):
        raise SettingsError(f"{name!r} is a page of the gallery, no model; it runs by 'bayeskit run {name} --out DIR'")
    entry = None if name is None else get(name)
    if out is not None:
        as_output_folder(out)  # said before a model is built, let alone run
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
            print_calibration([found], out)
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
        comparison = compare(target, chosen, seed, budget=budget, progress=progress)
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
        print_evidence(comparison, title, reference, reference_error)
        print_files(out)
    if not comparison.results and not comparison.scores:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason(comparison.refused).items())
        raise SettingsError(f"no method gave an answer: {reasons}")


@_command("run")
def run(
    name: Annotated[str, typer.Argument(help="A model or a page of 'bayeskit list'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for what is written.")],
    seed: Annotated[int | None, typer.Option(help="Seed; 0 by default.")] = None,
    chains: Annotated[int | None, typer.Option(min=1, help="Chains; 4 by default.")] = None,
    warmup: Annotated[int | None, typer.Option(min=0, help="Adapting iterations; 500 by default.")] = None,
    samples: Annotated[int | None, typer.Option(min=4, help="Draws of each chain; 1000 by default.")] = None,
    target_acceptance: Annotated[
        float | None, typer.Option(min=0.1, max=0.999, help="Acceptance to aim at; 0.8 by default.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Run a page in seconds.")] = False,
    quiet: Quiet = False,
) -> None:
    """Draw from the posterior of a named model, or run a page of the gallery.

    A model writes summary.csv, posterior.nc and report.html; a page what it prints and its figures.
    """
    from bayeskit import gallery
    from bayeskit._files import as_output_folder
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
            raise SettingsError(f"{name!r} is a page with its own settings; it takes --small, not {options}")
        print_files(out, gallery.run_page(name, out, small=small, quiet=quiet))
        return
    if small:
        raise SettingsError(f"--small is for pages of the gallery; {name!r} takes --chains, --warmup and --samples")
    entry = gallery.get(name)
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
    table = new_table(entry.name, "parameter", *(str(c).replace("_", "-") for c in summary.columns))
    for parameter, row in summary.head(40).iterrows():
        shown = [f"{row[c]:.4g}" for c in ("mean", "mcse", "sd", "5 %", "95 %")]
        table.add_row(Text(str(parameter)), *shown, f"{row['ess']:.0f}", f"{row['r_hat']:.3f}")
    console = new_console()
    console.print(table)
    if len(summary) > 40:
        console.print(f"... and {len(summary) - 40} more in summary.csv")
    print_files(out)


@_command("exam")
def exam(
    methods: Methods = "all",
    cases: Annotated[str, typer.Option(help="Exact cases separated by commas, or 'all'.")] = "all",
    seed: Seed = 0,
    small: Annotated[bool, typer.Option("--small", help="A budget of seconds, to try it out.")] = False,
    table: Annotated[str, typer.Option(help="'answers', or 'calibration': are the error bars right?")] = "answers",
    replicates: Annotated[
        int | None, typer.Option(min=2, help="Of each case, for the table of calibration; 20 by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Replicates or random problems under way at a time; 1 by default.")
    ] = None,
    generated: Annotated[int | None, typer.Option(min=1, help="So many random problems in place of the cases.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Let every method answer every problem whose exact evidence is known.

    With --generated, random problems from extreme ranges, whose answers are computed by other means, and a table by
    method; exits with 1 where more than 0.2 % of the answers are trusted and four errors off, or one failed. With
    --out, a killed run resumes with the same command.
    Exits with 1 where a method trusted an answer more than three standard errors away, with 2 where there was no answer
    at all. With --table calibration, every case is answered many times, on a small budget, and the table says whether
    the error bars are right. With --out, writes exam.csv, or calibration.csv and calibration.svg and a folder a case.
    """
    from bayeskit._files import as_output_folder
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
        raise SettingsError(f"--table is 'answers' or 'calibration', not {table!r}")
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
        print_calibration(found, out, one_folder=False)
        return
    for option, given in (("--replicates", replicates), ("--jobs", jobs if generated is None else None)):
        if given is not None:
            raise SettingsError(f"{option} is for --table calibration; the table of answers has one run of each case")
    folder = None if out is None else as_output_folder(out)
    if generated is not None:
        answers = run_generated_exam(
            generated,
            GENERATED_METHODS if methods == "all" else what,
            seed,
            budget=SMALL if small else None,
            progress=not quiet,
            num_jobs=1 if jobs is None else jobs,
            checkpoint=None if folder is None else folder / "generated",
        )
        if folder is not None:
            answers.to_csv(folder / "exam.csv")
        print_generated_exam(answers, folder)
        if answers.count(FALSE_COMFORT) > MAX_FALSE_COMFORT * len(answers.rows) or answers.count(FAILED):
            raise typer.Exit(FALSE_COMFORT_FOUND)
        return
    result = run_exam(what, which, seed, budget=SMALL if small else None, progress=not quiet)
    if folder is not None:
        result.to_csv(folder / "exam.csv")
    print_exam(result, folder)
    if not result.rows:
        raise typer.Exit(BAD_INPUT)
    if result.has_false_comfort:
        raise typer.Exit(FALSE_COMFORT_FOUND)


@_command("list")
def list_models() -> None:
    """List the models and the pages of the gallery that can be run by name."""
    from bayeskit import gallery

    console = new_console()
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
    common["skip_refused"] = True  # as one run does, which says what does not apply and goes on
    if out is None:
        return calibrate(methods, problem, replicates, **common)
    return calibration_in_folder(methods, problem, out, replicates, **common)


# -- input ----------------------------------------------------------------------------------


def _check_choice(name: str | None, alignment: Path | None, tree: Path | None) -> None:
    if name is not None and (alignment is not None or tree is not None):
        raise SettingsError("give either a name or --alignment with --tree, not both")
    if name is None and alignment is None and tree is None:
        raise SettingsError("say what to run: a name of 'bayeskit list', or --alignment FILE --tree FILE")
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
