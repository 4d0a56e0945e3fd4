"""What a comparison of estimators has found, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from bayeskit._plots import BLUE, GREY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Draws of a category that are expected before its component is judged: rarer ones make no bell curve.
EXPECTED = 200
#: A z-score beyond it is called a bias: one in 16,000 for a single component.
_BIASED = 4.0
#: Where larger ones are drawn.
_LAST = 1e3


@dataclass(frozen=True)
class GradientStatistics:
    """What replicates of one estimator have shown.

    Attributes
    ----------
    name : str
    mean, standard_error, exact : Tensor
        Of each component of the gradient, of the shape of the logits.
    rounding : Tensor
        Differences up to which say nothing, by component.
    judged : Tensor
        Which components had draws enough of their category to be judged, or are exact up to rounding; bool.
    variance : float
        Trace of the covariance of one gradient.
    num_evaluations : int
        Of the function, for one gradient.
    seconds : float
        For one gradient alone, the median of several.
    unbiased : bool
        What the estimator says of itself.
    """

    name: str
    mean: Tensor
    standard_error: Tensor
    exact: Tensor
    rounding: Tensor
    judged: Tensor
    variance: float
    num_evaluations: int
    seconds: float
    unbiased: bool

    @property
    def without_variance(self) -> bool:
        """Whether all gradients were the same, up to rounding."""
        return self.variance <= float(self.rounding.square().sum())

    @property
    def z(self) -> Tensor:
        """Difference from the exact gradient in standard errors, by component; NaN where draws were too few."""
        difference = self.mean - self.exact
        exact = (difference.abs() <= self.rounding) & (self.standard_error <= self.rounding)
        z = torch.where(exact | (difference == 0), 0.0, difference / self.standard_error)
        return torch.where(self.judged, z, torch.nan)

    @property
    def largest_z(self) -> float:
        """The z-score that is largest in size; NaN where none could be judged."""
        z = self.z[self.judged]
        return float(z[z.abs().argmax()]) if len(z) else float("nan")


@dataclass(frozen=True, repr=False)
class GradientComparison:
    """Statistics of several estimators on one problem.

    Attributes
    ----------
    results : dict of GradientStatistics
        By name, in the order they were given.
    num_replicates : int
    enough : float
        Replicates from which every component of every gradient is judged.
    notes : tuple of str
        What to bear in mind of this problem.
    """

    results: dict[str, GradientStatistics]
    num_replicates: int
    enough: float = 0.0
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> GradientStatistics:
        return self.results[name]

    def to_pandas(self) -> pd.DataFrame:
        """Return a table, a line for each estimator.

        Its columns: the estimator, the largest z-score against enumeration, of how many components of the gradient it
        is the largest (`judged`: those with draws enough) and how many there are (`components`), the trace of the
        covariance, evaluations of the function for a gradient, their product (the variance per unit cost), seconds for
        a gradient, and whether the estimator claims to be unbiased.
        """
        rows = [
            {
                "estimator": name,
                "largest_z": found.largest_z,
                "judged": int(found.judged.sum()),
                "components": found.judged.numel(),
                "variance": found.variance,
                "num_evaluations": found.num_evaluations,
                "variance_per_cost": found.variance * found.num_evaluations,
                "seconds": found.seconds,
                "unbiased": found.unbiased,
            }
            for name, found in self.results.items()
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        table = self.to_pandas()
        few = bool((table["judged"] < table["components"]).any())
        table["judged"] = [f"{k} of {n}" for k, n in zip(table["judged"], table.pop("components"), strict=True)]
        lines = [f"{self.num_replicates} replicates", table.to_string(index=False, float_format="{:.4g}".format)]
        if few:
            lines.append(
                f"judged: components of the gradient whose category is expected {EXPECTED} times or more, of all; "
                f"raise num_replicates to {self.enough:.7g} to judge every one"
            )
        return "\n".join([*lines, *self.notes])

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Plot variances per unit cost, and z-scores against enumeration; those that claim no bias are filled.

        Parameters
        ----------
        axes : sequence of two Axes, optional

        Returns
        -------
        sequence of Axes
        """
        figure = None
        if axes is None:
            from matplotlib.figure import Figure

            width = 7.0 + 0.075 * max(map(len, self.results))
            figure = Figure(figsize=(width, 1.8 + 0.4 * len(self.results)), layout="constrained")
            axes = list(figure.subplots(1, 2, sharey=True))
        left, right = axes
        costs = []
        for row, found in enumerate(self.results.values()):
            if found.without_variance:
                text = "exact" if found.unbiased else "no variance"
                left.annotate(text, (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY)
            else:
                costs.append(found.variance * found.num_evaluations)
                left.plot(costs[-1], row, **_mark(BLUE, found.unbiased))
            if bool(found.judged.any()):
                z = abs(found.largest_z)
                right.plot(min(z, _LAST), row, **_mark(VERMILION if z > _BIASED else BLUE, found.unbiased))
            else:
                right.annotate(
                    "too few draws", (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY
                )
        _logarithmic(left, costs)
        _by_size(right, max([0.0, *(abs(x.largest_z) for x in self.results.values() if bool(x.judged.any()))]))
        right.axvline(_BIASED, color=GREY, linestyle="--", linewidth=1.0, label=f"a bias beyond |z| = {_BIASED:g}")
        right.plot([], [], **_mark(BLUE, True), label="claims no bias")
        if not all(found.unbiased for found in self.results.values()):
            right.plot([], [], **_mark(BLUE, False), label="biased by its own account")
        if figure is None:
            right.legend(frameon=False, fontsize="small")
        else:
            figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize="small")
        left.set_yticks(range(len(self.results)), list(self.results))
        left.set_ylim(len(self.results) - 0.5, -0.5)
        left.set_xlabel("variance x evaluations")
        right.set_xlabel("largest |z| against\nenumeration")
        return axes


def _mark(colour: str, filled: bool) -> dict[str, Any]:
    return {"marker": "o", "linestyle": "", "color": colour, "markerfacecolor": colour if filled else "white"}


def _by_size(axes: Axes, largest: float) -> None:
    """Give z-scores an axis that is linear where they are small; the largest stand at its end."""
    end = min(max(2 * largest, 2 * _BIASED), 1.2 * _LAST)
    axes.set_xscale("symlog", linthresh=_BIASED)
    ticks = [x for x in (0.0, 2.0, 4.0, 10.0, 100.0, _LAST) if x <= end]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(-0.2, end)


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Give values a logarithmic axis, wide enough for a label and with labels that do not overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    axes.set_xscale("log")
    axes.set_xlim(low / 2, high * 2)
    if high / low < 20:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
