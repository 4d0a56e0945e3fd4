"""Thermodynamic variational objective: the log marginal likelihood as an integral over inverse temperatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.process_state import process_state
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives._objective import Draw, Objective, with_gradient_of


@runtime_checkable
class TemperatureSchedule(Protocol):
    """Grid of inverse temperatures from the guide (0) to the posterior (1)."""

    def __call__(self, log_weight: Tensor) -> Tensor:
        """Return ``num_intervals + 1`` inverse temperatures from 0 to 1, given log weights ``(K, *batch)``."""
        ...


@dataclass(frozen=True)
class LogUniform:
    """Inverse temperatures: zero, then log-spaced from ``smallest`` to one.

    Parameters
    ----------
    num_intervals : int, default 2
        With 1 the lower bound is the ELBO.
    smallest : float, default 0.025
        Smallest positive inverse temperature; ignored with one interval.

    Examples
    --------
    >>> import torch
    >>> LogUniform(3, smallest=0.01)(torch.zeros(4))
    tensor([0.0000, 0.0100, 0.1000, 1.0000])
    """

    num_intervals: int = 2
    smallest: float = 0.025

    def __post_init__(self) -> None:
        whole_number("num_intervals", self.num_intervals, least=1)
        real_number("smallest", self.smallest, "(0, 1)")

    def __call__(self, log_weight: Tensor) -> Tensor:
        """Return the inverse temperatures, independent of the weights."""
        exponent = torch.linspace(1.0, 0.0, self.num_intervals, dtype=log_weight.dtype, device=log_weight.device)
        inner = self.smallest**exponent if self.num_intervals > 1 else torch.ones_like(exponent)
        return torch.cat([inner.new_zeros(1), inner])


@dataclass(frozen=True)
class EqualMoments:
    """Inverse temperatures with equal increments of the expected log weight, averaged over the batch.

    References
    ----------
    Grosse, R., Maddison, C. J., Salakhutdinov, R. (2013). Annealing between distributions by averaging moments.
    NeurIPS.

    Examples
    --------
    >>> import torch
    >>> EqualMoments(2)(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.4706, 1.0000])
    """

    num_intervals: int = 2

    def __post_init__(self) -> None:
        whole_number("num_intervals", self.num_intervals, least=1)

    def __call__(self, log_weight: Tensor) -> Tensor:
        """Return the inverse temperatures for these weights."""
        log_weight = log_weight.detach().flatten(1) if log_weight.dim() > 1 else log_weight.detach()[:, None]
        low = log_weight.new_zeros(self.num_intervals + 1)
        high = torch.ones_like(low)
        first, last = tempered_means(log_weight, torch.stack([low[0], high[0]])).mean(1)
        wanted = first + (last - first) * torch.linspace(0.0, 1.0, len(low), dtype=low.dtype, device=low.device)
        for _ in range(torch.finfo(low.dtype).bits):
            middle = (low + high) / 2
            below = tempered_means(log_weight, middle).mean(1) < wanted
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        cuts = high.sort().values
        cuts[0], cuts[-1] = 0.0, 1.0
        return cuts


def _tempered_weights(log_weight: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Return self-normalised weights at each inverse temperature: ``(K, *batch)`` to ``(T, K, *batch)``."""
    beta = inverse_temperature.reshape(-1, *(1,) * log_weight.dim())
    return (beta * log_weight).softmax(1)


def tempered_means(log_weight: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Return the expected log weight at each inverse temperature: ``(K, *batch)`` to ``(T, *batch)``."""
    return (_tempered_weights(log_weight, inverse_temperature) * log_weight).sum(1)


def thermodynamic_bounds(log_weight: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return left and right Riemann sums of the expected log weight, lower and upper bound, each ``(*batch)``."""
    # log_weight: (K, *batch); inverse_temperature: (T + 1,), increasing from 0 to 1. Expectations are self-normalized,
    # so the upper bound is biased downward with finitely many particles.
    means = tempered_means(log_weight, inverse_temperature)
    steps = inverse_temperature.diff().reshape(-1, *(1,) * (means.dim() - 1))
    return (steps * means[:-1]).sum(0), (steps * means[1:]).sum(0)


def thermodynamic_estimate(
    log_model: Tensor, log_guide: Tensor, inverse_temperature: Tensor, log_score: Tensor | None = None
) -> Tensor:
    """Return the lower bound, ``(*batch)``, with its gradient by covariances."""
    # log_model, log_guide: (K, *batch) with K >= 2, at draws without a gradient; inverse_temperature: (T + 1,),
    # increasing from 0 to 1; log_score: (K, *batch), log density of the draws without scale or mask, default log_guide.
    # The derivative of an expectation under the tempered density is the expected derivative plus the covariance with
    # the derivative of the unnormalized log density: log_score plus beta times the log weight.
    log_score = log_guide if log_score is None else log_score
    log_weight = (log_model - log_guide).detach()
    weights = _tempered_weights(log_weight, inverse_temperature[:-1])
    means = (weights * log_weight).sum(1)
    shape = (-1, *(1,) * (weights.dim() - 1))
    step, beta = inverse_temperature.diff().reshape(shape), inverse_temperature[:-1].reshape(shape)
    mean_weight = (step * weights).sum(0)
    # Correct deviations from a mean of the same draws, which are too small; exact at inverse temperature zero.
    unbiased = len(log_weight) / (len(log_weight) - 1)
    deviation = unbiased * step * weights * (log_weight - means[:, None])
    factor = mean_weight + (beta * deviation).sum(0)
    value = (step[:, 0] * means).sum(0)
    return with_gradient_of(value, (factor * (log_model - log_guide) + deviation.sum(0) * log_score).sum(0))


class TVO(Objective):
    """Thermodynamic variational objective: a lower bound from a Riemann sum over inverse temperatures.

    The log marginal likelihood is the integral over inverse temperatures from 0 to 1 of the expected log weight under
    densities between guide and posterior. The integrand is increasing, so the left Riemann sum is a lower bound. All
    expectations reuse the same draws, with weights raised to the inverse temperature. Draws need not be
    reparameterized.

    Parameters
    ----------
    num_particles : int, default 16
        At least two.
    schedule : TemperatureSchedule, optional
        ``LogUniform()`` by default; ``EqualMoments()`` adapts to the weights.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If ``num_particles`` is less than 2.

    Notes
    -----
    Values and gradients at positive inverse temperatures are self-normalized; their bias is of order one over the
    number of particles.

    References
    ----------
    Masrani, V., Le, T. A., Wood, F. (2019). The thermodynamic variational objective. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import TVO
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior
    >>> x = torch.tensor(1.0)
    >>> lower, upper = TVO(num_particles=4).bounds(model, guide, x)
    >>> bool((upper - lower < 1e-5).all() and (lower - dist.Normal(0.0, 2**0.5).log_prob(x)).abs().max() < 1e-5)
    True
    """

    def __init__(
        self,
        num_particles: int = 16,
        schedule: TemperatureSchedule | None = None,
        *,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(
            num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            chunk_size=chunk_size,
            data_plate=data_plate,
        )
        if num_particles < 2:
            raise SettingsError("num_particles must be at least 2: the gradient of TVO is a covariance over particles")
        self.schedule = LogUniform() if schedule is None else schedule

    def estimate(self, draw: Draw) -> Tensor:
        """Return the lower bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles, detached=True)
        log_model, log_guide = particles.log_model, particles.log_guide_total
        schedule = self.schedule(particles.log_weight.detach())
        return thermodynamic_estimate(log_model, log_guide, schedule, particles.log_score)

    def bounds(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return lower and upper bound for each observation, ``(*batch)`` each, without gradients."""
        with process_state(), torch.no_grad():
            log_weight = Draw(self, model, guide, args, kwargs)(self.num_particles).log_weight
            return thermodynamic_bounds(log_weight, self.schedule(log_weight))
