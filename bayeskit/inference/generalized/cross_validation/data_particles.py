"""Populations of particles that are carried from one part of the data to another, each population to its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import InitializationError
from bayeskit.inference.generalized.cross_validation.weighted_data import WeightedData
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.smc.pilot import learn_metric
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.inference.samplers.smc.resampling import effective_share, next_temperature, systematic

TRAJECTORY = math.pi / 2  # a quarter period of a whitened normal posterior
LEARNING_RATE = 2.0
MIN_STEP_SIZE, MAX_STEPS = 1e-4, 64
MAX_SEARCH = 20  # trajectories, in one place, for a step size that is accepted at all
PLANNED_CALLS = 500
RESAMPLE_BELOW = 0.9
LOWEST = -1e30  # stands for minus infinity, where differences must stay numbers


class Particles(NamedTuple):
    """``r`` populations of ``N`` weighted particles, each population given its own part of ``n`` data."""

    position: Tensor  # (r, N, d)
    pointwise: Tensor  # (r, N, n), log likelihood of every datum, whether it counts or not
    log_weight: Tensor  # (r, N), normalised over N, double precision
    data_weights: Tensor  # (r, n), how often each datum counts, double precision
    step_size: float
    acceptance: float  # least mean acceptance of the moves so far
    num_evaluations: int


@dataclass(frozen=True)
class Carriage:
    """How particles are carried: by adaptive reweighting, resampling and Hamiltonian moves.

    A datum enters with the power of its likelihood that the particles can bear, then with more, until it counts in
    full. Particles move only where their weights have become uneven: the more data there are, the less a further one
    changes, and the rarer that is.

    Parameters
    ----------
    ess_threshold : float in (0, 1), default 0.8
        Conditional effective share that a reweighting leaves at least.
    move_below : float in (0, 1), default 0.5
        Particles are resampled and moved when the effective share of a population falls under this.
    num_moves : int, default 3
        Trajectories of a particle each time.
    target_acceptance : float in (0, 1), default 0.9

    References
    ----------
    Chopin, N. (2002). A sequential particle filter method for static models. Biometrika 89, 539-552.

    Examples
    --------
    >>> Carriage(num_moves=5).num_moves
    5
    """

    ess_threshold: float = 0.8
    move_below: float = 0.5
    num_moves: int = 3
    target_acceptance: float = 0.9

    def __post_init__(self) -> None:
        for name in ("ess_threshold", "move_below", "target_acceptance"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), between=(0, 1)))
        object.__setattr__(self, "num_moves", whole_number("num_moves", self.num_moves, 1))

    def carry(
        self, data: WeightedData, state: Particles, weights: Tensor, generator: torch.Generator
    ) -> tuple[Particles, Tensor]:
        """Carry each population in a straight line to other weights of the data.

        Parameters
        ----------
        data : WeightedData
        state : Particles
        weights : Tensor
            Shape ``(r, n)``.
        generator : torch.Generator

        Returns
        -------
        state : Particles
        log_increment : Tensor
            Shape ``(r,)``: estimates of the log ratio of normalising constants.
        """
        origin, direction = state.data_weights, weights - state.data_weights
        covered = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
        total = torch.zeros_like(covered)
        while bool((covered < 1).any()):
            log_ratio = (state.pointwise * direction.unsqueeze(1)).sum(-1)
            reached = next_temperature(state.log_weight, log_ratio, covered, self.ess_threshold)
            log_weight = state.log_weight + (reached - covered).unsqueeze(-1) * log_ratio
            increment = log_weight.logsumexp(-1)
            total = total + increment
            covered = reached
            share = covered.unsqueeze(-1)
            between = torch.where(share >= 1, weights, origin + share * direction)
            state = state._replace(log_weight=log_weight - increment.unsqueeze(-1), data_weights=between)
            if bool((effective_share(state.log_weight) < self.move_below).any()):
                state = self.rejuvenate(data, state, generator)
        return state, total

    def rejuvenate(self, data: WeightedData, state: Particles, generator: torch.Generator) -> Particles:
        """Resample populations of uneven weights, and move all particles."""
        metric = _shared_metric(state)
        state = _resampled(state, generator)
        r, n, d = state.position.shape
        part = data.counting(state.data_weights)
        kernel = _kernel(state.step_size, metric, r)
        chains = kernel.init(part, state.position.reshape(-1, d))
        moves, tried, calls, acceptance = 0, 0, 1, 1.0
        while moves < self.num_moves:
            chains, info = kernel.step(part, chains, generator=generator)
            calls += GRADIENTS_PER_STEP * kernel.num_steps
            acceptance = float(info.acceptance_rate.mean())
            step = kernel.step_size * math.exp(LEARNING_RATE * (acceptance - self.target_acceptance))
            kernel = _kernel(min(max(step, MIN_STEP_SIZE), TRAJECTORY), metric, r)
            tried += 1
            # A step size that is far off says nothing on how many moves are needed.
            moves += acceptance >= 0.5 * self.target_acceptance or tried >= MAX_SEARCH
        position = chains.position.reshape(r, n, d)
        return state._replace(
            position=position,
            pointwise=_pointwise(data, position),
            step_size=kernel.step_size,
            acceptance=min(state.acceptance, acceptance),
            num_evaluations=state.num_evaluations + (calls + 1) * r * n,
        )


def from_prior(data: WeightedData, num_populations: int, num_particles: int, generator: torch.Generator) -> Particles:
    """Draw populations from the prior: none of the data count.

    Raises
    ------
    InitializationError
        If a datum has no likelihood at any draw.
    """
    position = data.target.sample_prior(num_populations * num_particles, generator)
    state = at(data, position.reshape(num_populations, num_particles, -1), 0.0)
    hopeless = (state.pointwise <= LOWEST / 2).all(1).all(0)
    if bool(hopeless.any()):
        raise InitializationError(
            f"the likelihood of datum {int(hopeless.nonzero()[0])} is zero at all {len(position)} prior draws; check "
            "that data and likelihood fit, or use more particles"
        )
    return state


def at(data: WeightedData, position: Tensor, count: float) -> Particles:
    """Return equally weighted particles at ``position (r, N, d)``, every datum counting ``count`` times."""
    r, n, _ = position.shape
    like = {"dtype": torch.float64, "device": position.device}
    return Particles(
        position,
        _pointwise(data, position),
        torch.full((r, n), -math.log(n), **like),  # type: ignore[call-overload]
        torch.full((r, data.num_data), count, **like),  # type: ignore[call-overload]
        TRAJECTORY / 2,
        1.0,
        r * n,
    )


def merged(state: Particles, copies: int) -> Particles:
    """Make one population of each ``copies`` neighbours, which are given the same data."""
    return state._replace(
        position=state.position.unflatten(0, (-1, copies)).flatten(1, 2),
        pointwise=state.pointwise.unflatten(0, (-1, copies)).flatten(1, 2),
        log_weight=state.log_weight.unflatten(0, (-1, copies)).flatten(1, 2) - math.log(copies),
        data_weights=state.data_weights[::copies],
    )


class Predictive(NamedTuple):
    """The log predictive density of data, given what each population has seen."""

    log_density: Tensor  # (r, n), with the bias of the logarithm removed to first order
    effective: Tensor  # (r, n), number of particles that the density of a datum rests on
    influence: Tensor  # (r, N, n), of each particle on the log density


def predict(state: Particles) -> Predictive:
    """Predict every datum, seen or not."""
    log_weight = state.log_weight.unsqueeze(-1)
    log_density = (log_weight + state.pointwise).logsumexp(1)
    relative = (state.pointwise - log_density.unsqueeze(1)).exp()
    influence = log_weight.exp() * (relative - 1)
    effective = 1 / (2 * (log_weight + relative.log())).exp().sum(1)
    # E log X is below log E X by half the relative variance of X.
    return Predictive(log_density + influence.square().sum(1) / 2, effective, influence)


def _kernel(step_size: float, metric: Metric, num_populations: int) -> PopulationHMC:
    steps = min(max(1, round(TRAJECTORY / step_size)), MAX_STEPS)
    kernel = PopulationHMC(step_size, steps, metric, 1.0, planned_calls=PLANNED_CALLS)
    return replace(kernel, num_populations=num_populations)


def _shared_metric(state: Particles) -> Metric:
    """Learn the covariance within populations, which differ in where they are more than in how wide."""
    weight = state.log_weight.exp().to(state.position.dtype).unsqueeze(-1)
    centred = state.position - (weight * state.position).sum(1, keepdim=True)
    log_weight = state.log_weight - math.log(len(state.log_weight))
    return learn_metric(centred.flatten(0, 1), log_weight.flatten())


def _resampled(state: Particles, generator: torch.Generator) -> Particles:
    needed = (effective_share(state.log_weight) < RESAMPLE_BELOW).unsqueeze(-1)
    n = state.log_weight.shape[-1]
    index = torch.where(needed, systematic(state.log_weight, generator), torch.arange(n, device=needed.device))
    at_rows = index.unsqueeze(-1)
    return state._replace(
        position=state.position.gather(1, at_rows.expand_as(state.position)),
        pointwise=state.pointwise.gather(1, at_rows.expand_as(state.pointwise)),
        log_weight=torch.where(needed, -math.log(n), state.log_weight),
    )


def _pointwise(data: WeightedData, position: Tensor) -> Tensor:
    """Return the log likelihoods in double precision; what is not a number has none."""
    each = data.pointwise(position).to(torch.float64)
    return each.nan_to_num(nan=LOWEST, posinf=LOWEST, neginf=LOWEST).clamp(min=LOWEST)
