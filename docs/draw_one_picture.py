"""Draw the picture of the first page: every way to one marginal likelihood, and whether error bars are right.

    python docs/draw_one_picture.py

Reads `docs/tables/calibration.csv`, writes `docs/_static/one_picture.svg`, and `one_picture_narrow.svg` for phones.
"""

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from bayeskit import exact
from bayeskit.errors import BayeskitWarning
from bayeskit.inference import evidence

HERE = Path(__file__).parent
CASE = "linreg10"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"


def estimates(case):
    """Return one run of every method."""
    budget = evidence.Budget(
        num_chains=16, num_samples=250, ladder_chains=8, ladder_samples=150, num_particles=32, num_live=100
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayeskitWarning)  # what methods say against themselves is drawn hollow
        return evidence.compare(case.target(), seed=0, budget=budget, progress=False)


def draw_estimates(axes, ways, case):
    """Draw an interval for each method, and a triangle for what lies outside."""
    shown = [z for z in ways if np.isfinite(z.log_evidence)]
    shown.sort(key=lambda z: (z.trusted, -z.standard_error if np.isfinite(z.standard_error) else -np.inf))
    low, high = case.log_evidence - 2.2, case.log_evidence + 2.2
    for height, z in enumerate(shown):
        inside = low < z.log_evidence < high
        colour = BLUE if z.trusted else ORANGE
        if not inside:
            right = z.log_evidence > high
            axes.annotate(
                f"{z.log_evidence:.1f}",
                (high if right else low, height),
                xytext=(-34 if right else 8, -3),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
            axes.plot(high if right else low, height, ">" if right else "<", color=colour, markersize=5, clip_on=False)
            continue
        if np.isfinite(z.standard_error):
            axes.plot(z.log_evidence + 1.96 * z.standard_error * np.array([-1, 1]), [height] * 2, color=colour, lw=1.5)
        axes.plot(z.log_evidence, height, "o", color=colour, mfc=colour if z.trusted else "white", markersize=5)
    axes.axvline(case.log_evidence, color=GREY, linestyle="--", linewidth=1)
    axes.set(xlim=(low, high), yticks=range(len(shown)), xlabel="log evidence (nats)")
    axes.set_yticklabels([z.method.replace("_", " ") for z in shown], fontsize=7.5)
    axes.set_title("one model, every way", fontsize=10)


def draw_coverage(axes, table):
    """Draw how often 95 % intervals of consistent methods cover."""
    kinds = {m.name: m.kind for m in evidence.METHODS.values()}
    table = table[(table["case"] == CASE) & table["method"].map(kinds).eq("consistent") & (table["trusted"] > 0)]
    table = table.sort_values("coverage_95")
    error = np.sqrt(0.95 * 0.05 / table["replicates"])
    axes.axvspan(0.95 - 1.96 * error.iloc[0], 0.95 + 1.96 * error.iloc[0], color=GREY, alpha=0.2, lw=0)
    axes.axvline(0.95, color=GREY, linestyle="--", linewidth=1)
    axes.plot(table["coverage_95"], range(len(table)), "o", color=BLUE, markersize=5)
    axes.set(xlim=(0.8, 1.005), yticks=range(len(table)), xlabel="share of 95 % intervals that cover")
    axes.set_yticklabels([name.replace("_", " ") for name in table["method"]], fontsize=7.5)
    axes.set_title(f"{int(table['replicates'].iloc[0])} times: is the error bar right?", fontsize=10)


def draw(path, shape, size, ways, case, table):
    """Draw both panels, beside or below each other."""
    figure = Figure(figsize=size, layout="constrained")
    first, second = figure.subplots(*shape)
    draw_estimates(first, ways, case)
    draw_coverage(second, table)
    figure.savefig(path, metadata={"Date": None})


case, table = exact.get(CASE), pd.read_csv(HERE / "tables" / "calibration.csv")
ways = estimates(case)
draw(HERE / "_static" / "one_picture.svg", (1, 2), (10, 4.8), ways, case, table)
draw(HERE / "_static" / "one_picture_narrow.svg", (2, 1), (4.6, 8.4), ways, case, table)
