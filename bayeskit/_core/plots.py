"""Plots of estimates and chains, drawn with matplotlib itself.

ArviZ renamed its plots between 0.x and 1.x; these few do not depend on it. No global of matplotlib is
changed: figures that a function makes for itself are plain ``Figure`` objects, and only
:func:`plot_evidence` without axes goes through ``pyplot``, so that a script can show the figure.
"""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np

from bayeskit.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with any kind of colour vision and, by its lightness, in print.
BLUE, ORANGE, _GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PURPLE, SKY, _YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#666666"
CHAIN_COLOURS = (BLUE, ORANGE, _GREEN, VERMILION, _PURPLE, SKY, GREY)


class Drawing(NamedTuple):
    """A figure of a page, with the text that stands for it where it is not seen."""

    source: str
    alt: str
    caption: str
    is_broad: bool = False  # scrolls in its own box on a narrow screen

    @classmethod
    def of(cls, figure: Figure, alt: str, caption: str, *, is_broad: bool = False, as_pixels: bool = False) -> Drawing:
        """Return a drawing of a figure: lines, or pixels where there are many lines."""
        return cls(_png(figure) if as_pixels else _svg(figure), alt, caption, is_broad)


def new_figure(height: float) -> Figure:
    """Return a figure as wide as a page, whose letters can be read on a phone; its height is in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(5.0, height), layout="constrained")


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    # Without the XML declaration and the document type, which names an address.
    return "data:image/svg+xml," + quote(text[text.index("<svg") :], safe="/:=,;() ")


def _png(figure: Figure) -> str:
    from PIL import Image

    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    # A palette is enough for a few lines and a third of the size.
    Image.open(drawn).convert("RGB").quantize(64, method=Image.Quantize.FASTOCTREE).save(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def axes_or_new(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes, or without them those of a new figure, whose size is in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots() if ax is None else ax


def plot_trace(values: np.ndarray, name: str, ax: Axes) -> Axes:
    """Plot the path of every chain of ``values``, ``(chains, draws)``."""
    values = _chains(values)
    draw = np.arange(values.shape[1])
    _curves(ax, [np.column_stack([draw, path]) for path in values], 0.7 if len(values) <= 8 else 0.4)
    ax.set_xlim(0, max(1, values.shape[1] - 1))
    ax.set_xlabel("draw")
    ax.set_ylabel(name)
    return ax


def plot_rank(values: np.ndarray, name: str, ax: Axes) -> Axes:
    """Plot each chain's ECDF of fractional ranks less the uniform, ``(chains, draws)`` (Sailynoja et al. 2022)."""
    from scipy.stats import rankdata

    values = _chains(values)
    chains, draws = values.shape
    ranks = (rankdata(values.reshape(-1)).reshape(chains, draws) - 0.5) / values.size
    level = np.arange(1, draws + 1) / draws
    # The asymptotic Kolmogorov band of 99 % for independent draws; correlated chains leave it more often.
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


def plot_prior_and_posterior(prior: np.ndarray, posterior: np.ndarray, name: str, ax: Axes) -> Axes:
    """Plot densities of draws of one quantity ``(n,)``, the posterior filled."""
    low, high = np.quantile(posterior, [0.001, 0.999])
    first, last = np.quantile(prior, [0.02, 0.98])
    half, middle = max(high - low, 1e-12 * abs(high)) / 2, (low + high) / 2
    # A posterior that is much narrower than its prior would be a line: it takes a sixth of the axis at least.
    edges = np.linspace(max(min(first, low), middle - 6 * half), min(max(last, high), middle + 6 * half), 41)
    if not edges[0] < edges[-1]:
        edges = np.linspace(middle - 1, middle + 1, 41)
    for values, filled in ((prior, False), (posterior, True)):
        # Shares of all draws, also of those beyond the axis.
        density = np.histogram(values, edges)[0] / (len(values) * (edges[1] - edges[0]))
        ax.stairs(
            density, edges, fill=filled, color=BLUE if filled else GREY, alpha=0.75 if filled else 1, linewidth=1.1
        )
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(bottom=0)
    ax.set_yticks([])
    ax.locator_params(axis="x", nbins=4)
    ax.set_title(name, fontsize="small")
    return ax


def plot_rank_uniformity(ranks: np.ndarray, num_draws: int, name: str, histogram: Axes, ecdf: Axes) -> None:
    """Plot histogram and ECDF difference of ranks 0 to ``num_draws``, ``(replicates,)`` (Sailynoja et al. 2022)."""
    from scipy.stats import binom

    from bayeskit._core.uniformity import ecdf_band, rank_bins

    ranks = np.asarray(ranks)
    if ranks.ndim != 1:
        raise ShapeError(f"ranks have shape {ranks.shape}; pass (replicates,) ranks of one scalar quantity")
    bins = rank_bins(len(ranks), num_draws)
    edges = np.array([b[0] for b in bins] + [num_draws + 1]) - 0.5
    share = np.array([len(b) for b in bins]) / (num_draws + 1)
    # The bands hold each bar with 99 % probability, and the whole curve with 99 %.
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
        raise ShapeError(f"values have shape {values.shape}; pass (chains, draws) of one scalar quantity")
    return values
