"""Information of the latent variables on the data: active units, mutual information, aggregate posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._core.texts import short_repr, with_error
from bayeskit.errors import DataError, GuideError, SettingsError
from bayeskit.inference.held_out._importance import Minibatches, already_validated, draw_particles, positive
from bayeskit.inference.objectives._drawing import Layout, Site
from bayeskit.inference.objectives._latent_density import LatentDensity

if TYPE_CHECKING:
    import pandas as pd

# The latent coordinates that a guide uses.


@dataclass(frozen=True)
class ActiveUnits:
    """Variation of each latent coordinate with the data.

    Attributes
    ----------
    variance : dict of Tensor
        By site: variance of the posterior mean over the data, ``(d,)``.
    standard_error : dict of Tensor
        By site: standard error of ``variance`` for a random sample of data, ``(d,)``.
    threshold : float
        Smallest variance of an active coordinate.
    """

    variance: dict[str, Tensor]
    standard_error: dict[str, Tensor]
    threshold: float

    __repr__ = short_repr

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
        """Return one row per coordinate: site, coordinate, variance, standard_error, active."""
        import pandas as pd

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
    num_draws: int = 16,
    data_plate: str | None = None,
    seed: int = 0,
) -> ActiveUnits:
    r"""Count the latent coordinates with a posterior mean that varies with the data.

    A coordinate is active if :math:`\operatorname{Var}_x(\operatorname{E}_{q(z \mid x)} z)` exceeds the threshold.
    Means are analytic if the guide's distribution has a closed form and does not depend on other draws. Otherwise they
    are sample means, and their sampling variance is subtracted.

    Parameters
    ----------
    guide : callable
        The latent variables of each observation belong to one plate and are continuous.
    *args
        Arguments of the guide: the data, at least two observations.
    threshold : float, default 0.01
    num_draws : int, default 16
        Draws per observation, at least two.
    data_plate : str, optional
        Name of the plate of observations; by default the only plate that contains all sites.
    seed : int, default 0

    Returns
    -------
    ActiveUnits

    Raises
    ------
    SettingsError
        If the threshold is not positive or ``num_draws`` is below two.
    DataError
        If there is only one observation.
    GuideError
        If a latent site is discrete.
    ModelError
        If there is no plate of observations.

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
    positive(num_draws=num_draws)
    if num_draws < 2:
        raise SettingsError("num_draws must be at least 2: the error of a mean is estimated from several draws")
    threshold = real_number("threshold", threshold, "(0, inf)")
    # The guide also serves as the model, so that functions for runs of both accept it alone.
    with global_stream(new_generator(seed, stream="active units")):
        data = Minibatches.of(guide, guide, args, None, data_plate)
        if data.num_data < 2:
            raise DataError("active units need at least two observations; give several")
        particles = draw_particles(guide, guide, args, num_draws, data.nesting, data_plate)
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
            f"site {name!r} is discrete, and active units are defined for continuous sites only; examine instead the "
            "variation of the guide's probabilities over the data"
        )
    try:
        x = fn.mean
    except NotImplementedError:
        x = site["value"]
    if not bool(x.isfinite().all()):
        x = site["value"]  # for example, a Cauchy distribution has no mean
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


# Mutual information of latent variables and data, and the divergence of the aggregate posterior from the prior.

ROWS = 100_000  # draws times data per evaluation of the guide
_NEAR_LIMIT = 0.9


@dataclass(frozen=True)
class Information:
    """An estimate of information in nats, with its error.

    Attributes
    ----------
    value : float
    standard_error : float
        Monte Carlo standard error; of a guide's information, for the given data.
    limit : float
        Largest possible value for this number of observations, or of the lower bound for its number of inner draws.
    warnings : tuple of str
    lower, upper : float
        Bounds, where the information is estimated from both sides; ``value`` is then their mean.
    lower_error, upper_error : float
        Monte Carlo standard errors of the bounds.
    """

    value: float
    standard_error: float
    limit: float = math.inf
    warnings: tuple[str, ...] = ()
    lower: float | None = None
    lower_error: float | None = None
    upper: float | None = None
    upper_error: float | None = None

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.value) and math.isfinite(self.standard_error)

    @property
    def gap(self) -> float:
        """Upper less lower bound; NaN without bounds."""
        return math.nan if self.lower is None or self.upper is None else self.upper - self.lower

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        bounds = "" if self.lower is None or self.upper is None else f" (bounds {self.lower:.4f} and {self.upper:.4f})"
        return f"{with_error(self.value, self.standard_error)} nats{bounds}{flag}"


def mutual_information(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_draws: int = 10,
    data_plate: str | None = None,
    seed: int = 0,
) -> Information:
    r"""Estimate the mutual information of observation and latent variables under the guide.

    The aggregate posterior is :math:`q(z) = \frac{1}{N} \sum_n q(z \mid x_n)` over the ``N`` given observations. The
    mean divergence of the guide from the prior is the sum of this mutual information, between latent variables and
    observation index, and :func:`aggregate_kl`. The mixture includes all ``N`` observations, so the estimate is
    unbiased for these data. The mutual information cannot exceed :math:`\log N`; for a subset it is smaller in
    expectation than for all data.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each observation belong to one plate and are continuous.
    *args
        Arguments of model and guide: the data.
    num_draws : int, default 10
        Draws per observation, at least two. The cost is proportional to ``num_draws * N ** 2``.
    data_plate : str, optional
        Name of the plate of observations; by default the only plate that contains all sites.
    seed : int, default 0

    Returns
    -------
    Information
        Not trusted above 90 % of :math:`\log N`: more data would give a larger value.

    Raises
    ------
    SettingsError
        If ``num_draws`` is below two.
    GuideError
        If guide and model do not match, or a latent site is discrete.
    ModelError
        If there is no plate of observations.

    References
    ----------
    Hoffman, M. D., Johnson, M. J. (2016). ELBO surgery: yet another way to carve up the variational evidence lower
    bound. NIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import mutual_information
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.0 * x, 1.0))  # independent of the data
    >>> result = mutual_information(model, guide, torch.randn(50))
    >>> abs(result.value) < 1e-5
    True
    """
    terms = _Terms.of(model, guide, args, num_draws, data_plate, seed)
    value, error = _mean(terms.guide - terms.aggregate)
    count = terms.guide.shape[1]
    limit, problems = math.log(count), []
    if value > _NEAR_LIMIT * limit:
        problems.append(
            f"the value is near its limit, the log of the number of data ({count}), so the information may be larger: "
            "use more data"
        )
    return Information(value, error, limit, tuple(problems))


def aggregate_kl(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_draws: int = 10,
    data_plate: str | None = None,
    seed: int = 0,
) -> Information:
    """Estimate the Kullback-Leibler divergence of the aggregate posterior from the prior.

    The aggregate posterior is the mixture of the guide over all given data. Parameters and errors are those of
    :func:`mutual_information`. If the guide is the exact posterior and the data come from the model, the divergence
    tends to zero with more data.

    Parameters
    ----------
    model, guide : callable
    *args
        Arguments of model and guide: the data.
    num_draws : int, default 10
        Draws per observation, at least two.
    data_plate : str, optional
    seed : int, default 0

    Returns
    -------
    Information

    References
    ----------
    Hoffman, M. D., Johnson, M. J. (2016). ELBO surgery: yet another way to carve up the variational evidence lower
    bound. NIPS Workshop on Advances in Approximate Bayesian Inference.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import aggregate_kl
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.0 * x + 2.0, 1.0))  # two standard deviations off: 2 nats
    >>> result = aggregate_kl(model, guide, torch.randn(50))
    >>> abs(result.value - 2.0) < 4 * result.standard_error
    True
    """
    terms = _Terms.of(model, guide, args, num_draws, data_plate, seed)
    return Information(*_mean(terms.aggregate - terms.prior))


@dataclass(frozen=True)
class _Terms:
    """Log densities at ``K`` draws of the guide for each observation, ``(K, items)``."""

    guide: Tensor
    aggregate: Tensor
    prior: Tensor

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        num_draws: int,
        data_plate: str | None,
        seed: int,
    ) -> _Terms:
        positive(num_draws=num_draws)
        if num_draws < 2:
            raise SettingsError("num_draws must be at least 2: the standard error is estimated from several draws")
        with torch.no_grad(), global_stream(new_generator(seed, stream="information of the code")):
            data = Minibatches.of(model, guide, args, None, data_plate)
            with already_validated():
                own, count = _density(model, guide, data, num_draws), data.num_data
                log_guide, log_prior = own.log_guide(own.position), own.log_prior(own.position)
                # Every draw is evaluated under the guide of every observation.
                many = max(1, min(ROWS // count, own.num_rows))
                cross, parts = _density(model, guide, data, many), []
                for start in range(0, own.num_rows, many):
                    draws = own.position[start : start + many]
                    rows = torch.cat([draws, draws[:1].expand(many - len(draws), -1)])  # the last chunk is padded
                    density = cross.log_guide(rows.repeat_interleave(count, 0)).reshape(many, count)
                    parts.append(density[: len(draws)].to(torch.float64).logsumexp(1) - math.log(count))
        shape = (num_draws, count)
        return cls(*(x.to(torch.float64).reshape(shape) for x in (log_guide, torch.cat(parts), log_prior)))


def _density(
    model: Callable[..., Any], guide: Callable[..., Any], data: Minibatches, num_particles: int
) -> LatentDensity:
    return LatentDensity.from_pyro(
        model, guide, data.args, num_particles=num_particles, nesting=data.nesting, data_plate=data.data_plate
    )


def _mean(terms: Tensor) -> tuple[float, float]:
    """Return the mean of ``(K, items)`` and its error for fixed items and independent draws."""
    count = terms.numel()
    return float(terms.mean()), math.sqrt(float(terms.var(0).mean()) / count)
