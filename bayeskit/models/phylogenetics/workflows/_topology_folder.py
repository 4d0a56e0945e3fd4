"""Trees and the evidence over all topologies from a file of sequences, written to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeskit.errors import SettingsError
from bayeskit.extend import obey, remove_checkpoints, write_atomically, write_csv, write_netcdf
from bayeskit.models.phylogenetics import (
    Alignment,
    MrBayesBlock,
    Partition,
    Tree,
    asdsf,
    majority_rule_consensus,
    split_frequencies,
)
from bayeskit.models.phylogenetics._data_files import parse_models
from bayeskit.models.phylogenetics._mrbayes import has_mrbayes_block, set_block_aside
from bayeskit.models.phylogenetics.workflows._topology_evidence import TopologyEvidence, topology_evidence
from bayeskit.models.phylogenetics.workflows._topology_inference import TopologyInference, infer_topologies
from bayeskit.models.phylogenetics.workflows._topology_report import draw_consensus, write_topology_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bayeskit.models.phylogenetics import TreeSample

_CHECKPOINT = "checkpoint.search"


def infer_topologies_in_folder(
    path: str | Path,
    folder: str | Path,
    *,
    substitution: str | None = None,
    evidence: bool = True,
    num_steps: int = 20_000,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> tuple[TopologyInference, TopologyEvidence | None]:
    r"""Run `infer_topologies` and `topology_evidence` on a file, and write what they find.

    Files: `report.html`, `consensus.nwk` and `consensus.svg` (majority rule, with supports and mean branch lengths),
    `run1.trees`, ... (the trees of each run), `split_frequencies.csv`, `parameters.csv`, `posterior.nc` (for ArviZ)
    and, with `evidence`, `evidence.csv`. If it was killed, or a time budget ended it, a call with the same arguments
    resumes the search from `checkpoint.search`, which is deleted once the results of a finished search are written.
    Where subsets have their own branch lengths, those of the trees are their means.

    Parameters
    ----------
    path : path
        A FASTA, NEXUS or PHYLIP file, of one type of data or several.
    folder : path
        Existing folder.
    substitution : str, optional
        Such as "GTR+G4", or by type "DNA=GTR+G4,standard=Mkv"; by default what a MrBayes block of the file asks for,
        and without a block the usual models of `Partition.from_file`, JC69 for bases.
    evidence : bool, default True
        Whether to estimate the evidence over all topologies, in three ways.
    num_steps : int, default 20,000
        Steps of the variational inference.
    seed : int, default 0
    facts : mapping, optional
        More rows for the report's table of settings, such as the command.
    progress : bool, default True
    **settings
        Further settings of `infer_topologies`.

    Returns
    -------
    search : TopologyInference
    found : TopologyEvidence or None

    Raises
    ------
    AlignmentError
        If the file is missing or malformed, or has fewer than four taxa.
    SettingsError
        If a setting lies outside its domain; if the MrBayes block fixes the topology; or, with `evidence`, if it
        unlinks the branch lengths or there is one run only.
    KeyboardInterrupt
        On Ctrl-C, once a checkpoint is written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "data.fasta").write_text(">A\nAACCAGT\n>B\nAACCGGT\n>C\nAGCTAGA\n>D\nAGCTACA\n")
    >>> search, _ = infer_topologies_in_folder(
    ...     folder / "data.fasta", folder, evidence=False, num_warmup=50, num_samples=50, progress=False
    ... )
    >>> sorted(path.name for path in folder.glob("consensus.*"))
    ['consensus.nwk', 'consensus.svg']
    """
    folder = Path(folder)
    if evidence and settings.get("num_runs", 2) < 2:
        raise SettingsError(
            "num_runs: the evidence in three ways needs two runs or more, for the error of the topologies' mass. "
            "Remedy: use num_runs=2, or search without the evidence (--no-evidence)."
        )
    data, model = model_of_file(path, substitution, separate=not evidence)
    search = infer_topologies(
        data,
        seed=seed,
        checkpoint=folder / _CHECKPOINT,
        progress=progress,
        **model,
        **settings,
    )
    obey(search.ending)
    _write(search, folder)
    found = topology_evidence(search, num_steps=num_steps, seed=seed, progress=progress) if evidence else None
    if found is not None:
        obey(found.variational.ending)
        found.table.to_csv(folder / "evidence.csv")
    facts = {"alignment": path} | dict(facts or {})
    write_topology_report(folder / "report.html", search, found, title=f"Trees of {Path(path).name}", settings=facts)
    if search.ending != "time budget":
        remove_checkpoints(folder, "search")
    return search, found


def model_of_file(
    path: str | Path, substitution: str | None, *, separate: bool = False
) -> tuple[Alignment | Partition, dict[str, Any]]:
    """Return the alignment of a file or its partition, and its model: named, that of its MrBayes block, or usual.

    The model is a mapping of arguments: `substitution`, `site_rates` and, of a block, `branch_length_prior`,
    `constraints` and, if branch lengths may be `separate` and are, `separate_branch_lengths`. SettingsError if a block
    fixes the topology, or unlinks the branch lengths where they may not be separate.
    """
    if substitution is None and has_mrbayes_block(path):
        block = MrBayesBlock.from_file(path)
        if block.topology is not None:
            raise SettingsError(
                f"{path}: the MrBayes block fixes the topology, which the search for topologies does not support. "
                "Remedy: give a tree, or name a substitution model."
            )
        if block.separate_branch_lengths and not separate:
            raise SettingsError(
                f"{path}: the MrBayes block unlinks the branch lengths, which only a search without the evidence in "
                "three ways supports. Remedy: use 'bayeskit trees' with --no-evidence, or name a substitution model."
            )
        # The prior is the same for all topologies.
        model: dict[str, Any] = {
            "branch_length_prior": block.branch_length_prior(_any_tree(block.partition.taxa)),
            "constraints": tuple(block.constraints.values()),
        }
        if block.separate_branch_lengths:
            model["separate_branch_lengths"] = True
        data, chosen = with_one_model(block.partition)
        return data, model | chosen
    set_block_aside(path)
    return with_one_model(Partition.from_file(path, models=parse_models(substitution)))


def with_one_model(partition: Partition) -> tuple[Alignment | Partition, dict[str, Any]]:
    """Return a partition; if it has one subset, this alignment and the arguments of its model."""
    if len(partition.subsets) > 1:
        return partition, {}
    ((name, alignment),) = partition.subsets.items()
    return alignment, {"substitution": partition.substitution[name], "site_rates": partition.site_rates[name]}


def _any_tree(taxa: tuple[str, ...]) -> Tree:
    text = str(len(taxa) - 1)
    for place in reversed(range(2, len(taxa) - 1)):
        text = f"({place},{text})"
    return Tree.from_newick(f"(0,1,{text});", {str(place): taxon for place, taxon in enumerate(taxa)})


def _write(search: TopologyInference, folder: Path) -> None:
    """Write the trees, their summaries and the parameters."""
    import arviz

    sample = search.sample
    for number, run in enumerate(search.samples, start=1):
        run.to_file(folder / f"run{number}.trees")
    write_consensus(sample, folder)
    splits = asdsf(search.samples, 0.0) if len(search.samples) > 1 else split_frequencies(sample)
    write_csv(folder / "split_frequencies.csv", splits.to_pandas(), float_format=None)
    table = arviz.summary(search.to_arviz(), round_to="none")
    write_csv(folder / "parameters.csv", table, index=True, index_label="parameter", float_format=None)
    write_netcdf(search.to_datasets(), folder / "posterior.nc")


def write_consensus(sample: TreeSample, folder: Path) -> None:
    """Write the majority-rule consensus as `consensus.nwk` and `consensus.svg`."""
    tree = majority_rule_consensus(sample)
    tree.to_file(folder / "consensus.nwk")
    write_figure(folder / "consensus.svg", draw_consensus(tree))


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as SVG, whole or not at all."""
    drawn = BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_atomically(path, drawn.getvalue())
