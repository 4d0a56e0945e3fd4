"""The four Gaussian processes of a wide network on the same data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from bayeskit.errors import DataError, ShapeError, UnknownNameError
from bayeskit.extend import short_repr
from bayeskit.models.wide_networks._layers import check_targets
from bayeskit.models.wide_networks.gaussian_processes._ensemble import Ensemble, ntk_ensemble
from bayeskit.models.wide_networks.gaussian_processes._posterior import (
    KernelRegression,
    Posterior,
    nngp_posterior,
    ntk_posterior,
)
from bayeskit.models.wide_networks.gaussian_processes._wide_kernels import PrecomputedKernel, WideKernel, refuse_module

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAND = "2 standard deviations"


@dataclass(frozen=True, eq=False)
class ProcessPrediction:
    """Prediction of one Gaussian process at new inputs.

    Attributes
    ----------
    name : str
        Name of the process.
    random : str
        Source of the variance, in words.
    trained : str
        Description of the training, in words.
    mean : Tensor
        ``(n_new, *outputs)``.
    variance : Tensor or None
        Variance of each output, ``(n_new,)``; None for kernel regression.
    jitter : float
        Jitter added to the diagonal of the kernel matrix.
    """

    name: str
    random: str
    trained: str
    mean: Tensor
    variance: Tensor | None
    jitter: float

    __repr__ = short_repr


@dataclass(frozen=True, eq=False, repr=False)
class GaussianProcessComparison:
    """Predictions of the four Gaussian processes of a wide network at the same new inputs.

    Attributes
    ----------
    predictions : dict of ProcessPrediction
        By name of the process.
    x, y : Tensor
        Training data, ``(n, ...)`` and ``(n, *outputs)``.
    x_new : Tensor
        New inputs, ``(n_new, ...)``.
    noise_variance : float
        Noise variance of both posteriors; ridge of the ensemble and of kernel regression.
    """

    predictions: dict[str, ProcessPrediction]
    x: Tensor
    y: Tensor
    x_new: Tensor
    noise_variance: float

    def __getitem__(self, name: str) -> ProcessPrediction:
        if name not in self.predictions:
            raise UnknownNameError(f"there is no process {name!r}; the names are: {', '.join(self.predictions)}")
        return self.predictions[name]

    def __iter__(self) -> Iterator[ProcessPrediction]:
        return iter(self.predictions.values())

    def to_pandas(self) -> pd.DataFrame:
        """Return mean and standard deviation (or NaN), one row per process, new input and output."""
        tables = []
        for one in self:
            mean = one.mean.reshape(len(one.mean), -1)
            variance = torch.full_like(mean[:, 0], math.nan) if one.variance is None else one.variance
            points, outputs = mean.shape
            columns = {
                "process": one.name,
                "point": torch.arange(points).repeat_interleave(outputs).numpy(),
                "output": torch.arange(outputs).repeat(points).numpy(),
                "mean": mean.reshape(-1).cpu().numpy(),
                "standard_deviation": variance.sqrt().repeat_interleave(outputs).cpu().numpy(),
            }
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def summary(self) -> pd.DataFrame:
        """Return descriptions, distances, standard deviations and jitter, one row per process.

        ``distance`` is the root mean square difference from the mean of the NNGP posterior, ``standard_deviation`` the
        square root of the mean variance.
        """
        first = next(iter(self)).mean
        rows = [
            {
                "process": one.name,
                "random": one.random,
                "trained": one.trained,
                "distance": float((one.mean - first).square().mean().sqrt()),
                "standard_deviation": math.nan if one.variance is None else float(one.variance.mean().sqrt()),
                "jitter": one.jitter,
            }
            for one in self
        ]
        return pd.DataFrame(rows)

    def distances(self) -> pd.DataFrame:
        """Return root mean square differences between the means of all pairs, ``(4, 4)``."""
        means = torch.stack([one.mean.reshape(-1) for one in self])
        gaps = (means[:, None] - means).square().mean(-1).sqrt()
        names = list(self.predictions)
        return pd.DataFrame(gaps.cpu().numpy(), index=names, columns=names)

    def plot(self, output: int = 0, axes: list[Axes] | None = None) -> Figure | None:
        """Plot the mean of one output plus and minus two standard deviations, one panel per process.

        The horizontal axis is the input if it is scalar. Otherwise new inputs are ordered by the mean of the NNGP
        posterior.

        Parameters
        ----------
        output : int, default 0
        axes : list of Axes, optional
            Four axes; by default a new figure is made and returned.

        Raises
        ------
        ShapeError
            If the output does not exist, or the number of axes is not four.
        """
        from matplotlib.figure import Figure

        outputs = self.y.reshape(len(self.y), -1).shape[1]
        if not 0 <= output < outputs:
            raise ShapeError(f"output must be 0 to {outputs - 1}, not {output}")
        figure = None
        if axes is None:
            figure = Figure(figsize=(3.1 * len(self.predictions), 3.0), layout="constrained")
            axes = list(figure.subplots(1, len(self.predictions), sharey=True, squeeze=False)[0])
        if len(axes) != len(self.predictions):
            raise ShapeError(f"there must be {len(self.predictions)} axes, not {len(axes)}")
        for one, ax in zip(self, axes, strict=True):
            self._panel(one, output, ax)
        axes[0].set_ylabel("output" if outputs == 1 else f"output {output}")
        axes[0].legend(frameon=False, fontsize="small")
        return figure

    def _panel(self, one: ProcessPrediction, output: int, ax: Axes) -> None:
        from bayeskit.extend import BLUE, VERMILION

        line = self.x_new.dim() == 2 and self.x_new.shape[1] == 1
        first = next(iter(self)).mean.reshape(len(self.x_new), -1)[:, output]
        order = (self.x_new[:, 0] if line else first).argsort().cpu()
        place = (self.x_new[:, 0].cpu()[order] if line else torch.arange(len(order))).numpy()
        mean = one.mean.reshape(len(self.x_new), -1)[:, output].cpu()[order].numpy()
        ax.plot(place, mean, color=BLUE, linewidth=1.5, label="mean")
        if one.variance is not None:
            spread = 2 * one.variance.sqrt().cpu()[order].numpy()
            ax.fill_between(place, mean - spread, mean + spread, color=BLUE, alpha=0.2, linewidth=0, label=_BAND)
        if line:
            targets = self.y.reshape(len(self.y), -1)[:, output]
            x = self.x[:, 0].cpu().numpy()
            ax.plot(x, targets.cpu().numpy(), "o", markersize=4, color=VERMILION, label="data")
        ax.set_xlabel("input" if line else "new inputs, ordered by NNGP mean")
        ax.set_title(one.name + ("\n(point estimate, no variance)" if one.variance is None else ""), fontsize="medium")
        ax.grid(alpha=0.25)

    def __repr__(self) -> str:
        lines = [
            f"{len(self.x_new)} new inputs, {len(self.y)} training inputs, noise variance or ridge "
            f"{self.noise_variance:g}",
            f"  {'':16}{'distance':>10}{'sd':>10}",
        ]
        for row in self.summary().itertuples():
            spread = "-" if math.isnan(row.standard_deviation) else f"{row.standard_deviation:.4g}"
            used = f"; jitter {row.jitter:g}" if row.jitter else ""
            lines.append(f"  {row.process:16}{row.distance:10.4g}{spread:>10}{used}")
            lines.append(f"      random: {row.random}")
            lines.append(f"      trained: {row.trained}")
        return "\n".join(lines)


def compare_gaussian_processes(
    kernel: WideKernel,
    x: Tensor,
    y: Tensor,
    x_new: Tensor,
    *,
    noise_variance: float = 0.0,
    learning_rate: float = 1.0,
    time: float = math.inf,
    max_jitter: float | None = None,
) -> GaussianProcessComparison:
    """Compare the predictions of four Gaussian processes of a wide network.

    - NNGP posterior: posterior of a Bayesian network.
    - NTK ensemble: distribution of networks trained by gradient flow.
    - NTK regression: point estimate of kernel regression, without a variance.
    - NTK posterior: posterior with the tangent kernel as prior covariance; its variance describes no wide network.

    After infinite training time the last three have the same mean.

    Parameters
    ----------
    kernel, x, y, learning_rate, time, max_jitter
        As in :func:`ntk_ensemble`.
    x_new : Tensor
        New inputs, ``(n_new, ...)``.
    noise_variance : float, default 0.0
        Noise variance of both posteriors; ridge of the ensemble and of kernel regression.

    Returns
    -------
    GaussianProcessComparison

    Raises
    ------
    ShapeError, DataError, SettingsError, KernelError, ModelError
        As in :func:`ntk_ensemble`, and if ``x_new`` does not match ``x``.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from bayeskit.models.wide_networks import infinite_width
    >>> kernel = infinite_width(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)), bias_variance=1.0)
    >>> x = torch.tensor([[-1.0], [0.5], [1.0]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    >>> table = compare_gaussian_processes(kernel, x, y, torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    >>> table.summary()[["process", "distance", "standard_deviation"]].round(3)
              process  distance  standard_deviation
    0  NNGP posterior     0.000               0.191
    1    NTK ensemble     0.515               0.275
    2  NTK regression     0.515                 NaN
    3   NTK posterior     0.515               0.673
    """
    refuse_module(kernel)
    check_targets(x, y)
    if x.dtype != x_new.dtype or x.device != x_new.device:
        raise DataError(
            f"x is {x.dtype} on {x.device}, but x_new is {x_new.dtype} on {x_new.device}; convert one of them"
        )
    if x.shape[1:] != x_new.shape[1:]:
        raise ShapeError(f"x and x_new must have inputs of one shape, not {tuple(x.shape)} and {tuple(x_new.shape)}")
    shared = PrecomputedKernel.of(kernel, torch.cat([x, x_new]))
    rows = torch.arange(len(x) + len(x_new), device=x.device)
    old, new = rows[: len(x)], rows[len(x) :]
    tangent = ntk_posterior(shared, old, y, noise_variance, max_jitter=max_jitter)
    found = (
        nngp_posterior(shared, old, y, noise_variance, max_jitter=max_jitter),
        ntk_ensemble(
            shared, old, y, learning_rate=learning_rate, time=time, ridge=noise_variance, max_jitter=max_jitter
        ),
        KernelRegression(tangent),
        tangent,
    )
    return GaussianProcessComparison({one.name: _predict(one, new) for one in found}, x, y, x_new, noise_variance)


def _predict(one: Posterior | Ensemble | KernelRegression, new: Tensor) -> ProcessPrediction:
    variance = None if isinstance(one, KernelRegression) else one.variance(new)
    return ProcessPrediction(one.name, one.random, one.trained, one.mean(new), variance, one.jitter)
