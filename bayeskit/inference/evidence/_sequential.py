"""Sequential Monte Carlo with a fixed schedule, or with adaptive temperatures."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.convergence import MIN_EFFECTIVE
from bayeskit._core.inputs import whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import replicates_log_mean_error
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence._budget import SMCBudget
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import belongs
from bayeskit.inference.evidence._judging._densities import with_rounding
from bayeskit.inference.evidence._judging._diagnostics import from_draws
from bayeskit.inference.evidence._judging._missed_mass import unreached_by_moves
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._driver import Control, drive, obey
from bayeskit.inference.samplers._populations import PopulationMoves, ResampleMove, SMCInfo, SMCState, resample
from bayeskit.inference.samplers._smc import AdaptiveTempering, SMCRun, sample_smc

# Sequential Monte Carlo: the mean of unbiased estimates from independent populations.

MIN_REPLICATES = 8
_MAX_RELATIVE_SPREAD = 0.7
_MIN_CONDITIONAL_SHARE = 0.25
_MIN_ACCEPTANCE = 0.3
_MAX_CORRELATION = 0.8
_MIN_ANCESTORS = 2.0


def fewer_and_larger(spend: SMCBudget) -> dict[str, Any]:
    """Return half the replicates, twice as large: adaptation within a replicate biases its estimate."""
    return {"num_particles": 2 * spend.num_particles, "num_replicates": max(16, spend.num_replicates // 2)}


def _smc(target: Target, parts: Parts, seed: int) -> Evidence:
    settings = asdict(parts.budget.smc)
    run = sample_smc(target, **settings, seed=seed, checkpoint=parts.file("smc"), progress=parts.progress)
    obey(run.ending)
    # The duration of a resumed run includes that of its earlier parts.
    return replace(smc(target, run, seed=seed), seconds=run.draws.seconds)


@estimator(Part.PRIOR, by=_smc)
def smc(target: Target, run: SMCRun | None = None, *, seed: int = 0, progress: bool = True) -> Evidence:
    """Average the evidence estimates of SMC replicates with one fixed schedule.

    Each estimate is unbiased, and so is their mean; the variance between replicates gives the standard error (delta
    method for the log). With few replicates the standard error is widened, so that 1.96 standard errors equal the 97.5
    % quantile of Student's distribution.

    A narrow peak may have no particles until the temperature at which it dominates, and no replicate detects it. A
    search from the draws therefore compares the mass of missed modes with the estimate. Nor does a replicate reach a
    narrow part of the posterior, such as the neck of a funnel, if its steps are too long there. The particles are
    therefore moved with steps of a quarter of the length, and the estimate is not trusted if more of them enter a tail
    of a parameter, or of the likelihood, than leave it.

    Parameters
    ----------
    target : Target
    run : SMCRun, optional
        Finished run of :func:`sample_smc`; made with default settings if not given.
    seed : int, default 0
        Seed of the run and of the search for missed modes.
    progress : bool, default True

    Returns
    -------
    Evidence
        ``num_evaluations`` includes the pilot run, the search and these moves.

    Raises
    ------
    SettingsError
        If ``run`` is not an :class:`SMCRun`.
    DrawsError
        If the run ended early or belongs to another target.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2006). Sequential Monte Carlo samplers. Journal of the
    Royal Statistical Society B 68, 411-436.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence._sequential import smc
    >>> case = exact.get("beta_binomial")
    >>> z = smc(case.target(), seed=1)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    if run is None:
        run = sample_smc(target, seed=seed, progress=progress)
        obey(run.ending)
    if not isinstance(run, SMCRun):
        raise SettingsError(
            f"an SMCRun is needed, not {type(run).__name__}; make one by sample_smc(target), or give none"
        )
    if run.ending != "finished":
        reached = float(run.draws.beta[0])
        raise DrawsError(f"the run was stopped at inverse temperature {reached:.3g}; resume it from its checkpoint")
    belongs(run.draws, target)
    return from_draws(average(target, run, "smc"), run.draws)


def average(target: Target, run: SMCRun, method: str) -> Evidence:
    """Return the mean estimate of a finished run's replicates, with warnings, as that of ``method``."""
    log_evidence, error, spread, disagreement = mean_of_replicates(run.log_evidence)
    problems, diagnostics = _problems(run)
    problems += disagreement
    diagnostics["relative_spread"] = spread
    error = with_rounding(error, run.draws.log_likelihood)
    unreached, spent = unreached_by_moves(target, run.draws, error, run.num_gradients / run.draws.log_prior.numel())
    return Evidence(
        method,
        log_evidence,
        error,
        run.num_gradients + spent,
        (*problems, *unreached),
        diagnostics,
    )


def mean_of_replicates(log_values: Tensor) -> tuple[float, float, float, list[str]]:
    """Return the log of the mean of replicates ``(r,)``, its standard error, their relative spread, and a warning."""
    log_mean = float(log_values.logsumexp(0)) - math.log(len(log_values))
    error, spread = map(float, replicates_log_mean_error((log_values - log_mean).unsqueeze(0)))
    # A single replicate cannot disagree; a warning on the number of replicates exists already.
    if len(log_values) == 1 or spread <= _MAX_RELATIVE_SPREAD:
        return log_mean, error, spread, []
    disagreement = (
        f"replicates disagree (relative spread {spread:.2f} > {_MAX_RELATIVE_SPREAD}), so their mean may rest on "
        "a few of them: use more num_particles or a higher ess_threshold"
    )
    return log_mean, error, spread, [disagreement]


def _problems(run: SMCRun) -> tuple[list[str], dict[str, float]]:
    """Check number of replicates, distance of temperatures, moves, ancestry and likelihood."""
    info, (r, n) = run.info, run.draws.log_prior.shape
    left = info.conditional_share.mean(0)
    effective = float(info.effective_share.mean(0).min()) * r * n
    acceptance = info.acceptance_rate.mean(0)
    ancestors = float(info.num_ancestors[:, -1].double().mean())
    correlation = 0.0 if run.correlation is None else float(run.correlation.max())
    worst, sticky = int(left.argmin()), int(acceptance.argmin())
    problems = []
    if r < MIN_REPLICATES:
        problems.append(
            f"only {r} replicates, too few to see the error: use num_replicates of {MIN_REPLICATES} or more"
        )
    if not float(left[worst]) >= _MIN_CONDITIONAL_SHARE:
        problems.append(
            f"stage {worst + 1} leaves {100 * float(left[worst]):.0f} % of the particles effective: "
            "use a higher ess_threshold, or more particles where the schedule is learnt"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"a stage has only {effective:.0f} effective particles: use more num_particles")
    if not float(acceptance[sticky]) >= _MIN_ACCEPTANCE:
        problems.append(
            f"stage {sticky + 1} accepts {100 * float(acceptance[sticky]):.0f} % of its moves: use a higher "
            "target_acceptance, or learn a new schedule on this target, with more num_pilot_particles"
        )
    if correlation > _MAX_CORRELATION:
        problems.append(
            f"moves leave particles where they were (correlation {correlation:.2f}): raise max_moves or "
            "reparameterise the model"
        )
    if ancestors < _MIN_ANCESTORS:
        problems.append(f"particles descend from {ancestors:.1f} prior draws a replicate: use more num_particles")
    if run.undefined_share > 0:
        problems.append(
            f"the likelihood is NaN or infinite at {100 * run.undefined_share:.2g} % of the prior draws and counts as "
            "zero there: correct the model"
        )
    return problems, {
        "effective_particles": effective,
        "conditional_share": float(left[worst]),
        "acceptance_rate": float(acceptance[sticky]),
        "correlation": correlation,
        "surviving_ancestors": ancestors,
    }


def finished_run(
    target: Target,
    particles: SMCState,
    info: SMCInfo,
    step_size: Tensor,
    num_gradients: int,
    settings: dict[str, Any],
    beta: Tensor,
    correlation: Tensor | None,
) -> SMCRun:
    """Return the run of populations that reached the posterior; its draws are their particles, resampled."""
    generator = new_generator(settings["seed"], target.device, "draws of populations")
    particles = resample(particles, generator, below=1.0)
    draws = Draws(
        particles.position,
        particles.log_prior,
        particles.log_likelihood,
        torch.ones_like(particles.position[:, 0, 0]),
        {"step_size": step_size.unsqueeze(1).expand_as(particles.log_prior).clone()},
        num_gradients,
        0.0,
        settings,
        target,
    )
    return SMCRun(draws, None, beta, info, float(particles.undefined_share), correlation=correlation)


# Adaptive sequential Monte Carlo: temperatures are chosen during the run, without a pilot.


def _adaptive_smc(target: Target, parts: Parts, seed: int) -> Evidence:
    spend, file = fewer_and_larger(parts.budget.smc), parts.file("adaptive")
    return adaptive_smc(target, **spend, seed=seed, checkpoint=file, progress=parts.progress)


@estimator(Part.PRIOR, by=_adaptive_smc)
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
    progress: bool = True,
) -> Evidence:
    """Average the evidence estimates of SMC populations with adaptive temperatures, without a pilot run.

    The weights of all populations together determine each temperature step. Each population tunes its own step size;
    the number of trajectories and their steps are common to all. The metric of half of the populations is estimated
    from the other half: estimating it from the particles that it moves biases the evidence downward, in ten dimensions
    by several standard errors. Temperatures chosen by each population alone would have a smaller bias of the same kind.

    Adaptation leaves a relative bias of order one over the total number of particles, plus that of the step sizes.
    :func:`smc` has no such bias, because its schedule is fixed.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior.
    num_particles : int, default 128
        Per population.
    num_replicates : int, default 16
        Number of independent populations, at least 2, whose variance gives the standard error.
    ess_threshold : float in (0, 1), default 0.95
        Conditional effective share of all particles after each change of temperature.
    max_correlation : float in (0, 1), default 0.5
        Moves at a temperature end if no coordinate, nor the log likelihood, has a correlation above this with its value
        before the moves, or if the last move lowered no such correlation by a tenth.
    max_moves : int, default 20
        Largest number of moves per temperature.
    target_acceptance : float in (0, 1), default 0.9
    seed : int, default 0
    checkpoint : path, optional
        If the file exists, the run resumes from it; the result is bitwise identical to that of an uninterrupted run.
    progress : bool, default True

    Returns
    -------
    Evidence
        Standard error and diagnostics as for :func:`smc`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or the target cannot draw from its prior.
    InitializationError
        If the likelihood is zero at all prior draws.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

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
    >>> from bayeskit.inference.evidence._sequential import adaptive_smc
    >>> case = exact.get("beta_binomial")
    >>> z = adaptive_smc(case.target(), seed=1)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_particles = whole_number("num_particles", num_particles, 2)
    num_replicates = whole_number("num_replicates", num_replicates, 2)
    seed = whole_number("seed", seed)
    moves = PopulationMoves(max_correlation, max_moves, target_acceptance)
    steps = ResampleMove(ess_threshold, move_below=1.0, moves=moves)
    tempering = AdaptiveTempering(target, num_particles, num_replicates, steps, seed)
    generator = new_generator(seed, target.device, tempering.description)
    outcome = drive(tempering, Control(checkpoint, progress=progress), generator, target.device)
    obey(outcome.ending)
    state, records = outcome.state, outcome.records
    run = finished_run(
        target,
        state.particles,
        SMCInfo(*(records[name].mT.contiguous() for name in SMCInfo._fields)),
        state.step_size,
        tempering.num_evaluations(records),
        {"sampler": "adaptive SMC", "seed": seed, "ending": outcome.ending},
        records["beta"].mean(1),
        records["correlation"],
    )
    return from_draws(average(target, run, "adaptive_smc"), run.draws)
