"""Data that ship with the package."""

from __future__ import annotations

from importlib import resources

from bayeskit.models.phylogenetics.alignments.alignment import Alignment
from bayeskit.models.phylogenetics.trees.tree import Tree

_PRIMATES_TOPOLOGY = "(2,(12,((11,(10,(9,8))),(7,(6,(5,(4,3)))))),1);"


def primates() -> tuple[Alignment, Tree]:
    """Load mitochondrial DNA of twelve primates and a well-supported topology.

    Returns
    -------
    alignment : Alignment
        12 taxa, 898 sites.
    tree : Tree
        The topology, without branch lengths.

    References
    ----------
    K. Hayasaka, T. Gojobori and S. Horai (1988), Molecular phylogeny and evolution of primate
    mitochondrial DNA, Molecular Biology and Evolution 5, 626-644.

    Examples
    --------
    >>> alignment, tree = primates()
    >>> alignment.num_taxa, alignment.num_sites, tree.num_edges
    (12, 898, 21)
    """
    with resources.as_file(resources.files(__package__) / "data" / "primates.nex") as path:
        alignment = Alignment.from_file(path)
    names = {str(number): taxon for number, taxon in enumerate(alignment.taxa, start=1)}
    return alignment, Tree.from_newick(_PRIMATES_TOPOLOGY, translate=names)
