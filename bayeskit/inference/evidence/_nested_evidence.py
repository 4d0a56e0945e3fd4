"""Nested sampling: the likelihood integrated over the prior volumes of the dead points."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor

from bayeskit._core.convergence import MIN_EFFECTIVE
from bayeskit._logdensity.target import Target
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference._known_modes import KnownModes, check_modes
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import rounding_problems, with_rounding
from bayeskit.inference.evidence._judging._missed_mass import same_likelihood, weighted_check
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._driver import obey
from bayeskit.inference.samplers._nested import NestedRun, sample_nested

_NUM_SIMULATIONS = 1000
_MIN_P_VALUE = 1e-4
_MAX_START_CORRELATION = 0.3
_MAX_STUCK = 1e-3
_MAX_HIDDEN_SHARE = 0.05
_MIN_HIDDEN_RISE = 5.0
_NUM_SEARCHES = 16
_SEARCH_STEPS = 100


def _compared(target: Target, parts: Parts, seed: int) -> Evidence:
    settings = asdict(parts.budget.nested)
    run = sample_nested(target, **settings, seed=seed, checkpoint=parts.file("nested"), progress=parts.progress)
    obey(run.ending)
    return nested_sampling(target, run, seed=seed)


@estimator(Part.PRIOR, by=_compared)
def nested_sampling(
    target: Target,
    run: NestedRun | None = None,
    *,
    num_live: int = 500,
    num_slice_steps: int | None = None,
    termination: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> Evidence:
    """Estimate the log evidence by nested sampling.

    The prior volumes of the dead points have known distributions. The estimate uses their expected logarithms. The
    standard error is the standard deviation of the log evidence over simulated volumes: about
    ``sqrt(information / num_live)`` if points die one by one, and a fifth more if the lower half dies at once.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior.
    run : NestedRun, optional
        Existing run on ``target``; made if not given.
    num_live, num_slice_steps, termination : optional
        Settings of the run, as in :func:`~bayeskit.inference.samplers.sample_nested`.
    seed : int, default 0
        Seed of the run and of the simulated volumes.
    progress : bool, default True

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If ``run`` belongs to another target.
    SettingsError
        If ``run`` is not a :class:`NestedRun`, or the target cannot draw from its prior.

    References
    ----------
    Skilling, J. (2006). Nested sampling for general Bayesian computation. Bayesian
    Analysis 1, 833-859.
    Fowlie, A., Handley, W., Su, L. (2020). Nested sampling cross-checks using order
    statistics. Monthly Notices of the Royal Astronomical Society 497, 5256-5263.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence._nested_evidence import nested_sampling
    >>> case = exact.get("beta_binomial")
    >>> z = nested_sampling(case.target(), num_live=200)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    if run is None:
        run = sample_nested(
            target, num_live, seed=seed, num_slice_steps=num_slice_steps, termination=termination, progress=progress
        )
        obey(run.ending)
    elif not isinstance(run, NestedRun):
        raise SettingsError(
            f"run must be a NestedRun, not {type(run).__name__}; make it by sample_nested(target), or leave it out"
        )
    elif run.target is not target and run.target.fingerprint() != target.fingerprint():
        raise DrawsError("the run was made on another target; pass the target that it was made on")
    simulated = run.simulate_log_evidence(_NUM_SIMULATIONS, seed=seed)
    problems, diagnostics = _run_problems(target, run)
    spent = 0
    if run.ending == "converged":
        problems += _unreached_mode(run)
        spent = min(_NUM_SEARCHES, len(run.position)) * (_SEARCH_STEPS + 1)
    finite = run.log_likelihood[run.log_likelihood.isfinite()].to(target.dtype)
    error = with_rounding(float(simulated.std()), finite)
    rounded, diagnostics["rounded_share"] = rounding_problems(target, run.position, run.log_weights, error)
    problems += rounded
    known = KnownModes.of(target)
    spent += known.weigh(target)
    seen = weighted_check(run.position, run.log_weights, run.log_evidence, error)
    problems += check_modes(seen, known.weighted)
    return Evidence(
        "nested_sampling",
        run.log_evidence,
        error,
        run.num_evaluations + spent,
        tuple(problems),
        diagnostics,
        run.seconds,
    )


def _run_problems(target: Target, run: NestedRun) -> tuple[list[str], dict[str, float]]:
    """Check the ending of a run, the insertion of its new points, and its effective sample size."""
    deaths = max(1, len(run.insertion))
    diagnostics = {
        "information": run.information,
        "expected_error": expected_error(run),
        "insertion_p_value": run.insertion_index_p_value,
        "rolling_insertion_p_value": run.rolling_insertion_index_p_value,
        "start_correlation": run.start_correlation,
        "effective_draws": run.effective_draws,
        "remaining_share": run.remaining_share,
    }
    problems = same_likelihood(target, run.log_likelihood)
    if run.ending != "converged":
        problems.append(
            f"the run ended early ({run.ending}), with {100 * run.remaining_share:.0f} % of the posterior in its live "
            "points: resume it with more time or blocks"
        )
    p_value = min(run.insertion_index_p_value, run.rolling_insertion_index_p_value)
    if not p_value >= _MIN_P_VALUE:
        problems.append(
            f"new points are not uniform among the live points (insertion index p-value {p_value:.1g}): use more slice "
            "steps"
        )
    if not run.start_correlation <= _MAX_START_CORRELATION:
        problems.append(
            f"new points depend on their starting points (rank correlation {run.start_correlation:.2f}): use more "
            "slice steps"
        )
    if not run.effective_draws >= MIN_EFFECTIVE:
        problems.append(f"only {run.effective_draws:.0f} effective draws: use more live points")
    if run.num_stuck > _MAX_STUCK * deaths:
        problems.append(f"{run.num_stuck} slice updates found no new point: check that the likelihood is deterministic")
    if run.num_nan:
        share = 100 * run.num_nan / run.num_evaluations
        problems.append(
            f"the likelihood is NaN at {share:.2g} % of the points and was counted as zero there: correct the model"
        )
    if run.settings["num_delete"] <= run.target.dim:
        problems.append(
            f"blocks of {run.settings['num_delete']} points are too small to estimate the scales of {run.target.dim} "
            "dimensions: use more live points or larger blocks"
        )
    return problems, diagnostics


def expected_error(run: NestedRun) -> float:
    """Return the standard deviation of the log volume after a compression by ``information`` nats."""
    # A death among ``n`` points lowers the log volume by an amount of mean and standard deviation ``1 / n``.
    before = run.log_volume >= -max(run.information, 0.0)
    return math.sqrt(float(run.live_counts[before].to(torch.float64).pow(-2).sum()))


def _unreached_mode(run: NestedRun) -> list[str]:
    """Search from the best live points; return a warning if a mode exceeds the maximum extrapolated from them."""
    n = run.num_live
    log_likelihood, relative = run.log_likelihood[-n:], run.log_volume[-n:] - run.log_volume[-n]
    # Near a smooth maximum the log likelihood is linear in the volume to the power ``2 / d``. A narrow peak inside a
    # broad one exceeds that line, and matters if its height times the remaining volume is not small relative to the
    # evidence.
    abscissa = (relative * 2 / run.target.dim).exp()
    centred = abscissa - abscissa.mean()
    slope = (centred * log_likelihood).sum() / centred.square().sum()
    foretold = torch.maximum(log_likelihood.mean() - slope * abscissa.mean(), log_likelihood[-1])
    top = _highest_log_likelihood(run).to(torch.float64)
    rise = float(top - foretold)
    share = float(run.log_volume[-n] + top) - run.log_evidence
    if rise > _MIN_HIDDEN_RISE and share > math.log(_MAX_HIDDEN_SHARE):
        return [
            f"a mode {rise:.0f} nats above the maximum extrapolated from the live points was not reached: use a "
            "smaller termination, and more live points"
        ]
    return []


def _highest_log_likelihood(run: NestedRun) -> Tensor:
    """Return the largest log likelihood met on the way up the posterior from the best live points."""
    target, n = run.target, run.num_live
    x = run.position[-_NUM_SEARCHES:]
    variance = run.position[-n:].var(0)
    evaluate = target.evaluator(len(x))
    ones = torch.ones_like(x[:, 0])
    now = evaluate(x, ones)
    step, highest = ones.clone(), now.log_likelihood.nan_to_num(nan=-torch.inf).max()
    for _ in range(_SEARCH_STEPS):
        move = variance * now.gradient.nan_to_num()
        proposal = x + step.unsqueeze(-1) * move / (1 + (move.square() / variance).sum(-1, keepdim=True).sqrt())
        new = evaluate(proposal, ones)
        better = new.log_density > now.log_density
        x = torch.where(better.unsqueeze(-1), proposal, x)
        columns = zip(new, now, strict=True)
        now = type(now)(*(torch.where(better.reshape(-1, *[1] * (a.dim() - 1)), a, b) for a, b in columns))
        step = torch.where(better, 1.5 * step, 0.3 * step)
        highest = torch.maximum(highest, now.log_likelihood.nan_to_num(nan=-torch.inf).max())
    KnownModes.of(target).note(x[now.log_density.isfinite()], "nested points")
    return highest
