"""Plots of graphs in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._plots import CHAIN_COLOURS, VERMILION
from bayeskit.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def plot_adjacency(adjacency: Tensor, assignments: Tensor, ax: Axes | None = None) -> Axes:
    """Plot a graph as a matrix, dark for an edge, with lines between blocks.

    Nodes are sorted by block, then by their number, as :func:`plot_co_assignment` sorts them.

    Parameters
    ----------
    adjacency : Tensor or array
        Shape ``(nodes, nodes)``.
    assignments : Tensor of int or array
        Block of each node, ``(nodes,)``.
    ax : Axes, optional
        By default those of a new figure.

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
    adjacency, assignments, order = _sorted(adjacency, assignments)
    ax, _ = _plot_matrix(adjacency, order, ax)
    ax.set_title(f"{len(assignments.unique())} blocks", fontsize="small")
    ends = assignments[order].diff().nonzero().flatten() + 0.5
    for end in ends.tolist():
        ax.axhline(end, color=VERMILION, linewidth=1.2)
        ax.axvline(end, color=VERMILION, linewidth=1.2)
    return ax


def plot_co_assignment(probabilities: Tensor, assignments: Tensor, ax: Axes | None = None) -> Axes:
    """Plot the posterior probability of pairs to share a block, nodes sorted as by :func:`plot_adjacency`.

    Parameters
    ----------
    probabilities : Tensor or array
        Shape ``(nodes, nodes)``.
    assignments : Tensor of int or array
        The blocks to sort by, ``(nodes,)``, such as those of the most probable draw; labels are coloured by them.
    ax : Axes, optional
        By default those of a new figure. A colour bar takes some of their space.

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
    probabilities, assignments, order = _sorted(probabilities, assignments)
    ax, image = _plot_matrix(probabilities, order, ax)
    ax.figure.colorbar(image, ax=ax, label="probability to share a block")
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for label, block in zip(labels, assignments[order].tolist(), strict=True):
            label.set_color(CHAIN_COLOURS[block % len(CHAIN_COLOURS)])
    return ax


def _sorted(matrix: Tensor, assignments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both as tensors, and nodes by block and number."""
    matrix, assignments = as_numbers("the matrix", matrix), as_numbers("assignments", assignments)
    nodes = len(matrix) if matrix.dim() else 0
    if matrix.shape != (nodes, nodes) or assignments.shape != (nodes,):
        raise ShapeError(
            f"the matrix has shape {tuple(matrix.shape)} and assignments {tuple(assignments.shape)}; "
            "give (nodes, nodes) and (nodes,)"
        )
    return matrix, assignments, assignments.argsort(stable=True)


def _plot_matrix(matrix: Tensor, order: Tensor, ax: Axes | None) -> tuple[Axes, AxesImage]:
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(5.2, 4.6), layout="constrained").subplots()
    sorted_matrix = matrix[order][:, order].detach().cpu().to(torch.float64)
    image = ax.imshow(sorted_matrix.numpy(), cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
    ticks, names = range(len(order)), [str(node) for node in order.tolist()]
    size = 8 if len(order) <= 20 else 5
    ax.set_xticks(ticks, names, fontsize=size, rotation=90)
    ax.set_yticks(ticks, names, fontsize=size)
    ax.tick_params(length=0)
    ax.set_xlabel("node")
    ax.set_ylabel("node")
    return ax, image
