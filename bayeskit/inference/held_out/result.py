"""HeldOut: the log likelihood of each datum that was left out of training, with its error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PARETO_SHAPE = 0.7
MAX_SHARE = 0.05  # of the data may have worse weights before the mean is in doubt


@dataclass(frozen=True)
class HeldOut:
    """Estimates of the log likelihood of each datum, the latent variables integrated out.

    Attributes
    ----------
    method : str
        Name of the function that made them.
    log_likelihood : Tensor
        Shape ``(items,)``, in nats, in double precision.
    pointwise_standard_error : Tensor
        Monte Carlo standard error of each, ``(items,)``.
    num_samples : int
        Draws for each datum; of estimators of evidence, evaluations of its density.
    pareto_k : Tensor or None
        Shape of the tail of each datum's weights, ``(items,)``, of methods that weigh draws. Above 0.5 the weights
        have no variance, above 0.7 the estimate and its error are practically useless.
    warnings : tuple of str
        What the diagnostics found, each with its remedy.
    seconds : float

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.held_out import HeldOut
    >>> result = HeldOut("importance_sampling", torch.tensor([-1.0, -3.0]), torch.tensor([0.3, 0.4]), 1000)
    >>> result.mean, result.total, round(result.standard_error, 3), result.trusted
    (-2.0, -4.0, 0.25, True)
    """

    method: str
    log_likelihood: Tensor
    pointwise_standard_error: Tensor
    num_samples: int
    pareto_k: Tensor | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of the log likelihood over the data."""
        return float(self.log_likelihood.mean())

    @property
    def total(self) -> float:
        """Log likelihood of all data together."""
        return float(self.log_likelihood.sum())

    @property
    def standard_error(self) -> float:
        """Monte Carlo standard error of :attr:`mean`, for these data; how they were chosen is not part of it."""
        return float(self.pointwise_standard_error.square().sum().sqrt()) / self.log_likelihood.numel()

    @property
    def trusted(self) -> bool:
        """Whether no diagnostic objected."""
        return not self.warnings and math.isfinite(self.mean) and math.isfinite(self.standard_error)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with a row for each datum: log_likelihood, standard_error and, if there is one, pareto_k."""
        columns = {"log_likelihood": self.log_likelihood, "standard_error": self.pointwise_standard_error}
        if self.pareto_k is not None:
            columns["pareto_k"] = self.pareto_k
        return pd.DataFrame({name: x.cpu().numpy() for name, x in columns.items()}).rename_axis("item")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the data in the order of their log likelihood, with 95 % intervals.

        Data whose weights cannot be relied on are hollow; a dashed line marks the mean.

        Parameters
        ----------
        ax : Axes, optional
            Where to draw; by default a new figure of ``pyplot``.
        """
        from bayeskit._plots import BLUE, GREY, VERMILION

        if ax is None:
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
        order = self.log_likelihood.argsort()
        value, error = self.log_likelihood[order].cpu(), self.pointwise_standard_error[order].cpu()
        doubtful = ~error.isfinite()
        if self.pareto_k is not None:
            doubtful |= ~(self.pareto_k[order].cpu() <= MAX_PARETO_SHAPE)
        rank = torch.arange(len(value))
        for chosen, colour, face in ((~doubtful, BLUE, BLUE), (doubtful, VERMILION, "white")):
            if bool(chosen.any()):
                bars = 1.96 * error[chosen].nan_to_num(0.0, 0.0)
                x, y = rank[chosen].numpy(), value[chosen].numpy()
                ax.errorbar(x, y, bars.numpy(), fmt="o", markersize=4, color=colour, mfc=face, linewidth=1.0)
        if math.isfinite(self.mean):
            ax.axhline(self.mean, color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        ax.set_xlabel("data, in the order of their log likelihood")
        ax.set_ylabel("log likelihood (nats)")
        return ax

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        count = self.log_likelihood.numel()
        return f"{self.method}: mean log likelihood {self.mean:.4f} +- {self.standard_error:.4f} of {count} data{flag}"


def share_above(pareto_k: Tensor) -> float:
    """Return the share of data whose weights cannot be relied on."""
    return float((~(pareto_k <= MAX_PARETO_SHAPE)).to(torch.float64).mean())


def tail_problems(pareto_k: Tensor, remedy: str) -> list[str]:
    """Check how many data have weights with too heavy a tail."""
    share = share_above(pareto_k)
    if share <= MAX_SHARE:
        return []
    return [
        f"the largest weights dominate for {100 * share:.1f} % of the data (Pareto k > {MAX_PARETO_SHAPE}): {remedy}"
    ]
