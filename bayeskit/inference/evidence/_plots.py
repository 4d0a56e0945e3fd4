"""Plots of estimates, and of their errors relative to a known answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bayeskit._core.plots import BLUE, GREY, VERMILION
from bayeskit.inference.evidence._result import Evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bayeskit.inference.samplers._ladder import Ladder

_WIDTH = 3.0
"""Half the range of plots of estimates, in typical 95 % intervals."""
_EDGE = 6.0
"""Half the range of plots of calibration, in standard errors."""


def plot_evidence(estimates: Sequence[Evidence], reference: float | None = None, ax: Axes | None = None) -> Axes:
    """Plot estimates of one log evidence, from top to bottom, with 95 % intervals and a dashed reference."""
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(estimates)), layout="constrained")
    # The axis spans a few typical errors of trusted estimates; arrows at its ends mark values or bars beyond it.
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
    ax.locator_params(axis="x", nbins=4)  # long numbers such as -6468.9120 would overlap
    ax.ticklabel_format(axis="x", useOffset=False, style="plain")
    ax.set_xlabel("log evidence (nats)")
    ax.grid(axis="x", alpha=0.25)
    return ax


def _axis_range(estimates: Sequence[Evidence], reference: float | None) -> tuple[float, float]:
    """Return a range that shows the errors of trusted estimates, or of all estimates if none is trusted."""
    trusted = [z for z in estimates if z.trusted]
    shown = trusted or [z for z in estimates if math.isfinite(z.log_evidence)]
    if not shown:
        return (-1.0, 1.0) if reference is None else (reference - 1.0, reference + 1.0)
    values = np.array([z.log_evidence for z in shown])
    half = np.array([2.2 * z.standard_error if math.isfinite(z.standard_error) else 0.0 for z in shown])
    low, high = values - half, values + half
    middle = values.mean()
    if trusted:
        # Half of the estimates lie within a typical error or distance of the median; the widest must not determine the
        # scale.
        middle = float(np.median(values))
        reach = _WIDTH * max(float(np.median(half)), float(np.median(np.abs(values - middle))))
        low, high = low.clip(middle - reach, middle + reach), high.clip(middle - reach, middle + reach)
    first, last = float(low.min()), float(high.max())
    width = last - first
    if reference is not None and abs(reference - middle) <= max(4 * width, 1e-3):
        first, last = min(first, reference), max(last, reference)
    # If all errors are zero, the resolution of the numbers is the only scale.
    margin = max(0.12 * (last - first), 1e-3 if width == 0 else 0.0, 1e-9 * max(1.0, abs(first)))
    return first - margin, last + margin


def _interval(ax: Axes, estimate: Evidence, row: int, low: float, high: float) -> None:
    colour = BLUE if estimate.trusted else VERMILION
    _bar(ax, estimate, row, low, high, colour)
    face = colour if estimate.trusted else "white"
    ax.plot([estimate.log_evidence], [row], marker="o", markersize=5.5, color=colour, mfc=face, mew=1.4, zorder=3)


def _bar(ax: Axes, estimate: Evidence, row: int, low: float, high: float, colour: str) -> None:
    """Draw the part of an interval within the axis; a truncated end is an arrow."""
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
    """Return the number of decimals that distinguish a value beyond the axis from its edge."""
    return max(2, 1 - math.floor(math.log10(high - low)))


def plot_cost(estimates: Sequence[Evidence], ax: Axes) -> list[Evidence]:
    """Plot standard errors against evaluations; return and name those that no other surpasses in both."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    shown = [z for z in estimates if z.standard_error > 0 and z.num_evaluations > 0]
    shown.sort(key=lambda z: (z.num_evaluations, z.standard_error))
    best: list[Evidence] = []
    for z in shown:
        if not best or z.standard_error < best[-1].standard_error:
            best.append(z)
    others = [z for z in shown if z not in best]
    for several, colour in ((others, GREY), (best, BLUE)):
        cost, error = [z.num_evaluations for z in several], [z.standard_error for z in several]
        ax.plot(cost, error, marker="o", markersize=5, color=colour, linestyle="",
                alpha=1.0 if several is best else 0.6)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(x=0.12, y=0.2)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=7))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.xaxis.set_minor_formatter(NullFormatter())
    middle = math.sqrt(shown[0].num_evaluations * shown[-1].num_evaluations) if shown else 1.0
    for z in best:
        # Below and to the left of these points there are no others.
        side = "right" if z.num_evaluations > middle else "left"
        ax.annotate(
            z.method.replace("_", " "),
            (z.num_evaluations, z.standard_error),
            xytext=(0, -6),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize="small",
            color=BLUE,
        )
    ax.set_xlabel("evaluations, those of shared draws included")
    ax.set_ylabel("standard error (nats)")
    ax.grid(alpha=0.25)
    return best


def plot_path(ladder: Ladder, ax: Axes) -> Axes:
    """Plot the log likelihood against the inverse temperature: medians and central 90 % of the draws.

    The axis is that of ``beta ** 0.3``, near which temperatures are usually chosen, so that the steep part has room.
    """
    beta = ladder.beta.numpy()
    low, middle, high = np.quantile(ladder.log_likelihood.flatten(1).numpy(), [0.05, 0.5, 0.95], axis=1)
    ax.set_xscale("function", functions=(lambda x: np.abs(x) ** 0.3, lambda x: np.abs(x) ** (1 / 0.3)))
    ax.fill_between(beta, low, high, color=BLUE, alpha=0.25, linewidth=0)
    ax.plot(beta, middle, color=BLUE, marker="o", markersize=2.5, linewidth=1.0)
    ax.set_xlim(0.0, 1.0)
    ax.set_xticks([0, 0.001, 0.01, 0.1, 0.3, 1], ["0", "0.001", "0.01", "0.1", "0.3", "1"])
    ax.set_xlabel("inverse temperature (0: prior, 1: posterior)")
    ax.set_ylabel("log likelihood (nats)")
    ax.grid(alpha=0.25)
    return ax


def plot_calibration(
    z: Mapping[str, np.ndarray],
    trusted: Mapping[str, np.ndarray],
    name: str = "",
    ax: Axes | None = None,
    *,
    failed: Mapping[str, np.ndarray] | None = None,
) -> Axes:
    """Plot errors ``z (replicates,)`` of methods in standard errors, hollow for untrusted replicates."""
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(7.0, 1.4 + 0.42 * len(z)), layout="constrained")
    # With valid error bars, 95 % of the replicates are in the band.
    ax.axvspan(-1.96, 1.96, color=GREY, alpha=0.15, linewidth=0)
    ax.axvline(0.0, color=GREY, linewidth=1.0)
    labels = []
    for row, (method, values) in enumerate(z.items()):
        # NaN means an estimate without an error, or no estimate if ``failed``.
        known, lost = ~np.isnan(values), np.zeros(len(values), dtype=bool) if failed is None else failed[method]
        # Spread over the height of the row in a reproducible order, so that dots do not overlap.
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
            text = "failed" if lost.all() else "no standard error"
            ax.text(0.0, row, text, ha="center", va="center", color=GREY, style="italic",
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
        counts = {"failed": int((lost & ~known).sum()), "without standard error": int((~lost & ~known).sum())}
        remarks = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        labels.append(method.replace("_", " ") + (f" ({remarks})" if remarks and known.any() else ""))
    ax.set_xlim(-1.22 * _EDGE, 1.22 * _EDGE)
    ax.set_xticks(np.arange(-_EDGE, _EDGE + 1, 2))
    ax.set_ylim(max(len(z), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(z)), labels)
    ax.set_xlabel("error (standard errors)")
    ax.set_title(name)
    return ax
