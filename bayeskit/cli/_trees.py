"""``bayeskit trees``, ``compare``, ``sbn`` and ``vi``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bayeskit._core.folders import RunFolder
from bayeskit._core.inputs import unknown_name
from bayeskit._core.texts import with_error
from bayeskit._ctrl_c import give_back
from bayeskit.cli._application import TYPED, by_option
from bayeskit.cli._folders import checked_files, file_digest, named_files, opened, say_where
from bayeskit.cli._options import POSTERIOR, AlignmentFile, BurnIn, Force, Out, Quiet, Seed, numeric
from bayeskit.cli._tables import new_console, new_table, print_evidence, print_files, value_and_error
from bayeskit.errors import SettingsError, TreeError

if TYPE_CHECKING:
    import pandas as pd


SubstitutionByType = Annotated[
    str | None,
    typer.Option(
        "--substitution",
        help="Such as HKY85, GTR+I+G4 or LG+F+R3; by type of data, DNA=GTR+G4,standard=Mkv; by default the file's "
        "MrBayes block, or the usual model of each type.",
    ),
]


def sample_trees(
    alignment: AlignmentFile,
    substitution: SubstitutionByType = None,
    evidence: Annotated[bool, typer.Option(help="Estimate the evidence over all topologies, in three ways.")] = True,
    seed: Seed = 0,
    out: Out = None,
    force: Force = False,
    quiet: Quiet = False,
    runs: Annotated[int, typer.Option(min=1, help="Independent runs.", rich_help_panel=POSTERIOR)] = 2,
    warmup: Annotated[int | None, numeric("1000", "Warm-up rounds of each run.", POSTERIOR, min=0)] = None,
    samples: Annotated[int | None, numeric("4000", "Rounds of each run, one tree each.", POSTERIOR, min=8)] = None,
    temperatures: Annotated[int | None, numeric("by taxa", "Temperatures of each run.", POSTERIOR, min=2)] = None,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which the search ends early; the same command goes on.",
            rich_help_panel=POSTERIOR,
        ),
    ] = None,
    steps: Annotated[int | None, numeric("20000", "Steps of variational inference.", POSTERIOR, min=1)] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Threads.", rich_help_panel=POSTERIOR)] = 1,
) -> None:
    """Sample trees from an alignment alone, and estimate the evidence over all topologies.

    Writes report.html, consensus.nwk and consensus.svg (majority rule, with supports), run1.trees, ...,
    split_frequencies.csv, parameters.csv, posterior.nc and evidence.csv; a killed run resumes with the same command,
    and a finished one is not repeated. The evidence needs two runs or more.
    """
    more: dict[str, Any] = {"num_runs": runs, "time_budget": time_budget, "num_steps": steps}
    numbers = (warmup, samples, temperatures)
    infer_trees("trees", alignment, substitution, evidence, seed, out, force, quiet, *numbers, jobs, **more)


def _checked_alignment(alignment: Path, substitution: str | None) -> str:
    """Return the title of the run of an alignment with a model, or with models by type of data."""
    from bayeskit.gallery._trees import check_substitution

    for piece in [] if substitution is None else substitution.split(","):
        name = piece.rpartition("=")[2].strip()
        if name.partition("+")[0].lower() != "binary":  # of restriction sites only
            check_substitution(name)
    return checked_files(alignment, None, None)


def infer_trees(
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
    title = _checked_alignment(alignment, substitution)
    if evidence and more.get("num_runs", 2) < 2:
        raise SettingsError("the evidence in three ways needs two runs; pass --runs 2 or more, or --no-evidence")
    given = {"num_warmup": warmup, "num_samples": samples, "num_temperatures": temperatures, **more}
    numbers = {key: value for key, value in given.items() if value is not None}
    what = named_files(alignment, None) | {"substitution": substitution or "default", "evidence": evidence}
    folder = opened(command, Path(title).stem, out, force, quiet, {**what, "seed": seed, **numbers})
    if folder is None:
        return
    from bayeskit.models.phylogenetics.workflows._topology_folder import infer_topologies_in_folder

    facts = {"command": shlex.join(["bayeskit", *TYPED.get()])} if TYPED.get() else {}
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
    console = new_console()
    console.print(Text(by_option(search.verdict)), soft_wrap=True)
    if found is not None:
        print_evidence(found.table, title, None, 0.0)
    print_files(folder.path, folder.files())


def _begun(
    alignment: Path, substitution: str | None, folder: RunFolder, out: Path | None, quiet: bool
) -> dict[str, str]:
    """Say what a MrBayes block asks for, or which types of data there are, and where results go; return it by name."""
    from bayeskit.gallery._trees import mrbayes_block
    from bayeskit.models.phylogenetics._data_files import file_in_words

    give_back()
    block = mrbayes_block(alignment) if substitution is None else None
    found = {"MrBayes block": str(block)} if block is not None else {"data": file_in_words(alignment, substitution)}
    found = {name: text for name, text in found.items() if text}
    if not quiet:
        for text in found.values():
            typer.echo(text, err=True)
    say_where(folder, out, quiet)
    return found


def compare_trees(
    alignment: Path,
    trees: list[Path],
    substitution: str | None,
    most: int,
    draws: int | None,
    burn_in: float | None,
    seed: int,
    out: Path | None,
    force: bool,
    quiet: bool,
) -> None:
    """Compare given topologies by the evidence of each, on an alignment, in a folder."""
    title = _checked_alignment(alignment, substitution)
    given = {"num_draws": draws, "burn_in": _checked_burn_in(burn_in)}
    numbers: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    what = {**named_files(alignment), "trees": _checked_trees(trees), "substitution": substitution or "default"}
    folder = opened("compare", Path(title).stem, out, force, quiet, {**what, "most": most, "seed": seed, **numbers})
    if folder is None:
        return
    from bayeskit.models.phylogenetics.workflows._tree_folders import compare_topologies_in_folder

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
    said.append(f"{found.num_trees} trees read, {found.num_burn_in or 'none'} left out as burn-in")
    if found.total is not None:
        said.append(
            f"log evidence of all topologies {with_error(found.total.log_evidence, found.total.standard_error)}"
        )
    folder.finish("; ".join(said))
    if quiet:
        return
    console = new_console()
    for line in said:
        console.print(Text(line, style="bold"), soft_wrap=True)
    shares = dict(zip((f"tree {place + 1}" for place in range(count)), found.shares.tolist(), strict=True))
    table = new_table("", "topology", "log evidence", "std. error", "probability", "std. error", "in files", "trusted")
    for row in frame.head(_MOST_TREES).to_dict("records"):
        table.add_row(
            row["topology"],
            *value_and_error(row["log_evidence"], row["standard_error"]),
            *value_and_error(row["posterior_probability"], row["posterior_probability_error"]),
            f"{shares[row['topology']]:.4f}",
            "yes" if row["trusted"] else "no",
            style=None if row["trusted"] else "yellow",
        )
    console.print(table)
    if count > _MOST_TREES:
        console.print(f"... and {count - _MOST_TREES} more in topologies.csv")
    print_files(folder.path, folder.files())


def fit_network(
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
    folder = opened("sbn", trees[0].stem, out, force, quiet, settings)
    if folder is None:
        return
    from bayeskit.models.phylogenetics.workflows._tree_folders import fit_network_in_folder

    give_back()
    say_where(folder, out, quiet)
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
    console = new_console()
    console.print(Text(said, style="bold"), soft_wrap=True)
    if found.reference is not None:
        console.print(Text(f"reference: {found.reference}"), soft_wrap=True)
    for name, (value, error) in found.measures.items():
        console.print(Text(f"{name} {with_error(value, error or math.nan)}"), soft_wrap=True)
    _print_trees(found.trees, ["probability", "in_sample", *(["in_reference"] if references else [])], "trees.csv")
    print_files(folder.path, folder.files())


_NETWORK_METHODS = ("em", "simple_average")
#: Rows of a table of topologies that are printed.
_MOST_TREES = 20


def approximate_trees(
    alignment: AlignmentFile,
    trees: Annotated[
        list[Path] | None,
        typer.Option(
            "--trees", help="Trees whose topologies and their recombinations are the support; else it is searched for."
        ),
    ] = None,
    substitution: SubstitutionByType = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.", rich_help_panel=POSTERIOR)] = 20_000,
    time_budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds of training, over which annealing is spread; the same command goes on.",
            rich_help_panel=POSTERIOR,
        ),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=2, help="Draws for the evidence and the trees.", rich_help_panel=POSTERIOR)
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
    title, support = _checked_alignment(alignment, substitution), trees or []
    if burn_in is not None and not support:
        raise SettingsError("--burn-in is for the trees of a file; pass --trees FILE as well")
    given = {"time_budget": time_budget, "burn_in": _checked_burn_in(burn_in)}
    numbers: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    what = {**named_files(alignment), "trees": _checked_trees(support), "substitution": substitution or "default"}
    settings = {**what, "steps": steps, "draws": draws, "seed": seed, **numbers}
    folder = opened("vi", Path(title).stem, out, force, quiet, settings)
    if folder is None:
        return
    from bayeskit.inference.evidence import EvidenceComparison
    from bayeskit.models.phylogenetics.workflows._tree_folders import variational_inference_in_folder

    _begun(alignment, substitution, folder, out, quiet)
    posterior, z, sample = variational_inference_in_folder(
        alignment,
        folder.path,
        trees=support,
        substitution=substitution,
        num_steps=steps,
        num_draws=draws,
        seed=seed,
        on_support=None if quiet else lambda found: typer.echo(f"support: {found}", err=True),
        progress=not quiet,
        **numbers,
    )
    if posterior.ending != "time budget":
        folder.finish(str(z))
    if quiet:
        return
    print_evidence(EvidenceComparison({z.method: z}, None, None), title, None)
    bound = posterior.lower_bound(seed=seed)
    typer.echo(f"lower bound {with_error(*bound)}, after {posterior.num_steps} steps in {posterior.seconds:.0f} s")
    table = sample.to_pandas().rename(columns={"weight": "probability"})
    _print_trees(table, ["probability", "cumulative"], "trees.trprobs")
    print_files(folder.path, folder.files())


def _print_trees(table: pd.DataFrame, columns: Sequence[str], file: str) -> None:
    """Print the first rows of a table of topologies, and the first topology itself."""
    shown = new_table("", "topology", *(column.replace("_", " ") for column in columns))
    for place, row in enumerate(table.head(_MOST_TREES).to_dict("records"), start=1):
        shown.add_row(str(place), *(f"{row[column]:.4f}" for column in columns))
    console = new_console()
    console.print(shown)
    if len(table) > _MOST_TREES:
        console.print(f"... and {len(table) - _MOST_TREES} more in {file}")
    console.print(Text(f"topology 1: {table['newick'].iloc[0]}"), soft_wrap=True)


def _checked_trees(paths: Sequence[Path]) -> list[str]:
    """Return the digests of files of trees; TreeError if one is missing."""
    for path in paths:
        if not path.is_file():
            raise TreeError(f"{path}: there is no such file")
    return [file_digest(path) for path in paths]


def _checked_burn_in(burn_in: float | None) -> float | None:
    """Return a share, or a whole number of trees."""
    if burn_in is not None and burn_in >= 1 and burn_in != int(burn_in):
        raise SettingsError(f"--burn-in must be a share below 1 or a whole number of trees, not {burn_in}")
    return burn_in if burn_in is None or burn_in < 1 else int(burn_in)
