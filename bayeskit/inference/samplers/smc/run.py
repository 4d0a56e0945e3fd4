"""Tempered sequential Monte Carlo from a target: a pilot learns the schedule, independent replicates follow it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._arviz import as_inference_data
from bayeskit._interruption import Stopped, watching
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
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
from bayeskit.inference.samplers.smc.pilot import Pilot
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, MoveInfo
from bayeskit.inference.samplers.smc.resampling import systematic
from bayeskit.inference.samplers.smc.stages import Schedule, SMCInfo, SMCState, Stage, select, start
from bayeskit.target import Target


@dataclass(frozen=True, eq=False)
class SMCRun:
    """What :func:`sample_smc` leaves behind; ``R`` replicates, ``K`` stages.

    Attributes
    ----------
    draws : Draws
        Equally weighted, as many chains as replicates. A run that was stopped early has draws of a power
        posterior, with ``draws.beta`` below one; they have no statistics where their last move would have had to
        wait for the compiler.
    schedule : Schedule or None
        What the pilot has learnt; None if it was stopped before its end.
    beta : Tensor
        Inverse temperatures that the replicates have reached, shape ``(K,)``.
    info : SMCInfo
        Of every stage: ``log_increment``, ``conditional_share``, ``effective_share``, ``acceptance_rate`` and
        ``diverging``, each ``(R, K)``.
    undefined_share : float
        Share of prior draws where the likelihood was not a number or infinite; it counts as zero there.
    ending : str
        ``"finished"``, ``"time budget"`` or ``"interrupted"``.
    pilot_gradients : int
        Gradient evaluations of the pilot.
    correlation : Tensor or None
        Of the log likelihood with its value before the pilot's moves, ``(K,)``.
    """

    draws: Draws
    schedule: Schedule | None
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
        """Gradient evaluations spent, the pilot's included; values count as gradients."""
        return self.draws.num_gradients

    @property
    def log_evidence_increments(self) -> Tensor:
        """Log ratios of the normalising constants of neighbouring temperatures, ``(R, K)``."""
        return self.info.log_increment

    @property
    def log_evidence(self) -> Tensor:
        """Log of each replicate's unbiased estimate of the evidence, ``(R,)``."""
        return self.info.log_increment.sum(1)

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ; ``sample_stats`` also has the stages, in dimensions ``(chain, stage)``."""
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
    seed: int = 0,
    *,
    num_pilot_particles: int = 512,
    ess_threshold: float = 0.985,
    max_correlation: float = 0.5,
    max_moves: int = 20,
    target_acceptance: float = 0.9,
    schedule: Schedule | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> SMCRun:
    """Carry particles from the prior to the posterior through a sequence of temperatures.

    A pilot, one population of ``num_pilot_particles``, learns temperatures, metrics, step sizes and numbers
    of moves. Then ``num_replicates`` independent populations follow that frozen schedule as one batch,
    so that each gives an unbiased estimate of the evidence, and their spread its error.

    Parameters
    ----------
    target : Target
        Its prior must be one it can draw from.
    num_particles : int, default 64
        Of each replicate.
    num_replicates : int, default 32
    seed : int, default 0
    num_pilot_particles : int, default 512
    ess_threshold : float in (0, 1), default 0.985
        Conditional effective share of the particles that a change of temperature leaves. The variance of
        the evidence falls, and the cost grows, with the number of temperatures.
    max_correlation : float in (0, 1), default 0.5
        At each temperature the pilot's particles are moved until no coordinate, nor the log likelihood,
        correlates more than this with its value before, or the last move has lowered no such correlation by a
        tenth.
    max_moves : int, default 20
        Upper limit of the number of moves.
    target_acceptance : float in (0, 1), default 0.9
    schedule : Schedule, optional
        Of an earlier run on a target of the same dimension; there is no pilot then.
    checkpoint : path, optional
        Prefix of two files, ``PREFIX.pilot`` and ``PREFIX.replicates``, from which an interrupted run resumes
        and ends bit for bit as if it had not been.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints.
    time_budget : float, optional
        Seconds after which the run ends with what it has.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    SMCRun

    Raises
    ------
    BudgetError
        If the time budget ended in the first stage; Ctrl-C there raises ``KeyboardInterrupt``.
    SettingsError
        If there are no particles, a setting lies outside its domain, or the target cannot draw from its prior.
    ShapeError
        If ``schedule`` belongs to another dimension.
    InitializationError
        If the likelihood is zero at all prior draws.
    CheckpointError
        If a checkpoint is damaged or belongs to another run.

    Warns
    -----
    SamplingWarning
        If the run was ended early, by the time budget or by Ctrl-C; ``ending`` says by which.

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
    if not isinstance(schedule, (Schedule, type(None))):
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
            schedule = Schedule(stages) if beta == 1 else None
            run = _as_run(target, particles, outcome, schedule, stages, generator, pilot_gradients, seed, deadline)
            say_early(run.ending, control, pilot.description, f"at inverse temperature {beta:.3g}")
            return run
        schedule, correlation = Schedule(stages), outcome.records["correlation"]
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
    schedule: Schedule
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
        return start(self.target, self.num_replicates, self.num_particles, generator)

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
    schedule: Schedule | None,
    stages: Sequence[Stage],
    generator: torch.Generator,
    spent: int,
    seed: int,
    deadline: float | None,
) -> SMCRun:
    """Gather what a run has done, and make its particles draws of equal weight, moved once more.

    They stay where they are if that would have to wait for the compiler beyond ``deadline``, or after Ctrl-C.
    """
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
    """Resample all populations as one, each as heavy as its evidence; neighbours stay neighbours.

    Particles of one population estimate with a bias of order ``1 / n``; with these weights it
    is of order ``1 / (r n)``.
    """
    r, n = state.log_weight.shape
    possible = log_evidence.isfinite().any()
    log_weight = state.log_weight + torch.where(possible, log_evidence, torch.zeros_like(log_evidence)).unsqueeze(1)
    index = systematic((log_weight - log_weight.logsumexp((0, 1))).reshape(1, -1), generator)
    fields = (x.flatten(0, 1).unsqueeze(0) if x.dim() else x for x in state)
    chosen = select(SMCState(*fields), index)
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
