"""Plots of change points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeskit._plots import BLUE, GREY, VERMILION
from bayeskit.errors import ShapeError
from bayeskit.models.discrete.sequences.change_points import ChangePoints

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_change_points(posterior: ChangePoints, times: Tensor | None = None, name: str = "data") -> Figure:
    r"""Plot data with the posterior mean of their level, and the posteriors of places and number of change points.

    Parameters
    ----------
    posterior : ChangePoints
    times : Tensor, optional
        Of the data, shape ``(n,)``; by default 0, 1, 2, ... A change point is drawn at the last datum before it.
    name : str, default "data"
        Of what was measured.

    Returns
    -------
    Figure
        Of matplotlib, not registered with ``pyplot``.

    Raises
    ------
    ShapeError
        If there is not one time for each datum.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import (
    ...     ChangePoints, NumberOfChanges, PoissonSegments, plot_change_points)
    >>> x = torch.tensor([0.0, 1.0, 0.0, 7.0, 9.0])
    >>> figure = plot_change_points(ChangePoints(x, PoissonSegments(1.0, 0.2), NumberOfChanges.up_to(2)))
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['data', 'probability of\na change', 'probability']
    """
    from matplotlib.figure import Figure

    n = len(posterior.x)
    times = torch.arange(n) if times is None else times
    if times.shape != (n,):
        raise ShapeError(f"times has shape {tuple(times.shape)}; give ({n},)")
    x, level, change, probability = (
        tensor.detach().cpu().numpy()
        for tensor in (posterior.x, posterior.levels(), posterior.place_probabilities(), posterior.number_probabilities)
    )
    when = times.cpu().numpy()
    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1), height_ratios=(2, 1))
    series = figure.add_subplot(grid[0, 0])
    places = figure.add_subplot(grid[1, 0], sharex=series)
    numbers = figure.add_subplot(grid[:, 1])
    series.plot(when, x, color=GREY, marker=".", linewidth=0.6, markersize=4)
    series.plot(when, level, color=BLUE, linewidth=1.8)
    series.set_ylabel(name)
    series.tick_params(labelbottom=False)
    places.vlines(when[:-1], 0, change, color=VERMILION, linewidth=1.8)
    places.set_ylim(0, 1)
    places.set_ylabel("probability of\na change")
    shown = int((probability > 1e-3).nonzero()[0][-1]) + 1
    numbers.bar(range(shown), probability[:shown], color=BLUE)
    numbers.set_xticks(range(shown))
    numbers.set_ylim(0, 1)
    numbers.set_xlabel("number of change points")
    numbers.set_ylabel("probability")
    return figure
