"""Plots of a mixture: predictive density, responsibilities, and number of components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import Draws, real_number, whole_number
from bayeskit.models.discrete.mixtures._gaussian_mixture import GaussianMixture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN = 0.1


def predictive_density(
    mixture: GaussianMixture, values: Draws | Mapping[str, Tensor], x: Tensor, level: float = 0.9
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the posterior predictive density at points, and a pointwise credible band of the density.

    Parameters
    ----------
    mixture : GaussianMixture
    values : Draws or mapping of str to Tensor
        Posterior draws, or site values, ``{site: (*batch, *shape)}``.
    x : Tensor or array
        Points, shape ``(m,)`` or ``(m, D)`` as the data.
    level : float in (0, 1), default 0.9
        Posterior probability of the pointwise equal-tailed band.

    Returns
    -------
    mean, low, high : Tensor
        Shape ``(m,)`` each.
    """
    level = real_number("level", level, "(0, 1)")
    density = mixture.log_density(values, x).exp().reshape(-1, len(x))
    low, high = density.quantile(density.new_tensor([(1 - level) / 2, (1 + level) / 2]), 0)
    return density.mean(0), low, high


def plot_predictive(
    mixture: GaussianMixture,
    values: Draws | Mapping[str, Tensor],
    ax: Axes | None = None,
    *,
    level: float = 0.9,
    num_bins: int = 40,
    num_points: int = 400,
) -> Axes:
    """Plot the predictive density with a pointwise credible band over a histogram of the data.

    Raises ``SettingsError`` if the data are multivariate.

    Parameters
    ----------
    mixture, values, level
        As in :func:`predictive_density`, with univariate data; label switching has no effect.
    ax : Axes, optional
        Default new ``pyplot`` axes.
    num_bins, num_points : int, default 40 and 400

    Examples
    --------
    >>> import bayeskit as bk
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, galaxy_velocities, plot_predictive
    >>> mixture = GaussianMixture(galaxy_velocities(), num_components=3)
    >>> target = bk.Target.from_pyro(mixture)
    >>> values = target.constrain(target.sample_prior(50))
    >>> plot_predictive(mixture, values, Figure().subplots()).get_ylabel()
    'density'
    """
    from bayeskit.extend import BLUE, GREY

    if mixture.y.dim() == 2:
        raise SettingsError("the density of several columns has no curve; use predictive_density for contours")
    ax = _axes(ax)
    y = mixture.y
    margin = _MARGIN * (y.max() - y.min())
    points = whole_number("num_points", num_points, 2)
    x = torch.linspace(float(y.min() - margin), float(y.max() + margin), points, dtype=y.dtype, device=y.device)
    mean, low, high = (t.cpu().numpy() for t in predictive_density(mixture, values, x, level))
    bins = whole_number("num_bins", num_bins, 1)
    ax.hist(y.cpu().numpy(), bins=bins, density=True, color=GREY, alpha=0.3, label="data")
    ax.fill_between(x.cpu().numpy(), low, high, color=BLUE, alpha=0.25, linewidth=0, label=f"{level:.0%} band")
    ax.plot(x.cpu().numpy(), mean, color=BLUE, label=f"predictive, K = {mixture.num_components}")
    ax.set_xlabel("y")
    ax.set_ylabel("density")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    return ax


def plot_responsibilities(
    mixture: GaussianMixture, values: Draws | Mapping[str, Tensor], ax: Axes | None = None
) -> Axes:
    """Plot the posterior component probabilities of each observation as stacked bars.

    Univariate observations are sorted by value, multivariate observations by most probable component.

    Parameters
    ----------
    mixture, values, ax
        As in :func:`plot_predictive`, but with a common labelling (see :func:`relabel`).

    Examples
    --------
    >>> import torch
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, plot_responsibilities
    >>> mixture = GaussianMixture(torch.tensor([-2.0, 2.5, 2.2, -1.7]), 2)
    >>> values = {"share": torch.ones(2), "mean": torch.tensor([-2.0, 2.0]), "precision": torch.ones(2)}
    >>> plot_responsibilities(mixture, values, Figure().subplots()).get_ylabel()
    'probability'
    """
    from bayeskit.extend import CHAIN_COLOURS

    ax = _axes(ax)
    p = mixture.responsibilities(values)
    p = p.reshape(-1, *p.shape[-2:]).mean(0)  # (n, K)
    order = (p.argmax(-1) - p.amax(-1) if mixture.y.dim() == 2 else mixture.y).argsort()
    heights = p[order].cpu().numpy().T
    places, bottom = range(len(order)), 0.0
    for k, height in enumerate(heights):
        colour = CHAIN_COLOURS[k % len(CHAIN_COLOURS)]
        ax.bar(places, height, 1.0, bottom, color=colour, linewidth=0, label=f"component {k + 1}")
        bottom = bottom + height
    ax.set_xlim(-0.5, len(order) - 0.5)
    ax.set_ylim(0, 1)
    ax.set_xlabel("observation, sorted")
    ax.set_ylabel("probability")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def plot_num_components(probabilities: Mapping[int, tuple[float, float]], ax: Axes | None = None) -> Axes:
    """Plot the posterior of the number of components, with standard errors.

    Raises ``SettingsError`` if ``probabilities`` is empty.

    Parameters
    ----------
    probabilities : mapping of int to (float, float)
        Probability and standard error of each number of components.
    ax : Axes, optional
        As in :func:`plot_predictive`.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from bayeskit.models.discrete.mixtures import plot_num_components
    >>> plot_num_components({1: (0.1, 0.01), 2: (0.9, 0.01)}, Figure().subplots()).get_xlabel()
    'number of components'
    """
    from bayeskit.extend import BLUE, GREY

    if not probabilities:
        raise SettingsError("there are no numbers of components to plot; give {number: (probability, error)}")
    ax = _axes(ax)
    sizes = list(probabilities)
    heights, errors = zip(*probabilities.values(), strict=True)
    ax.bar(sizes, heights, yerr=errors, color=BLUE, alpha=0.8, ecolor=GREY, capsize=3)
    ax.set_xticks(sizes)
    ax.set_ylim(0, min(1.0, 1.15 * max(heights)))
    ax.set_xlabel("number of components")
    ax.set_ylabel("posterior probability")
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")[1]
