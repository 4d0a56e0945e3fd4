"""Which coordinates of the code a guide uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DataError, GuideError, SettingsError
from bayeskit.inference.held_out.minibatches import Minibatches, positive, run
from bayeskit.inference.objectives.layout import Layout
from bayeskit.inference.objectives.sites import Site


@dataclass(frozen=True)
class ActiveUnits:
    """How much each coordinate of the code varies with the data.

    Attributes
    ----------
    variance : dict of Tensor
        By site: variance over the data of the posterior mean, ``(d,)``.
    standard_error : dict of Tensor
        Of these, the data being a random sample, ``(d,)``.
    threshold : float
        Above which a coordinate is active.
    """

    variance: dict[str, Tensor]
    standard_error: dict[str, Tensor]
    threshold: float

    @property
    def active(self) -> dict[str, Tensor]:
        """By site: whether a coordinate is active, ``(d,)``."""
        return {name: variance > self.threshold for name, variance in self.variance.items()}

    @property
    def count(self) -> int:
        """Number of active coordinates of all sites."""
        return sum(int(active.sum()) for active in self.active.values())

    @property
    def num_undecided(self) -> int:
        """Number of coordinates whose variance is within two standard errors of the threshold."""
        near = ((v - self.threshold).abs() < 2 * self.standard_error[name] for name, v in self.variance.items())
        return sum(int(x.sum()) for x in near)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with a row for each coordinate: site, coordinate, variance, standard_error, active."""
        rows = [
            (name, i, float(v), float(self.standard_error[name][i]), bool(v > self.threshold))
            for name, variance in self.variance.items()
            for i, v in enumerate(variance)
        ]
        return pd.DataFrame(rows, columns=["site", "coordinate", "variance", "standard_error", "active"])


def active_units(
    guide: Callable[..., Any],
    *args: Any,
    threshold: float = 0.01,
    num_samples: int = 16,
    data_plate: str | None = None,
    seed: int = 0,
) -> ActiveUnits:
    r"""Count the coordinates of the code whose posterior mean varies with the data.

    A coordinate is active if :math:`\operatorname{Var}_x(\operatorname{E}_{q(z \mid x)} z)` exceeds the threshold.
    Means are in closed form where the guide's distribution has one. Where it has none, or depends on other draws,
    they are averages over draws, and what that adds to the variance is subtracted.

    Parameters
    ----------
    guide : callable
        The latent variables of each datum stand in one plate and are continuous.
    *args
        What it is called with: the data, at least two.
    threshold : float, default 0.01
    num_samples : int, default 16
        Draws for each datum, at least two.
    data_plate : str, optional
        Name of the plate whose items are the data; by default the only one that holds all sites.
    seed : int, default 0

    Returns
    -------
    ActiveUnits

    Raises
    ------
    SettingsError
        If the threshold is not positive or there are less than two draws.
    DataError
        If there is one datum only.
    GuideError
        If a site is discrete.
    ModelError
        If there is no plate of data.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import active_units
    >>> def guide(x):
    ...     weight = torch.tensor([0.5, 0.0, -0.2])
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x.unsqueeze(-1) * weight, 1.0).to_event(1))
    >>> result = active_units(guide, torch.linspace(-2.0, 2.0, 100))
    >>> result.count, result.active["z"].tolist()
    (2, [True, False, True])
    """
    positive(num_samples=num_samples)
    if num_samples < 2:
        raise SettingsError("num_samples must be at least 2: the error of a mean comes from draws that differ")
    if not threshold > 0:
        raise SettingsError(f"threshold must be positive, not {threshold}")
    # A guide is the model of its own draws, so that what reads runs of both can read it alone.
    with global_stream(new_generator(seed, stream="active units")):
        data = Minibatches.of(guide, guide, args, None, data_plate)
        if data.num_items < 2:
            raise DataError("one datum cannot tell what varies with the data; give several")
        particles = run(guide, guide, args, num_samples, data.nesting, data_plate)
    variance, error = {}, {}
    for name, site in particles.guide_sites.items():
        if not site["is_observed"]:
            variance[name], error[name] = _variance(_means(name, site, particles.layout))
    return ActiveUnits(variance, error, threshold)


def _means(name: str, site: Site, layout: Layout) -> Tensor:
    """Return the mean of a site given the draws before it, or else its draws: ``(K, items, d)``."""
    fn = site["fn"]
    if fn.support.is_discrete:
        raise GuideError(
            f"site {name!r} is discrete, and the mean of a category tells little: active units are of continuous codes "
            "only; look at how the guide's own probabilities vary with the data"
        )
    try:
        x = fn.mean
    except NotImplementedError:
        x = site["value"]
    if not bool(x.isfinite().all()):
        x = site["value"]  # such as a Cauchy's, whose mean does not exist
    x = x.reshape((1,) * (layout.nesting + 1 + fn.event_dim - x.dim()) + tuple(x.shape))
    (plate,) = layout.plates.values()
    x = x.movedim(layout.nesting + 1 + plate.dim, 1)
    return x.flatten(2).expand(layout.num_particles, -1, -1) if x.dim() > 2 else x.expand(layout.shape).unsqueeze(-1)


def _variance(means: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance over items of means ``(K, items, d)`` and its standard error, ``(d,)``."""
    means = means.to(torch.float64)
    count, items, _ = means.shape
    centre = means.mean(0)
    noise = means.var(0) / count
    deviation = (centre - centre.mean(0)).square()
    variance = deviation.sum(0) / (items - 1)
    return variance - noise.mean(0), (deviation - noise).std(0) / math.sqrt(items)
