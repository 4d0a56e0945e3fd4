"""Trees and the evidence over all topologies from a file of sequences, written to a folder."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from bayeskit.core.compatibility import write_netcdf
from bayeskit.core.folders import write_atomically, write_csv
from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import (
    Alignment,
    MrBayesBlock,
    Partition,
    Tree,
    asdsf,
    greedy_consensus,
    majority_rule_consensus,
    parse_substitution,
    split_frequencies,
)
from bayeskit.models.phylogenetics.mrbayes import has_mrbayes_block, set_block_aside
from bayeskit.workflows.phylogenetics.topology_evidence import TopologyEvidence, topology_evidence
from bayeskit.workflows.phylogenetics.topology_inference import TopologyInference, infer_topologies

__all__ = ["infer_topologies_in_folder"]


def infer_topologies_in_folder(
    path: str | Path,
    folder: str | Path,
    *,
    substitution: str | None = None,
    evidence: bool = True,
    num_steps: int = 20_000,
    seed: int = 0,
    progress: bool = True,
    **settings: Any,
) -> tuple[TopologyInference, TopologyEvidence | None]:
    r"""Run `infer_topologies` and `topology_evidence` on a file, and write what they find.

    Files: `consensus.nwk` and `consensus.svg` (majority rule, with supports and mean branch lengths), `run1.trees`,
    ... (the trees of each run), `split_frequencies.csv`, `parameters.csv`, `posterior.nc` (for ArviZ) and, with
    `evidence`, `evidence.csv`. The search resumes from `search.safetensors` if it was killed.

    Parameters
    ----------
    path : path
        A FASTA, NEXUS or PHYLIP file.
    folder : path
        Existing folder.
    substitution : str, optional
        Such as "GTR+G4"; by default what a MrBayes block of the file asks for, and without a block JC69.
    evidence : bool, default True
        Whether to estimate the evidence over all topologies, in three ways.
    num_steps : int, default 20,000
        Steps of the variational inference.
    seed : int, default 0
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
        If a setting lies outside its domain; if the MrBayes block fixes the topology or unlinks the branch lengths; or,
        with `evidence`, if it constrains the topologies or divides the sites.

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
    data, model = _model_of(path, substitution)
    if evidence and isinstance(data, Partition):
        raise SettingsError(
            f"{path}: the MrBayes block divides the sites, for which there are no three ways to sum over topologies. "
            "Remedy: search without the evidence, or have it from stepping stones alone, by "
            "infer_topologies(MrBayesBlock.from_file(path).partition)."
        )
    if evidence and model.get("constraints"):
        raise SettingsError(
            f"{path}: the MrBayes block constrains the topologies, so that three ways to sum over all of them would "
            "disagree. Remedy: search without the evidence, or name a substitution model."
        )
    search = infer_topologies(
        data,
        seed=seed,
        checkpoint=folder / "search.safetensors",
        progress=progress,
        **model,
        **settings,
    )
    _write(search, folder)
    if not evidence:
        return search, None
    found = topology_evidence(search, num_steps=num_steps, seed=seed, progress=progress)
    found.table.to_csv(folder / "evidence.csv")
    return search, found


def _model_of(path: str | Path, substitution: str | None) -> tuple[Alignment | Partition, dict[str, Any]]:
    """Return the alignment or its partition, and the settings of its model."""
    if substitution is None and has_mrbayes_block(path):
        block = MrBayesBlock.from_file(path)
        if block.separate_branch_lengths or block.topology is not None:
            what = "unlinks the branch lengths" if block.topology is None else "fixes the topology"
            raise SettingsError(
                f"{path}: the MrBayes block {what}, which the search for topologies does not support. Remedy: give a "
                "tree, or name a substitution model."
            )
        # The prior is the same for all topologies.
        model: dict[str, Any] = {
            "branch_length_prior": block.branch_length_prior(_any_tree(block.alignment.taxa)),
            "constraints": tuple(block.constraints.values()),
        }
        if len(block.partition.subsets) > 1:
            return block.partition, model
        (substitution_model,), (rates,) = block.partition.substitution.values(), block.partition.site_rates.values()
        return block.alignment, model | {"substitution": substitution_model, "site_rates": rates}
    set_block_aside(path)
    substitution = substitution or "JC69"
    kind = {"gy94": "codon", "gy": "codon", "mk": "standard"}.get(substitution.partition("+")[0].strip().lower())
    alignment = Alignment.from_file(path, data_type=kind)
    chosen, rates = parse_substitution(substitution, alignment)
    return alignment, {"substitution": chosen, "site_rates": rates}


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
    majority_rule_consensus(sample).to_file(folder / "consensus.nwk")
    drawn = BytesIO()
    figure: Any = greedy_consensus(sample).plot().figure
    figure.savefig(drawn, format="svg", bbox_inches="tight")
    write_atomically(folder / "consensus.svg", drawn.getvalue())
    splits = asdsf(search.samples, 0.0) if len(search.samples) > 1 else split_frequencies(sample)
    write_csv(folder / "split_frequencies.csv", splits.to_pandas(), float_format=None)
    table = arviz.summary(search.to_arviz(), round_to="none")
    write_csv(folder / "parameters.csv", table, index=True, index_label="parameter", float_format=None)
    write_netcdf(search.to_datasets(), folder / "posterior.nc")
