"""Summaries of tree samples: consensus trees, and plots of trees, split frequencies and credible sets."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import SettingsError, TreeError
from bayeskit.extend import BLUE, GREY, SKY, write_atomically
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._newick import quote
from bayeskit.models.phylogenetics._samples import TreeSample, asdsf, check_sample, split_frequencies
from bayeskit.models.phylogenetics._trees import Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from bayeskit.models.phylogenetics._samples import TreeSample

# Consensus trees.


@dataclass(frozen=True, eq=False, repr=False)
class ConsensusTree:
    """Consensus tree of a sample; nodes may have more than two children.

    Nodes `0 .. n-1` are the tips, in the order of `taxa`. Internal nodes follow, children before parents; the root is
    the last. The root of an unrooted tree is the node next to its first taxon. Edge `i` joins node `i` to its parent.

    Attributes
    ----------
    taxa : tuple of str
        Names of the tips.
    children : tuple of tuple of int
        Children of each internal node.
    rooted : bool
        Whether the position of the root matters.
    supports : ndarray
        Weighted frequency in the sample of the split or clade of each edge, shape `(edges,)`; one for tips.
    branch_lengths : Tensor or None
        Mean length of each edge over the trees with that edge, shape `(edges,)`, float64; None if the sample has no
        lengths.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._samples import TreeSample
    >>> from bayeskit.models.phylogenetics._topologies import all_topologies
    >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6])
    >>> majority_rule_consensus(sample).newick
    '(A,B,(C,D)0.75);'
    >>> majority_rule_consensus(sample)
    ConsensusTree(4 taxa, unrooted, 1 of at most 1 inner edges: (A,B,(C,D)0.75);)
    """

    taxa: tuple[str, ...]
    children: tuple[tuple[int, ...], ...]
    rooted: bool
    supports: NDArray[np.float64]
    branch_lengths: Tensor | None = None

    def __repr__(self) -> str:
        inner, most = len(self.children) - 1, self.num_taxa - (2 if self.rooted else 3)
        kind, text = "rooted" if self.rooted else "unrooted", self.to_newick()
        text = text if len(text) <= 80 else text[:77] + "..."
        return f"ConsensusTree({self.num_taxa} taxa, {kind}, {inner} of at most {most} inner edges: {text})"

    @property
    def num_taxa(self) -> int:
        """Number of tips."""
        return len(self.taxa)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.supports)

    @property
    def newick(self) -> str:
        """The tree as Newick text, with supports as labels of internal nodes."""
        return self.to_newick()

    def to_newick(self, supports: bool = True) -> str:
        """Write the tree as Newick text, with branch lengths if any.

        Parameters
        ----------
        supports : bool, default True
            Whether to label internal nodes with the supports of their edges.

        Returns
        -------
        str
            `Tree.from_newick(text, resolve=True)` reads it also if a node has more than two children.
        """
        lengths = [""] * self.num_edges
        if self.branch_lengths is not None:
            lengths = [f":{length!r}" for length in self.branch_lengths.tolist()]
        texts = [quote(taxon) for taxon in self.taxa]
        for node, below in enumerate(self.children, start=self.num_taxa):
            label = "" if node == self.num_edges or not supports else f"{self.supports[node]:.6g}"
            texts.append(f"({','.join(texts[child] + lengths[child] for child in below)}){label}")
        return texts[-1] + ";"

    def to_file(self, path: str | os.PathLike[str], supports: bool = True) -> None:
        """Write the tree to a file, as NEXUS if the suffix is `.nex`, `.nexus`, `.t` or `.trees`, else as Newick.

        `Tree.from_file(path, resolve=True)` reads it back without supports.

        Parameters
        ----------
        path : str or os.PathLike
        supports : bool, default True
            As in `to_newick`.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        text = self.to_newick(supports) + "\n"
        if Path(path).suffix.lower() in (".nex", ".nexus", ".t", ".trees"):
            mark = "[&R]" if self.rooted else "[&U]"
            text = f"#NEXUS\n\nbegin trees;\n   tree consensus = {mark} {text}end;\n"
        write_atomically(os.fspath(path), text.encode())

    def rooted_at(self, taxon: str) -> ConsensusTree:
        """Root an unrooted tree at the midpoint of an outgroup's edge.

        Parameters
        ----------
        taxon : str
            The outgroup.

        Returns
        -------
        ConsensusTree
            The rooted tree, with the support and length of each split.

        Raises
        ------
        TreeError
            If the taxon is unknown, or the tree is rooted.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics._samples import TreeSample
        >>> from bayeskit.models.phylogenetics._topologies import all_topologies
        >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 1, 6])
        >>> majority_rule_consensus(sample).rooted_at("C").to_newick()
        '(C,(D,(A,B)0.75)1);'
        """
        if self.rooted:
            raise TreeError("The tree has a root. Remedy: make the consensus of sample.unrooted().")
        if taxon not in self.taxa:
            raise TreeError(f"There is no taxon {taxon!r}. Remedy: use one of {', '.join(self.taxa[:5])}, ...")
        outgroup = self.taxa.index(taxon)
        sets = clades.single(self.num_taxa)
        for below in self.children[:-1]:
            sets = np.concatenate([sets, np.bitwise_or.reduce(sets[list(below)], axis=0)[None]])
        tip = sets[outgroup][None]
        turned = clades.turned(sets[self.num_taxa :], tip, self.num_taxa)
        ingroup = clades.everything(self.num_taxa) & ~tip
        lengths = self.branch_lengths
        if lengths is not None:
            lengths = torch.cat([lengths, lengths[outgroup : outgroup + 1] / 2])
            lengths[outgroup] /= 2
        return _hung(self.taxa, True, np.concatenate([turned, ingroup]), np.append(self.supports, 1.0), lengths)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the tree with its supports; see `plot_tree`."""
        return plot_tree(self, ax)


def majority_rule_consensus(sample: TreeSample, threshold: float = 0.5) -> ConsensusTree:
    """Return the majority-rule consensus: all splits with more than a given frequency.

    Parameters
    ----------
    sample : TreeSample
        Rooted trees are summarised by their clades.
    threshold : float, default 0.5
        From 0.5 to 1; 1 keeps the splits of all trees (strict consensus).

    Returns
    -------
    ConsensusTree

    Raises
    ------
    SettingsError
        If the threshold is outside its domain: less frequent splits may be incompatible.
    TreeError
        If `sample` is not a `TreeSample`.

    References
    ----------
    T. Margush and F. R. McMorris (1981), Consensus n-trees, Bulletin of Mathematical Biology 43, 239-244.

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
    return _consensus(sample, table.splits[kept], support[kept])


def greedy_consensus(sample: TreeSample, minimum_frequency: float = 0.0) -> ConsensusTree:
    """Return the greedy consensus (extended majority rule): add compatible splits in descending order of frequency.

    Parameters
    ----------
    sample : TreeSample
        Rooted trees are summarised by their clades.
    minimum_frequency : float, default 0.0
        Exclude splits of lower frequency, from 0 to 1.

    Returns
    -------
    ConsensusTree
        Ties are broken in favour of smaller splits.

    Raises
    ------
    SettingsError
        If the minimum frequency is outside its domain.
    TreeError
        If `sample` is not a `TreeSample`.

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
    chosen: list[int] = []
    for place in np.flatnonzero((support > 0) & (support >= minimum_frequency - 1e-12)).tolist():
        side, others = table.splits[place], table.splits[chosen]
        # Sides without the first taxon are compatible like clades: nested or disjoint.
        shared = side & others
        fits = (shared == 0).all(axis=1) | (shared == side).all(axis=1) | (shared == others).all(axis=1)
        if fits.all():
            chosen.append(place)
        if len(chosen) == num_inner:
            break
    return _consensus(sample, table.splits[chosen], support[chosen])


def _consensus(sample: TreeSample, splits: clades.Bits, support: np.ndarray) -> ConsensusTree:
    """Build the tree of compatible splits."""
    supports = np.concatenate([np.ones(sample.num_taxa), support])
    return _hung(sample.taxa, sample.rooted, splits, supports, _mean_lengths(sample, splits))


def _hung(
    taxa: tuple[str, ...], rooted: bool, splits: clades.Bits, supports: np.ndarray, lengths: Tensor | None
) -> ConsensusTree:
    """Build a tree of nested sets of taxa; supports and lengths are those of the tips and then of the sets."""
    order, num_taxa = clades.order(splits), len(taxa)
    splits, edges = splits[order], np.concatenate([np.arange(num_taxa), num_taxa + order])
    tips, root = clades.single(num_taxa), clades.everything(num_taxa)
    # Children before parents; sets without a superset are children of the root, as is the first taxon.
    sets = np.concatenate([tips, splits, root[None]])
    children: list[list[int]] = [[] for _ in range(len(splits) + 1)]
    for node in range(len(sets) - 1):
        later = sets[max(node + 1, num_taxa) :]
        holds = ((sets[node] & ~later) == 0).all(axis=1)
        parent = len(sets) - len(later) + int(holds.argmax())
        children[parent - num_taxa].append(node)
    below = tuple(tuple(nodes) for nodes in children)
    return ConsensusTree(taxa, below, rooted, supports[edges], None if lengths is None else lengths[edges])


def _mean_lengths(sample: TreeSample, splits: clades.Bits) -> Tensor | None:
    """Average the length of each tip's edge and of each split over the trees that have it."""
    if sample.branch_lengths is None:
        return None
    lengths, weights = sample.branch_lengths.numpy(), sample.sample_weights
    inner = sample.topologies.below[:, sample.num_taxa :]
    distinct, index = clades.identify(np.concatenate([splits, inner.reshape(-1, inner.shape[-1])]))
    numbers = index[len(splits) :].reshape(inner.shape[:2])[sample.index]
    held = np.broadcast_to(weights[:, None], numbers.shape)
    total = np.bincount(numbers.ravel(), held.ravel(), minlength=len(distinct))
    added = np.bincount(numbers.ravel(), (held * lengths[:, sample.num_taxa :]).ravel(), minlength=len(distinct))
    chosen = index[: len(splits)]
    return torch.from_numpy(np.concatenate([weights @ lengths[:, : sample.num_taxa], added[chosen] / total[chosen]]))


# Plots of trees, split frequencies and credible sets, in plain matplotlib.


def plot_tree(tree: Tree | ConsensusTree, ax: Axes | None = None, *, numbered: bool = False) -> Axes:
    """Plot a tree from left to right, with taxon names and supports.

    With branch lengths, horizontal lines are to scale, with a scale bar (phylogram); without, all tips are aligned
    (cladogram). An unrooted tree is drawn from the node that serves as its root.

    Parameters
    ----------
    tree : Tree or ConsensusTree
        Supports of a consensus tree are written above the edges.
    ax : Axes, optional
        By default new axes of ``pyplot``.
    numbered : bool, default False
        Write the number of each internal edge, its place in `branch_lengths` and `edge_names`, beside it.

    Returns
    -------
    Axes

    Raises
    ------
    TreeError
        If `tree` has another type.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> tree = Tree.from_newick("((A:0.1,B:0.2):0.3,C:0.4,D:0.5);")
    >>> [text.get_text() for text in plot_tree(tree, Figure().subplots()).texts]
    ['A', 'B', 'C', 'D', '0.1']
    """
    from matplotlib.collections import LineCollection

    if not isinstance(tree, (Tree, ConsensusTree)):
        raise TreeError(
            f"tree: {type(tree).__name__} is not a single tree. Remedy: for unrooted topologies, give "
            "topologies.tree(0); for rooted topologies, greedy_consensus(TreeSample.from_topologies(topologies[0]))."
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
    if isinstance(tree, ConsensusTree):
        for node in range(tree.num_taxa, tree.num_edges):
            _note(ax, f"{tree.supports[node]:.2f}", (x[node], y[node]), (-2, 1.5), ha="right", va="bottom", color=GREY)
    for node in range(tree.num_taxa, tree.num_edges) if numbered else ():
        _note(ax, f"{node}", (x[node], y[node]), (-2, 1.5), ha="right", va="bottom", color=GREY)
    width = float(x.max()) or 1.0
    ax.set_xlim(-0.02 * width, 1.02 * width)
    ax.set_ylim(tree.num_taxa + (0.6 if tree.branch_lengths is not None else -0.2), -0.8)
    ax.set_axis_off()
    if tree.branch_lengths is not None:
        length = _round_length(width / 4)
        bottom = tree.num_taxa - 0.2
        ax.plot([0, length], [bottom, bottom], color=GREY, linewidth=1.8)
        _note(ax, f"{length:g}", (length, bottom), (4, 0), ha="left", va="center", color=GREY)
    return ax


def _positions(tree: Tree | ConsensusTree) -> tuple[np.ndarray, np.ndarray]:
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
