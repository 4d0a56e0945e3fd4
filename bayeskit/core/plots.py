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

__all__ = [
    "BLUE",
    "CHAIN_COLOURS",
    "GREY",
    "ORANGE",
    "SKY",
    "VERMILION",
    "plot_calibration",
    "plot_evidence",
    "plot_rank",
    "plot_rank_uniformity",
    "plot_trace",
]


# Okabe and Ito's palette, told apart with any kind of colour vision and, by its lightness, in print.
BLUE, ORANGE, _GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PURPLE, SKY, _YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#666666"
CHAIN_COLOURS = (BLUE, ORANGE, _GREEN, VERMILION, _PURPLE, SKY, GREY)
_WIDTH = 3.0
"""How far plots of estimates reach from the middle, in typical 95 % intervals."""
_EDGE = 6.0
"""Standard errors at which plots of calibration end."""


def plot_evidence(estimates: Sequence[Evidence], reference: float | None = None, ax: Axes | None = None) -> Axes:
    """Plot estimates of one log evidence with their 95 % intervals.

    Filled circles are trusted, hollow ones are not, and a method that failed is listed without a mark. The axis is as
    wide as a few typical errors of trusted estimates; what lies beyond it is an arrow at the edge that carries its
    value, and a bar that goes on beyond it ends in an arrow, so that neither one absurd estimate nor one wide error
    flattens the others.

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
    >>> from bayeskit.core.plots import plot_evidence
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
            ax.text(0.5 * (low + high), row, "failed", ha="center", va="center", color=GREY, style="italic",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
        elif low <= estimate.log_evidence <= high:
            _interval(ax, estimate, row, low, high)
        else:
            _arrow(ax, estimate, row, low, high)
    if not estimates:
        ax.text(0.5 * (low + high), 0, "no estimates", ha="center", va="center", color=GREY, style="italic")
    if reference is not None:
        place = min(max(reference, low), high)
        ax.axvline(place, color=GREY, linestyle="--" if place == reference else ":", linewidth=1.0, zorder=0)
        beyond = "" if place == reference else ", beyond the axis"
        ax.annotate(
            f"reference {reference:.4f}{beyond}",
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center" if place == reference else "right" if place == high else "left",
            fontsize="small",
            color=GREY,
        )
    ax.set_xlim(low, high)
    ax.set_ylim(max(len(estimates), 1) - 0.5, -0.5)
    labels = [z.method.replace("_", " ") + ("" if z.trusted else " (not trusted)") for z in estimates]
    ax.set_yticks(range(len(estimates)), labels)
    ax.locator_params(axis="x", nbins=5)  # long numbers such as -6468.9120 would run into each other
    ax.ticklabel_format(axis="x", useOffset=False, style="plain")
    ax.set_xlabel("log evidence (nats)")
    ax.grid(axis="x", alpha=0.25)
    return ax


def _axis_range(estimates: Sequence[Evidence], reference: float | None) -> tuple[float, float]:
    """Return a range that shows the errors of what can be relied on, or everything where nothing can."""
    trusted = [z for z in estimates if z.trusted]
    shown = trusted or [z for z in estimates if math.isfinite(z.log_evidence)]
    if not shown:
        return (-1.0, 1.0) if reference is None else (reference - 1.0, reference + 1.0)
    values = np.array([z.log_evidence for z in shown])
    half = np.array([2.2 * z.standard_error if math.isfinite(z.standard_error) else 0.0 for z in shown])
    low, high = values - half, values + half
    middle = values.mean()
    if trusted:
        # Half of the estimates lie within a typical error or distance of the middle one; the widest must not set the
        # scale for all.
        middle = float(np.median(values))
        reach = _WIDTH * max(float(np.median(half)), float(np.median(np.abs(values - middle))))
        low, high = low.clip(middle - reach, middle + reach), high.clip(middle - reach, middle + reach)
    first, last = float(low.min()), float(high.max())
    width = last - first
    if reference is not None and abs(reference - middle) <= max(4 * width, 1e-3):
        first, last = min(first, reference), max(last, reference)
    # Where all errors are zero there is no scale but the resolution of the numbers.
    margin = max(0.12 * (last - first), 1e-3 if width == 0 else 0.0, 1e-9 * max(1.0, abs(first)))
    return first - margin, last + margin


def _interval(ax: Axes, estimate: Evidence, row: int, low: float, high: float) -> None:
    colour = BLUE if estimate.trusted else VERMILION
    _bar(ax, estimate, row, low, high, colour)
    face = colour if estimate.trusted else "white"
    ax.plot([estimate.log_evidence], [row], marker="o", markersize=5.5, color=colour, mfc=face, mew=1.4, zorder=3)


def _bar(ax: Axes, estimate: Evidence, row: int, low: float, high: float, colour: str) -> None:
    """Draw the part of an interval that lies within the axis; where it goes on, it ends in an arrow."""
    if not math.isfinite(estimate.standard_error):
        return
    left, right = estimate.interval()
    if right < low or left > high:
        return
    ax.plot([max(left, low), min(right, high)], [row, row], color=colour, linewidth=1.6, zorder=2)
    for end, edge, marker in ((left, low, "<"), (right, high, ">")):
        if low <= end <= high:
            ax.plot([end], [row], marker="|", markersize=8, color=colour, zorder=2)
        else:
            ax.plot([edge], [row], marker=marker, markersize=5, color=colour, clip_on=False, zorder=2)


def _arrow(ax: Axes, estimate: Evidence, row: int, low: float, high: float) -> None:
    colour = BLUE if estimate.trusted else VERMILION
    beyond_right = estimate.log_evidence > high
    edge, marker, side = (high, ">", "right") if beyond_right else (low, "<", "left")
    face = colour if estimate.trusted else "white"
    _bar(ax, estimate, row, low, high, colour)
    ax.plot([edge], [row], marker=marker, markersize=8, color=colour, mfc=face, mew=1.4, clip_on=False, zorder=3)
    ax.annotate(
        f"{estimate.log_evidence:.{_digits(low, high)}f}",
        (edge, row),
        xytext=(-10 if beyond_right else 10, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize="small",
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
    )


def _digits(low: float, high: float) -> int:
    """Return how many decimals tell a value beyond the axis from its edge."""
    return max(2, 1 - math.floor(math.log10(high - low)))


def plot_calibration(
    z: Mapping[str, np.ndarray],
    trusted: Mapping[str, np.ndarray],
    name: str = "",
    ax: Axes | None = None,
    *,
    failed: Mapping[str, np.ndarray] | None = None,
) -> Axes:
    """Plot how many standard errors replicates of several methods are off.

    A dot a replicate, hollow where it was not trusted; the band holds nineteen in twenty of right error bars. What lies
    beyond six standard errors, infinitely many included, is drawn at the edge, with the number of such replicates
    beside it. Replicates without an error or without an estimate are counted behind the name.

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
    failed : mapping of str to ndarray, optional
        Of the same shapes: where there was no estimate. Other z that are NaN are those of estimates without an error.

    Returns
    -------
    Axes

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.core.plots import plot_calibration
    >>> z = {"bridge_sampling": np.array([0.3, -1.2, 0.8])}
    >>> plot_calibration(z, {"bridge_sampling": np.ones(3, dtype=bool)}, "linreg10", Figure().subplots()).get_title()
    'linreg10'
    """
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(z)), layout="constrained")
    ax.axvspan(-1.96, 1.96, color=GREY, alpha=0.15, linewidth=0)
    ax.axvline(0.0, color=GREY, linewidth=1.0)
    labels = []
    for row, (method, values) in enumerate(z.items()):
        known, lost = ~np.isnan(values), np.zeros(len(values), dtype=bool) if failed is None else failed[method]
        # Spread over the height of the row in an order that repeats itself, so that no dot hides another.
        height = row + 0.6 * (np.arange(len(values)) * 0.618034 % 1.0 - 0.5)
        for sure, colour, face in ((True, BLUE, BLUE), (False, VERMILION, "none")):
            shown = known & (trusted[method].astype(bool) == sure)
            ax.scatter(
                values[shown].clip(-_EDGE, _EDGE),
                height[shown],
                s=10,
                edgecolors=colour,
                facecolors=face,
                linewidths=0.8,
            )
        for side, beyond in ((-1, values < -_EDGE), (1, values > _EDGE)):
            if beyond.any():
                text = f"‹ {beyond.sum()}" if side < 0 else f"{beyond.sum()} ›"
                ax.text(side * 1.12 * _EDGE, row, text, ha="center", va="center", fontsize="small", color=GREY)
        if not known.any():
            text = "failed" if lost.all() else "no error"
            ax.text(0.0, row, text, ha="center", va="center", color=GREY, style="italic",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
        counts = {"failed": int((lost & ~known).sum()), "without error": int((~lost & ~known).sum())}
        remarks = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        labels.append(method.replace("_", " ") + (f" ({remarks})" if remarks and known.any() else ""))
    ax.set_xlim(-1.22 * _EDGE, 1.22 * _EDGE)
    ax.set_xticks(np.arange(-_EDGE, _EDGE + 1, 2))
    ax.set_ylim(max(len(z), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(z)), labels)
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
    >>> from bayeskit.core.plots import plot_trace
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
    >>> from bayeskit.core.plots import plot_rank
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
    >>> from bayeskit.core.plots import plot_rank_uniformity
    >>> left, right = Figure().subplots(1, 2)
    >>> plot_rank_uniformity(np.arange(100) % 10, 9, "mean", left, right)
    >>> right.get_ylabel()
    'ECDF difference'
    """
    from scipy.stats import binom

    from bayeskit.core.uniformity import ecdf_band, rank_bins

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
