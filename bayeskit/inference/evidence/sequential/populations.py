"""Populations of particles that move as one batch: each at a density and with a step size of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluator
from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.smc.pilot import LEARNING_RATE, MAX_STEPS, MIN_STEP_SIZE, TRAJECTORY, learn_metric
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.inference.samplers.smc.resampling import bounded, conditional_share, next_temperature
from bayeskit.inference.samplers.smc.run import SMCRun
from bayeskit.inference.samplers.smc.stages import SMCInfo, SMCState, resample
from bayeskit.target import Target

PLANNED_CALLS = 200
WORTHWHILE = 0.9  # a move that leaves more than this of a correlation is not
MAX_SEARCH = 200  # gradient calls, in one stage, for step sizes that are accepted at all


class Moved(NamedTuple):
    """Populations after their moves."""

    particles: SMCState
    step_size: Tensor  # (r,)
    num_moves: int
    correlation: Tensor  # (), of the log likelihood with its value before
    acceptance_rate: Tensor  # (r,), of the last move
    diverging: Tensor  # (r,), of the last move
    num_evaluations: int


@dataclass(frozen=True)
class Moves:
    """How populations move: each by its own step size, all by the same number of trajectories.

    A metric must not be learnt on the very particles that it moves: they are led to where they were, and the evidence
    comes out too low, by several standard errors where there are few of them. So half of the populations move by what
    the other half has learnt.

    Parameters
    ----------
    max_correlation : float in (0, 1), default 0.5
        Moves end when no coordinate, nor the log likelihood, correlates more than this with its value before, or the
        last move has lowered no such correlation by a tenth.
    max_moves : int, default 20
        They end here in any case.
    target_acceptance : float in (0, 1), default 0.9

    References
    ----------
    Buchholz, A., Chopin, N., Jacob, P. E. (2021). Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte
    Carlo. Bayesian Analysis 16, 745-771.

    Examples
    --------
    >>> import torch
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers.smc.stages import start
    >>> target = exact.get("beta_binomial").target()
    >>> generator = torch.Generator().manual_seed(0)
    >>> particles = start(target, 4, 64, generator)
    >>> metric, step_size = crossed_metrics(particles), first_step_size(particles)
    >>> moved = Moves().run(target.evaluator(256), particles, metric, step_size, generator)
    >>> moved.particles.position.shape, moved.step_size.shape, 1 <= moved.num_moves <= 20
    (torch.Size([4, 64, 1]), torch.Size([4]), True)
    """

    max_correlation: float = 0.5
    max_moves: int = 20
    target_acceptance: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_correlation", "target_acceptance"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), between=(0, 1)))
        object.__setattr__(self, "max_moves", whole_number("max_moves", self.max_moves, 1))

    def run(
        self, evaluate: Evaluator, particles: SMCState, metric: Metric, step_size: Tensor, generator: torch.Generator
    ) -> Moved:
        """Move until little is left of where the particles were; tune the step sizes meanwhile.

        Parameters
        ----------
        evaluate : callable
            ``(u (r * n, d), ones (r * n,)) -> Evaluation`` of the density that each population has reached.
        particles : SMCState
            ``r`` populations of ``n``.
        metric : Metric
            One for each population, as from :func:`crossed_metrics` before particles were resampled.
        step_size : Tensor
            Shape ``(r,)``.
        generator : torch.Generator
        """
        r, n, d = particles.position.shape
        weight = particles.log_weight.exp()
        before = _summaries(particles.position, particles.log_likelihood)
        pooled = particles.log_weight.flatten() - math.log(r)
        target = cast(Target, _Evaluated(evaluate))  # a kernel asks it for nothing but its evaluator
        kernel = _kernel(metric, step_size)
        chains = kernel.init(target, particles.position.reshape(r * n, d))
        calls, moves, busy = 1, 0, True
        correlation = torch.ones_like(before[0])
        while busy and moves < self.max_moves:
            kernel = _kernel(metric, step_size)
            chains, info = kernel.step(target, chains, generator=generator)
            calls += GRADIENTS_PER_STEP * kernel.num_steps
            acceptance = (weight * info.acceptance_rate.reshape(r, n)).sum(-1)
            step_size = step_size * (LEARNING_RATE * (acceptance - self.target_acceptance)).exp()
            step_size = step_size.clamp(MIN_STEP_SIZE, TRAJECTORY)
            if float(acceptance.mean()) < 0.5 * self.target_acceptance and calls < MAX_SEARCH:
                continue  # step sizes that are far off, as they may be at first, say nothing on how many are needed
            now = _correlation(
                before, _summaries(chains.position.reshape(r, n, d), chains.log_likelihood.reshape(r, n)), pooled
            )
            # A coordinate that is held where it is, as by two modes, is not worth more moves.
            busy = bool(((now >= self.max_correlation) & (now < WORTHWHILE * correlation)).any())
            moves, correlation = moves + 1, now
        return Moved(
            particles._replace(
                position=chains.position.reshape(r, n, d),
                log_prior=chains.log_prior.reshape(r, n),
                log_likelihood=chains.log_likelihood.reshape(r, n),
            ),
            step_size,
            moves,
            correlation[-1],
            acceptance,
            (weight * info.diverging.reshape(r, n)).sum(-1),
            calls * r * n,
        )


def first_step_size(particles: SMCState) -> Tensor:
    """Return where the tuning of each population's step size starts, ``(r,)``."""
    return torch.full_like(particles.log_weight[:, 0], TRAJECTORY / 2)


def next_step(log_weight: Tensor, log_ratio: Tensor, covered: Tensor, threshold: float) -> Tensor:
    """Return how far the populations can go on their way to one, all as far as each other, ``(r,)``.

    A population that chose its own way by its own particles would, on average, be too low in what it says of the
    evidence; all of them together are so by a number that falls with theirs. Without any likelihood at all they go to
    the end.

    Parameters
    ----------
    log_weight, log_ratio : Tensor
        Shape ``(r, n)``: weights, and the log of what they are to be multiplied by on all of the way.
    covered : Tensor
        Where the populations are, ``(r,)``, equal numbers.
    threshold : float
        Conditional effective share that the step leaves, of all particles together.
    """
    weight = (log_weight.flatten() - math.log(len(log_weight))).unsqueeze(0)
    ratio, at = log_ratio.flatten().unsqueeze(0), covered[:1]
    whole = (1 - at).unsqueeze(-1)
    change = torch.where(whole > 0, whole * ratio, 0.0)
    if bool((conditional_share(weight, change) >= threshold).all()):
        return torch.ones_like(covered)  # as it is for most of many data
    if bool(((ratio == -torch.inf) | (weight == -torch.inf)).all()):
        return torch.ones_like(covered)
    return next_temperature(weight, ratio, at, threshold).expand_as(covered).clone()


def weigh(state: SMCState, log_ratio: Tensor, step: Tensor) -> tuple[SMCState, Tensor, Tensor]:
    """Multiply weights by a power of what stands on the way; ``step (r,)`` is zero for populations that wait.

    Returns
    -------
    state : SMCState
    log_increment, conditional_share : Tensor
        Shape ``(r,)``. A population without likelihood gets ``-inf`` and equal weights.
    """
    step = step.unsqueeze(-1)
    # Zero times minus infinity is not a number.
    change = torch.where(step > 0, step * log_ratio, torch.zeros_like(log_ratio))
    left = conditional_share(state.log_weight, change).nan_to_num(nan=0.0)
    log_weight = state.log_weight + change
    increment = log_weight.logsumexp(-1)
    alive = increment.isfinite().unsqueeze(-1)
    log_weight = torch.where(alive, log_weight - increment.unsqueeze(-1), -math.log(log_weight.shape[-1]))
    return state._replace(log_weight=log_weight), increment, left


def crossed_metrics(particles: SMCState) -> Metric:
    """Learn a metric for each half of the populations from the weighted particles of the other half."""
    r = len(particles.position)
    half = (r + 1) // 2
    learnt = [
        learn_metric(x.flatten(0, 1), (log_weight - math.log(len(log_weight))).flatten())
        for x, log_weight in zip(particles.position.split(half), particles.log_weight.split(half), strict=True)
    ]
    # A population that is alone has only itself to learn from.
    factors = [learnt[-1].factor] * half + [learnt[0].factor] * (r - half)
    return Metric(torch.stack(factors), learnt[0].is_dense)


def finished_run(
    target: Target, particles: SMCState, info: SMCInfo, num_gradients: int, settings: dict[str, Any]
) -> SMCRun:
    """Gather what populations that are at the posterior have done; the draws are their particles, resampled.

    Parameters
    ----------
    target : Target
    particles : SMCState
    info : SMCInfo
        Of all stages, ``(r, K)``.
    num_gradients : int
    settings : dict
        How the run was made, its seed among it.
    """
    generator = new_generator(settings["seed"], target.device, "draws of populations")
    particles = resample(particles, generator, below=1.0)
    draws = Draws(
        particles.position,
        particles.log_prior,
        particles.log_likelihood,
        torch.ones_like(particles.position[:, 0, 0]),
        {},
        num_gradients,
        0.0,
        settings,
        target,
    )
    return SMCRun(draws, None, torch.ones(info.log_increment.shape[1]), info, float(particles.undefined_share))


class _Evaluated:
    """What a kernel needs of a target."""

    def __init__(self, evaluate: Evaluator) -> None:
        self._evaluate = evaluate

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        return self._evaluate


def _kernel(metric: Metric, step_size: Tensor) -> PopulationHMC:
    """Return a kernel whose metrics hold the step sizes; a trajectory has as many steps as they need on average."""
    steps = round(TRAJECTORY / float(step_size.log().mean().exp()))
    scale = step_size.to(metric.factor.dtype).reshape(-1, *(1,) * (metric.factor.dim() - 1))
    scaled = Metric(metric.factor * scale, metric.is_dense)
    return PopulationHMC(1.0, min(max(1, steps), MAX_STEPS), scaled, 1.0, len(step_size), planned_calls=PLANNED_CALLS)


def _summaries(position: Tensor, log_likelihood: Tensor) -> Tensor:
    """Return what must be forgotten, ``(r * n, d + 1)``: where each particle is within its population."""
    columns = torch.cat([position, log_likelihood.unsqueeze(-1)], -1)
    # Populations differ in how far they are, which no move changes.
    centred = columns - columns.median(1, keepdim=True).values
    return centred.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).flatten(0, 1)


def _correlation(before: Tensor, after: Tensor, log_weight: Tensor) -> Tensor:
    """Return the correlation of each column before and after, over all populations, tails cut off."""
    weight = log_weight.exp().to(before.dtype).unsqueeze(-1)
    x, y = (bounded(column, log_weight)[0] for column in (before, after))
    x, y = x - (weight * x).sum(0), y - (weight * y).sum(0)
    size = ((weight * x * x).sum(0) * (weight * y * y).sum(0)).sqrt()
    return torch.where(size > 0, (weight * x * y).sum(0) / size, torch.zeros_like(size))
