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

from bayeskit._core.compatibility import as_inference_data
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.progress import Stopped, watching
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.samplers._driver import (
    CHECKPOINT_SECONDS,
    Control,
    Ending,
    Outcome,
    Records,
    drive,
    nothing_done,
    say_early,
)
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._population_moves import GRADIENTS_PER_STEP, MoveInfo, PopulationHMC
from bayeskit.inference.samplers._populations import (
    PLANNED_CALLS,
    PopulationMoves,
    ResampleMove,
    SMCInfo,
    SMCState,
    TemperedPath,
    first_step_size,
    num_trajectory_steps,
    resample,
    select_particles,
    start_populations,
)
from bayeskit.inference.samplers._weighted_particles import count_distinct, effective_share, reweighted, systematic

# Stages with settings that do not depend on the particles.


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
    >>> from bayeskit.inference.samplers._smc import Stage, start_populations
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
        beta = torch.full_like(state.beta, self.beta)
        step = (beta - state.beta).expand(len(state.log_weight))
        log_weight, increment, left = reweighted(state.log_weight, state.log_likelihood.to(torch.float64), step)
        state = resample(state._replace(log_weight=log_weight, beta=beta), generator)
        moved = self.move(target, state, generator=generator)
        info = SMCInfo(
            log_increment=increment,
            conditional_share=left,
            effective_share=effective_share(log_weight),
            acceptance_rate=moved.acceptance_rate,
            diverging=moved.diverging,
            num_ancestors=count_distinct(moved.state.ancestor),
        )
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


# Temperatures chosen and moves tuned on the way.

_PILOT_CALLS = 500


class TemperedPopulations(NamedTuple):
    """Populations, ``beta`` of shape ``(r, 1)``, and the step size that the moves of each have been tuned to."""

    particles: SMCState
    step_size: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class AdaptiveTempering:
    """Algorithm for :func:`drive` that carries populations from the prior to the posterior, one stage a step."""

    target: Target
    num_particles: int
    num_replicates: int
    steps: ResampleMove
    seed: int
    planned_calls: int = PLANNED_CALLS
    description: str = "adaptive tempering"

    num_steps = None

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on."""
        return {
            "model": self.target.fingerprint(),
            "compile": str(self.target.compile),
            "num_particles": self.num_particles,
            "num_replicates": self.num_replicates,
            "steps": repr(self.steps),
            "seed": self.seed,
        }

    def start(self, generator: torch.Generator) -> TemperedPopulations:
        """Draw from the prior."""
        particles = start_populations(self.target, self.num_replicates, self.num_particles, generator)
        particles = particles._replace(beta=particles.log_weight.new_zeros(self.num_replicates, 1))
        return TemperedPopulations(particles, first_step_size(particles))

    def advance(
        self, state: TemperedPopulations, iteration: int, generator: torch.Generator
    ) -> tuple[TemperedPopulations, Mapping[str, Tensor]]:
        """Run one stage."""
        path = TemperedPath(self.target, self.planned_calls)
        beta = state.particles.beta.squeeze(-1)
        step = self.steps.step(path, state.particles, beta, state.step_size, generator)
        learnt = {"beta": step.covered, "step_size": step.step_size}
        if (moved := step.moved) is not None:
            learnt["correlation"] = moved.correlation
            learnt["num_moves"] = torch.tensor(moved.num_moves)
            learnt["gradients"] = torch.tensor(moved.num_evaluations)
            if self.num_replicates == 1:
                learnt["factor"] = moved.metric.factor[0]  # for a schedule
        particles = step.particles._replace(beta=step.covered.unsqueeze(-1))
        return TemperedPopulations(particles, step.step_size), step.info._asdict() | learnt

    def ending(self, state: TemperedPopulations, iteration: int, records: Records) -> Ending | None:
        """End when all populations are at the posterior."""
        return "finished" if bool((state.particles.beta == 1).all()) else None

    def note(self, state: TemperedPopulations, iteration: int, records: Records) -> str:
        """Say how far they have come."""
        moves, acceptance = int(records["num_moves"][-1]), float(records["acceptance_rate"][-1].mean())
        return f"beta {float(state.particles.beta.min()):.3g}, {moves} moves, acceptance {acceptance:.2f}"

    def num_evaluations(self, records: Records) -> int:
        """Return the gradient evaluations so far; values count as gradients."""
        moved = int(records["gradients"].sum()) if "gradients" in records else 0
        return self.num_particles * self.num_replicates + moved


def _as_stages(records: Records) -> tuple[Stage, ...]:
    """Freeze what a single population has learnt."""
    if "beta" not in records:
        return ()
    columns = (records[name].flatten().tolist() for name in ("beta", "step_size", "num_moves"))
    return tuple(
        Stage(beta, step_size, num_trajectory_steps(step_size), num_moves, Metric(factor, factor.dim() == 2))
        for beta, step_size, num_moves, factor in zip(*columns, records["factor"].unbind(), strict=True)
    )


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


@takes_draws
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
        num_pilot_particles = whole_number("num_pilot_particles", num_pilot_particles, 2)
        moves = PopulationMoves(max_correlation, max_moves, target_acceptance)
        steps = ResampleMove(ess_threshold, move_below=1.0, moves=moves)
        pilot = AdaptiveTempering(target, num_pilot_particles, 1, steps, seed, _PILOT_CALLS, "tempering, pilot")
        generator = new_generator(seed, target.device, pilot.description)
        outcome = drive(pilot, control, generator, target.device)
        stages, pilot_gradients = _as_stages(outcome.records), pilot.num_evaluations(outcome.records)
        pilot_seconds = outcome.seconds
        if outcome.ending != "finished":
            if not stages:
                raise nothing_done(outcome.ending, control, "in the first stage of the pilot")
            beta = float(outcome.state.particles.beta)
            particles = outcome.state.particles._replace(beta=outcome.state.particles.beta.squeeze())
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
    chosen = select_particles(SMCState(*fields), index)
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
