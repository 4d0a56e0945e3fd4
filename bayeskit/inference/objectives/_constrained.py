"""GECO (training under a constraint) and InfoVAE (divergence of the aggregate posterior)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number
from bayeskit._logdensity.pyro_distributions import draw_values as draw_from
from bayeskit.errors import GuideError, SettingsError, ShapeError
from bayeskit.inference._kernel_discrepancy import Kernel, maximum_mean_discrepancy
from bayeskit.inference.objectives._drawing import Layout, Particles, Site, reduced, site_log_density, supplied_sites
from bayeskit.inference.objectives._evidence_lower_bound import divergences, score_function_estimate
from bayeskit.inference.objectives._objective import Draw, Objective

# GECO: minimize the divergence from the prior subject to a constraint on reconstruction.

Constraint = Callable[[Particles], Tensor]


@dataclass(frozen=True)
class MeanSquaredError:
    """Constraint on the squared error of an observed site's mean: at most ``tolerance``.

    Parameters
    ----------
    tolerance : float
        Largest allowed error per observation, averaged over its dimensions or summed.
    summed : bool, default False
        Sum the squared error over the dimensions of an observation instead of averaging.

    Raises
    ------
    SettingsError
        If ``tolerance`` is not positive, or the model does not observe ``site``.

    Examples
    --------
    >>> from bayeskit.inference.objectives._constrained import MeanSquaredError
    >>> MeanSquaredError("x", 0.1)
    MeanSquaredError(site='x', tolerance=0.1, summed=False)
    """

    site: str
    tolerance: float
    summed: bool = False

    def __post_init__(self) -> None:
        real_number("tolerance", self.tolerance, "(0, inf)")

    def __call__(self, particles: Particles) -> Tensor:
        """Return the error minus the tolerance, ``(K, *batch)``."""
        site = _observed(particles, self.site)
        error = (site["value"] - site["fn"].mean).square()
        events = site["fn"].event_dim
        count = math.prod(error.shape[error.dim() - events :])
        error = error.flatten(error.dim() - events).sum(-1) if events else error
        total = reduced(site, error, particles.layout)
        if self.summed:
            return total - self.tolerance
        seen = count * reduced(site, torch.ones_like(error), particles.layout)  # zero if fully masked
        return total / torch.where(seen > 0, seen, torch.ones_like(seen)) - self.tolerance


@dataclass(frozen=True)
class LogLikelihoodConstraint:
    """Constraint on the negative log likelihood of an observed site: at most ``tolerance`` nats per observation.

    SettingsError if the model does not observe ``site``.

    Examples
    --------
    >>> from bayeskit.inference.objectives._constrained import LogLikelihoodConstraint
    >>> LogLikelihoodConstraint("x", 90.0)
    LogLikelihoodConstraint(site='x', tolerance=90.0)
    """

    site: str
    tolerance: float

    def __call__(self, particles: Particles) -> Tensor:
        """Return the negative log density minus the tolerance, ``(K, *batch)``."""
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
    """KL divergence of guide from prior, minimized subject to a constraint on average over the data.

    The loss is the Lagrangian of ``minimize KL subject to E[C] <= 0``: the divergence plus a positive multiplier times
    a moving average of the constraint over steps. Its gradient uses the constraint on the current minibatch. Each
    training step multiplies the multiplier by ``exp(rate * average)``.

    Parameters
    ----------
    constraint : callable
        :class:`MeanSquaredError`, :class:`LogLikelihoodConstraint`, or a function that takes
        :class:`~bayeskit.inference.objectives._drawing.Particles` and returns ``C``, ``(K, *batch)``.
    smoothing : float, default 0.99
        Weight of previous steps in the moving average, in ``[0, 1)``.
    rate : float, default 0.01
        Growth rate of the log multiplier per unit of violation; one step changes it by at most a factor e.
    multiplier : float, default 1.0
        Initial value.
    bounds : (float, float), default (1e-6, 1e6)
        Range of the multiplier.
    analytic_kl, max_plate_nesting, data_plate
        As in :class:`ELBO`.

    Attributes
    ----------
    multiplier : Tensor
        Scalar; at the optimum, the change of the divergence in nats per unit of tolerance.
    average : Tensor
        Scalar moving average of the constraint; NaN before the first step.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    Notes
    -----
    For Gaussian data with variance ``v`` in each dimension and mean squared error at most ``D < v``, the optimum is
    the rate-distortion function: a divergence of ``log(v / D) / 2`` per dimension. The multiplier is ``1 / (2 D)`` for
    the summed error, and that value times the number of dimensions for the mean error.

    References
    ----------
    Rezende, D. J., Viola, F. (2018). Taming VAEs. arXiv:1810.00597.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives._constrained import GECO, MeanSquaredError
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
        smoothing = real_number("smoothing", smoothing, "[0, 1)")
        if len(bounds) != 2:
            raise SettingsError(f"bounds must be a least and a largest multiplier, not {bounds}")
        bounds = (real_number("bounds", bounds[0]), real_number("bounds", bounds[1]))
        if not 0 < bounds[0] <= multiplier <= bounds[1]:
            raise SettingsError(
                f"the multiplier must be positive and within its bounds, not {multiplier} with bounds {bounds}"
            )
        self.constraint, self.smoothing, self.bounds = constraint, smoothing, bounds
        self.rate = real_number("rate", rate, "(0, inf)")
        self.analytic_kl = analytic_kl
        self._first_multiplier = float(multiplier)
        self.reset()

    @property
    def is_moving(self) -> bool:
        """True: the multiplier changes during training."""
        return True

    def reset(self) -> None:
        """Reset the multiplier to its initial value and the average to NaN."""
        self.multiplier = torch.tensor(self._first_multiplier, dtype=torch.float64)
        self.average = torch.tensor(math.nan, dtype=torch.float64)

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the Lagrangian for each observation, ``(*batch)``."""
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
            usable = here.isfinite()  # a step with a non-finite loss does not update multiplier and average
            self.average = torch.where(usable, average, past)
            self.multiplier = torch.where(usable, updated, multiplier)
            constraint = constraint + (self.average - here)
        value = -multiplier * constraint
        for divergence in divergences(particles).values():
            value = value - divergence
        return score_function_estimate(value, particles.log_score)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the multiplier and the moving average."""
        return {"multiplier": self.multiplier, "average": self.average}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.multiplier, self.average = state["multiplier"], state["average"]


def updated_multiplier(multiplier: Tensor, average: Tensor, rate: float, bounds: tuple[float, float]) -> Tensor:
    """Return the multiplier after a step within ``bounds``: it grows while the constraint's average is positive."""
    return (multiplier * (rate * average).clamp(-1, 1).exp()).clamp(*bounds)


# InfoVAE: divergences from the prior of the aggregate posterior and of each observation's posterior.


class InfoVAE(Objective):
    """InfoVAE: the ELBO with weight ``1 - alpha`` on the KL divergence and an aggregate-posterior penalty.

    The penalty is ``alpha + weight - 1`` times the squared maximum mean discrepancy between the aggregate posterior
    (the guide averaged over the data) and the prior. It is estimated without bias from one guide draw per
    observation of the minibatch and the same number of prior draws.

    Parameters
    ----------
    alpha : float, default 0.0
        Reward per nat of mutual information between observation and latent code. With 1 the KL divergence has weight
        zero.
    weight : float, default 1.0
        Weight of the aggregate divergence. ``alpha = 0`` and ``weight = 1`` give the ELBO.
    kernel : Kernel, optional
        Kernel from :func:`bayeskit.inference.maximum_mean_discrepancy`; an inverse multiquadric by default.
    analytic_kl, max_plate_nesting, data_plate
        As in :class:`ELBO`.

    Raises
    ------
    SettingsError
        If a weight is negative.

    Notes
    -----
    The guide must be reparameterized, and the data must be in a plate with at least two items per minibatch.

    References
    ----------
    Zhao, S., Song, J., Ermon, S. (2019). InfoVAE: balancing learning and inference in variational autoencoders. AAAI.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives._constrained import InfoVAE
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
        """Return the objective for each observation, ``(*batch)``; the aggregate penalty is the same for all."""
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
    drawn = particles.guide_sites  # the model may sum out other sites
    latent = {n: site for n, site in particles.model_sites.items() if not site["is_observed"] and n in drawn}
    if len(latent) == 1:
        ((name, site),) = latent.items()
        shape = site["value"].shape[: site["value"].dim() - site["fn"].event_dim]
        fn = site["fn"].expand(shape)
        return {name: {**site, "value": fn.rsample() if fn.has_rsample else draw_from(fn)}}
    sites = supplied_sites(draw.model, draw.args, draw.kwargs, particles.layout, {}, lambda name, fn: None)
    return {name: sites[name] for name in latent}


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
