"""Arrays of topologies over the same taxa, and enumeration of all topologies of a few taxa."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeskit.errors import DataError, ShapeError, TreeError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics import _trees as edge_orders
from bayeskit.models.phylogenetics._newick import quote
from bayeskit.models.phylogenetics._trees import Tree, check_once, check_same_taxa

# Canonical form of topologies given by node numbers.


def canonical_children(children: NDArray[Any], num_taxa: int, rooted: bool) -> NDArray[np.int32]:
    """Return pairs of children, `(topologies, internal, 2)`, in the order of `Topologies`, int32.

    TreeError unless children precede parents and every node is used once; unrooted topologies omit taxon 0.
    """
    if not np.issubdtype(children.dtype, np.integer):
        raise TreeError(f"children: node numbers cannot be {children.dtype}. Remedy: give integers.")
    count, internal = children.shape[:2]
    first = 0 if rooted else 1
    own = np.arange(num_taxa, num_taxa + internal)
    used = np.arange(first, num_taxa + internal - 1)
    pairs = np.sort(children, axis=-1)
    if not ((pairs < own[:, None]).all() and (np.sort(pairs.reshape(count, -1), axis=1) == used).all()):
        raise TreeError(
            "children: a node is not used exactly once, or comes after its parent. Remedy: give the `children` of "
            "Topologies."
        )
    sets = clades.below(pairs, num_taxa)[:, num_taxa:]
    order = clades.order(sets)
    if (order == np.arange(internal)).all():
        return pairs.astype(np.int32)
    return clades.children_of(np.take_along_axis(sets, order[..., None], axis=1), num_taxa, first)


def _first_rows(children: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorted first rows of distinct topologies, `(distinct,)`, and each row's index in them."""
    if not len(children):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    _, first, index = np.unique(children.reshape(len(children), -1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[index.ravel()]


# Arrays of topologies over the same taxa.


@dataclass(frozen=True, eq=False, repr=False)
class Topologies:
    """Array of binary topologies over the same taxa, all rooted or all unrooted, in a canonical form.

    Two topologies are equal if and only if their rows of `children` are. Nodes `0 .. n-1` are the tips, in the order
    of `taxa`. Internal nodes follow, ordered by the number of taxa below them and then by the taxa themselves, so that
    children come before their parents. The last node is the root.

    An unrooted topology has as its root the node next to the first taxon. The first taxon is the third child of that
    node and is not listed: internal nodes `n .. 2n-3` are those of a rooted topology over all other taxa.

    **Order of the edges.** Edge `i` joins node `i` to its parent: `2n-3` edges for an unrooted topology, `2n-2` for a
    rooted one. `ForestLikelihood` and `TreeSample` use this order. **A `Tree` numbers its edges by their position in
    its text**, and `TreeModel` uses the order of its tree. `branch_lengths_of` converts branch lengths of trees to this
    order; `tree` and `tree_edges` convert from it.

    Attributes
    ----------
    taxa : tuple of str
        Names of the `n` tips; at least three.
    children : ndarray
        Both children of each internal node, the smaller number first: shape `(topologies, internal, 2)`, int32, with
        `n - 2` internal nodes of an unrooted topology and `n - 1` of a rooted one.
    rooted : bool
        Whether the position of the root matters.

    Examples
    --------
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((C,D),A,B);", "((A,C),B,D);")]
    >>> topologies = Topologies.from_trees(trees)
    >>> len(topologies), topologies.children[0].tolist()
    (3, [[2, 3], [1, 4]])
    >>> distinct, index = topologies.distinct()
    >>> len(distinct), index.tolist()
    (2, [0, 0, 1])
    >>> topologies
    Topologies(3 unrooted topologies, 4 taxa)
    """

    taxa: tuple[str, ...]
    children: NDArray[np.int32]
    rooted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "taxa", tuple(self.taxa))
        try:
            children = np.ascontiguousarray(self.children, dtype=np.int32)
        except (OverflowError, TypeError, ValueError) as error:
            raise DataError(f"children must be an array of node numbers (topologies, internal, 2): {error}") from error
        object.__setattr__(self, "children", children)
        check_once(self.taxa, "taxa")
        expected = (len(self.children), len(self.taxa) - (1 if self.rooted else 2), 2)
        if self.children.shape != expected or len(self.taxa) < 3:
            raise ShapeError(
                f"children: shape {self.children.shape} does not fit {len(self.taxa)} taxa. Remedy: make topologies "
                "with Topologies.from_trees or TreeSample.from_file."
            )

    @classmethod
    def from_trees(cls, trees: Sequence[Tree], taxa: Sequence[str] | None = None) -> Topologies:
        """Convert unrooted trees.

        Parameters
        ----------
        trees : sequence of Tree
            All over the same taxa, in any order.
        taxa : sequence of str, optional
            Order of the taxa; by default that of the first tree.

        Returns
        -------
        Topologies
            One per tree, in the same order.

        Raises
        ------
        TreeError
            If there is no tree, or a tree has different taxa.
        """
        return cls.from_edges(*edge_orders.edges_of_trees(trees, taxa), rooted=False)[0]

    def branch_lengths_of(self, trees: Sequence[Tree]) -> Tensor:
        """Return the branch lengths of trees in the edge order of `Topologies`.

        Parameters
        ----------
        trees : sequence of Tree
            With branch lengths and these topologies, such as the argument of `from_trees`.

        Returns
        -------
        Tensor
            Shape `(topologies, edges)`.

        Raises
        ------
        TreeError
            If a tree has another topology or no branch lengths, or the numbers of trees and topologies differ.

        Examples
        --------
        >>> trees = [Tree.from_newick("((A:1,B:2):3,C:4,D:5);")]
        >>> trees[0].branch_lengths.tolist(), Topologies.from_trees(trees, "BCDA").branch_lengths_of(trees).tolist()
        ([1.0, 2.0, 4.0, 5.0, 3.0], [[2.0, 4.0, 5.0, 1.0, 3.0]])
        """
        theirs, order = Topologies.from_edges(*edge_orders.edges_of_trees(trees, self.taxa), rooted=False)
        if self.rooted or not np.array_equal(theirs.children, self.children):
            raise TreeError(
                f"The {len(trees)} trees have other topologies than these {len(self)} topologies. Remedy: give the "
                "trees from which the topologies were made, in the same order."
            )
        lengths = edge_orders.stacked_lengths(trees)
        if lengths is None:
            raise TreeError("The trees have no branch lengths. Remedy: give trees with branch lengths.")
        return lengths.take_along_dim(torch.from_numpy(order).to(lengths.device), dim=1)

    @classmethod
    def from_clades(cls, taxa: Sequence[str], below: clades.Bits, rooted: bool) -> Topologies:
        """Make topologies from the sets of taxa below their internal nodes.

        Parameters
        ----------
        taxa : sequence of str
            Names of the tips.
        below : ndarray
            Taxa below each internal node as a bitset (see :mod:`~bayeskit.models.phylogenetics._clades`), in any order:
            shape `(topologies, internal, words)`, uint64. The sets of unrooted topologies exclude the first taxon.
        rooted : bool

        Raises
        ------
        TreeError
            If the sets of a topology do not form a binary tree.
        """
        first = 0 if rooted else 1
        if below.ndim != 3 or below.shape[1:] != (len(taxa) - 1 - first, clades.num_words(len(taxa))):
            raise ShapeError(
                f"below: shape {below.shape} does not fit {len(taxa)} taxa. Remedy: give shape (topologies, "
                f"{len(taxa) - 1 - first}, {clades.num_words(len(taxa))})."
            )
        ordered = np.take_along_axis(below, clades.order(below)[..., None], axis=1)
        return cls(tuple(taxa), clades.children_of(ordered, len(taxa), first), rooted)

    @classmethod
    def from_edges(cls, taxa: Sequence[str], edges: clades.Bits, rooted: bool) -> tuple[Topologies, NDArray[np.int64]]:
        """Make topologies from the taxa on one side of each of their edges.

        Parameters
        ----------
        taxa : sequence of str
            Names of the tips.
        edges : ndarray
            Bitset of the taxa below each edge (on either side of it, if unrooted): shape
            `(topologies, edges, words)`, uint64, in any order.
        rooted : bool

        Returns
        -------
        topologies : Topologies
        order : ndarray
            Index of the given edge for each edge of the topologies, shape `(topologies, edges)`. Convert values of the
            edges with `np.take_along_axis(lengths, order, axis=1)`.

        Raises
        ------
        TreeError
            If the sets do not form binary trees.

        Examples
        --------
        >>> edges = np.array([[[0b0011], [1], [2], [4], [8]]], dtype=np.uint64)
        >>> topologies, order = Topologies.from_edges("ABCD", edges, rooted=False)
        >>> topologies.to_newick(0), order.tolist()
        ('(A,B,(C,D));', [[1, 2, 3, 4, 0]])
        """
        everything = clades.everything(len(taxa))
        if not rooted:
            edges = np.where(clades.contains(edges, 0)[..., None], everything ^ edges, edges)
        order = clades.order(edges)
        ordered = np.take_along_axis(edges, order[..., None], axis=1)
        if rooted:
            root = np.broadcast_to(everything, (len(edges), 1, len(everything)))
            return cls.from_clades(taxa, np.concatenate([ordered[:, len(taxa) :], root], axis=1), rooted), order
        # All taxa but the first are the other side of the first taxon's edge: the last set, and edge 0.
        return cls.from_clades(taxa, ordered[:, len(taxa) - 1 :], rooted), np.roll(order, 1, axis=1)

    def __repr__(self) -> str:
        return f"Topologies({len(self)} {'rooted' if self.rooted else 'unrooted'} topologies, {self.num_taxa} taxa)"

    def __len__(self) -> int:
        return len(self.children)

    def __getitem__(self, index: int | slice | NDArray[Any] | Sequence[int]) -> Topologies:
        """Select topologies; an integer gives `Topologies` of length one."""
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
    def parents(self) -> NDArray[np.int32]:
        """Parent of every node but the root, shape `(topologies, edges)`, int32."""
        count, internal = self.children.shape[:2]
        parents = np.empty((count, self.num_edges), dtype=np.int32)
        parents[:, 0] = self.num_edges  # the first taxon of an unrooted topology is a child of the last node
        nodes = np.broadcast_to(np.arange(internal, dtype=np.int32)[:, None] + self.num_taxa, (count, internal, 2))
        np.put_along_axis(parents, self.children.reshape(count, -1), nodes.reshape(count, -1), axis=1)
        return parents

    @cached_property
    def below(self) -> clades.Bits:
        """Taxa below every node but the root as bitsets, shape `(topologies, edges, words)`, uint64."""
        return clades.below(self.children, self.num_taxa)[:, : self.num_edges]

    def distinct(self) -> tuple[Topologies, NDArray[np.int64]]:
        """Return the distinct topologies, in order of first appearance, and the index of each topology in them."""
        first, index = _first_rows(self.children)
        return self[first], index

    def tree(self, index: int, branch_lengths: Tensor | None = None) -> Tree:
        """Return one topology as a tree.

        Parameters
        ----------
        index : int
        branch_lengths : Tensor, optional
            Lengths in the edge order of this class, shape `(edges,)`; converted to the order of the tree.

        Returns
        -------
        Tree
            Unrooted.

        Raises
        ------
        TreeError
            If the topologies are rooted.
        ShapeError
            If the lengths have another shape.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")], taxa="ABCD")
        >>> topologies.tree(0, torch.tensor([1, 2, 3, 4, 5])).to_newick()
        '(A:1.0,B:2.0,(C:3.0,D:4.0):5.0);'
        """
        nodes, children = self._written(index)
        if branch_lengths is not None:
            self._check_lengths(tuple(branch_lengths.shape))
            branch_lengths = branch_lengths.detach().to("cpu", torch.float64)[nodes[:-1]]
        return Tree(tuple(self.taxa[tip] for tip in nodes[: self.num_taxa]), children, branch_lengths)

    def tree_edges(self, index: int) -> NDArray[np.int64]:
        """Return the index in this class of each edge of `tree(index)`, shape `(edges,)`.

        `branch_lengths[..., topologies.tree_edges(index)]` has the edge order of that tree, as required by
        `TreeModel(alignment, topologies.tree(index))`.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")], taxa="BCDA")
        >>> topologies.tree(0).taxa, topologies.tree_edges(0).tolist()
        (('B', 'A', 'C', 'D'), [0, 3, 1, 2, 4])
        """
        return np.array(self._written(index)[0][:-1])

    def _written(self, index: int) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        """Return nodes and children of one unrooted topology in the order of a tree."""
        if self.rooted:
            raise TreeError("A rooted topology is not an unrooted tree. Remedy: call to_newick, or unrooted() first.")
        if not -len(self) <= index < len(self):
            raise TreeError(f"There is no topology {index}. Remedy: use numbers from 0 to {len(self) - 1}.")
        *children, last = self.children[index].tolist()
        return edge_orders.as_written([*children, [0, *last]], self.num_taxa)

    def to_newick(self, index: int, branch_lengths: Tensor | Sequence[float] | None = None) -> str:
        """Write one topology as Newick text.

        Parameters
        ----------
        index : int
        branch_lengths : Tensor or sequence of float, optional
            Lengths in the edge order of this class, shape `(edges,)`.

        Returns
        -------
        str
            The outermost parenthesis holds three subtrees if unrooted, two if rooted.

        Raises
        ------
        ShapeError
            If the lengths have another shape.

        Examples
        --------
        >>> unrooted = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")], taxa="ABCD")
        >>> unrooted.to_newick(0), unrooted.rooted_at(4).to_newick(0, [1, 2, 3, 4, 5, 6])
        ('(A,B,(C,D));', '((A:1,B:2):5,(C:3,D:4):6);')
        """
        ends = [""] * self.num_edges
        if branch_lengths is not None:
            # Python floats keep all their digits.
            values = branch_lengths if isinstance(branch_lengths, Tensor) else np.asarray(branch_lengths)
            self._check_lengths(tuple(values.shape))
            ends = [f":{value!r}" for value in values.tolist()]
        texts = [quote(taxon) + end for taxon, end in zip(self.taxa, ends, strict=False)]
        for (one, other), end in zip(self.children[index].tolist(), [*ends[self.num_taxa :], ";"], strict=True):
            first = "" if self.rooted or end != ";" else texts[0] + ","
            texts.append(f"({first}{texts[one]},{texts[other]}){end}")
            texts[one] = texts[other] = ""  # or all texts of a tree of many taxa would be held at once
        return texts[-1]

    def _check_lengths(self, shape: tuple[int, ...]) -> None:
        if shape != (self.num_edges,):
            raise ShapeError(
                f"branch_lengths: shape {shape} does not fit. Remedy: give shape ({self.num_edges},), one length for "
                "each edge in the order of Topologies."
            )

    def with_taxa(self, taxa: Sequence[str]) -> tuple[Topologies, NDArray[np.int64]]:
        """Return the same topologies with another order of the taxa.

        Parameters
        ----------
        taxa : sequence of str
            The same names in another order.

        Returns
        -------
        topologies : Topologies
        order : ndarray
            Index in this object of each edge of the result, shape `(topologies, edges)`.

        Raises
        ------
        TreeError
            If the names differ.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")])
        >>> topologies.with_taxa("DCBA")[0].to_newick(0)
        '(D,C,(B,A));'
        """
        check_same_taxa(self.taxa, taxa, "the topologies", "the requested order")
        number = {taxon: position for position, taxon in enumerate(taxa)}
        tips = clades.single(len(taxa))[[number[taxon] for taxon in self.taxa]]
        below = clades.below(self.children, len(taxa), np.broadcast_to(tips, (len(self), *tips.shape)))
        return Topologies.from_edges(taxa, below[:, : self.num_edges], self.rooted)

    def unrooted(self) -> tuple[Topologies, NDArray[np.int64]]:
        """Remove the roots: the two edges at each root become one.

        Returns
        -------
        topologies : Topologies
        order : ndarray
            Index in this object of each edge of the result, shape `(topologies, unrooted edges)`. For the joined edge
            it is the root edge without the first taxon below it; the length of the joined edge is the sum of both.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")]).rooted_at("C")
        >>> topologies.to_newick(0), topologies.unrooted()[0].to_newick(0)
        ('(C,(D,(A,B)));', '(A,B,(C,D));')
        """
        if not self.rooted:
            return self, np.broadcast_to(np.arange(self.num_edges), (len(self), self.num_edges))
        kept = np.ones((len(self), self.num_edges), dtype=bool)
        kept[np.arange(len(self)), self.upper_root_edge] = False
        edges = self.below[kept].reshape(len(self), self.num_edges - 1, -1)
        topologies, order = Topologies.from_edges(self.taxa, edges, rooted=False)
        numbers = np.nonzero(kept)[1].reshape(len(self), -1)
        return topologies, np.take_along_axis(numbers, order, axis=1)

    @property
    def upper_root_edge(self) -> NDArray[np.int32]:
        """Edge from the root towards the first taxon, shape `(topologies,)`."""
        at_root = self.children[:, -1]
        sets = np.take_along_axis(self.below, at_root[..., None], axis=1)
        return np.where(clades.contains(sets[:, 0], 0), at_root[:, 0], at_root[:, 1])

    def rooted_at(self, edge: int | str | NDArray[np.integer[Any]] | Sequence[int]) -> Topologies:
        """Place a root on an edge of each unrooted topology.

        Parameters
        ----------
        edge : int, str, ndarray or sequence of int
            Edge in the order of this class: one for all, or one per topology, shape `(topologies,)`. A taxon name
            makes that taxon the outgroup.

        Returns
        -------
        Topologies

        Raises
        ------
        TreeError
            If the topologies are rooted already, or there is no such edge or taxon.

        Examples
        --------
        >>> topologies = Topologies.from_trees([Tree.from_newick("((A,B),C,D);")])
        >>> topologies.rooted_at("C").to_newick(0), topologies.rooted_at([4]).to_newick(0)
        ('(C,(D,(A,B)));', '((A,B),(C,D));')
        """
        if self.rooted:
            raise TreeError("The topologies have a root. Remedy: call unrooted() first.")
        edges = edge_orders.chosen_edges(edge, self.taxa, len(self), self.num_edges)
        split = self.below[np.arange(len(self)), edges][:, None]
        turned = clades.turned(self.below[:, self.num_taxa :], split, self.num_taxa)
        root = np.broadcast_to(clades.everything(self.num_taxa), split.shape)
        return Topologies.from_clades(self.taxa, np.concatenate([turned, root ^ split, root], axis=1), rooted=True)

    def __iter__(self) -> Iterator[Topologies]:
        return (self[place] for place in range(len(self)))


# Enumeration of all topologies of a few taxa.


def all_topologies(taxa: Sequence[str], rooted: bool = False) -> Topologies:
    """List all topologies of a few taxa.

    Parameters
    ----------
    taxa : sequence of str
        Names of the tips: 3 to 9, or 3 to 8 for rooted topologies.
    rooted : bool, default False

    Returns
    -------
    Topologies
        All `(2n-5)!!` unrooted topologies, or `(2n-3)!!` rooted ones, each once.

    Raises
    ------
    TreeError
        If there are too few or too many taxa.

    Examples
    --------
    >>> [len(all_topologies("ABCDEFG"[:n])) for n in (3, 4, 5, 6, 7)]
    [1, 3, 15, 105, 945]
    >>> len(all_topologies("ABCD", rooted=True))
    15
    """
    largest = 8 if rooted else 9
    if not 3 <= len(taxa) <= largest:
        raise TreeError(
            f"{len(taxa)} taxa: all topologies are listed for 3 to {largest} taxa only. Remedy: for more taxa, use the "
            "topologies of a sample, TreeSample.from_file(...).topologies."
        )
    # An unrooted topology is a rooted topology of all taxa but the first, with the first attached to its root.
    first = 0 if rooted else 1
    alone = clades.single(len(taxa))
    # Taxa below every node; each further taxon is grafted onto the edge above each node, including the root.
    nodes = alone[None, first : first + 1]
    for taxon in range(first + 1, len(taxa)):
        place = np.arange(nodes.shape[1])
        target = nodes[:, place, None]
        inside = ((target & ~nodes[:, None]) == 0).all(axis=-1) & (place[:, None] != place)
        grown = np.where(inside[..., None], nodes[:, None] | alone[taxon], nodes[:, None])
        added = np.broadcast_to(alone[taxon], target.shape)
        nodes = np.concatenate([grown, target | alone[taxon], added], axis=2).reshape(-1, len(place) + 2, len(alone[0]))
    internal = nodes[clades.size(nodes) > 1].reshape(len(nodes), -1, nodes.shape[-1])
    return Topologies.from_clades(taxa, internal, rooted)
