"""Plots of graphs in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeskit._plots import CHAIN_COLOURS, VERMILION
from bayeskit.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_adjacency(adjacency: Tensor, assignments: Tensor, ax: Axes) -> Axes:
    """Plot a graph as a matrix whose nodes are sorted by block, then by degree, with lines between blocks.

    Parameters
    ----------
    adjacency : Tensor
        Shape ``(nodes, nodes)``.
    assignments : Tensor of int
        Block of each node, ``(nodes,)``.
    ax : Axes

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If the shapes differ from these.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> axes = plot_adjacency(torch.ones(4, 4), torch.tensor([0, 1, 0, 1]), Figure().subplots())
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['0', '2', '1', '3']
    """
    order = _order(adjacency, assignments)
    _plot_matrix(adjacency, order, ax)
    ax.set_title(f"{len(assignments.unique())} blocks", fontsize="small")
    ends = assignments[order].diff().nonzero().flatten() + 0.5
    for end in ends.tolist():
        ax.axhline(end, color=VERMILION, linewidth=1.2)
        ax.axvline(end, color=VERMILION, linewidth=1.2)
    return ax


def plot_co_assignment(probabilities: Tensor, assignments: Tensor, ax: Axes) -> Axes:
    """Plot the posterior probability of pairs to share a block, dark for one, nodes sorted by an assignment.

    Parameters
    ----------
    probabilities : Tensor
        Shape ``(nodes, nodes)``.
    assignments : Tensor of int
        The blocks to sort by, ``(nodes,)``, such as those of the most probable draw; labels are coloured by them.
    ax : Axes

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If the shapes differ from these.

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> axes = plot_co_assignment(torch.eye(3), torch.tensor([1, 0, 1]), Figure().subplots())
    >>> axes.images[0].get_clim()
    (0.0, 1.0)
    """
    order = _order(probabilities, assignments)
    _plot_matrix(probabilities, order, ax)
    ax.set_title("probability to share a block", fontsize="small")
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for label, block in zip(labels, assignments[order].tolist(), strict=True):
            label.set_color(CHAIN_COLOURS[block % len(CHAIN_COLOURS)])
    return ax


def _order(matrix: Tensor, assignments: Tensor) -> Tensor:
    nodes = len(matrix)
    if matrix.shape != (nodes, nodes) or assignments.shape != (nodes,):
        raise ShapeError(
            f"the matrix has shape {tuple(matrix.shape)} and assignments {tuple(assignments.shape)}; "
            "give (nodes, nodes) and (nodes,)"
        )
    by_degree = matrix.sum(-1).argsort(descending=True, stable=True)
    return by_degree[assignments[by_degree].argsort(stable=True)]


def _plot_matrix(matrix: Tensor, order: Tensor, ax: Axes) -> None:
    sorted_matrix = matrix[order][:, order].detach().cpu().to(torch.float64)
    ax.imshow(sorted_matrix.numpy(), cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
    ticks, names = range(len(order)), [str(node) for node in order.tolist()]
    size = 8 if len(order) <= 20 else 5
    ax.set_xticks(ticks, names, fontsize=size, rotation=90)
    ax.set_yticks(ticks, names, fontsize=size)
    ax.tick_params(length=0)
