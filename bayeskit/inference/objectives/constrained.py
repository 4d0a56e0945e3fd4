"""Training under a constraint, or with a divergence of the aggregate posterior: GECO and InfoVAE."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from bayeskit.errors import GuideError, SettingsError, ShapeError
from bayeskit.inference.kernel_discrepancy import Kernel, maximum_mean_discrepancy
from bayeskit.inference.objectives.drawing import PARTICLES, Layout, Particles, Site, reduced, site_log_density
from bayeskit.inference.objectives.evidence_lower_bound import divergences, score_function_estimate
from bayeskit.inference.objectives.objective import Draw, Objective
from bayeskit.logdensity.pyro_distributions import MendedDraws
from bayeskit.logdensity.pyro_distributions import draw_values as draw_from

__all__ = [
    "Constraint",
    "GECO",
    "InfoVAE",
    "LogLikelihoodConstraint",
    "MeanSquaredError",
    "updated_multiplier",
]

# Training under a constraint: the least divergence from the prior at a given quality of reconstruction.

Constraint = Callable[[Particles], Tensor]


@dataclass(frozen=True)
class MeanSquaredError:
    """The squared distance of an observed site from its distribution's mean is to be at most ``tolerance``.

    Parameters
    ----------
    site : str
    tolerance : float
        Of the mean over the dimensions of a datum, or of the sum.
    summed : bool, default False
        Sum over the dimensions of a datum instead of taking the mean.

    Raises
    ------
    SettingsError
        If ``tolerance`` is not positive, or the model does not observe ``site``.

    Examples
    --------
    >>> from bayeskit.inference.objectives.constrained import MeanSquaredError
    >>> MeanSquaredError("x", 0.1)
    MeanSquaredError(site='x', tolerance=0.1, summed=False)
    """

    site: str
    tolerance: float
    summed: bool = False

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise SettingsError(f"tolerance must be positive, not {self.tolerance}")

    def __call__(self, particles: Particles) -> Tensor:
        """Return the error less the tolerance, ``(K, *batch)``."""
        site = _observed(particles, self.site)
        error = (site["value"] - site["fn"].mean).square()
        events = site["fn"].event_dim
        count = math.prod(error.shape[error.dim() - events :])
        error = error.flatten(error.dim() - events).sum(-1) if events else error
        total = reduced(site, error, particles.layout)
        if self.summed:
            return total - self.tolerance
        seen = count * reduced(site, torch.ones_like(error), particles.layout)  # none where all of it is masked
        return total / torch.where(seen > 0, seen, torch.ones_like(seen)) - self.tolerance


@dataclass(frozen=True)
class LogLikelihoodConstraint:
    """Minus the log density of an observed site is to be at most ``tolerance`` nats for each datum.

    Parameters
    ----------
    site : str
    tolerance : float

    Raises
    ------
    SettingsError
        If the model does not observe ``site``.

    Examples
    --------
    >>> from bayeskit.inference.objectives.constrained import LogLikelihoodConstraint
    >>> LogLikelihoodConstraint("x", 90.0)
    NegativeLogLikelihood(site='x', tolerance=90.0)
    """

    site: str
    tolerance: float

    def __call__(self, particles: Particles) -> Tensor:
        """Return minus the log density less the tolerance, ``(K, *batch)``."""
        site = _observed(particles, self.site)
        return -reduced(site, site_log_density(site["fn"], site["value"]), particles.layout) - self.tolerance


def _observed(particles: Particles, name: str) -> Site:
    site = particles.model_sites.get(name)
    if site is None or not site["is_observed"]:
        names = [n for n, s in particles.model_sites.items() if s["is_observed"]]
        raise SettingsError(f"the constraint is about site {name!r}, but the model observes {', '.join(names)}")
    if len(site["fn"].batch_shape) > particles.layout.nesting + 1:
        which = "an enumerated site" if particles.in_expectation is None else f"site {particles.in_expectation!r}"
        raise GuideError(
            f"the constraint is about site {name!r}, which depends on {which}, enumerated instead of drawn; take the "
            'mark infer={"enumerate": "parallel"} off, or give a function of particles.log_likelihood as constraint'
        )
    return site


class GECO(Objective):
    """The least divergence of guide from prior such that a constraint holds on average over the data.

    The Lagrangian of ``minimise KL subject to E[C] <= 0`` has a positive multiplier, which each training step
    multiplies by ``exp(rate * average)``, where the average is a moving one of the constraint over the steps. The
    loss is the divergence plus the multiplier times the moving average; its gradient passes through the constraint on
    the minibatch at hand.

    Parameters
    ----------
    constraint : callable
        :class:`MeanSquaredError`, :class:`LogLikelihoodConstraint`, or a function that takes
        :class:`~bayeskit.inference.objectives.drawing.Particles` and returns ``C``, ``(K, *batch)``.
    num_particles : int, default 1
    smoothing : float, default 0.99
        Weight of the past in the moving average, in ``[0, 1)``.
    rate : float, default 0.01
        How fast the multiplier grows where the constraint is violated. No step changes it by more than a factor e.
    multiplier : float, default 1.0
        Where it starts.
    bounds : (float, float), default (1e-6, 1e6)
        The multiplier stays between these.
    analytic_kl : bool, default True
        Use the closed form of a site's divergence where there is one.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Attributes
    ----------
    multiplier : Tensor
        A scalar; at the optimum it says how many nats one unit of the tolerance is worth.
    average : Tensor
        Moving average of the constraint, a scalar; NaN before the first step.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Notes
    -----
    For Gaussian data of variance ``v`` in each dimension and a mean squared error of at most ``D < v``, the optimum
    is the rate-distortion function: a divergence of ``log(v / D) / 2`` a dimension, and a multiplier of ``1 / (2 D)``
    on the summed error, or times the number of dimensions on the mean.

    References
    ----------
    Rezende, D. J., Viola, F. (2018). Taming VAEs. arXiv:1810.00597.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives.constrained import GECO, MeanSquaredError
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5))
    >>> objective = GECO(MeanSquaredError("x", 0.01))
    >>> loss = objective.differentiable_loss(model, guide, torch.ones(10))
    >>> bool(objective.multiplier > 1)  # the constraint is violated
    True
    """

    def __init__(
        self,
        constraint: Constraint,
        num_particles: int = 1,
        *,
        smoothing: float = 0.99,
        rate: float = 0.01,
        multiplier: float = 1.0,
        bounds: tuple[float, float] = (1e-6, 1e6),
        analytic_kl: bool = True,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        if not callable(constraint):
            raise SettingsError(f"constraint must be callable, such as MeanSquaredError(site, 0.1), not {constraint!r}")
        if not 0 <= smoothing < 1:
            raise SettingsError(f"smoothing must lie in [0, 1), not {smoothing}")
        if not rate > 0:
            raise SettingsError(f"rate must be positive, not {rate}")
        if not 0 < bounds[0] <= multiplier <= bounds[1]:
            raise SettingsError(
                f"the multiplier must be positive and within its bounds, not {multiplier} with bounds {bounds}"
            )
        self.constraint, self.smoothing, self.rate, self.bounds = constraint, smoothing, rate, bounds
        self.analytic_kl = analytic_kl
        self._first_multiplier = float(multiplier)
        self.reset()

    @property
    def is_moving(self) -> bool:
        """True: the multiplier moves."""
        return True

    def reset(self) -> None:
        """Let the multiplier be where it starts, and forget the average."""
        self.multiplier = torch.tensor(self._first_multiplier, dtype=torch.float64)
        self.average = torch.tensor(math.nan, dtype=torch.float64)

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the Lagrangian of each datum, ``(*batch)``."""
        particles = draw(self.num_particles, analytic_kl=self.analytic_kl)
        particles.require_divergences("GECO")
        constraint = self.constraint(particles)
        if constraint.shape != particles.log_likelihood.shape:
            raise ShapeError(
                f"the constraint has shape {tuple(constraint.shape)}, not that of (particles, *data), "
                f"{tuple(particles.log_likelihood.shape)}"
            )
        here = constraint.detach().mean().to(torch.float64)
        multiplier = self.multiplier.to(here.device)
        if torch.is_grad_enabled():
            past = self.average.to(here.device)
            average = torch.where(past.isnan(), here, self.smoothing * past + (1 - self.smoothing) * here)
            updated = updated_multiplier(multiplier, average, self.rate, self.bounds)
            # A step whose loss is not finite teaches nothing.
            usable = here.isfinite()
            self.average, self.multiplier = (
                torch.where(usable, average, past),
                torch.where(usable, updated, multiplier),
            )
            constraint = constraint + (self.average - here)
        value = -multiplier * constraint
        for divergence in divergences(particles).values():
            value = value - divergence
        return score_function_estimate(value, particles.log_score)

    def state_dict(self) -> dict[str, Tensor]:
        """Return multiplier and moving average."""
        return {"multiplier": self.multiplier, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.multiplier, self.average = state["multiplier"], state["average"]


def updated_multiplier(multiplier: Tensor, average: Tensor, rate: float, bounds: tuple[float, float]) -> Tensor:
    """Return the multiplier after a step within ``bounds``: it grows while the constraint's average is positive."""
    return (multiplier * (rate * average).clamp(-1, 1).exp()).clamp(*bounds)


# The objective of InfoVAE: a divergence of the aggregate posterior from the prior beside that of each datum.


class InfoVAE(Objective):
    """Expected log likelihood, less ``1 - alpha`` divergences of guide from prior and some of their aggregates.

    The aggregate posterior, the guide averaged over the data, is compared with the prior by the squared maximum mean
    discrepancy, with weight ``alpha + weight - 1``, estimated without bias from one draw for each datum of the
    minibatch and as many from the prior.

    Parameters
    ----------
    alpha : float, default 0.0
        Nats of mutual information of data and code are rewarded by ``alpha``.
    weight : float, default 1.0
        Of the divergence of the aggregates. With ``alpha = 0`` and ``weight = 1`` this is the ELBO; with
        ``alpha = 1`` only the aggregates are compared.
    kernel : Kernel, optional
        From :mod:`bayeskit.inference.kernel_discrepancy`; an inverse multiquadric by default.
    num_particles : int, default 1
    analytic_kl : bool, default True
        Use the closed form of a site's divergence where there is one.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If a weight is negative.

    Notes
    -----
    The guide's draws have to carry gradients, and the data to stand in a plate of which each minibatch holds at
    least two items.

    References
    ----------
    Zhao, S., Song, J., Ermon, S. (2019). InfoVAE: balancing learning and inference in variational autoencoders. AAAI.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives.constrained import InfoVAE
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.7))
    >>> loss = InfoVAE(alpha=1.0, weight=10.0).loss(model, guide, torch.randn(50))
    """

    def __init__(
        self,
        alpha: float = 0.0,
        weight: float = 1.0,
        kernel: Kernel | None = None,
        num_particles: int = 1,
        *,
        analytic_kl: bool = True,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        if not (alpha <= 1 and alpha + weight >= 1):
            raise SettingsError(
                f"alpha must be at most 1 and alpha + weight at least 1, so that no divergence is rewarded, not "
                f"alpha={alpha} and weight={weight}"
            )
        self.alpha, self.weight, self.kernel, self.analytic_kl = float(alpha), float(weight), kernel, analytic_kl

    def estimate(self, draw: Draw) -> Tensor:
        """Return the objective of each datum, ``(*batch)``; the aggregates' part is the same for all."""
        particles = draw(self.num_particles, analytic_kl=self.analytic_kl)
        if particles.log_score is not None:
            raise GuideError(
                "InfoVAE needs a guide whose draws carry gradients, but some do not, such as discrete ones; use ELBO"
            )
        particles.require_divergences("InfoVAE")
        value = particles.log_likelihood
        for divergence in divergences(particles).values():
            value = value - (1 - self.alpha) * divergence
        aggregate = self.alpha + self.weight - 1
        if aggregate:
            if particles.in_expectation is not None:
                raise GuideError(
                    f"site {particles.in_expectation!r} is enumerated in the guide, but InfoVAE compares draws with "
                    "the prior's; take the mark out of the guide, or use ELBO"
                )
            codes = _code_vectors(particles.guide_sites, particles.layout)
            prior = _code_vectors(_prior_sites(draw, particles), particles.layout)
            discrepancy = maximum_mean_discrepancy(codes, prior, self.kernel)
            value = value - aggregate * discrepancy.reshape(-1, *(1,) * (value.dim() - 1))
        return value.mean(0)


def _prior_sites(draw: Draw, particles: Particles) -> dict[str, Site]:
    """Return the latent sites with values drawn from the prior instead of the guide."""
    drawn = particles.guide_sites  # the model may sum out others
    latent = {n: site for n, site in particles.model_sites.items() if not site["is_observed"] and n in drawn}
    if len(latent) == 1:
        ((name, site),) = latent.items()
        shape = site["value"].shape[: site["value"].dim() - site["fn"].event_dim]
        fn = site["fn"].expand(shape)
        return {name: {**site, "value": fn.rsample() if fn.has_rsample else draw_from(fn)}}
    model, layout = draw.model, particles.layout
    if layout.num_particles > 1:
        model = pyro.plate(PARTICLES, layout.num_particles, dim=-layout.nesting - 1)(model)
    with poutine.block(), MendedDraws():
        nodes: Any = poutine.trace(model).get_trace(*draw.args, **draw.kwargs).nodes
    return {name: nodes[name] for name in latent}


def _code_vectors(sites: dict[str, Site], layout: Layout) -> Tensor:
    """Return the latent values of each datum as a vector, ``(K, data, features)``; SettingsError below two data."""
    data = sorted(plate.dim for plate in layout.plates.values())
    count = math.prod(layout.batch_shape)
    if count < 2:
        raise SettingsError(
            "the aggregate posterior needs latent variables in a plate of data, and at least two items in a minibatch"
        )
    parts = []
    for name in sorted(name for name, site in sites.items() if not site["is_observed"]):
        value, events = sites[name]["value"], sites[name]["fn"].event_dim
        plates = layout.nesting + 1
        value = value.reshape((1,) * (plates + events - value.dim()) + tuple(value.shape))
        shape = list(value.shape)
        shape[0] = layout.num_particles
        for plate in layout.plates.values():
            shape[plates + plate.dim] = plate.size
        value = value.expand(shape).movedim([plates + d for d in data], list(range(1, 1 + len(data))))
        parts.append(value.reshape(layout.num_particles, count, -1))
    return torch.cat(parts, -1)
