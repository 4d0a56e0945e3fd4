"""Unrooted binary trees with branch lengths, and conversion between the two orders of edges."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import ConversionWarning, ShapeError, TreeError
from bayeskit.extend import new_generator, warn_user
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._newick import (
    ParsedTree,
    every_name,
    parse_newick,
    quote,
    read_tree_texts,
    resolve_at_random,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Unrooted binary trees.


@dataclass(frozen=True, eq=False, repr=False)
class Tree:
    """Unrooted binary tree over named taxa, with or without branch lengths.

    A tree of `n` taxa has `n` tips, `n - 2` internal nodes of degree three and `2n - 3` edges. Tip `i` is node `i`
    and has the name `taxa[i]`. Internal nodes follow in post-order, so that children come before their parent. The
    last node has three children and serves as the root in computations.

    **Order of the edges.** Edge `i` joins node `i` to its parent. Edges `0 .. n-1` end in the tips, in the order of
    `taxa` (left to right in the Newick text). Edges `n .. 2n-4` are internal, in the order in which their parentheses
    close. `branch_lengths` and `TreeModel` use this order. **`Topologies` use another order**, as do
    `ForestLikelihood` and `TreeSample.branch_lengths`: convert with `Topologies.branch_lengths_of` and
    `Topologies.tree_edges`.

    Use `from_newick` or `from_file` to make a tree.

    Attributes
    ----------
    taxa : tuple of str
        Names of the `n` tips.
    children : tuple of tuple of int
        Children of the internal nodes `n .. 2n-3`: three for the last node, two for each other.
    branch_lengths : Tensor or None
        Lengths of the edges, shape `(2n-3,)`, float64, in expected substitutions per site; None if the text has none.

    Examples
    --------
    >>> tree = Tree.from_newick("((A:0.1,B:0.2):0.3,C:0.4,D:0.5);")
    >>> tree.taxa, tree.num_edges, tree.edge_names
    (('A', 'B', 'C', 'D'), 5, ('A', 'B', 'C', 'D', 'A|B'))
    >>> tree.branch_lengths
    tensor([0.1000, 0.2000, 0.4000, 0.5000, 0.3000], dtype=torch.float64)
    >>> tree
    Tree(4 taxa, with branch lengths: ((A:0.1,B:0.2):0.3,C:0.4,D:0.5);)
    """

    taxa: tuple[str, ...]
    children: tuple[tuple[int, ...], ...]
    branch_lengths: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        """Refuse lengths that are no numbers."""
        if isinstance(self.branch_lengths, Tensor) and bool(self.branch_lengths.isnan().any()):
            raise TreeError("branch_lengths has NaN among its lengths; give lengths that are finite, or None")

    @classmethod
    def from_newick(
        cls,
        text: str,
        translate: Mapping[str, str] | None = None,
        *,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
    ) -> Tree:
        """Read a tree from Newick text.

        A root of degree two is removed: its two edges are joined and their lengths add up, because the likelihood of
        a time-reversible substitution model does not depend on the position of the root.

        Parameters
        ----------
        text : str
            One tree. Comments in brackets and labels of internal nodes are ignored; underscores are kept.
        translate : mapping of str to str, optional
            Taxon names by the labels of the text; every tip is one of its labels or names.
        resolve : bool, default False
            Resolve polytomies at random with edges of length zero, all resolutions equally likely; if False, a
            polytomy is an error.
        seed : int or torch.Generator, default 0
            Used by `resolve`.

        Returns
        -------
        Tree

        Raises
        ------
        TreeError
            If the text is not one binary tree of at least three taxa with unique names, or if only some edges have a
            branch length, a length is negative or not finite, or a tip is not in `translate`.

        Warns
        -----
        ConversionWarning
            If the tree was rooted and its root was removed.

        Examples
        --------
        >>> Tree.from_newick("(2,(3,4),1)", translate={"1": "A", "2": "B", "3": "C", "4": "D"}).taxa
        ('B', 'C', 'D', 'A')
        """
        _check_text(text)
        generator = new_generator(seed, stream="multifurcations") if resolve else None
        return _build(parse_newick(text), "Newick text", every_name(translate or {}), generator)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        index: int | None = None,
        *,
        resolve: bool = False,
        seed: int | torch.Generator = 0,
    ) -> Tree:
        """Read a tree from a file of Newick, NEXUS, PHYLIP, PAML or RevBayes, plain or compressed by gzip.

        Parameters
        ----------
        path : str or os.PathLike
            As in `TreeSample.from_file`; translate tables of NEXUS are applied.
        index : int, optional
            Position of the tree in the file, from 0. Required only if the file holds several trees.
        resolve, seed
            As in `from_newick`.

        Returns
        -------
        Tree

        Raises
        ------
        TreeError
            If the file holds no tree, several trees without `index`, or a tree that `from_newick` rejects. The
            message gives file and line.

        Warns
        -----
        ConversionWarning
            If the tree was rooted and its root was removed.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "tree.nwk"
        >>> _ = path.write_text("((A,B),C,D);")
        >>> Tree.from_file(path).num_taxa
        4
        """
        texts = read_tree_texts(path)
        if index is None and len(texts) > 1:
            raise TreeError(
                f"{os.fspath(path)}: the file holds {len(texts)} trees. Remedy: choose one with index=0, "
                f"..., {len(texts) - 1}."
            )
        if index is not None and not 0 <= index < len(texts):
            raise TreeError(
                f"{os.fspath(path)}: there is no tree {index}. Remedy: choose an index from 0 to {len(texts) - 1}."
            )
        entry = texts[index or 0]
        parsed = parse_newick(entry.newick, entry.source, entry.line)
        generator = new_generator(seed, stream="multifurcations") if resolve else None
        return _build(parsed, f"{entry.source}, line {entry.line}", entry.translate, generator)

    def __repr__(self) -> str:
        lengths = "without" if self.branch_lengths is None else "with"
        text = self.to_newick()
        return f"Tree({self.num_taxa} taxa, {lengths} branch lengths: {text if len(text) <= 80 else text[:77] + '...'})"

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return len(self.taxa)

    @property
    def num_edges(self) -> int:
        """Number of edges, `2 * num_taxa - 3`."""
        return 2 * len(self.taxa) - 3

    @property
    def root(self) -> int:
        """Number of the root node, `2n - 3`."""
        return 2 * len(self.taxa) - 3

    @property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node but the root, that is the upper end of every edge."""
        parents = [-1] * self.num_edges
        for offset, below in enumerate(self.children):
            for child in below:
                parents[child] = self.num_taxa + offset
        return tuple(parents)

    @property
    def edge_names(self) -> tuple[str, ...]:
        """Unique names of the edges: the taxa below each edge, abbreviated from five taxa on."""
        first = list(range(self.num_taxa))
        last = list(range(self.num_taxa))
        names = list(self.taxa)
        # Tips are numbered from left to right, so the taxa below an edge are consecutive numbers: the first and the
        # last identify the edge.
        for below in self.children[:-1]:
            first.append(first[below[0]])
            last.append(last[below[-1]])
            run = self.taxa[first[-1] : last[-1] + 1]
            if len(run) > 4:
                names.append(f"{run[0]}|{run[1]}|...|{run[-1]} ({len(run)} taxa)")
            else:
                names.append("|".join(run))
        seen: set[str] = set()
        for edge, name in enumerate(names):
            while names[edge] in seen:
                names[edge] = f"{name} [{edge}]"
            seen.add(names[edge])
        return tuple(names)

    def to_newick(self, branch_lengths: Tensor | Sequence[float] | None = None) -> str:
        """Write the tree as Newick text.

        Parameters
        ----------
        branch_lengths : Tensor or sequence of float, optional
            Shape `(edges,)`; the tree's own lengths by default.

        Returns
        -------
        str
            `from_newick` reads it as the same tree with the same order of edges.

        Raises
        ------
        ShapeError
            If `branch_lengths` is not a vector with one entry per edge.

        Examples
        --------
        >>> tree = Tree.from_newick("((A,B),C,D);")
        >>> tree.to_newick([0.1, 0.2, 0.3, 0.4, 0.5])
        '((A:0.1,B:0.2):0.5,C:0.3,D:0.4);'
        """
        lengths = self.branch_lengths
        if branch_lengths is not None:
            # Python floats keep all their digits.
            lengths = torch.as_tensor(branch_lengths, dtype=_dtype_of(branch_lengths))
        if lengths is not None and tuple(lengths.shape) != (self.num_edges,):
            raise ShapeError(
                f"branch_lengths: shape {tuple(lengths.shape)} does not fit the tree. "
                f"Remedy: give shape ({self.num_edges},), one length for each entry of edge_names."
            )
        values = None if lengths is None else lengths.detach().tolist()
        parts: list[str] = []
        stack: list[int | str] = [self.root]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                parts.append(item)
                continue
            ending = ";" if item == self.root else "" if values is None else f":{values[item]!r}"
            if item < self.num_taxa:
                parts.append(quote(self.taxa[item]) + ending)
                continue
            parts.append("(")
            stack.append(")" + ending)
            below = self.children[item - self.num_taxa]
            for position, child in enumerate(reversed(below)):
                stack.extend([","] if position else [])
                stack.append(child)
        return "".join(parts)


def check_same_taxa(one: Sequence[str], other: Sequence[str], name: str, other_name: str) -> None:
    """Raise TreeError if two lists of taxa differ in more than their order, or a list repeats a taxon."""
    check_once(one, name)
    check_once(other, other_name)
    missing, extra = sorted(set(one) - set(other)), sorted(set(other) - set(one))
    if missing or extra:
        sides = ((f"only in {name}", missing), (f"only in {other_name}", extra))
        problems = [f"{side}: {_some(names)}" for side, names in sides if names]
        alike = {taxon.replace(" ", "_"): taxon for taxon in extra}
        pairs = [(taxon, alike[form]) for taxon in missing if (form := taxon.replace(" ", "_")) in alike]
        blanks = [
            f"{one!r} and {two!r} differ by a blank and an underscore only; write both alike, or " for one, two in pairs
        ]
        raise TreeError(
            f"The taxa of {name} and {other_name} differ; {'; '.join(problems)}. "
            f"Remedy: {''.join(blanks[:1])}prune or rename taxa so that both have the same taxa (letter case and "
            "underscores count; a FASTA name ends at its first blank where first words differ)."
        )


def _some(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_text(text: object) -> None:
    """Raise TreeError for anything but text, and for a path."""
    if not isinstance(text, str):
        raise TreeError(f"text: {type(text).__name__} is not text. Remedy: for a path, use Tree.from_file.")
    if "(" not in text and re.fullmatch(r"\S*[/\\]\S*|\S+\.[A-Za-z]\w*", text.strip()):
        raise TreeError(f"Newick text: {text!r} is a path, not a tree. Remedy: read the file with Tree.from_file.")


def _build(
    parsed: ParsedTree, where: str, translate: Mapping[str, str], generator: torch.Generator | None = None
) -> Tree:
    """Check a parsed description and number its nodes; resolve polytomies if a generator is given."""
    children = [list(below) for below in parsed.children]
    lengths = list(parsed.lengths)
    names = [tip_name(parsed, node, where, translate) if not below else "" for node, below in enumerate(children)]
    tips = [node for node, below in enumerate(children) if not below]
    taxa = [names[node] for node in tips]
    check_taxa(taxa, where)
    has_lengths = check_lengths(parsed, names, where)
    if generator is not None:
        resolve_at_random(children, lengths, 0.0 if has_lengths else None, generator)
    root = 0
    if len(children[0]) == 2:
        root = _unroot(children, lengths, has_lengths, where)
    for node, below in enumerate(children):
        expected = 3 if node == root else 2
        if below and len(below) != expected:
            raise TreeError(
                f"{where}: the node above {describe_node(children, names, node)} joins {len(below)} subtrees, "
                f"not {expected}; the tree is not binary. Remedy: "
                + ("pass resolve=True, which resolves it at random." if len(below) > expected else "remove the node.")
            )
    order: list[int] = []
    stack = [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children[node])
    number = {node: position for position, node in enumerate(tips)}
    numbered: list[tuple[int, ...]] = []
    for node in reversed(order):
        if children[node]:
            number[node] = len(tips) + len(numbered)
            numbered.append(tuple(number[child] for child in children[node]))
    values = None
    if has_lengths:
        edges = sorted((number[node], node) for node in number if node != root)
        values = torch.tensor([lengths[node] for _, node in edges], dtype=torch.float64)
    return Tree(tuple(taxa), tuple(numbered), values)


def tip_name(parsed: ParsedTree, node: int, where: str, translate: Mapping[str, str]) -> str:
    """Return the name of a tip by a table as of `every_name`; TreeError if it has none."""
    label = parsed.labels[node]
    if not label:
        raise TreeError(f"{where}: a tip has no name. Remedy: name every tip.")
    if translate and label not in translate:
        raise TreeError(
            f"{where}: the tip {label!r} is neither a key nor a name of the translate table. Remedy: add it to the "
            f"table, which has {_some(list(dict.fromkeys(translate.values())))}."
        )
    return translate.get(label, label)


def check_taxa(taxa: list[str], where: str) -> None:
    """Raise TreeError for fewer than three taxa or a repeated name."""
    if len(taxa) < 3:
        raise TreeError(f"{where}: the tree has {len(taxa)} taxa. Remedy: give a tree of at least 3 taxa.")
    check_once(taxa, where)


def check_once(taxa: Sequence[str], where: str) -> None:
    """Raise TreeError for a repeated name."""
    seen: set[str] = set()
    for name in taxa:
        if name in seen:
            raise TreeError(f"{where}: the taxon {name!r} occurs twice. Remedy: make names unique.")
        seen.add(name)


def check_lengths(parsed: ParsedTree, names: list[str], where: str) -> bool:
    """Tell whether all edges have lengths; TreeError if only some have, or a length is negative or not finite."""
    given = [node for node in range(1, len(names)) if parsed.lengths[node] is not None]
    for node in given:
        length = parsed.lengths[node]
        if length is None or not 0.0 <= length < float("inf"):
            raise TreeError(
                f"{where}: the edge above {describe_node(parsed.children, names, node)} has length {length}. "
                "Remedy: give finite lengths of at least 0."
            )
    if given and len(given) < len(names) - 1:
        node = next(node for node in range(1, len(names)) if parsed.lengths[node] is None)
        raise TreeError(
            f"{where}: the edge above {describe_node(parsed.children, names, node)} has no length, but other "
            "edges have lengths. Remedy: give a length for every edge, or for none."
        )
    return bool(given)


def _unroot(children: list[list[int]], lengths: list[float | None], has_lengths: bool, where: str) -> int:
    """Dissolve a root of degree two in place and return the node that takes its place."""
    left, right = children[0]
    kept, moved = (left, right) if children[left] else (right, left)
    # The moved subtree keeps its position among its siblings, so that taxa stay in text order.
    children[kept] = [*children[kept], moved] if moved == right else [moved, *children[kept]]
    children[0] = []
    if has_lengths:
        lengths[moved] = (lengths[left] or 0.0) + (lengths[right] or 0.0)
    warn_user(
        f"{where}: the tree is rooted; it was unrooted by joining the two edges at its root"
        + (" (their lengths add)." if has_lengths else "."),
        ConversionWarning,
    )
    return kept


def _dtype_of(lengths: Tensor | Sequence[float]) -> torch.dtype:
    return lengths.dtype if isinstance(lengths, Tensor) else torch.float64


def describe_node(children: Sequence[Sequence[int]], names: Sequence[str], node: int) -> str:
    """Name a node by a few of the tips below it."""
    tips: list[str] = []
    stack = [node]
    while stack and len(tips) < 5:
        at = stack.pop()
        if children[at]:
            stack.extend(reversed(children[at]))
        else:
            tips.append(names[at])
    return "(" + ", ".join(tips[:4]) + (", ..." if len(tips) > 4 else "") + ")"


# Two orders of edges: the order of a tree's text, and the canonical order of `Topologies`.


def edges_of_trees(trees: Sequence[Tree], taxa: Sequence[str] | None = None) -> tuple[tuple[str, ...], clades.Bits]:
    """Return the order of taxa and the taxa below every edge, `(trees, edges, words)`; TreeError if taxa differ."""
    if isinstance(trees, Tree) or not isinstance(trees, Sequence):
        raise TreeError(f"trees: {type(trees).__name__} is not a list of trees. Remedy: give a list of Tree.")
    if not trees:
        raise TreeError("There is no tree. Remedy: give at least one tree.")
    for place, tree in enumerate(trees, start=1):
        if not isinstance(tree, Tree):
            remedy = "read text with Tree.from_newick, files with Tree.from_file or TreeSample.from_file"
            raise TreeError(f"Tree {place} of the list is of type {type(tree).__name__}. Remedy: {remedy}.")
    given = "tree 1" if taxa is None else "the requested order"
    taxa = trees[0].taxa if taxa is None else tuple(taxa)
    for place, tree in enumerate(trees, start=1):
        check_same_taxa(taxa, tree.taxa, given, f"tree {place}")
    number = {taxon: position for position, taxon in enumerate(taxa)}
    tips = clades.single(len(taxa))[np.array([[number[taxon] for taxon in tree.taxa] for tree in trees])]
    # The root has a third child, but no edge above it.
    pairs = np.array([[below[:2] for below in tree.children] for tree in trees]).reshape(len(trees), -1, 2)
    return taxa, clades.below(pairs, len(taxa), tips)[:, :-1]


def stacked_lengths(trees: Sequence[Tree]) -> Tensor | None:
    """Return branch lengths `(trees, edges)`, None where no tree has any; TreeError if only some have."""
    lengths = [tree.branch_lengths for tree in trees if tree.branch_lengths is not None]
    if len(lengths) not in (0, len(trees)):
        raise TreeError(
            f"Only {len(lengths)} of {len(trees)} trees have branch lengths. Remedy: give lengths for all trees, or "
            "for none."
        )
    return torch.stack(lengths) if lengths else None


def chosen_edges(
    edge: int | str | NDArray[np.integer[Any]] | Sequence[int], taxa: Sequence[str], num_topologies: int, num_edges: int
) -> NDArray[np.integer[Any]]:
    """Return an edge of each topology, `(topologies,)`, from numbers or the taxon at its tip; TreeError if absent."""
    if isinstance(edge, str):
        if edge not in taxa:
            raise TreeError(f"There is no taxon {edge!r}. Remedy: use one of {', '.join(taxa[:5])}, ...")
        edge = taxa.index(edge)
    given = np.asarray(edge)
    if not np.issubdtype(given.dtype, np.integer) or given.shape not in ((), (num_topologies,)):
        raise TreeError(
            f"edge: an array of {given.dtype} with shape {given.shape} does not select edges. Remedy: give a taxon, an "
            f"integer, or one integer for each of the {num_topologies} topologies."
        )
    if ((given < 0) | (given >= num_edges)).any():
        raise TreeError(f"There is no such edge. Remedy: use numbers from 0 to {num_edges - 1}.")
    return np.broadcast_to(given, num_topologies)


def as_written(children: Sequence[Sequence[int]], num_taxa: int) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return nodes in the order of a tree's text, the root last, and the children of internal ones by their places."""
    # Tips from left to right, then internal nodes in the order in which they close.
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
