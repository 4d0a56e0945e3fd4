"""Adaptive sequential Monte Carlo: populations choose their temperatures on the way, without a pilot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluation, Evaluator
from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator
from bayeskit.inference.evidence.checks import NO_PRIOR_DRAWS
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.sequential.populations import (
    PLANNED_CALLS,
    Moves,
    crossed_metrics,
    finished_run,
    first_step_size,
    next_step,
    weigh,
)
from bayeskit.inference.evidence.sequential.smc import average
from bayeskit.inference.samplers.driver import Control, Ending, Outcome, Records, drive, obey
from bayeskit.inference.samplers.smc.resampling import effective_share
from bayeskit.inference.samplers.smc.run import SMCRun
from bayeskit.inference.samplers.smc.stages import SMCInfo, SMCState, count_distinct, resample, start
from bayeskit.target import Target


@estimator()
def adaptive_smc(
    target: Target,
    *,
    num_particles: int = 128,
    num_replicates: int = 16,
    ess_threshold: float = 0.95,
    max_correlation: float = 0.5,
    max_moves: int = 20,
    target_acceptance: float = 0.9,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = False,
) -> Evidence:
    """Average the evidence estimates of populations that choose their temperatures on the way, without a pilot.

    The inverse temperature is raised as far as the weights of all populations together allow, and each tunes the step
    size of its moves to itself. The metric that half of the populations move by is learnt from the other half: learnt
    from the very particles that it moves, it lets the evidence come out too low, in ten dimensions by several standard
    errors; and so, by less, would temperatures that each population chose alone. The number of trajectories and their
    steps are common to all.

    What is averaged has also chosen what it is averaged over, so the estimate has a relative bias of order one over
    the number of all particles, beside that of the step sizes. That of ``smc``, whose schedule is frozen, has none.

    Parameters
    ----------
    target : Target
        Its prior must be one it can draw from.
    num_particles : int, default 128
        Of each population.
    num_replicates : int, default 16
        Independent populations, 2 or more, whose spread is the error.
    ess_threshold : float in (0, 1), default 0.95
        Conditional effective share of all particles that a change of temperature leaves.
    max_correlation : float in (0, 1), default 0.5
        Particles are moved until no coordinate, nor the log likelihood, correlates more than this with its value
        before, or the last move has lowered no such correlation by a tenth.
    max_moves : int, default 20
        They end here in any case.
    target_acceptance : float in (0, 1), default 0.9
    seed : int, default 0
    checkpoint : path, optional
        File from which an interrupted run resumes, and ends bit for bit as if it had not been.
    progress : bool, default False

    Returns
    -------
    Evidence
        Its error as that of :func:`smc`, and its diagnostics too.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or the target cannot draw from its prior.
    InitializationError
        If the likelihood is zero at all prior draws.
    CheckpointError
        If a checkpoint is damaged or belongs to another run.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2012). An adaptive sequential Monte Carlo method for approximate Bayesian
    computation. Statistics and Computing 22, 1009-1020.
    Buchholz, A., Chopin, N., Jacob, P. E. (2021). Adaptive tuning of Hamiltonian Monte Carlo within sequential Monte
    Carlo. Bayesian Analysis 16, 745-771.
    Beskos, A., Jasra, A., Kantas, N., Thiery, A. (2016). On the convergence of adaptive sequential Monte Carlo
    methods. Annals of Applied Probability 26, 1111-1146.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence.sequential.adaptive_smc import adaptive_smc
    >>> case = exact.get("beta_binomial")
    >>> z = adaptive_smc(case.target(), seed=1)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    moves = Moves(max_correlation, max_moves, target_acceptance)
    populations = AdaptivePopulations(target, num_particles, num_replicates, ess_threshold, moves, seed)
    generator = new_generator(populations.seed, target.device, populations.stream)
    outcome = drive(populations, Control(checkpoint, progress=progress), generator, target.device)
    obey(outcome.ending)
    run = populations.as_run(outcome)
    return with_missed_peak(average(run, "adaptive_smc"), target, run.draws)


class AdaptiveState(NamedTuple):
    """Populations, ``beta`` of shape ``(r, 1)``, and the step size that the moves of each have been tuned to."""

    particles: SMCState
    step_size: Tensor  # (r,)


@dataclass(frozen=True, eq=False)
class AdaptivePopulations:
    """What :func:`drive` advances: one stage of every population that has not reached the posterior."""

    target: Target
    num_particles: int
    num_replicates: int
    ess_threshold: float
    moves: Moves
    seed: int

    description = "adaptive tempering"
    stream = "adaptive tempering"
    num_steps = None

    def __post_init__(self) -> None:
        for name, least in (("num_particles", 2), ("num_replicates", 2), ("seed", None)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        threshold = real_number("ess_threshold", self.ess_threshold, between=(0, 1))
        object.__setattr__(self, "ess_threshold", threshold)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must agree on."""
        settings = {name: value for name, value in vars(self).items() if name not in ("target", "moves")}
        model = {"model": self.target.fingerprint(), "compile": str(self.target.compile)}
        return model | settings | vars(self.moves)

    def start(self, generator: torch.Generator) -> AdaptiveState:
        """Draw from the prior."""
        particles = start(self.target, self.num_replicates, self.num_particles, generator)
        particles = particles._replace(beta=torch.zeros_like(particles.log_weight[:, :1]))
        return AdaptiveState(particles, first_step_size(particles))

    def advance(
        self, state: AdaptiveState, iteration: int, generator: torch.Generator
    ) -> tuple[AdaptiveState, Mapping[str, Tensor]]:
        """Run one stage."""
        particles, before = state.particles, state.particles.beta.squeeze(-1)
        log_likelihood = particles.log_likelihood.to(torch.float64)
        beta = next_step(particles.log_weight, log_likelihood, before, self.ess_threshold)
        particles, increment, left = weigh(particles, log_likelihood, beta - before)
        particles = particles._replace(beta=beta.unsqueeze(-1))
        share = effective_share(particles.log_weight)
        metric = crossed_metrics(particles)
        particles = resample(particles, generator)
        moved = self.moves.run(self._at(particles.beta), particles, metric, state.step_size, generator)
        ancestors = count_distinct(moved.particles.ancestor)
        info = SMCInfo(increment, left, share, moved.acceptance_rate, moved.diverging, ancestors)
        learnt = {
            "beta": beta,
            "correlation": moved.correlation,
            "num_moves": torch.tensor(moved.num_moves),
            "gradients": torch.tensor(moved.num_evaluations),
        }
        return AdaptiveState(moved.particles, moved.step_size), info._asdict() | learnt

    def ending(self, state: AdaptiveState, iteration: int, records: Records) -> Ending | None:
        """End when all populations are at the posterior."""
        return "finished" if bool((state.particles.beta == 1).all()) else None

    def note(self, state: AdaptiveState, iteration: int, records: Records) -> str:
        """Say how far they have come."""
        moves, acceptance = int(records["num_moves"][-1]), float(records["acceptance_rate"][-1].mean())
        return f"beta {float(state.particles.beta.min()):.3g}, {moves} moves, acceptance {acceptance:.2f}"

    def as_run(self, outcome: Outcome) -> SMCRun:
        """Gather what a finished run has done."""
        records = outcome.records
        info = SMCInfo(*(records[name].mT.contiguous() for name in SMCInfo._fields))
        spent = self.num_particles * self.num_replicates + int(records["gradients"].sum())
        settings = {"sampler": "adaptive SMC", "seed": self.seed, "ending": outcome.ending}
        run = finished_run(self.target, outcome.state.particles, info, spent, settings)
        return replace(run, beta=records["beta"].mean(1), correlation=records["correlation"])

    def _at(self, beta: Tensor) -> Evaluator:
        """Return the evaluation of all particles at the temperatures of their populations, ``(r, 1)``."""
        rows = beta.to(self.target.dtype).expand(-1, self.num_particles).flatten()
        evaluate = self.target.evaluator(len(rows), PLANNED_CALLS)

        def tempered(u: Tensor, _: Tensor) -> Evaluation:
            return evaluate(u, rows)

        return tempered


def refuses(target: Target) -> str | None:
    """Return why sequential Monte Carlo does not apply to a target, or None if it does.

    Examples
    --------
    >>> from bayeskit import exact
    >>> refuses(exact.get("beta_binomial").target()) is None
    True
    """
    if target.can_sample_prior:
        return None
    return NO_PRIOR_DRAWS
