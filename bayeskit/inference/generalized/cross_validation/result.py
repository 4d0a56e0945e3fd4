"""CrossValidation: scores by the number of data held out, with their errors and their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.result import Evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False)
class CrossValidation:
    """Leave-p-out cross-validation of the log predictive density.

    Attributes
    ----------
    method : str
        "enumeration", "tempering", "orders" or "importance": how the predictive densities were found.
    num_data : int
    held_out : Tensor
        The sizes ``p`` of held-out sets, increasing, ``(m,)``.
    score : Tensor
        Mean log predictive density of a held-out datum given the data not held out, ``(m,)``, in nats.
    standard_error : Tensor
        Of each score, ``(m,)``: of the Monte Carlo, and of the choice of held-out sets where not all were taken.
    cumulative_standard_error : Tensor
        Of the sums of scores from the first on, ``(m,)``.
    num_sets : Tensor
        Held-out sets of each size, ``(m,)``.
    warnings : tuple of str
        What the diagnostics found, each with its remedy.
    pareto_k : Tensor or None
        Shape of the tail of the weights of the worst held-out set, ``(m,)``, where posterior draws were weighted.
    num_rerun : Tensor or None
        Held-out sets whose weights could not be relied on, so that particles were carried to them, ``(m,)``.
    prequential : Evidence or None
        What the same particles say of the evidence when each order is summed by itself, where all sizes were asked
        for. No choice of sets enters it, so that its error is the smaller one.
    num_evaluations : int
        Evaluations of the log density or its gradient, those of draws that were given not included.
    seconds : float

    Examples
    --------
    >>> import torch
    >>> score, error = torch.tensor([-1.0, -1.5]), torch.tensor([0.01, 0.01])
    >>> result = CrossValidation("orders", 2, torch.tensor([1, 2]), score, error, error, torch.tensor([2, 1]))
    >>> result.log_evidence, result.trusted
    (-2.5, True)
    """

    method: str
    num_data: int
    held_out: Tensor
    score: Tensor
    standard_error: Tensor
    cumulative_standard_error: Tensor
    num_sets: Tensor
    warnings: tuple[str, ...] = ()
    pareto_k: Tensor | None = None
    num_rerun: Tensor | None = None
    prequential: Evidence | None = None
    num_evaluations: int = 0
    seconds: float = 0.0

    @property
    def cumulative(self) -> Tensor:
        """Sums of the scores of ``1, ..., p`` held-out data, ``(m,)``.

        The sum up to ``p`` is the mean, over held-out sets of ``p`` data, of their joint log predictive density
        given the others: the log of the geometric intrinsic evidence.

        Raises
        ------
        SettingsError
            If a size in between is missing.
        """
        if self.held_out.tolist() != list(range(1, len(self.held_out) + 1)):
            raise SettingsError(
                f"scores of {self.held_out.tolist()} held-out data do not add up to anything; ask for "
                f"p=range(1, {int(self.held_out[-1]) + 1})"
            )
        return self.score.cumsum(0)

    @property
    def log_evidence(self) -> float:
        """The sum of all scores.

        Raises
        ------
        SettingsError
            If they are not those of all sizes from 1 to the number of data.
        """
        self._check_complete()
        return float(self.cumulative[-1])

    @property
    def log_evidence_standard_error(self) -> float:
        """Standard error of :attr:`log_evidence`."""
        self._check_complete()
        return float(self.cumulative_standard_error[-1])

    @property
    def trusted(self) -> bool:
        """Whether no diagnostic objected."""
        return not self.warnings and bool((self.score.isfinite() & self.standard_error.isfinite()).all())

    def _check_complete(self) -> None:
        if len(self.held_out) != self.num_data:
            raise SettingsError(
                f"the log evidence is the sum of the scores of 1 to {self.num_data} held-out data, and here are those "
                f"of {self.held_out.tolist()}; leave p=None"
            )

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with a row for each number of held-out data."""
        columns = {"score": self.score, "standard_error": self.standard_error}
        if self.held_out.tolist() == list(range(1, len(self.held_out) + 1)):
            columns |= {"cumulative": self.cumulative, "cumulative_standard_error": self.cumulative_standard_error}
        columns["num_sets"] = self.num_sets
        for name in ("pareto_k", "num_rerun"):
            if (value := getattr(self, name)) is not None:
                columns[name] = value
        table = {name: x.cpu().numpy() for name, x in columns.items()}
        return pd.DataFrame(table, index=pd.Index(self.held_out.cpu().numpy(), name="held_out"))

    def plot(self, ax: Axes | None = None, *, cumulative: bool = False, label: str = "") -> Axes:
        """Plot the scores, or their sums, against the number of data held out, with 95 % bands.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw, so that models can be compared; by default a new figure of ``pyplot``.
        cumulative : bool, default False
            Plot the sums of the scores instead, which end at the log evidence.
        label : str, default ""
            Of the curve.
        """
        from bayeskit._plots import CHAIN_COLOURS

        value = self.cumulative if cumulative else self.score
        error = self.cumulative_standard_error if cumulative else self.standard_error
        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        size, band = self.held_out.cpu().numpy(), 1.96 * error.nan_to_num(0.0, 0.0).cpu()
        colour = CHAIN_COLOURS[len(ax.lines) % len(CHAIN_COLOURS)]
        few = len(size) <= 40
        face = colour if self.trusted else "white"
        ax.plot(size, value.cpu().numpy(), color=colour, marker="o" if few else "", mfc=face, label=label or None)
        low, high = (value.cpu() - band).numpy(), (value.cpu() + band).numpy()
        ax.fill_between(size, low, high, color=colour, alpha=0.2, linewidth=0)
        ax.set_xlabel("data held out")
        ax.set_ylabel("cumulative score (nats)" if cumulative else "log predictive density of a datum (nats)")
        if label:
            ax.legend(frameon=False)
        return ax

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        if len(self.held_out) == self.num_data:
            number, error = self.log_evidence, self.log_evidence_standard_error
            return f"cross-validation of {self.num_data} data: log evidence {number:.4f} +- {error:.4f}{flag}"
        scores = ", ".join(
            f"{p}: {s:.4f} +- {e:.4f}"
            for p, s, e in zip(self.held_out.tolist(), self.score.tolist(), self.standard_error.tolist(), strict=True)
            if math.isfinite(s)
        )
        return f"cross-validation of {self.num_data} data, score by number held out: {scores}{flag}"


def no_error(sizes: tuple[int, ...]) -> Tensor:
    """Return standard errors of what is exact."""
    return torch.zeros(len(sizes), dtype=torch.float64)
