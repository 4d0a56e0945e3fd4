"""Sequential Monte Carlo: the mean of unbiased estimates from independent populations."""

from __future__ import annotations

import math

from bayeskit._statistics import replicates_log_mean_error
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence.checks import MIN_EFFECTIVE, belongs, with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers.driver import obey
from bayeskit.inference.samplers.smc.run import SMCRun, sample_smc
from bayeskit.target import Target

MIN_REPLICATES = 8
MAX_RELATIVE_SPREAD = 0.7
MIN_CONDITIONAL_SHARE = 0.25
MIN_ACCEPTANCE = 0.3
MAX_CORRELATION = 0.8
MIN_ANCESTORS = 2.0


@estimator()
def smc(target: Target, run: SMCRun | None = None, *, seed: int = 0, progress: bool = True) -> Evidence:
    """Average the evidence estimates of replicates that followed one frozen schedule.

    Each estimate is unbiased, so their mean is, and their spread is its error. The standard error
    of the log evidence follows by the delta method; with few replicates it is widened so that 1.96
    of it hold the 97.5 % quantile of Student's distribution.

    A peak that is much narrower than what surrounds it draws no particles before the temperature at which it
    suddenly holds most of the mass, and no replicate notices. So the highest point above the draws is
    sought, and the mass about it compared with the estimate.

    Parameters
    ----------
    target : Target
    run : SMCRun, optional
        A finished run of :func:`sample_smc`; by default one is made, with its default settings.
    seed : int, default 0
        Of that run, and of the search for a missed peak.
    progress : bool, default True

    Returns
    -------
    Evidence
        ``num_evaluations`` counts the pilot and the search.

    Raises
    ------
    SettingsError
        If ``run`` is none of :func:`sample_smc`.
    DrawsError
        If it was stopped early, or belongs to another target.

    References
    ----------
    Del Moral, P., Doucet, A., Jasra, A. (2006). Sequential Monte Carlo samplers. Journal of the
    Royal Statistical Society B 68, 411-436.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence.sequential.smc import smc
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
    return with_missed_peak(average(run, "smc"), target, run.draws)


def average(run: SMCRun, method: str) -> Evidence:
    """Average the estimates of a finished run's replicates, and check what they rest on.

    Parameters
    ----------
    run : SMCRun
    method : str
        Whose estimate it is.
    """
    log_values = run.log_evidence
    log_evidence = float(log_values.logsumexp(0)) - math.log(len(log_values))
    problems, diagnostics = _problems(run)
    error, spread = map(float, replicates_log_mean_error((log_values - log_evidence).unsqueeze(0)))
    diagnostics["relative_spread"] = spread
    # One alone cannot disagree; that it is alone has been said.
    if len(log_values) > 1 and not spread <= MAX_RELATIVE_SPREAD:
        problems.append(
            f"replicates disagree (relative spread {spread:.2f} > {MAX_RELATIVE_SPREAD}), so their mean may rest on "
            "a few of them: use more num_particles or a higher ess_threshold"
        )
    return Evidence(
        method,
        log_evidence,
        with_rounding(error, run.draws.log_likelihood),
        run.num_gradients,
        tuple(problems),
        diagnostics,
    )


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
    if not float(left[worst]) >= MIN_CONDITIONAL_SHARE:
        problems.append(
            f"stage {worst + 1} leaves {100 * float(left[worst]):.0f} % of the particles effective: "
            "use a higher ess_threshold, or more particles where the schedule is learnt"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"a stage rests on {effective:.0f} effective particles: use more num_particles")
    if not float(acceptance[sticky]) >= MIN_ACCEPTANCE:
        problems.append(
            f"stage {sticky + 1} accepts {100 * float(acceptance[sticky]):.0f} % of its moves: use a higher "
            "target_acceptance, or learn a new schedule on this target, with more num_pilot_particles"
        )
    if correlation > MAX_CORRELATION:
        problems.append(
            f"moves leave particles where they were (correlation {correlation:.2f}): raise max_moves or "
            "reparameterise the model"
        )
    if ancestors < MIN_ANCESTORS:
        problems.append(f"particles descend from {ancestors:.1f} prior draws a replicate: use more num_particles")
    if run.undefined_share > 0:
        problems.append(
            f"the likelihood is NaN or infinite at {100 * run.undefined_share:.2g} % of the prior draws and counts as "
            "zero there: mend the model"
        )
    return problems, {
        "effective_particles": effective,
        "conditional_share": float(left[worst]),
        "acceptance_rate": float(acceptance[sticky]),
        "correlation": correlation,
        "surviving_ancestors": ancestors,
    }
