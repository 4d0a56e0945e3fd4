"""Plots of estimates and chains, drawn with matplotlib itself.

ArviZ renamed its plots between 0.x and 1.x; these few do not depend on it. No global of matplotlib is
changed: figures that a function makes for itself are plain ``Figure`` objects, and only
:func:`plot_evidence` without axes goes through ``pyplot``, so that a script can show what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bayeskit.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bayeskit.inference.evidence.result import Evidence

# Okabe and Ito's palette, told apart with any kind of colour vision and, by its lightness, in print.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#666666"
CHAIN_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)


def plot_evidence(estimates: Sequence[Evidence], reference: float | None = None, ax: Axes | None = None) -> Axes:
    """Plot estimates of one log evidence with their 95 % intervals.

    Filled circles are trusted, hollow ones are not, and a method that failed is listed without a mark. The
    axis spans the trusted estimates and the reference; what lies beyond it is clipped to an arrow at the
    edge that carries its value, so that one absurd estimate does not flatten the others.

    Parameters
    ----------
    estimates : sequence of Evidence
        From top to bottom.
    reference : float, optional
        An exact or published value, drawn as a dashed line.
    ax : Axes, optional
        Where to draw; by default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit._plots import plot_evidence
    >>> from bayeskit.inference.evidence.result import Evidence
    >>> estimates = [Evidence("bridge_sampling", -94.08, 0.004, 8000)]
    >>> plot_evidence(estimates, -94.0845, Figure().subplots()).get_xlabel()
    'log evidence (nats)'
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(estimates)), layout="constrained")
    low, high = _axis_range(estimates, reference)
    for row, estimate in enumerate(estimates):
        if not math.isfinite(estimate.log_evidence):
            ax.text(0.5 * (low + high), row, "failed", ha="center", va="center", color=GREY, style="italic")
        elif low <= estimate.log_evidence <= high:
            _interval(ax, estimate, row, low, high)
        else:
            _arrow(ax, estimate, row, low, high)
    if reference is not None:
        ax.axvline(reference, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.annotate(
            f"reference {reference:.4f}",
            (reference, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize="small",
            color=GREY,
        )
    ax.set_xlim(low, high)
    ax.set_ylim(len(estimates) - 0.5, -0.5)
    labels = [z.method.replace("_", " ") + ("" if z.trusted else " (not trusted)") for z in estimates]
    ax.set_yticks(range(len(estimates)), labels)
    ax.locator_params(axis="x", nbins=5)  # long numbers such as -6468.9120 would run into each other
    ax.ticklabel_format(axis="x", useOffset=False, style="plain")
    ax.set_xlabel("log evidence (nats)")
    ax.grid(axis="x", alpha=0.25)
    return ax


def _axis_range(estimates: Sequence[Evidence], reference: float | None) -> tuple[float, float]:
    """Return a range that shows what can be relied on, or everything where nothing can."""
    trusted = [z for z in estimates if z.trusted]
    shown = trusted or [z for z in estimates if math.isfinite(z.log_evidence)]
    ends = [] if reference is None else [reference]
    for z in shown:
        half = 2.2 * z.standard_error if math.isfinite(z.standard_error) else 0.0
        ends += [z.log_evidence - half, z.log_evidence + half]
    if not ends:
        return -1.0, 1.0
    low, high = min(ends), max(ends)
    margin = max(0.12 * (high - low), 1e-3, 1e-6 * abs(low))
    return low - margin, high + margin


def _interval(ax: Axes, estimate: Evidence, row: int, low: float, high: float) -> None:
    colour = BLUE if estimate.trusted else VERMILION
    if math.isfinite(estimate.standard_error):
        left, right = estimate.interval()
        ax.plot([max(left, low), min(right, high)], [row, row], color=colour, linewidth=1.8, zorder=2)
        for end in (left, right):
            if low <= end <= high:
                ax.plot([end], [row], marker="|", markersize=9, color=colour, zorder=2)
    face = colour if estimate.trusted else "white"
    ax.plot([estimate.log_evidence], [row], marker="o", markersize=7, color=colour, mfc=face, mew=1.6, zorder=3)


def _arrow(ax: Axes, estimate: Evidence, row: int, low: float, high: float) -> None:
    colour = BLUE if estimate.trusted else VERMILION
    beyond_right = estimate.log_evidence > high
    edge, marker, side = (high, ">", "right") if beyond_right else (low, "<", "left")
    face = colour if estimate.trusted else "white"
    ax.plot([edge], [row], marker=marker, markersize=9, color=colour, mfc=face, mew=1.4, clip_on=False, zorder=3)
    ax.annotate(
        f"{estimate.log_evidence:.2f}",
        (edge, row),
        xytext=(-10 if beyond_right else 10, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize="small",
        color=colour,
    )


def plot_calibration(
    z: Mapping[str, np.ndarray], trusted: Mapping[str, np.ndarray], name: str = "", ax: Axes | None = None
) -> Axes:
    """Plot how many standard errors replicates of several methods are off.

    A dot a replicate, hollow where it was not trusted; the band holds nineteen in twenty of right error bars. What lies
    beyond six standard errors is drawn at the edge.

    Parameters
    ----------
    z : mapping of str to ndarray
        By method, shape ``(replicates,)``.
    trusted : mapping of str to ndarray
        Of the same shapes.
    name : str, optional
        Of the problem, as the title.
    ax : Axes, optional
        Where to draw; by default new axes of ``pyplot``.

    Returns
    -------
    Axes

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from bayeskit._plots import plot_calibration
    >>> z = {"bridge_sampling": np.array([0.3, -1.2, 0.8])}
    >>> plot_calibration(z, {"bridge_sampling": np.ones(3, dtype=bool)}, "linreg10", Figure().subplots()).get_title()
    'linreg10'
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(z)), layout="constrained")
    ax.axvspan(-1.96, 1.96, color=GREY, alpha=0.15, linewidth=0)
    ax.axvline(0.0, color=GREY, linewidth=1.0)
    for row, (method, values) in enumerate(z.items()):
        known = np.isfinite(values)
        # Spread over the height of the row in an order that repeats itself, so that no dot hides another.
        height = row + 0.6 * (np.arange(len(values)) * 0.618034 % 1.0 - 0.5)
        for sure, colour, face in ((True, BLUE, BLUE), (False, VERMILION, "none")):
            shown = known & (trusted[method].astype(bool) == sure)
            ax.scatter(
                values[shown].clip(-6, 6), height[shown], s=10, edgecolors=colour, facecolors=face, linewidths=0.8
            )
    ax.set_xlim(-6.3, 6.3)
    ax.set_ylim(len(z) - 0.5, -0.5)
    ax.set_yticks(range(len(z)), [method.replace("_", " ") for method in z])
    ax.set_xlabel("standard errors from the answer")
    ax.set_title(name)
    return ax


def plot_trace(values: np.ndarray, name: str, ax: Axes) -> Axes:
    """Plot the path of every chain.

    Parameters
    ----------
    values : ndarray
        Shape ``(chains, draws)``.
    name : str
        The quantity, as the label of the axis.
    ax : Axes

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If ``values`` has another number of dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from bayeskit._plots import plot_trace
    >>> plot_trace(np.zeros((3, 10)), "mean", Figure().subplots()).get_ylabel()
    'mean'
    """
    values = _chains(values)
    draw = np.arange(values.shape[1])
    _curves(ax, [np.column_stack([draw, path]) for path in values], 0.7 if len(values) <= 8 else 0.4)
    ax.set_xlim(0, max(1, values.shape[1] - 1))
    ax.set_xlabel("draw")
    ax.set_ylabel(name)
    return ax


def plot_rank(values: np.ndarray, name: str, ax: Axes) -> Axes:
    """Plot how far the ranks of every chain's draws stray from uniform.

    The curve of a chain is the empirical distribution function of its fractional ranks among all draws,
    minus that of the uniform distribution. Chains that agree stay close to zero; the grey band holds 99 % of
    the curves of as many *independent* draws, so that correlated chains leave it more often.

    Parameters
    ----------
    values : ndarray
        Shape ``(chains, draws)``.
    name : str
        The quantity, as the title.
    ax : Axes

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If ``values`` has another number of dimensions.

    References
    ----------
    Sailynoja, T., Buerkner, P.-C., Vehtari, A. (2022). Graphical test for discrete
    uniformity and its applications in goodness-of-fit evaluation and multiple sample
    comparison. Statistics and Computing 32, 32 (here with the asymptotic Kolmogorov band).

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from bayeskit._plots import plot_rank
    >>> axes = plot_rank(np.arange(20.0).reshape(2, 10), "mean", Figure().subplots())
    >>> axes.get_xlabel()
    'fractional rank'
    """
    from scipy.stats import rankdata

    values = _chains(values)
    chains, draws = values.shape
    ranks = (rankdata(values.reshape(-1)).reshape(chains, draws) - 0.5) / values.size
    level = np.arange(1, draws + 1) / draws
    # Chains share their ranks, which narrows the spread of each around their common mean.
    band = 1.628 * math.sqrt((1.0 - 1.0 / chains) / draws) if chains > 1 else 1.628 / math.sqrt(draws)
    ax.axhspan(-band, band, color=GREY, alpha=0.15, linewidth=0)
    ordered = np.sort(ranks, axis=1)
    curves = [np.column_stack([rank, level - rank]) for rank in ordered]
    _curves(ax, curves, 1.0 if chains <= 8 else 0.6)
    ax.set_xlim(0, 1)
    ax.set_xlabel("fractional rank")
    ax.set_ylabel("ECDF difference")
    ax.set_title(name, fontsize="small")
    return ax


def plot_rank_uniformity(ranks: np.ndarray, num_draws: int, name: str, histogram: Axes, ecdf: Axes) -> None:
    """Plot whether ranks among ``num_draws`` draws are uniform: their histogram and their ECDF difference.

    The grey bands hold, where the ranks are uniform, each bar with 99 % probability and the whole curve with 99 %.

    Parameters
    ----------
    ranks : ndarray of int
        Shape ``(replicates,)``, each from 0 to ``num_draws``.
    num_draws : int
    name : str
        The quantity, as the title.
    histogram, ecdf : Axes

    Raises
    ------
    ShapeError
        If ``ranks`` has another number of dimensions.

    References
    ----------
    Sailynoja, T., Buerkner, P.-C., Vehtari, A. (2022). Graphical test for discrete uniformity and its
    applications in goodness-of-fit evaluation and multiple sample comparison. Statistics and Computing 32, 32.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from bayeskit._plots import plot_rank_uniformity
    >>> left, right = Figure().subplots(1, 2)
    >>> plot_rank_uniformity(np.arange(100) % 10, 9, "mean", left, right)
    >>> right.get_ylabel()
    'ECDF difference'
    """
    from scipy.stats import binom

    from bayeskit._uniformity import ecdf_band, rank_bins

    ranks = np.asarray(ranks)
    if ranks.ndim != 1:
        raise ShapeError(f"ranks have shape {ranks.shape}; give (replicates,) of one scalar quantity")
    bins = rank_bins(len(ranks), num_draws)
    edges = np.array([b[0] for b in bins] + [num_draws + 1]) - 0.5
    share = np.array([len(b) for b in bins]) / (num_draws + 1)
    low, high = (binom.ppf(q, len(ranks), share) for q in (0.005, 0.995))
    histogram.stairs(high, edges, baseline=low, fill=True, color=GREY, alpha=0.15)
    histogram.stairs(np.histogram(ranks, edges)[0], edges, color=BLUE, linewidth=1.2)
    histogram.set_xlim(edges[0], edges[-1])
    histogram.set_ylim(bottom=0)
    histogram.set_xlabel("rank")
    histogram.set_ylabel("replicates")
    histogram.set_title(name, fontsize="small")
    level = np.arange(1, num_draws + 1) / (num_draws + 1)
    lower, upper = ecdf_band(len(ranks), num_draws)
    ecdf.fill_between(level, lower - level, upper - level, step="mid", color=GREY, alpha=0.15, linewidth=0)
    curve = np.cumsum(np.bincount(ranks, minlength=num_draws + 1))[:-1] / len(ranks)
    ecdf.step(level, curve - level, where="mid", color=BLUE, linewidth=1.2)
    ecdf.set_xlim(0, 1)
    ecdf.set_xlabel("fractional rank")
    ecdf.set_ylabel("ECDF difference")
    ecdf.set_title(name, fontsize="small")


def _curves(ax: Axes, curves: list[np.ndarray], width: float) -> None:
    """Draw one curve a chain, as one artist: with dozens of chains that takes half the time."""
    from matplotlib.collections import LineCollection

    ax.add_collection(LineCollection(curves, colors=CHAIN_COLOURS, linewidths=width, alpha=0.75))
    ax.autoscale_view()


def _chains(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 2:
        raise ShapeError(f"values have shape {values.shape}; give (chains, draws) of one scalar quantity")
    return values
