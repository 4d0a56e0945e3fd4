"""Summaries of tree samples: trees with supports and intervals of lengths; plots of trees, splits and credible sets."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError, TreeError
from bayeskit.extend import BLUE, GREY, SKY, unknown_name, write_atomically
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._exports import taxa_block, write_nexus
from bayeskit.models.phylogenetics._newick import quote
from bayeskit.models.phylogenetics._samples import TreeSample, asdsf, check_sample, split_frequencies
from bayeskit.models.phylogenetics._topologies import Topologies
from bayeskit.models.phylogenetics._trees import Tree, check_same_taxa
from bayeskit.models.phylogenetics._weighted_summaries import (
    WeightedSummary,
    ancestor_heights,
    length_summary,
    summarised,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from bayeskit.models.phylogenetics._samples import TreeSample

# Trees with what a sample says about their edges.

#: What the length of an edge of a summary may be.
LengthChoice = Literal["mean", "median", "heights"]
_LENGTH_CHOICES = ("mean", "median", "heights")
_FORMS = ("mrbayes", "beast")


@dataclass(frozen=True, eq=False, repr=False)
class AnnotatedTree:
    """Tree with the supports of its edges and intervals of their lengths; nodes may have more than two children.

    Nodes `0 .. n-1` are the tips, in the order of `taxa`. Internal nodes follow, children before parents; the root is
    the last. The root of an unrooted tree is the node next to its first taxon. Edge `i` joins node `i` to its parent.

    `majority_rule_consensus`, `greedy_consensus` and `maximum_clade_credibility` make one of a sample, and `of` one of
    a given tree.

    Attributes
    ----------
    taxa : tuple of str
        Names of the tips.
    children : tuple of tuple of int
        Children of each internal node.
    rooted : bool
        Whether the position of the root matters.
    supports : ndarray or None
        Weighted frequency in the sample (posterior probability) of the split or clade of each edge, shape `(edges,)`;
        one for tips. None without a sample.
    branch_lengths : Tensor or None
        Length of each edge, shape `(edges,)`, float64; None without lengths.
    length_summary : WeightedSummary or None
        Mean, median and 95 % interval of the length of each edge, over the trees with that edge.
    height_summary : WeightedSummary or None
        For a rooted sample with lengths, the same of the height of each node, `edges + 1` of them: the height of the
        most recent common ancestor of the taxa below the node, over all trees. Height is measured from the tip that is
        farthest from the root.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6])
    >>> majority_rule_consensus(sample).newick
    '(A,B,(C,D)0.75);'
    >>> majority_rule_consensus(sample)
    AnnotatedTree(4 taxa, unrooted, 1 of at most 1 inner edges: (A,B,(C,D)0.75);)
    """

    taxa: tuple[str, ...]
    children: tuple[tuple[int, ...], ...]
    rooted: bool
    supports: NDArray[np.float64] | None = None
    branch_lengths: Tensor | None = None
    length_summary: WeightedSummary | None = None
    height_summary: WeightedSummary | None = None

    @classmethod
    def of(cls, tree: Tree | Topologies, sample: TreeSample | None = None) -> AnnotatedTree:
        """Annotate a given tree, such as one of maximum likelihood.

        Parameters
        ----------
        tree : Tree or Topologies
            Unrooted, with or without branch lengths; or one topology, rooted or unrooted.
        sample : TreeSample, optional
            Gives supports and intervals: over the same taxa in any order, rooted if and only if the tree is.

        Returns
        -------
        AnnotatedTree
            With the lengths of the tree, if any, otherwise mean lengths of the sample. A split that the sample lacks
            has support zero.

        Raises
        ------
        TreeError
            If an argument has another type, the taxa differ, or only one of tree and sample is rooted.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> tree = Tree.from_newick("((A:1,B:2):3,C:4,D:5);")
        >>> AnnotatedTree.of(tree, TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6])).newick
        '(A:1.0,B:2.0,(C:4.0,D:5.0)0.75:3.0);'
        """
        topologies = Topologies.from_trees([tree]) if isinstance(tree, Tree) else tree
        if not isinstance(topologies, Topologies) or len(topologies) != 1:
            raise TreeError(f"tree: {tree!r:.60} is not a single tree. Remedy: give a Tree, or topologies[0].")
        own = None
        if isinstance(tree, Tree) and tree.branch_lengths is not None:
            own = topologies.branch_lengths_of([tree])[0].detach().to("cpu", torch.float64)
        splits = topologies.below[0, topologies.num_taxa :]
        if sample is None:
            hung = _hung(topologies.taxa, topologies.rooted, splits)
            return hung if own is None else replace(hung, branch_lengths=own)
        check_same_taxa(topologies.taxa, check_sample(sample).taxa, "the tree", "the sample")
        if sample.rooted != topologies.rooted:
            raise TreeError("Only one of tree and sample is rooted. Remedy: give sample.unrooted().")
        aligned = sample if sample.taxa == topologies.taxa else sample.with_taxa(topologies.taxa)
        table = split_frequencies(aligned)
        _, index = clades.identify(np.concatenate([splits, table.splits]))
        support = np.zeros(index.max(initial=-1) + 1)
        support[index[len(splits) :]] = table.frequencies[0]
        found = _annotated(aligned, splits, support[index[: len(splits)]], None)
        return found if own is None else replace(found, branch_lengths=own)

    def __repr__(self) -> str:
        inner, most = len(self.children) - 1, self.num_taxa - (2 if self.rooted else 3)
        kind, text = "rooted" if self.rooted else "unrooted", self.to_newick()
        text = text if len(text) <= 80 else text[:77] + "..."
        return f"AnnotatedTree({self.num_taxa} taxa, {kind}, {inner} of at most {most} inner edges: {text})"

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return len(self.taxa)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.taxa) + len(self.children) - 1

    @property
    def newick(self) -> str:
        """The tree as Newick text, with supports as labels of internal nodes."""
        return self.to_newick()

    def to_newick(self, supports: bool = True, *, annotations: str | None = None) -> str:
        """Write the tree as Newick text, with branch lengths if any.

        Parameters
        ----------
        supports : bool, default True
            Whether to write the supports.
        annotations : {"mrbayes", "beast"}, optional
            By default supports are labels of the nodes below their edges. Otherwise supports and intervals are comments
            with the names that MrBayes gives them (`prob`, `length_mean`, `length_median`, `length_95%HPD`), or those
            of BEAST's TreeAnnotator (`posterior`, `length`, `length_median`, `length_95%_HPD`, `height` and
            `CAheight_mean`, `CAheight_median`, `CAheight_95%_HPD`). FigTree, IcyTree, treeio and DendroPy read both.

        Returns
        -------
        str
            `Tree.from_newick(text, resolve=True)` reads it also if a node has more than two children.

        Raises
        ------
        UnknownNameError
            If there is no such form of annotations.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6])
        >>> majority_rule_consensus(sample).to_newick(annotations="beast")
        '(A,B,(C,D)[&posterior=0.75])[&posterior=1.0];'
        """
        return self._written([quote(taxon) for taxon in self.taxa], supports, annotations)

    def to_file(
        self, path: str | os.PathLike[str], supports: bool = True, *, annotations: str | None = "mrbayes"
    ) -> None:
        """Write the tree to a file: NEXUS if the suffix is `.nex`, `.nexus`, `.tre`, `.t` or `.trees`, else Newick.

        `Tree.from_file(path, resolve=True)` reads it back without supports.

        Parameters
        ----------
        path : str or os.PathLike
        supports : bool, default True
            As in `to_newick`.
        annotations : {"mrbayes", "beast"} or None, default "mrbayes"
            Form of the comments in NEXUS, as in `to_newick`; Newick files have none.

        Raises
        ------
        OutputError
            If the file cannot be written.
        UnknownNameError
            If there is no such form of annotations.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "tree.nex"
        >>> AnnotatedTree.of(Tree.from_newick("(A:1,B:2,C:4);")).rooted_at_midpoint().to_file(path)
        >>> path.read_text().splitlines()[-2]
        '   tree summary = [&R] (3:3.0,(1:1.0,2:2.0):1.0);'
        """
        if Path(path).suffix.lower() in (".nex", ".nexus", ".t", ".tre", ".trees"):
            # Numbers, because readers of annotations take some marks in names for lengths.
            text = self._written([str(tip + 1) for tip in range(self.num_taxa)], supports, annotations)
            write_nexus(path, self.taxa, self.rooted, [("summary", "", text)], taxa_block(self.taxa))
        else:
            write_atomically(os.fspath(path), (self.to_newick(supports) + "\n").encode())

    def _written(self, names: Sequence[str], supports: bool, annotations: str | None) -> str:
        """Write the tree as Newick text with the given names of the tips."""
        if annotations is not None and annotations not in _FORMS:
            raise unknown_name("form of annotations", annotations, _FORMS)
        lengths = None if self.branch_lengths is None else self.branch_lengths.tolist()

        def end(node: int) -> str:
            label, note, behind = "", [], []
            if self.supports is not None and supports:
                support = 1.0 if node == self.num_edges else round(self.supports[node].item(), 12)
                if annotations == "mrbayes" and (node < self.num_edges or self.rooted):
                    note.append(f"prob={support!r}")
                elif annotations == "beast" and node >= self.num_taxa:
                    note.append(f"posterior={support!r}")
                elif annotations is None and self.num_taxa <= node < self.num_edges:
                    label = f"{support:.6g}"
            if annotations == "beast" and self.height_summary is not None:
                note.append(f"height={self.height_summary.mean[node].item()!r}")
                note += self.height_summary.texts(node, "CAheight_mean", "CAheight_median", "CAheight_95%_HPD")
            if annotations and self.length_summary is not None and node < self.num_edges:
                if annotations == "mrbayes":
                    behind = self.length_summary.texts(node, "length_mean", "length_median", "length_95%HPD")
                else:
                    note += self.length_summary.texts(node, "length", "length_median", "length_95%_HPD")
            length = "" if lengths is None or node == self.num_edges else f":{lengths[node]!r}"
            return label + _comment(note) + length + _comment(behind)

        texts = [name + end(tip) for tip, name in enumerate(names)]
        for node, below in enumerate(self.children, start=self.num_taxa):
            texts.append(f"({','.join(texts[child] for child in below)}){end(node)}")
        return texts[-1] + ";"

    def rooted_at(self, outgroup: str | Sequence[str]) -> AnnotatedTree:
        """Root an unrooted tree at the midpoint of an outgroup's edge.

        Parameters
        ----------
        outgroup : str or sequence of str
            One taxon, or several that one edge of the tree separates from all others.

        Returns
        -------
        AnnotatedTree
            The rooted tree, with the support and length of each split. Both edges at the root have the support of the
            split that they form, and half its length.

        Raises
        ------
        TreeError
            If a taxon is unknown, no edge separates the outgroup from all others, or the tree is rooted.

        References
        ----------
        L. Czech, J. Huerta-Cepas and A. Stamatakis (2017), A critical review on the use of support values in tree
        viewers and bioinformatics toolkits, Molecular Biology and Evolution 34, 1535-1542.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> tree = majority_rule_consensus(TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6]))
        >>> tree.rooted_at("C").to_newick(), tree.rooted_at(["C", "D"]).to_newick()
        ('(C,(D,(A,B)0.75)1);', '((A,B)0.75,(C,D)0.75);')
        """
        self._check_unrooted()
        chosen = [outgroup] if isinstance(outgroup, str) else list(outgroup)
        unknown = [taxon for taxon in chosen if taxon not in self.taxa]
        if unknown or not 0 < len(set(chosen)) < self.num_taxa:
            problem = f"There is no taxon {unknown[0]!r}" if unknown else "The outgroup is empty, or has all taxa"
            raise TreeError(f"{problem}. Remedy: use some of {', '.join(self.taxa[:5])}, ...")
        places = [self.taxa.index(taxon) for taxon in chosen]
        group, everything = np.bitwise_or.reduce(clades.single(self.num_taxa)[places]), clades.everything(self.num_taxa)
        sets = self._sets()[:-1]
        # A set and the set of all other taxa are the same split.
        edges = np.flatnonzero((sets == group).all(1) | (sets == (everything & ~group)).all(1))
        if not len(edges):
            sides = np.concatenate([sets, everything & ~sets])
            around = sides[((group & ~sides) == 0).all(1)]
            smallest = around[clades.size(around).argmin()] if len(around) else everything
            others = [self.taxa[taxon] for taxon in clades.members(smallest & ~group)]
            raise TreeError(
                f"outgroup: no edge separates {', '.join(chosen[:5])} from all other taxa; the smallest group with all "
                f"of them also has {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}. Remedy: give such a "
                "group, or one taxon."
            )
        return self._rooted_on(int(edges[0]), 0.5)

    def rooted_at_midpoint(self) -> AnnotatedTree:
        """Root an unrooted tree in the middle of the longest path between two tips.

        Returns
        -------
        AnnotatedTree
            The rooted tree, with the support and length of each split, as in `rooted_at`.

        Raises
        ------
        TreeError
            If the tree is rooted, or has no branch lengths above zero.

        References
        ----------
        J. S. Farris (1972), Estimating phylogenetic trees from distance matrices, American Naturalist 106, 645-668.

        Examples
        --------
        >>> AnnotatedTree.of(Tree.from_newick("((A:1,B:2):3,C:4,D:5);")).rooted_at_midpoint().to_newick()
        '((A:1.0,B:2.0):3.0,(C:4.0,D:5.0):0.0);'
        """
        self._check_unrooted()
        lengths = [] if self.branch_lengths is None else self.branch_lengths.tolist()
        if not any(lengths):
            raise TreeError("The tree has no branch lengths above zero. Remedy: root it with rooted_at('OUTGROUP').")
        # The longest way down from the upper end of each edge, and from each node.
        reach, longest, top = [0.0] * self.num_taxa, -1.0, 0
        for node, below in enumerate(self.children, start=self.num_taxa):
            ways = sorted((lengths[child] + reach[child] for child in below), reverse=True)
            reach.append(ways[0])
            if ways[0] + ways[1] > longest:
                longest, top = ways[0] + ways[1], node
        # Down the longer half of the path, to the edge in which its middle lies.
        node = top
        while node == top or reach[node] > longest / 2:
            node = max(self.children[node - self.num_taxa], key=lambda child: lengths[child] + reach[child])
        return self._rooted_on(node, (longest / 2 - reach[node]) / lengths[node])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the tree with its supports; see `plot_tree`."""
        return plot_tree(self, ax)

    def _check_unrooted(self) -> None:
        if self.rooted:
            raise TreeError("The tree has a root. Remedy: make the summary of sample.unrooted().")

    def _sets(self) -> clades.Bits:
        """Return the taxa below every node, `(nodes, words)`."""
        sets = list(clades.single(self.num_taxa))
        for below in self.children:
            sets.append(np.bitwise_or.reduce([sets[child] for child in below]))
        return np.stack(sets)

    def _rooted_on(self, edge: int, share: float) -> AnnotatedTree:
        """Place the root on an edge, with a share of its length below it; the other part is a new edge."""
        sets = self._sets()[:-1]
        split = sets[edge][None]
        turned = clades.turned(sets[self.num_taxa :], split, self.num_taxa)
        groups = np.concatenate([turned, clades.everything(self.num_taxa) & ~split])
        edges = np.append(np.arange(self.num_edges), edge)
        parts = np.ones(self.num_edges + 1)
        parts[[edge, -1]] = share, 1 - share
        lengths = None if self.branch_lengths is None else self.branch_lengths[edges] * torch.from_numpy(parts)
        summary = self.length_summary
        if summary is not None:
            mean, median, interval = (values[edges] for values in summary)
            summary = WeightedSummary(mean * parts, median * parts, interval * parts[:, None])
        supports = None if self.supports is None else self.supports[edges]
        return _hung(self.taxa, True, groups, supports, lengths, summary)


def _comment(notes: Sequence[str]) -> str:
    return f"[&{','.join(notes)}]" if notes else ""


#: The same class by the name that consensus trees had alone.


def majority_rule_consensus(
    sample: TreeSample, threshold: float = 0.5, *, lengths: LengthChoice | None = None
) -> AnnotatedTree:
    """Return the majority-rule consensus: all splits with more than a given frequency.

    `greedy_consensus` adds the compatible splits of lower frequency.

    Parameters
    ----------
    sample : TreeSample
        Rooted trees are summarised by their clades.
    threshold : float, default 0.5
        From 0.5 to 1; 1 keeps the splits of all trees (strict consensus).
    lengths : {"mean", "median", "heights"}, optional
        Branch lengths: mean or median over the trees with the edge; or, for rooted trees, differences of mean heights,
        where the height of a node is that of the most recent common ancestor of the taxa below it, over all trees. By
        default means, if the sample has lengths.

    Returns
    -------
    AnnotatedTree

    Raises
    ------
    SettingsError
        If the threshold is outside its domain: less frequent splits may be incompatible.
    UnknownNameError
        If there is no such choice of lengths.
    TreeError
        If `sample` is not a `TreeSample`, or `lengths` are asked of a sample without them or heights of one without
        roots.

    References
    ----------
    T. Margush and F. R. McMorris (1981), Consensus n-trees, Bulletin of Mathematical Biology 43, 239-244.

    J. Heled and R. R. Bouckaert (2013), Looking for trees in the forest: summary tree from posterior samples, BMC
    Evolutionary Biology 13, 221.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [2, 2, 4])
    >>> majority_rule_consensus(sample).newick
    '(A,B,C,D);'
    """
    if not 0.5 <= threshold <= 1.0:
        raise SettingsError(
            f"threshold={threshold} is not between 0.5 and 1. Remedy: for rarer splits use greedy_consensus, which "
            "adds compatible splits in descending order of frequency."
        )
    table = split_frequencies(sample)
    support = table.frequencies[0]
    # Sums of weights are subject to rounding.
    kept = support > min(threshold + 1e-12, 1.0 - 1e-9)
    return _annotated(sample, table.splits[kept], support[kept], lengths)


def greedy_consensus(
    sample: TreeSample, minimum_frequency: float = 0.0, *, lengths: LengthChoice | None = None
) -> AnnotatedTree:
    """Return the greedy consensus (extended majority rule): add compatible splits in descending order of frequency.

    Parameters
    ----------
    sample : TreeSample
        Rooted trees are summarised by their clades.
    minimum_frequency : float, default 0.0
        Exclude splits of lower frequency, from 0 to 1.
    lengths : {"mean", "median", "heights"}, optional
        As in `majority_rule_consensus`.

    Returns
    -------
    AnnotatedTree
        Ties are broken in favour of smaller splits.

    Raises
    ------
    SettingsError
        If the minimum frequency is outside its domain.
    UnknownNameError, TreeError
        As in `majority_rule_consensus`.

    References
    ----------
    D. Bryant (2003), A classification of consensus methods for phylogenetics, DIMACS Series in Discrete Mathematics
    and Theoretical Computer Science 61, 163-184.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [3, 3, 4])
    >>> greedy_consensus(sample).newick
    '(A,B,(C,D)0.4);'
    """
    if not 0.0 <= minimum_frequency <= 1.0:
        raise SettingsError(
            f"minimum_frequency={minimum_frequency} is not a frequency. Remedy: give a number from 0 to 1."
        )
    table = split_frequencies(sample)
    support = table.frequencies[0]
    num_inner = sample.topologies.num_edges - sample.num_taxa
    places = np.flatnonzero((support > 0) & (support >= minimum_frequency - 1e-12))
    # Splits of more than half of the trees are compatible: two of them are in one tree.
    chosen: list[int] = places[support[places] > 0.5 + 1e-9].tolist()
    for place in places[len(chosen) :].tolist():
        side, others = table.splits[place], table.splits[chosen]
        # Sides without the first taxon are compatible like clades: nested or disjoint.
        shared = side & others
        fits = (shared == 0).all(axis=1) | (shared == side).all(axis=1) | (shared == others).all(axis=1)
        if fits.all():
            chosen.append(place)
        if len(chosen) == num_inner:
            break
    return _annotated(sample, table.splits[chosen], support[chosen], lengths)


def maximum_clade_credibility(sample: TreeSample, *, lengths: LengthChoice | None = None) -> AnnotatedTree:
    """Return the sampled topology with the largest product of the frequencies of its splits, or clades if rooted.

    Parameters
    ----------
    sample : TreeSample
    lengths : {"mean", "median", "heights"}, optional
        As in `majority_rule_consensus`.

    Returns
    -------
    AnnotatedTree
        Binary. Of tied topologies, the most frequent and then the first.

    Raises
    ------
    UnknownNameError, TreeError
        As in `majority_rule_consensus`.

    References
    ----------
    J. Heled and R. R. Bouckaert (2013), Looking for trees in the forest: summary tree from posterior samples, BMC
    Evolutionary Biology 13, 221.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> maximum_clade_credibility(TreeSample.from_topologies(all_topologies("ABCD"), [3, 3, 4])).newick
    '(A,B,(C,D)0.4);'
    """
    table = split_frequencies(sample)
    inner = sample.topologies.below[:, sample.num_taxa :]
    _, index = clades.identify(np.concatenate([table.splits, inner.reshape(-1, inner.shape[-1])]))
    support = np.zeros(index.max(initial=-1) + 1)
    support[index[: len(table.splits)]] = table.frequencies[0]
    supports = support[index[len(table.splits) :]].reshape(inner.shape[:2])
    # Topologies of weight zero are not sampled. Rounded, so that ties do not depend on the order of the sums.
    with np.errstate(divide="ignore"):
        credibility = np.where(sample.weights > 0, np.log(supports).sum(1).round(9), -np.inf)
    best = int(np.lexsort((-sample.weights, -credibility))[0])
    return _annotated(sample, inner[best], supports[best], lengths)


def _annotated(
    sample: TreeSample, splits: clades.Bits, support: np.ndarray, lengths: LengthChoice | None
) -> AnnotatedTree:
    """Build the tree of compatible splits with what the sample says about them."""
    if lengths is not None and lengths not in _LENGTH_CHOICES:
        raise unknown_name("choice of lengths", lengths, _LENGTH_CHOICES)
    if lengths is not None and sample.branch_lengths is None:
        raise TreeError(f"lengths={lengths!r}: the trees have no branch lengths. Remedy: omit lengths.")
    if lengths == "heights" and not sample.rooted:
        raise TreeError("lengths='heights': the trees have no root. Remedy: use 'mean' or 'median'.")
    supports = np.concatenate([np.ones(sample.num_taxa), support])
    if sample.branch_lengths is None:
        return _hung(sample.taxa, sample.rooted, splits, supports)
    summary = length_summary(sample, splits)
    chosen = torch.from_numpy(summary.median if lengths == "median" else summary.mean)
    tree = _hung(sample.taxa, sample.rooted, splits, supports, chosen, summary)
    if not sample.rooted:
        return tree
    heights = ancestor_heights(sample, tree._sets())
    count, nodes = heights.shape
    places = np.broadcast_to(np.arange(nodes), heights.shape)
    tree = replace(tree, height_summary=summarised(places, heights, sample.sample_weights, nodes))
    if lengths == "heights" and tree.height_summary is not None:
        mean = tree.height_summary.mean
        above = np.empty(nodes - 1, dtype=np.int64)
        for node, below in enumerate(tree.children, start=tree.num_taxa):
            above[list(below)] = node
        tree = replace(tree, branch_lengths=torch.from_numpy(np.maximum(mean[above] - mean[:-1], 0.0)))
    return tree


_Values = TypeVar("_Values", "NDArray[np.float64]", Tensor)


def _hung(
    taxa: tuple[str, ...],
    rooted: bool,
    splits: clades.Bits,
    supports: NDArray[np.float64] | None = None,
    lengths: Tensor | None = None,
    summary: WeightedSummary | None = None,
) -> AnnotatedTree:
    """Build a tree of nested sets of taxa; values of edges are those of the tips and then of the sets."""
    order, num_taxa = clades.order(splits), len(taxa)
    splits, edges = splits[order], np.concatenate([np.arange(num_taxa), num_taxa + order])
    # Smaller sets come first, and the root last.
    highest = np.arange(num_taxa)  # the largest set so far that holds each taxon
    children: list[list[int]] = []
    for node, side in enumerate([*splits, clades.everything(num_taxa)], start=num_taxa):
        held = np.array(clades.members(side))
        children.append(np.unique(highest[held]).tolist())
        highest[held] = node

    def placed(values: _Values | None) -> _Values | None:
        return None if values is None else values[edges]

    summary = None if summary is None else WeightedSummary(*(values[edges] for values in summary))
    below = tuple(tuple(nodes) for nodes in children)
    return AnnotatedTree(taxa, below, rooted, placed(supports), placed(lengths), summary)


# Plots of trees, split frequencies and credible sets, in plain matplotlib.


def plot_tree(
    tree: Tree | AnnotatedTree, ax: Axes | None = None, *, numbered: bool = False, intervals: bool = False
) -> Axes:
    """Plot a tree from left to right, with taxon names and supports.

    With branch lengths, horizontal lines are to scale, with a scale bar (phylogram); without, all tips are aligned
    (cladogram). An unrooted tree is drawn from the node that serves as its root.

    Parameters
    ----------
    tree : Tree or AnnotatedTree
        Supports of an annotated tree are written above the edges.
    ax : Axes, optional
        By default new axes of ``pyplot``.
    numbered : bool, default False
        Write the number of each internal edge, its place in `branch_lengths` and `edge_names`, beside it.
    intervals : bool, default False
        Draw bars of the 95 % intervals of the heights of the internal nodes. They fit a tree with `lengths="heights"`.

    Returns
    -------
    Axes

    Raises
    ------
    TreeError
        If `tree` has another type, or `intervals` are asked of a tree without heights.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> tree = Tree.from_newick("((A:0.1,B:0.2):0.3,C:0.4,D:0.5);")
    >>> [text.get_text() for text in plot_tree(tree, Figure().subplots()).texts]
    ['A', 'B', 'C', 'D', '0.1']
    """
    from matplotlib.collections import LineCollection

    if not isinstance(tree, (Tree, AnnotatedTree)):
        raise TreeError(
            f"tree: {type(tree).__name__} is not a single tree. Remedy: for unrooted topologies, give "
            "topologies.tree(0); for rooted topologies, greedy_consensus(TreeSample.from_topologies(topologies[0]))."
        )
    heights = tree.height_summary if isinstance(tree, AnnotatedTree) else None
    if intervals and heights is None:
        raise TreeError(
            "intervals: the tree has no heights. Remedy: make it of rooted trees with branch lengths, such as "
            "maximum_clade_credibility(sample, lengths='heights')."
        )
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 0.8 + 0.22 * tree.num_taxa), layout="constrained")
    x, y = _positions(tree)
    lines: list[list[tuple[float, float]]] = []
    for node, below in enumerate(tree.children, start=tree.num_taxa):
        lines.append([(x[node], min(y[child] for child in below)), (x[node], max(y[child] for child in below))])
        lines += [[(x[node], y[child]), (x[child], y[child])] for child in below]
    ax.add_collection(LineCollection(lines, colors=BLUE, linewidths=1.2, capstyle="projecting"))
    for taxon, name in enumerate(tree.taxa):
        _note(ax, name, (x[taxon], y[taxon]), (4, 0), ha="left", va="center")
    if intervals and heights is not None:
        ends = x[:, None] + heights.mean[:, None] - heights.interval
        bars = [[(left, y[node]), (right, y[node])] for node, (right, left) in enumerate(ends)][tree.num_taxa :]
        ax.add_collection(LineCollection(bars, colors=SKY, linewidths=5.0, alpha=0.6, zorder=1))
    if isinstance(tree, AnnotatedTree) and tree.supports is not None:
        for node in range(tree.num_taxa, tree.num_edges):
            _note(ax, f"{tree.supports[node]:.2f}", (x[node], y[node]), (-2, 1.5), ha="right", va="bottom", color=GREY)
    for node in range(tree.num_taxa, tree.num_edges) if numbered else ():
        _note(ax, f"{node}", (x[node], y[node]), (-2, 1.5), ha="right", va="bottom", color=GREY)
    width = float(x.max()) or 1.0
    left = min(0.0, float(ends.min())) if intervals else 0.0
    ax.set_xlim(left - 0.02 * width, 1.02 * width)
    ax.set_ylim(tree.num_taxa + (0.6 if tree.branch_lengths is not None else -0.2), -0.8)
    ax.set_axis_off()
    if tree.branch_lengths is not None:
        length = _round_length(width / 4)
        bottom = tree.num_taxa - 0.2
        ax.plot([0, length], [bottom, bottom], color=GREY, linewidth=1.8)
        _note(ax, f"{length:g}", (length, bottom), (4, 0), ha="left", va="center", color=GREY)
    return ax


def _positions(tree: Tree | AnnotatedTree) -> tuple[np.ndarray, np.ndarray]:
    """Place every node: the root at the left, tips in rows from the top, parents in the middle of their children."""
    num_taxa, root = tree.num_taxa, tree.num_edges
    upwards = [node for node in range(num_taxa, root + 1)]
    # Number of levels below each node.
    height = np.zeros(root + 1)
    for node in upwards:
        height[node] = 1 + max(height[child] for child in tree.children[node - num_taxa])
    x = height[root] - height
    y = np.zeros(root + 1)
    stack, row = [root], 0
    lengths = None if tree.branch_lengths is None else tree.branch_lengths.tolist()
    while stack:
        node = stack.pop()
        if node < num_taxa:
            y[node], row = row, row + 1
            continue
        for child in tree.children[node - num_taxa]:
            x[child] = x[child] if lengths is None else x[node] + lengths[child]
        stack.extend(reversed(tree.children[node - num_taxa]))
    for node in upwards:
        below = tree.children[node - num_taxa]
        y[node] = (y[below[0]] + y[below[-1]]) / 2
    return x, y


def _round_length(largest: float) -> float:
    """Return the largest of 1, 2 or 5 times a power of ten that is not above a length."""
    power = 10.0 ** math.floor(math.log10(largest))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= largest * (1 + 1e-9))


def _note(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], ha: str, va: str, color: str = "black"
) -> None:
    ax.annotate(text, at, offset, textcoords="offset points", ha=ha, va=va, fontsize="small", color=color)


def plot_split_frequencies(one: TreeSample, other: TreeSample, ax: Axes | None = None) -> Axes:
    """Plot the split frequencies of one sample against those of another.

    Agreeing runs lie on the diagonal. The title gives the average and the largest standard deviation of split
    frequencies, over splits with frequency 0.1 or more in at least one sample.

    Parameters
    ----------
    one, other : TreeSample
        Both rooted or both unrooted, over the same taxa.
    ax : Axes, optional
        By default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Raises
    ------
    TreeError
        If the taxa differ, or only one sample is rooted.
    SettingsError
        If the trees have fewer than four taxa, or no split is frequent enough.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> runs = [TreeSample.from_topologies(all_topologies("ABCD"), weights) for weights in ([4, 6, 0], [6, 4, 0])]
    >>> plot_split_frequencies(*runs, Figure().subplots()).get_title()
    'ASDSF 0.1414, maximum 0.1414'
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(4.6, 4.6), layout="constrained")
    deviations = asdsf([one, other])
    x, y = split_frequencies([one, other]).frequencies
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.0, zorder=0)
    ax.plot(x, y, "o", color=BLUE, alpha=0.6, markersize=4, markeredgewidth=0, clip_on=False)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    ax.set_aspect("equal")
    ax.set_xlabel("split frequency, first sample")
    ax.set_ylabel("split frequency, second sample")
    ax.set_title(f"ASDSF {deviations.average:.4f}, maximum {deviations.maximum:.4f}", fontsize="medium")
    ax.grid(alpha=0.25)
    return ax


def plot_credible_set(sample: TreeSample, level: float = 0.95, ax: Axes | None = None) -> Axes:
    """Plot probabilities and cumulative probabilities of the topologies of a credible set.

    Parameters
    ----------
    sample : TreeSample
    level : float, default 0.95
        Probability of the set, above 0 and at most 1.
    ax : Axes, optional
        By default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Raises
    ------
    SettingsError
        If `level` is outside its domain.
    TreeError
        If `sample` is not a `TreeSample`.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [6, 3, 1])
    >>> plot_credible_set(sample, 0.9, Figure().subplots()).get_title()
    '2 of 3 topologies have probability 0.900'
    """
    weights = check_sample(sample).weights[sample.credible_set(level)]
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    rank = np.arange(1, len(weights) + 1)
    total = np.cumsum(weights)
    ax.bar(rank, weights, color=BLUE, width=0.8, label="each")
    ax.step(rank, total, where="mid", color=SKY, linewidth=1.4, label="sum")
    ax.axhline(level, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
    ax.set_ylim(0, 1.02)
    ax.set_xlim(0.4, len(weights) + 0.6)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("topology, in descending order of probability")
    ax.set_ylabel("probability")
    ax.set_title(
        f"{len(weights)} of {len(sample.weights)} topologies have probability {total[-1]:.3f}", fontsize="medium"
    )
    ax.grid(axis="y", alpha=0.25)
    ax.legend(frameon=False, loc="center right")
    return ax
