"""Populations of weighted particles, carried through a sequence of distributions by resampling and moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluation, Evaluator
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._logdensity.target import Target
from bayeskit.errors import DataError, InitializationError, SettingsError
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._population_moves import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.inference.samplers._weighted_particles import (
    RESAMPLE_BELOW,
    count_distinct,
    effective_share,
    next_common_temperature,
    next_temperature,
    reweighted,
    standardised,
    survivors,
)


class SMCState(NamedTuple):
    """``r`` independent populations of ``n`` weighted particles at one temperature."""

    position: Tensor  # (r, n, d)
    log_prior: Tensor  # (r, n)
    log_likelihood: Tensor  # (r, n), -inf where it was not a number or infinite
    log_weight: Tensor  # (r, n), normalised over n, double precision
    ancestor: Tensor  # (r, n), index of the prior draw that a particle descends from
    beta: Tensor  # (), double precision
    undefined_share: Tensor  # (), share of prior draws where the likelihood was not a number or infinite


class SMCInfo(NamedTuple):
    """Diagnostics of one stage."""

    log_increment: Tensor  # (r,), estimate of the log ratio of the two normalising constants
    conditional_share: Tensor  # (r,), effective share left by this reweighting alone
    effective_share: Tensor  # (r,), of all weights, before resampling
    acceptance_rate: Tensor  # (r,), mean over particles and moves
    diverging: Tensor  # (r,), share of moves
    num_ancestors: Tensor  # (r,), int64: prior draws that still have descendants


def start_populations(target: Target, num_replicates: int, num_particles: int, generator: torch.Generator) -> SMCState:
    """Draw ``num_replicates`` populations of ``num_particles`` from the prior, as a state at ``beta = 0``."""
    # DataError if every log likelihood is NaN, InitializationError if every likelihood is zero.
    r, n = num_replicates, num_particles
    position = target.sample_prior(r * n, seed=generator).to(target.device)
    log_prior, log_likelihood = target.evaluate(position, compiled=False)
    if bool(log_likelihood.isnan().all()):
        raise DataError("the log likelihood is NaN at every prior draw; look for NaN or infinite values in the data")
    undefined = (log_likelihood.isnan() | (log_likelihood == torch.inf)).to(torch.float64).mean()
    log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    if not bool(log_likelihood.isfinite().any()):
        raise InitializationError(
            f"the likelihood is zero at all {r * n} prior draws; use more particles, or check that data and "
            "likelihood fit"
        )
    state = equally_weighted(position.reshape(r, n, -1), log_prior.reshape(r, n), log_likelihood.reshape(r, n))
    return state._replace(undefined_share=undefined)


def equally_weighted(position: Tensor, log_prior: Tensor, log_likelihood: Tensor) -> SMCState:
    """Return particles ``(r, n, d)`` of equal weight, with log densities ``(r, n)``, as a state at ``beta = 0``."""
    r, n, _ = position.shape
    zero = torch.zeros((), dtype=torch.float64, device=position.device)
    return SMCState(
        position=position,
        log_prior=log_prior,
        log_likelihood=log_likelihood,
        log_weight=zero.new_full((r, n), -math.log(n)),
        ancestor=torch.arange(n, device=position.device).expand(r, n).clone(),
        beta=zero,
        undefined_share=zero,
    )


def resample(state: SMCState, generator: torch.Generator, below: float = RESAMPLE_BELOW) -> SMCState:
    """Replace each population whose effective share has fallen under ``below`` by an equally weighted one."""
    index, log_weight = survivors(state.log_weight, generator, below)
    return select_particles(state, index)._replace(log_weight=log_weight)


def select_particles(state: SMCState, index: Tensor) -> SMCState:
    """Keep the particles ``index``, ``(r, n)``, of each population; their weights stay where they are."""
    at = index.unsqueeze(-1).expand(-1, -1, state.position.shape[-1])
    return state._replace(
        position=state.position.gather(1, at),
        log_prior=state.log_prior.gather(1, index),
        log_likelihood=state.log_likelihood.gather(1, index),
        ancestor=state.ancestor.gather(1, index),
    )


# Metrics of weighted particles.

_MAX_DENSE_DIMENSION = 200
_BOUND = 4.0  # standard deviations beyond which particles count as less far out, so that every moment exists
_ENOUGH = 0.25  # dimensions a particle, from which correlations are known


def learn_metric(position: Tensor, log_weight: Tensor) -> Metric:
    """Return the metric of weighted particles, ``(n, d)`` and ``(n,)``, tails bounded; dense up to 200 dimensions."""
    n, d = position.shape
    weight = log_weight.exp().to(position.dtype).unsqueeze(-1)
    z, scale = standardised(position, log_weight)
    deviation = _deviation(z.clamp(-_BOUND, _BOUND), weight)
    if d > _MAX_DENSE_DIMENSION:
        return Metric(deviation * scale, False)
    # A particle far out moves as a whole towards the mean of the others: bounds of its coordinates one by one, or their
    # medians as the middle, would take it out of a narrow ridge across them.
    z = z.nan_to_num()
    farthest = z.abs().amax(-1, keepdim=True)
    near = weight * (farthest <= _BOUND)
    z = z - (near * z).sum(0) / near.sum().clamp(min=torch.finfo(z.dtype).tiny)
    z = z * (_BOUND / farthest.clamp(min=_BOUND))
    inside = _deviation(z, weight)
    z = (z - (weight * z).sum(0)) / inside
    # Correlations of few particles are shrunk to zero, those of four times the dimension are not.
    ratio = d / (n * effective_share(log_weight))
    shrinkage = ((ratio.square() - _ENOUGH**2) / (1 - _ENOUGH**2)).clamp(0.0, 1.0).to(position.dtype)
    identity = torch.eye(d, dtype=position.dtype, device=position.device)
    rounding = d * torch.finfo(position.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(torch.lerp((weight * z).mT @ z, identity, shrinkage + rounding))
    factor = torch.where(failed == 0, factor, identity)
    # One factor for all coordinates, which keeps the ridge.
    inside = inside * (deviation / inside).log().mean().exp()
    return Metric((inside * scale).unsqueeze(-1) * factor, True)


def crossed_metrics(particles: SMCState, centred: bool = False) -> Metric:
    """Learn a metric for each half of the populations from the weighted particles of the other half.

    They are ``centred`` at the mean of their population where populations have different distributions.
    """
    # Estimating the metric from the particles that it moves biases the evidence downward.
    position, r = particles.position, len(particles.position)
    if centred:
        weight = particles.log_weight.exp().to(position.dtype).unsqueeze(-1)
        position = position - (weight * position).sum(1, keepdim=True)
    half = (r + 1) // 2
    learnt = [
        learn_metric(x.flatten(0, 1), (log_weight - math.log(len(log_weight))).flatten())
        for x, log_weight in zip(position.split(half), particles.log_weight.split(half), strict=True)
    ]
    if r == 1:  # which has to use its own particles
        return Metric(learnt[0].factor.unsqueeze(0), learnt[0].is_dense)
    return Metric(torch.stack([learnt[1].factor] * half + [learnt[0].factor] * (r - half)), learnt[0].is_dense)


def _deviation(z: Tensor, weight: Tensor) -> Tensor:
    """Return the standard deviation of each column of ``z (n, k)`` under weights ``(n, 1)``, one where it is zero."""
    deviation = (weight * (z - (weight * z).sum(0)).square()).sum(0).sqrt()
    return torch.where(deviation > 0, deviation, torch.ones_like(deviation))


# Moves in one batch, each population with its own density and step size.

PLANNED_CALLS = 200
_TRAJECTORY = math.pi / 2  # a quarter period of a whitened normal posterior
_LEARNING_RATE = 2.0  # of the log step size, per unit of acceptance
_WORTHWHILE = 0.9  # a move that leaves more than this of a correlation is not
_MAX_SEARCH = 200  # gradient calls, in one stage, for a step size that is accepted at all
_MIN_STEP_SIZE, _MAX_STEPS = 1e-6, 64


class MovedPopulations(NamedTuple):
    """Populations after their moves."""

    particles: SMCState
    step_size: Tensor  # (r,)
    num_moves: int
    correlation: Tensor  # (), of the log likelihood with its value before
    acceptance_rate: Tensor  # (r,), of the last move
    diverging: Tensor  # (r,), of the last move
    num_evaluations: int
    metric: Metric  # (r,)


@dataclass(frozen=True)
class PopulationMoves:
    """Settings of moves of populations by HMC, equally many for all, each at its own step size.

    Moves end if no coordinate, nor the log likelihood, has a correlation above ``max_correlation`` with its value
    before the moves, or if the last move lowered no such correlation by a tenth.

    Parameters
    ----------
    max_correlation : float in (0, 1), default 0.5
    max_moves : int, default 20
        Largest number of trajectories of a particle.
    target_acceptance : float in (0, 1), default 0.9
        Acceptance rate that step sizes are tuned to.

    References
    ----------
    Buchholz, A., Chopin, N., Jacob, P. E. (2021). Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte
    Carlo. Bayesian Analysis 16, 745-771.

    Examples
    --------
    >>> from bayeskit.inference.samplers import PopulationMoves
    >>> PopulationMoves(max_moves=5)
    PopulationMoves(max_correlation=0.5, max_moves=5, target_acceptance=0.9)
    """

    max_correlation: float = 0.5
    max_moves: int = 20
    target_acceptance: float = 0.9

    def __post_init__(self) -> None:
        for name in ("max_correlation", "target_acceptance"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), "(0, 1)"))
        object.__setattr__(self, "max_moves", whole_number("max_moves", self.max_moves, 1))

    def run(
        self, evaluate: Evaluator, particles: SMCState, metric: Metric, step_size: Tensor, generator: torch.Generator
    ) -> MovedPopulations:
        """Move ``r`` populations of ``n`` until little is left of where they were, and tune ``step_size (r,)``.

        ``evaluate`` maps ``(r * n, d)`` and ones ``(r * n,)`` to the density reached; ``metric`` has ``r`` entries.
        """
        r, n, d = particles.position.shape
        weight = particles.log_weight.exp()
        before = _summaries(particles.position, particles.log_likelihood)
        pooled = particles.log_weight.flatten() - math.log(r)
        target = _Evaluated(evaluate)
        num_steps = num_trajectory_steps(float(_typical(step_size)))
        chains = _kernel(metric, step_size, num_steps).init(target, particles.position.reshape(r * n, d))
        calls, moves, busy = 1, 0, 1.0
        correlation = torch.ones_like(before[0])
        while busy and moves < self.max_moves:
            chains, info = _kernel(metric, step_size, num_steps).step(target, chains, generator=generator)
            calls += GRADIENTS_PER_STEP * num_steps
            acceptance = (weight * info.acceptance_rate.reshape(r, n)).sum(-1)
            step_size = step_size * (_LEARNING_RATE * (acceptance - self.target_acceptance)).exp()
            step_size = step_size.clamp(_MIN_STEP_SIZE, _TRAJECTORY)
            now = _correlation_left(
                before, _summaries(chains.position.reshape(r, n, d), chains.log_likelihood.reshape(r, n)), pooled
            )
            # More moves are not worth their cost for a coordinate that cannot mix, such as one with two separate modes.
            worth = ((now >= self.max_correlation) & (now < _WORTHWHILE * correlation)).any()
            # One transfer from the device for all three.
            seen = torch.stack([_typical(step_size), acceptance.mean(), worth.to(step_size)]).tolist()
            num_steps, accepted, more = num_trajectory_steps(seen[0]), seen[1], seen[2]
            if accepted < 0.5 * self.target_acceptance and calls < _MAX_SEARCH:
                continue  # step sizes that are far off, as they may be at first, say nothing on how many are needed
            moves, busy, correlation = moves + 1, more, now
        return MovedPopulations(
            particles=particles._replace(
                position=chains.position.reshape(r, n, d),
                log_prior=chains.log_prior.reshape(r, n),
                log_likelihood=chains.log_likelihood.reshape(r, n),
            ),
            step_size=step_size,
            num_moves=moves,
            correlation=correlation[-1],
            acceptance_rate=acceptance,
            diverging=(weight * info.diverging.reshape(r, n)).sum(-1),
            num_evaluations=calls * r * n,
            metric=metric,
        )


def first_step_size(particles: SMCState) -> Tensor:
    """Return where the tuning of each population's step size starts, ``(r,)``."""
    return particles.log_weight.new_full((len(particles.log_weight),), _TRAJECTORY / 2)


class _Evaluated:
    """What a kernel needs of a target."""

    def __init__(self, evaluate: Evaluator) -> None:
        self._evaluate = evaluate

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        return self._evaluate


def _typical(step_size: Tensor) -> Tensor:
    """Return the geometric mean of step sizes, ``(r,) -> ()``."""
    return step_size.log().mean().exp()


def _kernel(metric: Metric, step_size: Tensor, num_steps: int) -> PopulationHMC:
    """Return a kernel whose metrics, ``r`` of them, are scaled by the step sizes, ``(r,)``."""
    scale = step_size.to(metric.factor.dtype).reshape(-1, *(1,) * (metric.factor.dim() - 1))
    scaled = Metric(metric.factor * scale, metric.is_dense)
    return PopulationHMC(1.0, num_steps, scaled, 1.0, len(step_size), planned_calls=PLANNED_CALLS)


def _summaries(position: Tensor, log_likelihood: Tensor) -> Tensor:
    """Return what must be forgotten, ``(r * n, d + 1)``: where each particle is within its population."""
    columns = torch.cat([position, log_likelihood.unsqueeze(-1)], -1)
    # Populations differ in their temperature, which moves do not change.
    centred = columns - columns.median(1, keepdim=True).values
    return centred.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).flatten(0, 1)


def _correlation_left(before: Tensor, after: Tensor, log_weight: Tensor) -> Tensor:
    """Return the correlation of each column before and after, tails bounded."""
    weight = log_weight.exp().to(before.dtype).unsqueeze(-1)
    x, y = (standardised(column, log_weight)[0].clamp(-_BOUND, _BOUND) for column in (before, after))
    x, y = x - (weight * x).sum(0), y - (weight * y).sum(0)
    size = ((weight * x * x).sum(0) * (weight * y * y).sum(0)).sqrt()
    return torch.where(size > 0, (weight * x * y).sum(0) / size, torch.zeros_like(size))


def num_trajectory_steps(step_size: float) -> int:
    """Return how many steps a trajectory has."""
    return min(max(1, round(_TRAJECTORY / step_size)), _MAX_STEPS)


# The engine: what differs among its users is the sequence of distributions, and that alone they say.


class DistributionPath(Protocol):
    """A sequence of distributions from one to another, of which each population has covered a share, ``(r,)``."""

    @property
    def is_common(self) -> bool:
        """Whether all populations are at one distribution, so that a step and a metric can be learnt from all."""
        ...

    def log_ratio(self, particles: SMCState) -> Tensor:
        """Return the log ratio of the last distribution to the first at each particle, ``(r, n)``, double precision."""
        ...

    def at(self, particles: SMCState, covered: Tensor) -> tuple[SMCState, Evaluator]:
        """Return the particles with their log likelihood at the shares covered, and the evaluation of all there."""
        ...


@dataclass(frozen=True)
class TemperedPath:
    """The way from the prior to the posterior by powers of the likelihood."""

    target: Target
    planned_calls: int = PLANNED_CALLS

    is_common = True

    def log_ratio(self, particles: SMCState) -> Tensor:
        """Return the log likelihood."""
        return particles.log_likelihood.to(torch.float64)

    def at(self, particles: SMCState, covered: Tensor) -> tuple[SMCState, Evaluator]:
        """Return the particles, and their evaluation at the temperatures of the populations."""
        rows = covered.to(self.target.dtype).repeat_interleave(particles.log_weight.shape[1])
        evaluate = self.target.evaluator(len(rows), self.planned_calls)

        def tempered(u: Tensor, _: Tensor) -> Evaluation:
            return evaluate(u, rows)

        return particles, tempered


class PopulationStep(NamedTuple):
    """Populations after a step along a path."""

    particles: SMCState
    covered: Tensor  # (r,)
    step_size: Tensor  # (r,), of the moves
    info: SMCInfo
    moved: MovedPopulations | None  # None if the weights were even enough


@dataclass(frozen=True)
class ResampleMove:
    """Settings of adaptive steps through a sequence of distributions: reweighting, resampling and moves.

    Parameters
    ----------
    ess_threshold : float in (0, 1), default 0.8
        Conditional effective share of the particles that a reweighting leaves, which determines its size.
    move_below : float in (0, 1], default 0.5
        Effective share of the particles below which uneven populations are resampled and all particles moved; with 1
        they are after every reweighting.
    moves : PopulationMoves
        Settings of the moves.

    References
    ----------
    Gilks, W. R., Berzuini, C. (2001). Following a moving target: Monte Carlo inference for dynamic Bayesian models.
    Journal of the Royal Statistical Society B 63, 127-146.
    Chopin, N. (2002). A sequential particle filter method for static models. Biometrika 89, 539-552.

    Examples
    --------
    >>> from bayeskit.inference.samplers import PopulationMoves, ResampleMove
    >>> ResampleMove(0.9, moves=PopulationMoves(max_moves=5)).move_below
    0.5
    """

    ess_threshold: float = 0.8
    move_below: float = 0.5
    moves: PopulationMoves = PopulationMoves()

    def __post_init__(self) -> None:
        for name, domain in (("ess_threshold", "(0, 1)"), ("move_below", "(0, 1]")):
            object.__setattr__(self, name, real_number(name, getattr(self, name), domain))
        if not isinstance(self.moves, PopulationMoves):
            raise SettingsError(f"moves must be PopulationMoves, not a {type(self.moves).__name__}")

    def step(
        self,
        path: DistributionPath,
        particles: SMCState,
        covered: Tensor,
        step_size: Tensor,
        generator: torch.Generator,
    ) -> PopulationStep:
        """Take one step along ``path`` from the shares ``covered (r,)``, with moves of ``step_size (r,)``."""
        log_ratio = path.log_ratio(particles)
        choose = next_common_temperature if path.is_common else next_temperature
        reached = choose(particles.log_weight, log_ratio, covered, self.ess_threshold)
        log_weight, increment, left = reweighted(particles.log_weight, log_ratio, reached - covered)
        particles = particles._replace(log_weight=log_weight)
        share, moved = effective_share(log_weight), None
        acceptance, diverging = torch.ones_like(share), torch.zeros_like(share)
        if self._is_uneven(share, path.is_common):
            particles, evaluate = path.at(particles, reached)
            metric = crossed_metrics(particles, centred=not path.is_common)
            particles = resample(particles, generator)
            moved = self.moves.run(evaluate, particles, metric, step_size, generator)
            particles, step_size = moved.particles, moved.step_size
            acceptance, diverging = moved.acceptance_rate, moved.diverging
        info = SMCInfo(
            log_increment=increment,
            conditional_share=left,
            effective_share=share,
            acceptance_rate=acceptance,
            diverging=diverging,
            num_ancestors=count_distinct(particles.ancestor),
        )
        return PopulationStep(particles=particles, covered=reached, step_size=step_size, info=info, moved=moved)

    def _is_uneven(self, share: Tensor, is_common: bool) -> bool:
        if self.move_below == 1:
            return True  # whatever the weights, which a device need not tell
        return float(share.mean() if is_common else share.min()) < self.move_below
