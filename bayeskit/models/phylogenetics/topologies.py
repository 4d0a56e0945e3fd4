"""Many topologies over the same taxa, as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import ShapeError, TreeError
from bayeskit.models.phylogenetics import clades
from bayeskit.models.phylogenetics.tree import Tree, check_same_taxa


@dataclass(frozen=True, eq=False)
class Topologies:
    """Binary topologies over the same taxa, all rooted or all unrooted, in one canonical form.

    Two topologies are equal exactly where their rows of `children` are. Nodes `0 .. n-1` are the tips, in the order of
    `taxa`; internal nodes follow, ordered by the number of taxa below them and then by which taxa these are, so that
    children come before their parents. The last node is the root.

    An unrooted topology hangs from the node next to its first taxon, which is the third child of that node and not
    listed: its internal nodes `n .. 2n-3` are those of a rooted topology over all other taxa.

    **Order of the edges.** Edge `i` joins node `i` to its parent, as in `Tree`: `2n-3` edges for an unrooted topology,
    `2n-2` for a rooted one.

    Attributes
    ----------
    taxa : tuple of str
        Names of the `n` tips; at least three.
    children : ndarray
        Both children of each internal node, the smaller number first: shape `(topologies, internal, 2)`, int32, with
        `n - 2` internal nodes of an unrooted topology and `n - 1` of a rooted one.
    rooted : bool
        Whether the place of the root counts.

    Examples
    --------
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((C,D),A,B);", "((A,C),B,D);")]
    >>> topologies = Topologies.from_trees(trees)
    >>> len(topologies), topologies.children[0].tolist()
    (3, [[2, 3], [1, 4]])
    >>> distinct, index = topologies.distinct()
    >>> len(distinct), index.tolist()
    (2, [0, 0, 1])
    """

    taxa: tuple[str, ...]
    children: np.ndarray
    rooted: bool = False

    def __post_init__(self) -> None:
        expected = (len(self.children), len(self.taxa) - (1 if self.rooted else 2), 2)
        if self.children.shape != expected or len(self.taxa) < 3:
            raise ShapeError(
                f"children: shape {self.children.shape} does not fit {len(self.taxa)} taxa. Remedy: make topologies "
                "by Topologies.from_trees or TreeSample.from_file."
            )

    @classmethod
    def from_trees(cls, trees: Sequence[Tree], taxa: Sequence[str] | None = None) -> Topologies:
        """Collect unrooted trees.

        Parameters
        ----------
        trees : sequence of Tree
            All over the same taxa, in any order.
        taxa : sequence of str, optional
            The order of the taxa; that of the first tree by default.

        Returns
        -------
        Topologies
            One for each tree, in their order.

        Raises
        ------
        TreeError
            If there is no tree, or a tree has other taxa.
        """
        if not trees:
            raise TreeError("There is no tree. Remedy: give at least one.")
        order = trees[0].taxa if taxa is None else tuple(taxa)
        number = {taxon: position for position, taxon in enumerate(order)}
        for place, tree in enumerate(trees):
            check_same_taxa(order, tree.taxa, "taxa" if taxa is not None else "tree 0", f"tree {place}")
        return cls.from_clades(order, _hung_from_the_first_taxon(trees, number), rooted=False)

    @classmethod
    def from_clades(cls, taxa: Sequence[str], below: np.ndarray, rooted: bool) -> Topologies:
        """Make topologies from the sets of taxa below their internal nodes.

        Parameters
        ----------
        taxa : sequence of str
            Names of the tips.
        below : ndarray
            For each internal node the taxa below it as a bitset (see :mod:`~bayeskit.models.phylogenetics.clades`),
            in any order: shape `(topologies, internal, words)`, uint64. Unrooted topologies hang from the first taxon,
            which is in none of the sets.
        rooted : bool
            Whether the topologies are rooted.

        Returns
        -------
        Topologies
            The topologies.

        Raises
        ------
        TreeError
            If the sets of a topology are not nested as those of a binary tree.
        """
        first = 0 if rooted else 1
        if below.ndim != 3 or below.shape[1:] != (len(taxa) - 1 - first, clades.num_words(len(taxa))):
            raise ShapeError(
                f"below: shape {below.shape} does not fit {len(taxa)} taxa. Remedy: give shape (topologies, "
                f"{len(taxa) - 1 - first}, {clades.num_words(len(taxa))})."
            )
        ordered = np.take_along_axis(below, clades.order(below)[..., None], axis=1)
        return cls(tuple(taxa), clades.children_of(ordered, len(taxa), first), rooted)

    def __len__(self) -> int:
        return len(self.children)

    def __getitem__(self, index: int | slice | np.ndarray | Sequence[int]) -> Topologies:
        """Select topologies; a single number gives one."""
        rows = [index] if isinstance(index, (int, np.integer)) else index
        return Topologies(self.taxa, self.children[rows], self.rooted)

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return len(self.taxa)

    @property
    def num_edges(self) -> int:
        """Number of edges of each topology."""
        return 2 * len(self.taxa) - (2 if self.rooted else 3)

    @cached_property
    def parents(self) -> np.ndarray:
        """Parent of every node but the root, shape `(topologies, edges)`, int32."""
        count, internal = self.children.shape[:2]
        parents = np.empty((count, self.num_edges), dtype=np.int32)
        parents[:, 0] = self.num_edges  # the first taxon of an unrooted topology is a child of the last node
        nodes = np.broadcast_to(np.arange(internal, dtype=np.int32)[:, None] + self.num_taxa, (count, internal, 2))
        np.put_along_axis(parents, self.children.reshape(count, -1), nodes.reshape(count, -1), axis=1)
        return parents

    @cached_property
    def below(self) -> np.ndarray:
        """Taxa below every node but the root as bitsets, shape `(topologies, edges, words)`, uint64."""
        return clades.below(self.children, self.num_taxa)[:, : self.num_edges]

    def distinct(self) -> tuple[Topologies, np.ndarray]:
        """Return every topology once, in order of first appearance, and which of them each one is."""
        flat = np.ascontiguousarray(self.children.reshape(len(self), -1))
        _, first, index = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return self[first[order]], rank[index.ravel()]

    def tree(self, index: int, branch_lengths: Tensor | None = None) -> Tree:
        """Return one topology as a tree.

        Parameters
        ----------
        index : int
            Which one.
        branch_lengths : Tensor, optional
            Lengths in this class's order of edges, shape `(edges,)`; the tree has them in its own order.

        Returns
        -------
        Tree
            The unrooted tree.

        Raises
        ------
        TreeError
            If the topologies are rooted.
        ShapeError
            If the lengths do not fit.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")], taxa="ABCD")
        >>> topologies.tree(0, torch.tensor([1, 2, 3, 4, 5])).to_newick()
        '(A:1.0,B:2.0,(C:3.0,D:4.0):5.0);'
        """
        if self.rooted:
            raise TreeError("A rooted topology is no unrooted tree. Remedy: call to_newick, or unrooted() first.")
        children = self.children[index].tolist()
        children[-1] = [0, *children[-1]]
        # A tree numbers its nodes as they stand in its text: tips from left to right, internal nodes as they close.
        ours: list[int] = []
        stack = [self.num_edges]
        while stack:
            node = stack.pop()
            ours.append(node)
            if node >= self.num_taxa:
                stack.extend(children[node - self.num_taxa])
        ours.reverse()
        tips = [node for node in ours if node < self.num_taxa]
        internal = [node for node in ours if node >= self.num_taxa]
        theirs = {node: number for number, node in enumerate([*tips, *internal])}
        below = tuple(tuple(theirs[child] for child in children[node - self.num_taxa]) for node in internal)
        if branch_lengths is not None:
            if tuple(branch_lengths.shape) != (self.num_edges,):
                raise ShapeError(
                    f"branch_lengths: shape {tuple(branch_lengths.shape)} does not fit. Remedy: give shape "
                    f"({self.num_edges},), one length for each edge in the order of Topologies."
                )
            branch_lengths = branch_lengths.detach().to("cpu", torch.float64)[[*tips, *internal[:-1]]]
        return Tree(tuple(self.taxa[tip] for tip in tips), below, branch_lengths)

    def __iter__(self) -> Iterator[Topologies]:
        return (self[place] for place in range(len(self)))


def _hung_from_the_first_taxon(trees: Sequence[Tree], number: Mapping[str, int]) -> clades.Bits:
    """Return the sets of taxa on the far side of every internal edge, seen from taxon 0, and all taxa but it."""
    num_taxa = len(number)
    taxa = np.array([[number[taxon] for taxon in tree.taxa] for tree in trees])
    pairs = np.array([[below[:2] for below in tree.children] for tree in trees]).reshape(len(trees), num_taxa - 2, 2)
    sets = clades.below(pairs, num_taxa, clades.single(num_taxa)[taxa])[:, num_taxa:]
    everything = clades.everything(num_taxa)
    sets = np.where(clades.contains(sets, 0)[..., None], everything & ~sets, sets)
    sets[:, -1] = everything & ~clades.single(num_taxa)[0]
    return sets
