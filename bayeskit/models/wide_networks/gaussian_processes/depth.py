"""The depth of a network of infinite width by marginal likelihood."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from torch import Tensor, nn

from bayeskit.errors import SettingsError
from bayeskit.models.wide_networks.gaussian_processes.marginal_likelihood import Fit, fit_variances
from bayeskit.models.wide_networks.infinite_width import InfiniteWidth, infinite_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class DepthComparison:
    """Fits of networks of several depths to the same data; made by :func:`fit_depths`.

    Attributes
    ----------
    fits : mapping of int to Fit
        By depth.
    """

    fits: Mapping[int, Fit]

    @property
    def best(self) -> int:
        """The depth of the largest marginal likelihood."""
        return max(self.fits, key=lambda depth: self.fits[depth].log_evidence)

    def to_pandas(self) -> pd.DataFrame:
        """Return one row a depth, with the variances that were found."""
        return pd.DataFrame(
            {
                "depth": depth,
                "log_evidence": found.log_evidence,
                **found.variances,
                "noise_variance": found.noise_variance,
                "jitter": found.posterior.jitter,
                "at_bound": ", ".join(found.at_bound),
            }
            for depth, found in self.fits.items()
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the log evidence against depth.

        Parameters
        ----------
        ax : Axes, optional
            By default of a new figure.

        Returns
        -------
        Axes
        """
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(4.5, 3.5), layout="constrained").subplots()
        depths = sorted(self.fits)
        ax.plot(depths, [self.fits[depth].log_evidence for depth in depths], "o-")
        ax.plot(self.best, self.fits[self.best].log_evidence, "o", color="C1", label=f"depth {self.best}")
        ax.set(xlabel="depth", ylabel="log evidence", xticks=depths)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        fits = "\n".join(f"    {depth}: {found!r}" for depth, found in self.fits.items())
        return f"DepthComparison: depth {self.best} is best\n{fits}"


def fit_depths(
    make_network: Callable[[int], nn.Module | InfiniteWidth],
    depths: Sequence[int],
    x: Tensor,
    y: Tensor,
    *,
    weight_variance: float = 2.0,
    bias_variance: float = 0.1,
    noise_variance: float | None = None,
    tied: bool = True,
    covariance: str = "nngp",
    num_starts: int = 4,
    time_budget: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> DepthComparison:
    """Fit networks of several depths, each with its own variances, and compare their marginal likelihoods.

    Parameters
    ----------
    make_network : callable
        From a depth to a torch module, or to a network of infinite width with variances of its own.
    depths : sequence of int
    x, y : Tensor
        As in :func:`fit_variances`.
    weight_variance, bias_variance : float, default 2.0 and 0.1
        Where learning begins, for torch modules.
    noise_variance, tied, covariance, num_starts, seed, progress
        As in :func:`fit_variances`.
    time_budget : float, optional
        Seconds for each depth.

    Returns
    -------
    DepthComparison

    Raises
    ------
    SettingsError, DataError, ShapeError, ModelError, KernelError
        As in :func:`fit_variances`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> def make_network(depth):
    ...     hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(8, 8), nn.ReLU())]
    ...     return nn.Sequential(nn.Linear(1, 8), nn.ReLU(), *hidden, nn.Linear(8, 1))
    >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    >>> fit_depths(make_network, [1, 3], x, torch.sin(6 * x[:, 0]), num_starts=1).best
    3
    """
    if not len(depths):
        raise SettingsError("depths must name at least one depth")
    fits = {}
    for depth in depths:
        made = make_network(depth)
        if not isinstance(made, InfiniteWidth):
            made = infinite_width(made, weight_variance=weight_variance, bias_variance=bias_variance)
        fits[depth] = fit_variances(
            made,
            x,
            y,
            noise_variance=noise_variance,
            tied=tied,
            covariance=covariance,
            num_starts=num_starts,
            time_budget=time_budget,
            seed=seed,
            progress=progress,
        )
    return DepthComparison(fits)
