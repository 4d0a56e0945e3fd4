"""Targets of phylogenetic models: the primates, or a given alignment and tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bayeskit.core.inputs import unknown_name

if TYPE_CHECKING:
    from bayeskit.logdensity.target import Target

__all__ = ["SUBSTITUTION_MODELS", "primates_target", "tree_target"]

SUBSTITUTION_MODELS = ("JC69", "K80", "HKY85", "TN93", "GTR")
"""Names of the substitution models; their parameters have the usual priors."""


def primates_target() -> Target:
    """Build the target of the primates alignment on its fixed topology, with Jukes-Cantor."""
    from bayeskit.logdensity.target import Target
    from bayeskit.models.phylogenetics import JC69, TreeModel, primates

    alignment, tree = primates()
    # The likelihood is compiled already; torch's compiler would take ten seconds to save a tenth of a ladder's call.
    return Target.from_pyro(TreeModel(alignment, tree, substitution=JC69()), compile=False)


def tree_target(alignment: str | Path, tree: str | Path, substitution: str = "JC69") -> Target:
    r"""Build the target of an alignment on a fixed unrooted topology.

    Branch lengths have independent exponential priors with rate 10.

    Parameters
    ----------
    alignment : path
        A FASTA, NEXUS or PHYLIP file.
    tree : path
        A Newick or NEXUS file over the same taxa.
    substitution : str, default "JC69"
        One of :data:`SUBSTITUTION_MODELS`.

    Returns
    -------
    Target

    Raises
    ------
    UnknownNameError
        If there is no such substitution model.
    AlignmentError, TreeError
        If a file is missing or malformed, or the taxa differ.

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
    if substitution not in SUBSTITUTION_MODELS:
        raise unknown_name("substitution model", substitution, SUBSTITUTION_MODELS)
    from bayeskit.logdensity.target import Target
    from bayeskit.models import phylogenetics

    sequences = phylogenetics.Alignment.from_file(alignment)
    topology = phylogenetics.Tree.from_file(tree)
    model = phylogenetics.TreeModel(sequences, topology, substitution=getattr(phylogenetics, substitution)())
    return Target.from_pyro(model)
