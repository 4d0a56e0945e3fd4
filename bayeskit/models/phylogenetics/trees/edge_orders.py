"""The two orders in which edges stand: that of a tree's text, and the canonical one of `Topologies`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.trees import clades
from bayeskit.models.phylogenetics.trees.tree import Tree, check_same_taxa


def edges_of_trees(trees: Sequence[Tree], taxa: Sequence[str] | None = None) -> tuple[tuple[str, ...], clades.Bits]:
    """Return the order of the taxa, and the taxa below every edge in each tree's order, `(trees, edges, words)`.

    Raises
    ------
    TreeError
        If there is no tree, one is something else, or a tree has other taxa.
    """
    if isinstance(trees, Tree) or not isinstance(trees, Sequence):
        raise TreeError(f"trees: {type(trees).__name__} is no list of trees. Remedy: give a list of Tree.")
    if not trees:
        raise TreeError("There is no tree. Remedy: give at least one.")
    for place, tree in enumerate(trees, start=1):
        if not isinstance(tree, Tree):
            remedy = "read text by Tree.from_newick, files by Tree.from_file or TreeSample.from_file"
            raise TreeError(f"Tree {place} of the list is of type {type(tree).__name__}. Remedy: {remedy}.")
    given = "tree 1" if taxa is None else "the order asked for"
    taxa = trees[0].taxa if taxa is None else tuple(taxa)
    for place, tree in enumerate(trees, start=1):
        check_same_taxa(taxa, tree.taxa, given, f"tree {place}")
    number = {taxon: position for position, taxon in enumerate(taxa)}
    tips = clades.single(len(taxa))[np.array([[number[taxon] for taxon in tree.taxa] for tree in trees])]
    # The root has a third child, but no edge above it.
    pairs = np.array([[below[:2] for below in tree.children] for tree in trees]).reshape(len(trees), -1, 2)
    return taxa, clades.below(pairs, len(taxa), tips)[:, :-1]


def stacked_lengths(trees: Sequence[Tree]) -> Tensor | None:
    """Return the branch lengths of trees in their own orders, `(trees, edges)`; None where no tree has any.

    Raises
    ------
    TreeError
        If only some have.
    """
    lengths = [tree.branch_lengths for tree in trees if tree.branch_lengths is not None]
    if len(lengths) not in (0, len(trees)):
        raise TreeError(f"Only {len(lengths)} of {len(trees)} trees have branch lengths. Remedy: give all, or none.")
    return torch.stack(lengths) if lengths else None


def chosen_edges(
    edge: int | str | np.ndarray | Sequence[int], taxa: Sequence[str], num_topologies: int, num_edges: int
) -> np.ndarray:
    """Return the number of an edge of each topology, shape `(topologies,)`; the name of a taxon stands for its tip's.

    Raises
    ------
    TreeError
        If there is no such edge or taxon.

    Examples
    --------
    >>> chosen_edges("C", "ABCD", 2, 5).tolist()
    [2, 2]
    """
    if isinstance(edge, str):
        if edge not in taxa:
            raise TreeError(f"There is no taxon {edge!r}. Remedy: use one of {', '.join(taxa[:5])}, ...")
        edge = taxa.index(edge)
    given = np.asarray(edge)
    if not np.issubdtype(given.dtype, np.integer) or given.shape not in ((), (num_topologies,)):
        raise TreeError(
            f"edge: {given.dtype} of shape {given.shape} names no edges. Remedy: give a taxon, an integer, or one "
            f"for each of the {num_topologies} topologies."
        )
    if ((given < 0) | (given >= num_edges)).any():
        raise TreeError(f"There is no such edge. Remedy: use numbers from 0 to {num_edges - 1}.")
    return np.broadcast_to(given, num_topologies)


def as_written(children: Sequence[Sequence[int]], num_taxa: int) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Put nodes into the order of a tree's text: tips from left to right, then internal nodes as they close.

    Parameters
    ----------
    children : sequence of sequence of int
        Children of each internal node; the last is the root.
    num_taxa : int
        Number of tips; internal nodes are numbered from here on.

    Returns
    -------
    nodes : list of int
        The nodes in that order, the root last.
    children : tuple of tuple of int
        Children of the internal nodes, by their places in `nodes`.

    Examples
    --------
    >>> as_written([[2, 1], [0, 3, 4]], 4)
    ([0, 3, 2, 1, 4, 5], ((2, 3), (0, 1, 4)))
    """
    ours: list[int] = []
    stack = [num_taxa + len(children) - 1]
    while stack:
        node = stack.pop()
        ours.append(node)
        if node >= num_taxa:
            stack.extend(children[node - num_taxa])
    ours.reverse()
    nodes = sorted(ours, key=lambda node: node >= num_taxa)
    places = {node: place for place, node in enumerate(nodes)}
    return nodes, tuple(tuple(places[child] for child in children[node - num_taxa]) for node in nodes[num_taxa:])
