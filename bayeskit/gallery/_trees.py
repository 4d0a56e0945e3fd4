"""Targets of phylogenetic models: the primates, or a given alignment and tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bayeskit._core.inputs import unknown_name
from bayeskit.models._substitution_names import KNOWN_NAMES

if TYPE_CHECKING:
    from bayeskit._logdensity.target import Target
    from bayeskit.models.phylogenetics._mrbayes import MrBayesBlock


def check_substitution(text: str) -> None:
    """Raise UnknownNameError if the model of a text such as "GTR+G4" is unknown, without an import of torch."""
    name = text.partition("+")[0].strip()
    known = {spelling.lower() for spelling in KNOWN_NAMES}
    if name.lower() not in known | {"mkv"} and not re.fullmatch("[0-9]{6}", name):
        raise unknown_name("substitution model", name, KNOWN_NAMES)


def primates_target() -> Target:
    """Build the target of the primates alignment on its fixed topology, with Jukes-Cantor."""
    from bayeskit._logdensity.target import Target
    from bayeskit.models.phylogenetics import JC69, TreeModel, primates

    alignment, tree = primates()
    # The likelihood is compiled already; torch's compiler would take ten seconds to save a tenth of a ladder's call.
    return Target.from_pyro(TreeModel(alignment, tree, substitution=JC69()), compile=False)


def tree_target(
    alignment: str | Path, tree: str | Path, substitution: str | None = None, block: MrBayesBlock | None = None
) -> Target:
    r"""Build the target of an alignment on a fixed unrooted topology.

    Parameters
    ----------
    alignment : path
        A FASTA, NEXUS or PHYLIP file.
    tree : path
        A Newick or NEXUS file over the same taxa.
    substitution : str, optional
        A model by its name in IQ-TREE or ModelTest, and what is added to it, such as "HKY85", "GTR+G4" or "LG+F+R3";
        branch lengths have independent exponential priors with rate 10. By default, what a MrBayes block of the
        alignment's file asks for, and without a block JC69.
    block : MrBayesBlock, optional
        That block, if it is read already.

    Returns
    -------
    Target

    Raises
    ------
    UnknownNameError
        If there is no such substitution model.
    SettingsError
        If a suffix is unknown, or the data are of another type than the model.
    AlignmentError, TreeError
        If a file is missing or malformed, the taxa differ, there is no model for what a MrBayes block asks, or a block
        beside `substitution` changes the data.

    Warns
    -----
    ConversionWarning
        If a MrBayes block is not used, because `substitution` is given.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from bayeskit.gallery import tree_target
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     alignment = pathlib.Path(folder) / "three.fasta"
    ...     tree = pathlib.Path(folder) / "three.nwk"
    ...     _ = alignment.write_text(">A\nACGT\n>B\nACGA\n>C\nACAA\n"), tree.write_text("(A,B,C);")
    ...     tree_target(alignment, tree).dim
    3
    """
    if substitution is not None:
        check_substitution(substitution)
    from bayeskit._logdensity.target import Target
    from bayeskit.models import phylogenetics
    from bayeskit.models.phylogenetics._data_files import parse_models
    from bayeskit.models.phylogenetics._mrbayes import set_block_aside

    block = mrbayes_block(alignment) if substitution is None and block is None else block
    if block is not None:
        return Target.from_pyro(block.model(phylogenetics.Tree.from_file(tree)))
    set_block_aside(alignment)
    partition = phylogenetics.Partition.from_file(alignment, models=parse_models(substitution))
    topology = phylogenetics.Tree.from_file(tree)
    if len(partition.subsets) > 1:
        return Target.from_pyro(phylogenetics.PartitionedTreeModel(partition, topology))
    ((name, sequences),) = partition.subsets.items()
    model, site_rates = partition.substitution[name], partition.site_rates[name]
    return Target.from_pyro(phylogenetics.TreeModel(sequences, topology, model, site_rates=site_rates))


def mrbayes_block(alignment: str | Path) -> MrBayesBlock | None:
    """Return what the MrBayes blocks of an alignment's file ask for, or None if there are none."""
    from bayeskit.models.phylogenetics._mrbayes import MrBayesBlock, has_mrbayes_block

    return MrBayesBlock.from_file(alignment) if has_mrbayes_block(alignment) else None
