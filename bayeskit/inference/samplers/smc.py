"""Tempered sequential Monte Carlo: a pilot run tunes the schedule, independent replicates use it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit.core.compatibility import as_inference_data
from bayeskit.core.evaluation import Evaluation, Evaluator
from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.progress import Stopped, watching
from bayeskit.core.randomness import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import DataError, InitializationError, SettingsError, ShapeError
from bayeskit.inference.samplers.driver import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Outcome,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.population_moves import (
    GRADIENTS_PER_STEP,
    MoveInfo,
    PopulationHMC,
)
from bayeskit.inference.samplers.weighted_particles import (
    effective_share,
    next_temperature,
    reweighted,
    standardised,
    systematic,
)
from bayeskit.logdensity.target import Target

__all__ = [
    "LEARNING_RATE",
    "MIN_STEP_SIZE",
    "MovedParticles",
    "MovedPopulations",
    "PLANNED_CALLS",
    "Pilot",
    "PilotState",
    "PopulationMoves",
    "Replicates",
    "SMCInfo",
    "SMCRun",
    "SMCSchedule",
    "SMCState",
    "Stage",
    "TRAJECTORY",
    "at_temperatures",
    "count_distinct",
    "first_step_size",
    "learn_metric",
    "num_trajectory_steps",
    "resample",
    "sample_smc",
    "start_populations",
    "survivors",
]

# Tempered sequential Monte Carlo: populations move from the prior to the posterior in stages.

RESAMPLE_BELOW = 0.9


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
    return SMCState(
        position.reshape(r, n, -1),
        log_prior.reshape(r, n),
        log_likelihood.reshape(r, n),
        torch.full((r, n), -math.log(n), dtype=torch.float64, device=position.device),
        torch.arange(n, device=position.device).expand(r, n).clone(),
        torch.zeros((), dtype=torch.float64, device=position.device),
        undefined,
    )


def _reweight(state: SMCState, beta: float | Tensor) -> tuple[SMCState, Tensor, Tensor]:
    """Return the state at ``beta``, the log increment and the conditional share, both ``(r,)``."""
    beta = beta if isinstance(beta, Tensor) else torch.full_like(state.beta, beta)
    step = (beta - state.beta).expand(len(state.log_weight))
    log_weight, increment, left = reweighted(state.log_weight, state.log_likelihood.to(torch.float64), step)
    return state._replace(log_weight=log_weight, beta=beta), increment, left


def resample(state: SMCState, generator: torch.Generator, below: float = RESAMPLE_BELOW) -> SMCState:
    """Replace each population whose effective share has fallen under ``below`` by an equally weighted one."""
    index, log_weight = survivors(state.log_weight, generator, below)
    return _select(state, index)._replace(log_weight=log_weight)


def survivors(log_weight: Tensor, generator: torch.Generator, below: float = RESAMPLE_BELOW) -> tuple[Tensor, Tensor]:
    """Return the particles to keep, ``(r, n)``, and their weights; populations above ``below`` keep all as they are."""
    needed, n = (effective_share(log_weight) < below).unsqueeze(-1), log_weight.shape[-1]
    index = torch.where(needed, systematic(log_weight, generator), torch.arange(n, device=needed.device))
    return index, torch.where(needed, -math.log(n), log_weight)


def _select(state: SMCState, index: Tensor) -> SMCState:
    """Keep the particles ``index``, ``(r, n)``, of each population; their weights stay where they are."""
    at = index.unsqueeze(-1).expand(-1, -1, state.position.shape[-1])
    return state._replace(
        position=state.position.gather(1, at),
        log_prior=state.log_prior.gather(1, index),
        log_likelihood=state.log_likelihood.gather(1, index),
        ancestor=state.ancestor.gather(1, index),
    )


def count_distinct(index: Tensor) -> Tensor:
    """Return how many different numbers are in each row, ``(r, n) -> (r,)``."""
    return 1 + (index.sort(-1).values.diff(dim=-1) != 0).sum(-1)


class MovedParticles(NamedTuple):
    """Particles after the moves of a stage."""

    state: SMCState
    last: MoveInfo  # (r * n,), of the last move
    acceptance_rate: Tensor  # (r,), mean over particles and moves
    diverging: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of tempered SMC: reweight to ``beta``, resample if the weights are uneven, move.

    The settings do not depend on the particles, so the product of the increments over stages is an unbiased estimate of
    the evidence.

    Parameters
    ----------
    beta : float in (0, 1]
        Inverse temperature at the end of the stage.
    step_size : float
        Of the moves, as in :class:`PopulationHMC`; also ``num_steps`` and ``metric``.
    num_steps : int
    num_moves : int
        Trajectories per particle.
    metric : Metric
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether ``Target`` compiles.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2006). Sequential Monte Carlo samplers. Journal of the
    Royal Statistical Society B 68, 411-436.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import Metric
    >>> from bayeskit.inference.samplers.smc import Stage, start_populations
    >>> target = bk.exact.get("beta_binomial").target()
    >>> stage = Stage(0.5, 1.0, 1, 1, Metric.diagonal(torch.ones(1, dtype=torch.float64)))
    >>> generator = torch.Generator().manual_seed(0)
    >>> state, info = stage.step(target, start_populations(target, 4, 32, generator), generator=generator)
    >>> state.position.shape, info.log_increment.shape
    (torch.Size([4, 32, 1]), torch.Size([4]))
    """

    beta: float
    step_size: float
    num_steps: int
    num_moves: int
    metric: Metric
    planned_calls: int = 1

    def __post_init__(self) -> None:
        real_number("a stage's inverse temperature", self.beta, "(0, 1]")
        whole_number("num_moves", self.num_moves, least=1)
        self.kernel()  # checks the rest

    @property
    def num_calls(self) -> int:
        """Gradient evaluations per particle: one at its start, the others along its trajectories."""
        return 1 + GRADIENTS_PER_STEP * self.num_steps * self.num_moves

    def step(self, target: Target, state: SMCState, *, generator: torch.Generator) -> tuple[SMCState, SMCInfo]:
        """Reweight, resample and move the populations to ``beta``."""
        state, increment, left = _reweight(state, self.beta)
        share = effective_share(state.log_weight)
        state = resample(state, generator)
        moved = self.move(target, state, generator=generator)
        ancestors = count_distinct(moved.state.ancestor)
        info = SMCInfo(increment, left, share, moved.acceptance_rate, moved.diverging, ancestors)
        return moved.state, info

    def move(self, target: Target, state: SMCState, *, generator: torch.Generator) -> MovedParticles:
        """Run ``num_moves`` trajectories from every particle."""
        r, n, _ = state.position.shape
        kernel = self.kernel(r)
        chains = kernel.init(target, state.position.flatten(0, 1))
        acceptance = torch.zeros(r * n, dtype=torch.float64, device=state.beta.device)
        diverging = torch.zeros_like(acceptance)
        for _ in range(self.num_moves):
            chains, info = kernel.step(target, chains, generator=generator)
            acceptance += info.acceptance_rate
            diverging += info.diverging
        state = state._replace(
            position=chains.position.reshape(state.position.shape),
            log_prior=chains.log_prior.reshape(r, n),
            log_likelihood=chains.log_likelihood.reshape(r, n),
        )
        mean = (acceptance / self.num_moves).reshape(r, n).mean(-1)
        return MovedParticles(state, info, mean, (diverging / self.num_moves).reshape(r, n).mean(-1))

    def kernel(self, num_populations: int = 1) -> PopulationHMC:
        """Return the kernel of the moves for ``num_populations`` populations."""
        return PopulationHMC(
            self.step_size,
            self.num_steps,
            self.metric,
            self.beta,
            num_populations=num_populations,
            planned_calls=self.planned_calls,
        )


@dataclass(frozen=True, eq=False)
class SMCSchedule:
    """Settings tuned by a pilot run: temperatures, metrics, step sizes, trajectory lengths, numbers of moves.

    Parameters
    ----------
    stages : tuple of Stage
        Inverse temperatures increase and end at one.

    Raises
    ------
    SettingsError
        If a temperature lies outside (0, 1], or the temperatures do not increase to one.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Metric
    >>> metric = Metric.diagonal(torch.ones(2))
    >>> schedule = SMCSchedule(tuple(Stage(beta, 1.0, 1, 1, metric) for beta in (0.1, 0.4, 1.0)))
    >>> len(schedule), schedule.dim
    (3, 2)
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        beta = self.beta
        if len(beta) < 2 or beta[-1] != 1 or bool((beta.diff() <= 0).any()):
            raise SettingsError("the inverse temperatures of a schedule must increase strictly and end at one")

    @property
    def num_calls(self) -> int:
        """Gradient evaluations per particle."""
        return sum(stage.num_calls for stage in self.stages)

    @property
    def beta(self) -> Tensor:
        """Inverse temperatures, starting with 0 for the prior, shape ``(K + 1,)``."""
        return torch.tensor([0.0, *(stage.beta for stage in self.stages)], dtype=torch.float64)

    @property
    def dim(self) -> int:
        """Dimension of the unconstrained space."""
        return int(self.stages[0].metric.factor.shape[-1])

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def check(self, target: Target) -> None:
        """Raise if the target has another dimension.

        Raises
        ------
        ShapeError
        """
        if self.dim != target.dim:
            raise ShapeError(
                f"the schedule was learnt in {self.dim} dimensions, the target has {target.dim}; "
                "learn a new one by leaving schedule=None"
            )

    def fingerprint(self) -> str:
        """Return a digest of all settings."""
        digest = hashlib.sha256()
        for stage in self.stages:
            digest.update(repr((stage.beta, stage.step_size, stage.num_steps, stage.num_moves)).encode())
            digest.update(stage.metric.factor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]


# Populations of particles that move in one batch, each with its own density and step size.

PLANNED_CALLS = 200
TRAJECTORY = math.pi / 2  # a quarter period of a whitened normal posterior
LEARNING_RATE = 2.0  # of the log step size, per unit of acceptance
_WORTHWHILE = 0.9  # a move that leaves more than this of a correlation is not
_MAX_SEARCH = 200  # gradient calls, in one stage, for a step size that is accepted at all
MIN_STEP_SIZE, _MAX_STEPS = 1e-6, 64


class MovedPopulations(NamedTuple):
    """Populations after their moves."""

    particles: SMCState
    step_size: Tensor  # (r,)
    num_moves: int
    correlation: Tensor  # (), of the log likelihood with its value before
    acceptance_rate: Tensor  # (r,), of the last move
    diverging: Tensor  # (r,), of the last move
    num_evaluations: int


@dataclass(frozen=True)
class PopulationMoves:
    """Moves of populations by HMC, equally many for all, each at its own step size (Buchholz et al. 2021)."""

    # Moves end if no coordinate, nor the log likelihood, has a correlation above this with its value before the moves,
    # or if the last move lowered no such correlation by a tenth.
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
            step_size = step_size * (LEARNING_RATE * (acceptance - self.target_acceptance)).exp()
            step_size = step_size.clamp(MIN_STEP_SIZE, TRAJECTORY)
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


def at_temperatures(target: Target, beta: Tensor, num_particles: int, planned_calls: int = PLANNED_CALLS) -> Evaluator:
    """Return the evaluation of all particles at the temperatures of their populations, ``(r, 1)``."""
    rows = beta.to(target.dtype).expand(-1, num_particles).flatten()
    evaluate = target.evaluator(len(rows), planned_calls)

    def tempered(u: Tensor, _: Tensor) -> Evaluation:
        return evaluate(u, rows)

    return tempered


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


# The pilot run of tempered sequential Monte Carlo: one population tunes every stage.

_MAX_DENSE_DIMENSION = 200
_BOUND = 4.0  # standard deviations beyond which particles count as less far out, so that every moment exists
_ENOUGH = 0.25  # dimensions a particle, from which correlations are known
_PLANNED_CALLS = 500


class PilotState(NamedTuple):
    """A population and the step size that its moves have been tuned to."""

    particles: SMCState
    step_size: Tensor  # ()


@dataclass(frozen=True, eq=False)
class Pilot:
    """Algorithm for :func:`drive` that learns a schedule of temperatures and moves, one stage a step."""

    target: Target
    num_particles: int
    ess_threshold: float  # conditional effective share that a change of temperature leaves
    seed: int
    # Moves end if no coordinate, nor the log likelihood, has a correlation above this with its value before the moves;
    # if the last move lowered no such correlation by a tenth; or after max_moves.
    max_correlation: float = 0.5
    max_moves: int = 20
    target_acceptance: float = 0.9

    description = "tempering, pilot"
    stream = "tempering, pilot"
    num_steps = None

    def __post_init__(self) -> None:
        for name, called, least in (("num_particles", "num_pilot_particles", 2), ("max_moves", "max_moves", 1),
                                    ("seed", "seed", None)):  # fmt: skip
            object.__setattr__(self, name, whole_number(called, getattr(self, name), least))
        for name in ("ess_threshold", "max_correlation", "target_acceptance"):
            object.__setattr__(self, name, real_number(name, getattr(self, name), "(0, 1)"))

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on."""
        settings = {k: v for k, v in vars(self).items() if k != "target"}
        return {"model": self.target.fingerprint(), "compile": str(self.target.compile)} | settings

    def start(self, generator: torch.Generator) -> PilotState:
        """Draw from the prior."""
        particles = start_populations(self.target, 1, self.num_particles, generator)
        return PilotState(particles, torch.full_like(particles.beta, TRAJECTORY / 2))

    def advance(
        self, state: PilotState, iteration: int, generator: torch.Generator
    ) -> tuple[PilotState, Mapping[str, Tensor]]:
        """Tune and run one stage."""
        particles = state.particles
        log_likelihood = particles.log_likelihood[0].to(torch.float64)
        beta = next_temperature(particles.log_weight[0], log_likelihood, particles.beta, self.ess_threshold)
        particles, increment, left = _reweight(particles, beta)
        share = effective_share(particles.log_weight)
        metric = learn_metric(particles.position[0], particles.log_weight[0])
        particles = resample(particles, generator)
        moves = PopulationMoves(self.max_correlation, self.max_moves, self.target_acceptance)
        evaluate = at_temperatures(self.target, beta.reshape(1, 1), self.num_particles, _PLANNED_CALLS)
        own = Metric(metric.factor.unsqueeze(0), metric.is_dense)
        moved = moves.run(evaluate, particles, own, state.step_size.reshape(1), generator)
        ancestors = count_distinct(particles.ancestor)
        info = SMCInfo(increment, left, share, moved.acceptance_rate, moved.diverging, ancestors)
        learnt = {
            "step_size": moved.step_size[0],
            "num_moves": torch.tensor(moved.num_moves),
            "correlation": moved.correlation,
            "gradients": torch.tensor(moved.num_evaluations),
            "beta": beta,
            "factor": metric.factor,
        }
        return PilotState(moved.particles, moved.step_size[0]), info._asdict() | learnt

    def ending(self, state: PilotState, iteration: int, records: Records) -> Ending | None:
        """End at the posterior."""
        return "finished" if float(state.particles.beta) == 1 else None

    def note(self, state: PilotState, iteration: int, records: Records) -> str:
        """Say how far it has come."""
        moves, acceptance = int(records["num_moves"][-1]), float(records["acceptance_rate"][-1])
        return f"beta {float(state.particles.beta):.3g}, {moves} moves, acceptance {acceptance:.2f}"

    def stages(self, records: Records) -> tuple[Stage, ...]:
        """Freeze what has been learnt."""
        if "beta" not in records:
            return ()
        columns = (records[name].tolist() for name in ("beta", "step_size", "num_moves"))
        return tuple(
            Stage(beta, step_size, num_trajectory_steps(step_size), num_moves, Metric(factor, factor.dim() == 2))
            for beta, step_size, num_moves, factor in zip(*columns, records["factor"].unbind(), strict=True)
        )

    def spent(self, records: Records) -> int:
        """Return the gradient evaluations so far; values count as gradients."""
        return self.num_particles + (int(records["gradients"].sum()) if "gradients" in records else 0)


def num_trajectory_steps(step_size: float) -> int:
    """Return how many steps a trajectory has."""
    return min(max(1, round(TRAJECTORY / step_size)), _MAX_STEPS)


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


def _deviation(z: Tensor, weight: Tensor) -> Tensor:
    """Return the standard deviation of each column of ``z (n, k)`` under weights ``(n, 1)``, one where it is zero."""
    deviation = (weight * (z - (weight * z).sum(0)).square()).sum(0).sqrt()
    return torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _correlation_left(before: Tensor, after: Tensor, log_weight: Tensor) -> Tensor:
    """Return the correlation of each column before and after, tails bounded."""
    weight = log_weight.exp().to(before.dtype).unsqueeze(-1)
    x, y = (standardised(column, log_weight)[0].clamp(-_BOUND, _BOUND) for column in (before, after))
    x, y = x - (weight * x).sum(0), y - (weight * y).sum(0)
    size = ((weight * x * x).sum(0) * (weight * y * y).sum(0)).sqrt()
    return torch.where(size > 0, (weight * x * y).sum(0) / size, torch.zeros_like(size))


# Tempered sequential Monte Carlo for a target: a pilot run tunes the schedule, independent replicates use it.


@dataclass(frozen=True, eq=False)
class SMCRun:
    """Result of :func:`sample_smc`; ``R`` replicates, ``K`` stages.

    Attributes
    ----------
    draws : Draws
        Equally weighted, one chain per replicate. Draws of a run that ended early are from a power posterior with
        ``draws.beta`` below one; they lack statistics if the last move would have had to wait for compilation.
    schedule : SMCSchedule or None
        Result of the pilot run; None if the pilot ended early.
    beta : Tensor
        Inverse temperatures reached by the replicates, shape ``(K,)``.
    info : SMCInfo
        Per stage: ``log_increment``, ``conditional_share``, ``effective_share``, ``acceptance_rate`` and
        ``diverging``, each ``(R, K)``.
    undefined_share : float
        Share of prior draws with a NaN or infinite likelihood, which counts as zero.
    ending : str
        ``"finished"``, ``"time budget"`` or ``"interrupted"``.
    pilot_gradients : int
        Gradient evaluations of the pilot run.
    correlation : Tensor or None
        Correlation of the log likelihood with its value before the pilot's moves, ``(K,)``.
    """

    draws: Draws
    schedule: SMCSchedule | None
    beta: Tensor
    info: SMCInfo
    undefined_share: float
    ending: Ending = "finished"
    pilot_gradients: int = 0
    correlation: Tensor | None = None

    def __repr__(self) -> str:
        log_evidence = float(self.log_evidence.logsumexp(0)) - math.log(len(self.log_evidence))
        return (
            f"SMCRun(log_evidence={log_evidence:.3f}, replicates={self.draws.num_chains}, "
            f"particles={self.draws.num_draws}, stages={len(self.beta)}, ending={self.ending!r})"
        )

    @property
    def num_gradients(self) -> int:
        """Gradient evaluations, including the pilot run; evaluations of the value count as gradients."""
        return self.draws.num_gradients

    @property
    def log_evidence_increments(self) -> Tensor:
        """Log ratios of the normalising constants of neighbouring temperatures, ``(R, K)``."""
        return self.info.log_increment

    @property
    def log_evidence(self) -> Tensor:
        """Log of the unbiased evidence estimate of each replicate, ``(R,)``."""
        return self.info.log_increment.sum(1)

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ; ``sample_stats`` includes the stages, with dimensions ``(chain, stage)``."""
        groups = self.draws.to_datasets()
        columns = {
            "beta": self.beta.expand_as(self.info.log_increment),
            "log_marginal_likelihood": self.info.log_increment.cumsum(1),
            "accept_rate": self.info.acceptance_rate,
            "effective_share": self.info.effective_share,
        }
        stages = {name: (("chain", "stage"), value.cpu().numpy()) for name, value in columns.items()}
        groups["sample_stats"] = groups["sample_stats"].assign(stages)
        return as_inference_data(groups)


def sample_smc(
    target: Target,
    num_particles: int = 64,
    num_replicates: int = 32,
    *,
    seed: int = 0,
    num_pilot_particles: int = 512,
    ess_threshold: float = 0.985,
    max_correlation: float = 0.5,
    max_moves: int = 20,
    target_acceptance: float = 0.9,
    schedule: SMCSchedule | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> SMCRun:
    """Draw from the posterior by tempered sequential Monte Carlo.

    A pilot run with one population of ``num_pilot_particles`` tunes temperatures, metrics, step sizes and numbers of
    moves. ``num_replicates`` independent populations then use this fixed schedule in one batch. Each replicate gives an
    unbiased estimate of the evidence; the variance between replicates gives the standard error.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior.
    num_particles : int, default 64
        Per replicate.
    num_replicates : int, default 32
    seed : int, default 0
    num_pilot_particles : int, default 512
    ess_threshold : float in (0, 1), default 0.985
        Conditional effective share of the particles after each change of temperature. A larger value means more
        temperatures, a higher cost and a smaller variance of the evidence.
    max_correlation : float in (0, 1), default 0.5
        Moves at a temperature end if no coordinate, nor the log likelihood, has a correlation above this with its value
        before the moves, or if the last move lowered no such correlation by a tenth.
    max_moves : int, default 20
        Largest number of moves per temperature.
    target_acceptance : float in (0, 1), default 0.9
    schedule : SMCSchedule, optional
        Schedule of an earlier run on a target of the same dimension; replaces the pilot run.
    checkpoint : path, optional
        Prefix of the files ``PREFIX.pilot`` and ``PREFIX.replicates``. If they exist, the run resumes from them; the
        draws are bitwise identical to those of an uninterrupted run.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds after which the run ends with the stages completed so far.
    progress : bool, default True
        Show a progress bar for runs longer than two seconds.

    Returns
    -------
    SMCRun

    Raises
    ------
    BudgetError
        If the time budget ends in the first stage; Ctrl-C there raises ``KeyboardInterrupt``.
    SettingsError
        If there are no particles, a setting lies outside its domain, or the target cannot draw from its prior.
    ShapeError
        If ``schedule`` has another dimension.
    InitializationError
        If the likelihood is zero at all prior draws.
    CheckpointError
        If a checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the time budget or Ctrl-C ends the run early; ``ending`` is the reason.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2006). Sequential Monte Carlo samplers. Journal of the
    Royal Statistical Society B 68, 411-436.
    Buchholz, A., Chopin, N., Jacob, P. E. (2021). Adaptive tuning of Hamiltonian Monte Carlo within
    sequential Monte Carlo. Bayesian Analysis 16, 745-771.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import sample_smc
    >>> run = sample_smc(exact.get("beta_binomial").target(), seed=1, ess_threshold=0.9)
    >>> run.draws.unconstrained.shape, run.log_evidence.shape
    (torch.Size([32, 64, 1]), torch.Size([32]))
    """
    num_particles, num_replicates = _check_numbers(num_particles, num_replicates)
    seed = whole_number("seed", seed)
    if not isinstance(schedule, (SMCSchedule, type(None))):
        raise SettingsError(
            f"schedule must be a Schedule, such as the one of an earlier run, not a {type(schedule).__name__}"
        )
    files = [None if checkpoint is None else f"{checkpoint}.{name}" for name in ("pilot", "replicates")]
    control = Control(files[0], checkpoint_seconds, time_budget, progress)
    deadline = None if control.time_budget is None else time.monotonic() + control.time_budget
    pilot_gradients, correlation, pilot_seconds = 0, None, 0.0
    given = schedule is not None
    if schedule is None:
        pilot = Pilot(target, num_pilot_particles, ess_threshold, seed, max_correlation, max_moves, target_acceptance)
        generator = new_generator(seed, target.device, pilot.stream)
        outcome = drive(pilot, control, generator, target.device)
        stages, pilot_gradients = pilot.stages(outcome.records), pilot.spent(outcome.records)
        pilot_seconds = outcome.seconds
        if outcome.ending != "finished":
            if not stages:
                raise nothing_done(outcome.ending, control, "in the first stage of the pilot")
            particles = outcome.state.particles
            beta = float(particles.beta)
            schedule = SMCSchedule(stages) if beta == 1 else None
            run = _as_run(target, particles, outcome, schedule, stages, generator, pilot_gradients, seed, deadline)
            say_early(run.ending, control, pilot.description, f"at inverse temperature {beta:.3g}")
            return run
        schedule, correlation = SMCSchedule(stages), outcome.records["correlation"]
    left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
    replicates = Replicates(target, schedule, num_replicates, num_particles, seed)
    generator = new_generator(seed, target.device, replicates.stream)
    rest = replace(control, checkpoint=files[1], time_budget=left)
    outcome = drive(replicates, rest, generator, target.device)
    if given and outcome.ending != "finished" and outcome.num_iterations == 0:
        raise nothing_done(outcome.ending, control, "in the first stage")
    stages = replicates.stages[: outcome.num_iterations]
    spent = pilot_gradients + num_replicates * num_particles * (1 + sum(stage.num_calls for stage in stages))
    run = _as_run(target, outcome.state, outcome, schedule, stages, generator, spent, seed, deadline)
    say_early(run.ending, control, replicates.description, f"after {len(stages)} of {len(schedule)} stages")
    draws = replace(run.draws, seconds=pilot_seconds + outcome.seconds)
    return replace(run, draws=draws, pilot_gradients=pilot_gradients, correlation=correlation)


@dataclass(frozen=True, eq=False)
class Replicates:
    """What :func:`drive` advances to carry independent populations through a frozen schedule."""

    target: Target
    schedule: SMCSchedule
    num_replicates: int
    num_particles: int
    seed: int

    description = "tempering, replicates"
    stream = "tempering, replicates"

    def __post_init__(self) -> None:
        _check_numbers(self.num_particles, self.num_replicates)
        object.__setattr__(self, "seed", whole_number("seed", self.seed))
        self.schedule.check(self.target)

    @property
    def num_steps(self) -> int:
        """One step a stage."""
        return len(self.schedule)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The schedule's stages, told how many calls there will be."""
        return tuple(replace(stage, planned_calls=self.schedule.num_calls) for stage in self.schedule)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on."""
        return {
            "model": self.target.fingerprint(),
            "num_replicates": self.num_replicates,
            "num_particles": self.num_particles,
            "seed": self.seed,
            "schedule": self.schedule.fingerprint(),
            "compile": str(self.target.compile),
        }

    def start(self, generator: torch.Generator) -> SMCState:
        """Draw all populations from the prior."""
        return start_populations(self.target, self.num_replicates, self.num_particles, generator)

    def advance(
        self, state: SMCState, iteration: int, generator: torch.Generator
    ) -> tuple[SMCState, Mapping[str, Tensor]]:
        """Run one stage."""
        state, info = self.stages[iteration].step(self.target, state, generator=generator)
        return state, info._asdict()

    def ending(self, state: SMCState, iteration: int, records: Records) -> Ending | None:
        """End with the schedule."""
        return "finished" if iteration == len(self.schedule) else None

    def note(self, state: SMCState, iteration: int, records: Records) -> str:
        """Say how far it has come."""
        return f"beta {float(state.beta):.3g}, acceptance {float(records['acceptance_rate'][-1].mean()):.2f}"


def _check_numbers(num_particles: int, num_replicates: int) -> tuple[int, int]:
    return whole_number("num_particles", num_particles, 2), whole_number("num_replicates", num_replicates, 1)


def _as_run(
    target: Target,
    state: SMCState,
    outcome: Outcome,
    schedule: SMCSchedule | None,
    stages: Sequence[Stage],
    generator: torch.Generator,
    spent: int,
    seed: int,
    deadline: float | None,
) -> SMCRun:
    """Return a run's record and its particles as draws of equal weight, moved once more."""
    # No move if it would have to wait for compilation beyond ``deadline``, or after Ctrl-C.
    r, n = state.log_weight.shape
    beta = torch.tensor([stage.beta for stage in stages], dtype=torch.float64)
    empty = torch.empty(0, r, dtype=torch.float64, device=target.device)
    columns = (outcome.records[name] if stages else empty for name in SMCInfo._fields)
    info = SMCInfo(*(column.mT.contiguous() for column in columns))
    ending, stats = outcome.ending, {}
    left = None if deadline is None else deadline - time.monotonic()
    with one_thread(), torch.no_grad(), watching(left) as watch:
        if ending == "interrupted":
            watch.interrupted.set()
        state = _pooled(state, info.log_increment.sum(1), generator)
        if stages:
            try:
                moved = stages[-1].move(target, state, generator=generator)
                state, stats = moved.state, _statistics(moved.last, stages[-1], (r, n))
                spent += stages[-1].num_calls * r * n
            except Stopped as stopped:
                ending = stopped.reason
    if watch.interrupted.is_set():
        ending = "interrupted"
    draws = Draws(
        state.position,
        state.log_prior,
        state.log_likelihood,
        state.beta.to(state.position.dtype).expand(r).clone(),
        stats,
        spent,
        outcome.seconds,
        {"sampler": "tempered SMC", "seed": seed, "ending": ending},
        target,
    )
    return SMCRun(draws, schedule, beta, info, float(state.undefined_share), ending)


def _pooled(state: SMCState, log_evidence: Tensor, generator: torch.Generator) -> SMCState:
    """Resample all populations as one, each weighted by its evidence; neighbours stay neighbours."""
    # Estimates from a single population have a bias of order 1 / n; these weights reduce it to order 1 / (r n).
    r, n = state.log_weight.shape
    possible = log_evidence.isfinite().any()
    log_weight = state.log_weight + torch.where(possible, log_evidence, torch.zeros_like(log_evidence)).unsqueeze(1)
    index = systematic((log_weight - log_weight.logsumexp((0, 1))).reshape(1, -1), generator)
    fields = (x.flatten(0, 1).unsqueeze(0) if x.dim() else x for x in state)
    chosen = _select(SMCState(*fields), index)
    return SMCState(*(x.reshape(r, n, *x.shape[2:]) if x.dim() else x for x in chosen))


def _statistics(info: MoveInfo, stage: Stage, shape: tuple[int, int]) -> dict[str, Tensor]:
    stats = {
        "acceptance_rate": info.acceptance_rate,
        "diverging": info.diverging,
        "energy": info.energy,
        "n_steps": torch.full_like(info.diverging, GRADIENTS_PER_STEP * stage.num_steps, dtype=torch.int64),
        "step_size": torch.full_like(info.energy, stage.step_size),
    }
    return {name: value.reshape(shape) for name, value in stats.items()}
