"""Plots of trees, of split frequencies and of credible sets, drawn with matplotlib itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bayeskit._plots import BLUE, GREY, SKY
from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.samples.consensus import ConsensusTree
from bayeskit.models.phylogenetics.samples.distances import asdsf, check_sample, split_frequencies
from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
from bayeskit.models.phylogenetics.trees.tree import Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_tree(tree: Tree | ConsensusTree, ax: Axes | None = None) -> Axes:
    """Plot a tree from left to right, with the names of its taxa and the supports of its splits.

    With branch lengths the horizontal lines are drawn to scale beside a bar of a round length (a phylogram); without,
    all tips are aligned (a cladogram). An unrooted tree is drawn from the node that it hangs from.

    Parameters
    ----------
    tree : Tree or ConsensusTree
        The tree. Supports of a consensus tree are written above the edges.
    ax : Axes, optional
        Where to draw; by default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Raises
    ------
    TreeError
        If something else is given.

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
            f"tree: {type(tree).__name__} is no single tree. Remedy: of unrooted topologies give one, .tree(0); of "
            "rooted ones greedy_consensus(TreeSample.from_topologies(topologies[0]))."
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
    # How many levels of nodes are below each.
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
    """Plot the frequency of every split in one sample against that in another.

    Points of runs that agree lie on the line. The title gives the average standard deviation of split frequencies and
    the largest one, over splits of at least 0.1 in one of the two.

    Parameters
    ----------
    one, other : TreeSample
        Both rooted or both unrooted, over the same taxa.
    ax : Axes, optional
        Where to draw; by default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Raises
    ------
    TreeError
        If the samples differ in taxa or in being rooted.
    SettingsError
        If the trees have less than four taxa, or no split that is frequent enough.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
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
    """Plot the probabilities of the topologies of a credible set, the most probable first, and their sums.

    Parameters
    ----------
    sample : TreeSample
        The trees.
    level : float, default 0.95
        Probability of the set.
    ax : Axes, optional
        Where to draw; by default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Raises
    ------
    SettingsError
        If `level` is outside its domain.
    TreeError
        If it is no sample of trees.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
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
    ax.set_xlabel("topology, the most probable first")
    ax.set_ylabel("probability")
    ax.set_title(
        f"{len(weights)} of {len(sample.weights)} topologies have probability {total[-1]:.3f}", fontsize="medium"
    )
    ax.grid(axis="y", alpha=0.25)
    ax.legend(frameon=False, loc="center right")
    return ax
