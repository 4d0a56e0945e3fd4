"""``bayeskit evidence``."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bayeskit._ctrl_c import give_back
from bayeskit.cli._folders import checked_files, named_files, opened, say_where
from bayeskit.cli._names import checked_methods
from bayeskit.cli._options import (
    Acceptance,
    Chains,
    Force,
    Jobs,
    LadderChains,
    LadderSamples,
    LadderWarmup,
    LivePoints,
    Methods,
    Out,
    Particles,
    Quiet,
    ReferenceTemperatures,
    Replicates,
    Samples,
    Seed,
    SMCReplicates,
    Substitution,
    Temperatures,
    Warmup,
)
from bayeskit.cli._own_models import Data, is_own, stem_of, target_of, what_runs
from bayeskit.cli._tables import print_calibration, print_evidence, print_files
from bayeskit.cli._trees import infer_trees
from bayeskit.errors import SettingsError

if TYPE_CHECKING:
    from bayeskit.gallery import Entry
    from bayeskit.inference.evidence import Budget, Calibration, Problem


def evidence(
    name: Annotated[
        str | None, typer.Argument(help="A model listed by 'bayeskit list', or one of yours, as model.py:model.")
    ] = None,
    data: Data = None,
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
    """Estimate the log evidence of a model, named or of yours, of an alignment on a tree, or of one over all trees.

    Writes evidence.csv, report.html and, if a method needed draws, posterior.nc; a killed run resumes with the same
    command, and a finished one is not repeated. With --replicates, repeats the run with other seeds, compares the
    spread of the estimates with their standard errors, and writes replicates.csv, calibration.csv and calibration.svg
    instead. A model may have other default numbers than these. The exit status is 2 if no method applies.
    """
    _check_choice(name, alignment, tree)
    if name is None and alignment is not None and tree is None:
        _only_of_trees(methods, replicates, chains, particles, live_points, ladder_chains, reference_temperatures)
        numbers_of_trees = (warmup, samples, temperatures, jobs)
        infer_trees("evidence", alignment, substitution, True, seed, out, force, quiet, *numbers_of_trees)
        return
    if jobs > 1 and replicates == 1:
        raise SettingsError("--jobs is the number of replicates run in parallel; pass --replicates as well")
    chosen = checked_methods(methods)
    own = name is not None and is_own(name)
    if data is not None and not own:
        raise SettingsError("--data is for a model in a file of yours; name it, as model.py:model")
    if name is not None:
        title = name if own else _checked_model(name)
    else:
        title = checked_files(alignment, tree, substitution)
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
    if name is not None:
        what = what_runs([name], data) if own else {"model": name}
    else:
        what = named_files(alignment, tree) | {"substitution": called}
    folder = opened(
        "evidence" if replicates == 1 else "replicates",
        stem_of(title) if own else Path(title).stem,
        out,
        force,
        quiet,
        {**what, "methods": chosen, "seed": seed, "replicates": replicates, **numbers},
    )
    if folder is None:
        return
    from bayeskit.gallery._registry import get_model
    from bayeskit.gallery._trees import mrbayes_block, tree_target
    from bayeskit.inference.evidence import Budget
    from bayeskit.inference.evidence._tables import by_reason
    from bayeskit.workflows import evidence_in_folder

    give_back()
    entry = None if name is None or own else get_model(name)
    budget = Budget(**((dict(entry.budget) if entry is not None else {}) | numbers))  # type: ignore[arg-type]
    block = mrbayes_block(alignment) if alignment is not None and substitution is None else None
    if block is not None and not quiet:
        typer.echo(str(block), err=True)
    if replicates > 1:
        problem = _problem(entry, alignment, tree, substitution, name, data)
        say_where(folder, out, quiet)
        found = _calibrated(problem, chosen, replicates, budget, seed, jobs, folder.path, quiet)
        folder.finish(f"{replicates} replicates of {', '.join(found.estimates) or 'no method'}")
        if not quiet:
            print_calibration([found], folder.path)
        return
    reference, reference_error = None, 0.0
    settings: dict[str, Any]
    if entry is not None:
        target = entry.build()
        reference, reference_error = entry.reference, entry.reference_error
        settings = {"model": entry.description}
        if entry.reference_source:
            settings["reference from"] = entry.reference_source
    elif name is not None:
        target = target_of(name, data, seed)
        settings = {"model": name} | ({} if data is None else {"data": data.name})
    elif alignment is not None and tree is not None:
        target = tree_target(alignment, tree, substitution, block)
        used = substitution or ("JC69" if block is None else str(block))
        settings = {"alignment": alignment, "tree": tree, "substitution": used}
    say_where(folder, out, quiet)
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
        print_evidence(comparison, title, reference, reference_error)
        print_files(folder.path, folder.files())
    if not comparison.results and not comparison.scores:
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason(comparison.refused).items())
        raise SettingsError(f"no method gave an answer: {reasons}")


def _problem(
    entry: Entry | None,
    alignment: Path | None,
    tree: Path | None,
    substitution: str | None,
    name: str | None = None,
    data: Path | None = None,
) -> Problem:
    from bayeskit.gallery import tree_target
    from bayeskit.inference.evidence import Problem

    if entry is not None:
        known = math.nan if entry.reference is None else entry.reference
        return Problem(entry.name, entry.build, known, entry.reference_error)
    if name is not None:
        return Problem(name, functools.partial(target_of, name, data))
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


def _check_choice(name: str | None, alignment: Path | None, tree: Path | None) -> None:
    if name is not None and (alignment is not None or tree is not None):
        raise SettingsError("pass either a name or --alignment with --tree, not both")
    if name is None and alignment is None and tree is None:
        raise SettingsError("no model was named; pass a name of 'bayeskit list', or --alignment FILE --tree FILE")
    if name is None and alignment is None:
        raise SettingsError("--tree needs --alignment FILE, the sequences at its tips")


def _checked_model(name: str) -> str:
    """Return the name of a model; a page is refused."""
    from bayeskit.gallery._scripts import is_page

    if is_page(name):
        raise SettingsError(f"{name!r} is a page of the gallery, not a model; use 'bayeskit run {name}'")
    return name


def _only_of_trees(methods: str, replicates: int, *numbers: int | None) -> None:
    """Refuse options that the evidence over all topologies does not have."""
    if methods != "all" or replicates > 1 or any(number is not None for number in numbers):
        raise SettingsError(
            "--alignment without --tree sums over all topologies, by methods and with numbers of its own; pass --tree "
            "FILE, or only --substitution, --warmup, --samples, --temperatures, --seed and --jobs"
        )
