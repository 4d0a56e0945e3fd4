"""Time series from Python packages; plots of change points, hidden states and segmentations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError, MissingPackageError, ShapeError
from bayeskit.extend import BLUE, CHAIN_COLOURS, GREY, VERMILION, as_numbers
from bayeskit.models.discrete._inputs import new_axes
from bayeskit.models.discrete.sequences._change_points import ChangePoints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Time series shipped with installed Python packages; loading does not download.


class Series(NamedTuple):
    """Time series.

    Attributes
    ----------
    times : Tensor of int
        Shape ``(n,)``.
    values : Tensor
        Shape ``(n,)``, float64.
    """

    times: Tensor
    values: Tensor


def load_nile() -> Series:
    """Load the flow of the Nile at Aswan in each year from 1871 to 1970, in units of 10^8 cubic metres.

    Raises ``MissingPackageError`` if statsmodels, which ships the data, is not installed.

    References
    ----------
    Cobb, G. W. (1978). The problem of the Nile: conditional solution to a changepoint problem. Biometrika 65, 243-251.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import load_nile
    >>> nile = load_nile()
    >>> len(nile.values), float(nile.values.mean())
    (100, 919.35)
    """
    try:
        from statsmodels.datasets import nile
    except ImportError as error:
        raise MissingPackageError(
            "load_nile needs statsmodels; install it with: pip install 'bayeskit[tables]'"
        ) from error
    table = nile.load_pandas().data
    return Series(torch.tensor(table["year"].to_numpy(dtype=int)), torch.tensor(table["volume"].to_numpy(dtype=float)))


# Plots of change points, of hidden states, and of the segmentation of a text.


def plot_change_points(
    posterior: ChangePoints,
    times: Tensor | Sequence[Any] | None = None,
    name: str = "data",
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    r"""Plot data with posterior mean level, and the posteriors of positions and number of change points.

    Raises ``ShapeError`` if there is not one time per observation, and ``DataError`` if times are lists of differing
    length.

    Parameters
    ----------
    posterior : ChangePoints
    times : Tensor, array or sequence, optional
        Numbers or dates, shape ``(n,)``; default 0, 1, 2, ... A change point is drawn at the last observation before
        it.
    name : str, default "data"
        Label of the observations.
    figure : Figure or SubFigure, optional
        Default a new figure, not registered with ``pyplot``.

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
    x, level, change, probability = map(
        _array, (posterior.x, posterior.levels(), posterior.place_probabilities(), posterior.number_probabilities)
    )
    when = _when(times, len(x))
    figure = _figure(figure, 9.0)
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1), height_ratios=(2, 1))
    series = figure.add_subplot(grid[0, 0])
    places = figure.add_subplot(grid[1, 0], sharex=series)
    numbers = figure.add_subplot(grid[:, 1])
    _plot_series(series, when, x, name)
    series.plot(when, level, color=BLUE, linewidth=1.8)
    places.vlines(when[:-1], 0, change, color=VERMILION, linewidth=1.8)
    places.set_ylim(0, 1)
    places.set_ylabel("probability of\na change")
    shown = int((probability > 1e-3).nonzero()[0][-1]) + 1
    numbers.bar(range(shown), probability[:shown], color=BLUE)
    numbers.set_xticks(range(shown))
    numbers.set_ylim(0, 1)
    numbers.set_xlabel("number of change points")
    numbers.set_ylabel("probability")
    _shorten_dates(places)
    return figure


def plot_states(
    probabilities: Tensor,
    x: Tensor,
    times: Tensor | Sequence[Any] | None = None,
    name: str = "data",
    figure: Figure | SubFigure | None = None,
) -> Figure | SubFigure:
    """Plot a sequence and the probability of each hidden state at each step.

    Raises ``ShapeError`` if ``probabilities``, ``x`` and ``times`` differ in length or are not of one sequence.

    Parameters
    ----------
    probabilities : Tensor or array
        Shape ``(T, K)``, from :meth:`HiddenMarkovModel.state_probabilities` of one sequence.
    x : Tensor or array
        Observations, shape ``(T,)``.
    times, name, figure
        As in :func:`plot_change_points`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import plot_states
    >>> figure = plot_states(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9]]), torch.tensor([0.2, -0.3, 4.0]))
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['data', 'probability']
    """
    shares, observed = _array(as_numbers("probabilities", probabilities)), _array(as_numbers("x", x))
    if shares.ndim != 2 or not shares.size:
        raise ShapeError(f"probabilities has shape {shares.shape}; give (T, K), those of one sequence")
    if observed.shape != shares.shape[:1]:
        raise ShapeError(f"x has shape {observed.shape}; give ({len(shares)},), one observation per step")
    when = _when(times, len(shares))
    figure = _figure(figure, 8.0)
    series, states = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _plot_series(series, when, observed, name)
    colours = [CHAIN_COLOURS[state % len(CHAIN_COLOURS)] for state in range(shares.shape[1])]
    labels = [f"state {state}" for state in range(shares.shape[1])]
    states.stackplot(when, shares.T, colors=colours, labels=labels, alpha=0.8, linewidth=0)
    states.set_ylim(0, 1)
    states.set_ylabel("probability")
    states.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _shorten_dates(states)
    return figure


def plot_boundaries(probabilities: Tensor, string: str, ax: Axes | None = None) -> Axes:
    """Plot the probability that a word ends after each character of a string.

    Parameters
    ----------
    probabilities : Tensor or array
        One row of :meth:`Segmentations.boundary_probabilities`, at least one entry per character; padding is ignored.
    string : str
    ax : Axes, optional
        Default axes of a new figure, not registered with ``pyplot``.

    Raises
    ------
    ShapeError
        If there are fewer probabilities than characters.
    DataError
        If ``string`` is empty or not a string.

    Examples
    --------
    >>> from bayeskit.models.discrete.sequences import Lexicon, plot_boundaries
    >>> lexicon = Lexicon.from_weights({"a": 0.3, "b": 0.2, "ab": 0.4})
    >>> plot_boundaries(lexicon.segmentations(["abab"]).boundary_probabilities()[0], "abab").get_ylabel()
    'probability of an end'
    """
    if not isinstance(string, str) or not string:
        raise DataError(f"string is {string!r:.80}; give a string of at least one character")
    shares = _array(as_numbers("probabilities", probabilities))
    if shares.ndim != 1 or len(shares) < len(string):
        raise ShapeError(f"probabilities has shape {shares.shape}; give ({len(string)},), one value per character")
    ax = new_axes(max(3.0, 0.25 * len(string)), 2.0) if ax is None else ax
    ax.bar(np.arange(len(string)) + 0.5, shares[: len(string)], width=0.25, color=VERMILION)
    ax.set_xticks(range(len(string)), list(string))
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.7, len(string) - 0.2)
    ax.set_ylim(0, 1)
    ax.set_ylabel("probability of an end")
    return ax


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _when(times: Any, n: int) -> np.ndarray:
    """Return ``n`` plotting positions, an array that matplotlib supports."""
    try:
        given = _array(times) if isinstance(times, torch.Tensor) else times
        when = np.arange(n) if given is None else np.asarray(given)
    except (TypeError, ValueError) as error:
        raise DataError(f"times cannot be read as an array ({error}); give a list of numbers or dates") from error
    if when.shape != (n,):
        raise ShapeError(f"times has shape {when.shape}; give ({n},)")
    return when


def _figure(figure: Any, width: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 4.5), layout="constrained") if figure is None else figure


def _plot_series(ax: Axes, when: np.ndarray, x: np.ndarray, name: str) -> None:
    ax.plot(when, x, color=GREY, marker=".", linewidth=0.6, markersize=4)
    ax.set_ylabel(name)
    ax.tick_params(labelbottom=False)


def _shorten_dates(ax: Axes) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator = ax.xaxis.get_major_locator()
    if isinstance(locator, AutoDateLocator):
        ax.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=locator.tz))
