"""Plots of time trees, in plain matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.extend import BLUE, SKY
from bayeskit.models.phylogenetics._dated_topologies import DatedTopology

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_time_tree(dated: DatedTopology, node_heights: Tensor, ax: Axes | None = None) -> Axes:
    """Plot a rooted topology along an axis of time, with 95 % intervals of the node heights.

    Parameters
    ----------
    dated : DatedTopology
        Such as `TimeTreeModel.dated`.
    node_heights : Tensor
        Heights of the internal nodes, shape `(*draws, n-1)`. Nodes are at the means over draws; bars are central
        95 % intervals.
    ax : Axes, optional
        By default new axes of ``pyplot``.

    Returns
    -------
    Axes
        Time runs to the right: calendar dates where dates are known, else heights.

    Raises
    ------
    ShapeError
        If the last dimension of the heights is not the number of internal nodes.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> dated = DatedTopology.of("((A,B),C);", dates={"A": 2010.0, "B": 2009.0, "C": 2000.0})
    >>> axes = plot_time_tree(dated, torch.tensor([2.0, 12.0]), Figure().subplots())
    >>> [text.get_text() for text in axes.texts], axes.get_xlabel()
    (['A', 'B', 'C'], 'date')
    """
    from matplotlib.collections import LineCollection

    if not isinstance(node_heights, Tensor) or node_heights.shape[-1:] != (dated.num_taxa - 1,):
        raise ShapeError(
            f"node_heights: {tuple(getattr(node_heights, 'shape', ()))} does not fit the tree. Remedy: give a "
            f"tensor of shape (*draws, {dated.num_taxa - 1}), such as torch.as_tensor(draws['node_heights'])."
        )
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 0.9 + 0.24 * dated.num_taxa), layout="constrained")
    draws = node_heights.detach().cpu().double().reshape(-1, dated.num_taxa - 1)
    x = dated.all_heights(draws.mean(0)).tolist()
    children, y = dated.children.tolist(), _rows(dated)
    lines: list[list[tuple[float, float]]] = []
    for node, below in enumerate(children, start=dated.num_taxa):
        lines.append([(x[node], y[child]) for child in below])
        lines += [[(x[node], y[child]), (x[child], y[child])] for child in below]
    if len(draws) > 1:
        ends = draws.quantile(draws.new_tensor([0.025, 0.975]), 0).T.tolist()
        bars = [[(low, y[node]), (high, y[node])] for node, (low, high) in enumerate(ends, start=dated.num_taxa)]
        ax.add_collection(LineCollection(bars, colors=SKY, linewidths=5.0, alpha=0.6, zorder=1))
    ax.add_collection(LineCollection(lines, colors=BLUE, linewidths=1.2, capstyle="projecting"))
    for taxon, name in enumerate(dated.topology.taxa):
        place = (x[taxon], y[taxon])
        ax.annotate(name, place, (4, 0), textcoords="offset points", ha="left", va="center", fontsize="small")
    oldest = float(draws[:, -1].quantile(0.975))
    ax.set_xlim(1.03 * oldest, -0.02 * oldest)
    ax.set_ylim(dated.num_taxa - 0.2, -0.8)
    ax.set_yticks([])
    ax.spines[["left", "right", "top"]].set_visible(False)
    if dated.youngest_date:
        ax.xaxis.set_major_formatter(lambda height, _: f"{dated.youngest_date - height:g}")
    ax.set_xlabel("date" if dated.youngest_date else "time before the youngest tip")
    return ax


def _rows(dated: DatedTopology) -> list[float]:
    """Place tips in rows from the top, and parents in the middle of their children."""
    rows, children = [0.0] * (2 * dated.num_taxa - 1), dated.children.tolist()
    stack, row = [2 * dated.num_taxa - 2], 0
    while stack:
        node = stack.pop()
        if node < dated.num_taxa:
            rows[node], row = float(row), row + 1
        else:
            stack += reversed(children[node - dated.num_taxa])
    for node, below in enumerate(children, start=dated.num_taxa):
        rows[node] = sum(rows[child] for child in below) / 2
    return rows
