"""Estimators on draws at a ladder of temperatures between prior and posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bayeskit._core.convergence import MAX_PARETO_SHAPE, MAX_R_HAT, MIN_EFFECTIVE
from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import (
    effective_sample_size,
    log_mean_exp,
    log_mean_exp_error,
    mean_error,
    pareto_shape,
    r_hat,
    weight_effective_sample_size,
)
from bayeskit._draws import Draws
from bayeskit._logdensity.combinators import rebased
from bayeskit._logdensity.target import Target
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference._proposals import SplitStudentT
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import belongs
from bayeskit.inference.evidence._judging._chains import ladder_problems, posterior_problems
from bayeskit.inference.evidence._judging._densities import with_rounding, without_nan
from bayeskit.inference.evidence._judging._diagnostics import from_draws
from bayeskit.inference.evidence._methods import Part, Parts
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers import sample_ladder
from bayeskit.inference.samplers._ladder import Ladder

# The mean log likelihood as a function of the inverse temperature, and its numerical integration.

_MAX_GAP = 1.0  # nats: a larger error of the integration says that the temperatures are too few
_MIN_INTERVALS = 4  # enough to omit every second temperature


class IntegrandCurve(NamedTuple):
    """The mean log likelihood along a ladder of ``T`` temperatures, from the first one above the prior upwards."""

    start: float  # log mean importance ratio of the first temperature to the prior
    start_terms: Tensor  # (1, chains, draws), ratios behind ``start`` relative to their mean
    beta: Tensor  # (T - 1,), inverse temperatures
    # Cumulants of the log likelihood, (T - 1,), each the derivative of the previous one.
    mean: Tensor
    variance: Tensor
    third: Tensor
    centred: Tensor  # (T - 1, chains, draws), log likelihoods less their mean
    scale: Tensor  # (T, chains, draws), log likelihoods, for their rounding error
    problems: tuple[str, ...]
    diagnostics: dict[str, float]
    first_step_holds: bool = True  # whether enough prior draws are effective in the first step

    @property
    def has_enough_intervals(self) -> bool:
        """Whether there are enough temperatures to estimate the discretisation error."""
        return len(self.beta) > _MIN_INTERVALS

    @property
    def width(self) -> Tensor:
        """Widths of the intervals, shape ``(T - 2,)``."""
        return self.beta.diff()

    @property
    def trapezoid(self) -> float:
        """Integral by the trapezoidal rule, the first interval by its importance ratio."""
        return self.start + float((self.width * (self.mean[1:] + self.mean[:-1])).sum()) / 2

    @property
    def corrections(self) -> Tensor:
        """Leading error of the trapezoidal rule in each interval, by the derivatives at its ends."""
        return -self.width.square() * self.variance.diff() / 12

    @property
    def gaps(self) -> Tensor:
        """Leading error of the corrected rule in each interval ``(T - 2,)``, by the second derivatives at its ends."""
        # The correction is exact if the variance changes as the trapezoidal rule for its derivative implies;
        # the remainder enters the next rule with a tenth of the weight.
        curvature = self.width * (self.third[1:] + self.third[:-1]) / 2
        return self.width.square() * (curvature - self.variance.diff()) / 60

    def error(self, ladder: Ladder, *, corrected: bool) -> float:
        """Monte Carlo error of the integral; with ``corrected`` that of the variances is included."""
        weight, slope = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        weight[:-1] += self.width / 2
        weight[1:] += self.width / 2
        if corrected:
            slope[:-1] += self.width.square() / 12
            slope[1:] -= self.width.square() / 12
        # One series per temperature combines the errors of mean and variance, including their correlation.
        influence = weight[:, None, None] * self.centred + slope[:, None, None] * self.centred.square()
        error = _ladder_error(torch.cat([self.start_terms, influence]), ladder)
        return _with_rounding_of_sum(error, self.scale, len(ladder.beta))

    def coarse_gap(self) -> float:
        """Return the corrected rule's error, estimated by every second temperature; infinite if they are too few."""
        if not self.has_enough_intervals:
            return math.inf
        keep = sorted({*range(0, len(self.beta), 2), len(self.beta) - 1})
        coarse = self._replace(beta=self.beta[keep], mean=self.mean[keep], variance=self.variance[keep])
        # The rule is of fourth order, so the difference is about fifteen times the error of the finer rule.
        fine = self.trapezoid + float(self.corrections.sum())
        return abs(fine - coarse.trapezoid - float(coarse.corrections.sum())) / 15


def curve(target: Target, ladder: Ladder) -> IntegrandCurve:
    """Return the integrand along a ladder; SettingsError if it is not a ladder, DrawsError if of another target."""
    _check_ladder(ladder, target)
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    log_likelihood = log_likelihood.to(torch.float64)
    # Under a heavy-tailed prior the log likelihood has no moments, so the first interval, which is narrow on a ladder,
    # uses the importance ratio of stepping stone.
    first = ladder.beta[1] * log_likelihood[:1]
    start = float(log_mean_exp(first))
    tempered = log_likelihood[1:]
    mean = tempered.mean((1, 2))
    centred = tempered - mean[:, None, None]
    terms = (first - start).exp()
    problems, diagnostics = _problems(ladder, target)
    first_problems, facts = _first_step(first, terms)
    if len(ladder.beta) - 2 < _MIN_INTERVALS:
        problems.append(
            f"a ladder of {len(ladder.beta) - 1} steps has too few temperatures to estimate the discretisation error: "
            f"use at least {_MIN_INTERVALS + 1} steps"
        )
    return IntegrandCurve(
        start,
        terms,
        ladder.beta[1:],
        mean,
        centred.square().mean((1, 2)),
        centred.pow(3).mean((1, 2)),
        centred,
        ladder.log_likelihood,
        (*problems, *first_problems, *nan_problems),
        diagnostics | facts,
        not first_problems,
    )


def _problems(ladder: Ladder, target: Target) -> tuple[list[str], dict[str, float]]:
    """Return the problems of a ladder, found once for all estimators that share it, since that takes seconds."""
    known = target.findings.setdefault("ladders", WeakIdKeyDictionary())
    if ladder not in known:
        known[ladder] = ladder_problems(ladder)
    problems, facts = known[ladder]
    return list(problems), dict(facts)


def _check_ladder(ladder: Ladder, target: Target) -> None:
    """Raise SettingsError if it is not a ladder, DrawsError if it is of another target."""
    if not isinstance(ladder, Ladder):
        raise SettingsError(
            f"ladder must be a Ladder, with draws at every temperature, not {type(ladder).__name__}; make it by "
            "sample_ladder(target)"
        )
    belongs(ladder.draws, target, posterior=False)


def _ladder_error(influence: Tensor, ladder: Ladder) -> float:
    """Return the standard error of a sum of one mean per temperature, from influences ``(T, chains, draws)``."""
    # Temperatures with exchanges are correlated, so terms are added before their error is estimated.
    if ladder.exchange is not None:
        return float(mean_error(influence.sum(0)))
    return float(mean_error(influence).square().sum().sqrt())


def _with_rounding_of_sum(standard_error: float, log_values: Tensor, count: int) -> float:
    """Add to a standard error the rounding error of log densities and of a sum of ``count`` such terms."""
    return with_rounding(with_rounding(standard_error, log_values), count * log_values.to(torch.float64))


def _first_step(log_weights: Tensor, terms: Tensor) -> tuple[list[str], dict[str, float]]:
    """Check the weights of the first step ``(1, chains, draws)``; ``terms`` are the weights over their mean."""
    # Draws of zero likelihood count in the effective sample size but not in the tail of the weights.
    shape = pareto_shape(log_weights[log_weights > -torch.inf])
    independent = (effective_sample_size(terms[0]) / terms.numel()).clamp(max=1.0)
    effective = float(weight_effective_sample_size(log_weights.flatten()) * independent)
    problems = []
    if not effective >= MIN_EFFECTIVE:
        problems.append(
            f"the first step from the prior has only {effective:.0f} effective draws: use a first temperature "
            "closer to zero, or longer chains"
        )
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the weights of the first step have a heavy tail (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): use a first "
            "temperature closer to zero"
        )
    return problems, {"first_step_effective_draws": effective, "first_step_pareto_shape": shape}


# Temperatures that equalise the error over the intervals of a ladder.

_FIRST_SHARE = 0.5  # effective share of the prior draws in the first step
_LEAST_INTERVALS = 6
_WIDEST_RATIO = 2.0  # of neighbouring temperatures below those of the pilot


def temperatures(path: IntegrandCurve, ladder: Ladder, gap: float, most: int) -> Tensor:
    """Return temperatures ``(steps + 1,)`` from 0 to 1 with an error near ``gap`` nats (Calderhead, Girolami 2009)."""
    first = _first(ladder)
    gaps, length = path.gaps.abs(), path.width * ((path.variance[1:] + path.variance[:-1]) / 2).sqrt()
    fifth = gaps.pow(0.2)  # the error of the rule in an interval is of fifth order in its width
    # Half of the temperatures equalise the estimated errors of the rule. The other half equalise thermodynamic length,
    # the integral of the standard deviation of the log likelihood, and thereby the Monte Carlo errors. No interval then
    # stays wide because its error estimate is small by chance.
    share = fifth / fifth.sum().clamp(min=1e-300) + length / length.sum().clamp(min=1e-300)
    share = (share / share.sum().clamp(min=1e-300)).clamp(min=1e-6)
    # An interval cut into n * share parts has an error smaller by the fourth power of that number.
    wanted = (float((gaps / share.pow(4)).sum()) / gap) ** 0.25
    count = math.ceil(max(wanted, float(length.sum()), _LEAST_INTERVALS))

    logs = path.beta.to(torch.float64).log()
    travelled = torch.cat([share.new_zeros(1), share.cumsum(0)]).to(torch.float64)
    low = float(logs[0])
    extra = logs.new_zeros(0)
    if math.log(first) < low:
        # Below the pilot's first temperature there is no information except that the first step has to be shorter.
        steps = math.ceil((low - math.log(first)) / math.log(_WIDEST_RATIO))
        extra = torch.linspace(math.log(first), low, steps + 1, dtype=torch.float64, device=logs.device)[:-1]
        begin = 0.0
    else:
        begin = float(_interpolate(logs.new_tensor([math.log(first)]), logs, travelled))
    left = max(1.0 - begin / float(travelled[-1]), 1e-6)
    inner = max(2, min(math.ceil(count * left), most - 1 - len(extra)))
    levels = torch.linspace(begin, float(travelled[-1]), inner + 1, dtype=torch.float64, device=logs.device)
    inside = torch.cat([extra, _interpolate(levels, travelled, logs)]).exp()
    inside[-1] = 1.0
    return torch.cat([inside.new_zeros(1), inside])


def _first(ladder: Ladder) -> float:
    """Return the inverse temperature, at most 0.5, at which half of the prior draws are effective."""
    log_likelihood = ladder.log_likelihood[0].flatten()
    log_likelihood = log_likelihood[log_likelihood > -torch.inf]
    log_likelihood = (log_likelihood - log_likelihood.median()).to(torch.float64)
    low, high = -60.0, math.log(0.5)
    for _ in range(40):
        middle = (low + high) / 2
        share = float(weight_effective_sample_size(math.exp(middle) * log_likelihood)) / len(log_likelihood)
        low, high = (middle, high) if share >= _FIRST_SHARE else (low, middle)
    return math.exp(low)


def _interpolate(x: Tensor, known: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly between increasing points."""
    right = torch.searchsorted(known, x).clamp(1, len(known) - 1)
    low, high = known[right - 1], known[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (x - low) / (high - low)


# Path sampling: the mean log likelihood integrated over the temperature ladder.


@estimator(Part.LADDER, kind="approximation")
def path_sampling(target: Target, ladder: Ladder) -> Evidence:
    """Integrate the mean log likelihood over the inverse temperature by the trapezoidal rule.

    The bias of the rule is negative if the variance of the log likelihood decreases along the path, and does not shrink
    with more draws. The standard error includes this gap, ``diagnostics["trapezoid_gap"]``. The estimate is not
    trusted if the gap may exceed one nat. :func:`modified_path_sampling` removes most of the bias, from the same
    ladder. The first interval, next to the prior, uses its importance ratio, because the log likelihood under a vague
    prior has a huge mean or none.

    Parameters
    ----------
    target : Target
    ladder : Ladder

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``ladder`` is not a :class:`Ladder`.
    DrawsError
        If the ladder comes from another target.

    References
    ----------
    Gelman, A., Meng, X.-L. (1998). Simulating normalizing constants. Statistical
    Science 13, 163-185.
    Lartillot, N., Philippe, H. (2006). Computing Bayes factors using thermodynamic
    integration. Systematic Biology 55, 195-207.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import path_sampling
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = path_sampling(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error or not z.trusted
    True
    """
    path = curve(target, ladder)
    monte_carlo = error = path.error(ladder, corrected=False)
    gap, problems = float(path.corrections.sum()), path.problems
    if path.has_enough_intervals:
        left = path.coarse_gap()
        error = math.hypot(monte_carlo, abs(gap) + left)
        if not abs(gap) + left <= _MAX_GAP:
            problems += (
                f"the trapezoidal rule misses about {gap:+.3f} nats, and this is known to within {left:.3f}: use "
                "modified_path_sampling or more temperatures",
            )
    diagnostics = path.diagnostics | {"trapezoid_gap": gap, "monte_carlo_error": monte_carlo}
    z = Evidence("path_sampling", path.trapezoid, error, ladder.num_evaluations, problems, diagnostics)
    return from_draws(z, ladder.draws, known_bias=gap)


# Modified path sampling: the trapezoidal rule, corrected by the variances at the temperatures.


@estimator(Part.LADDER)
def modified_path_sampling(target: Target, ladder: Ladder) -> Evidence:
    """Integrate the mean log likelihood over the inverse temperature by the corrected trapezoidal rule.

    The derivative of the integrand is the variance of the log likelihood, which gives the leading error of the
    trapezoidal rule: ``h ** 2 * v / 12`` for an interval of width ``h`` over which the variance changes by ``v``. The
    standard error includes what this correction may leave, ``diagnostics["remaining_gap"]``, by the difference to every
    second temperature; the estimate is not trusted if that exceeds one nat. The first interval, next to the prior, uses
    its importance ratio, which needs no moments.

    Parameters
    ----------
    target : Target
    ladder : Ladder

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``ladder`` is not a :class:`Ladder`.
    DrawsError
        If the ladder comes from another target.

    References
    ----------
    Friel, N., Hurn, M., Wyse, J. (2014). Improving power posterior estimation of
    statistical evidence. Statistics and Computing 24, 709-723.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import modified_path_sampling
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = modified_path_sampling(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    path = curve(target, ladder)
    monte_carlo = error = path.error(ladder, corrected=True)
    correction, left = float(path.corrections.sum()), path.coarse_gap()
    problems = path.problems
    if path.has_enough_intervals:
        error = math.hypot(monte_carlo, left)
        if not left <= _MAX_GAP:
            problems += (f"the ladder is too coarse (gap {left:.3f} nats after correction): use more temperatures",)
    diagnostics = path.diagnostics | {"trapezoid_gap": correction, "remaining_gap": left}
    diagnostics["monte_carlo_error"] = monte_carlo
    value = path.trapezoid + correction
    z = Evidence("modified_path_sampling", value, error, ladder.num_evaluations, problems, diagnostics)
    return from_draws(z, ladder.draws)


# Stepping stone: a product of importance ratios along the temperature ladder.


@estimator(Part.LADDER)
def stepping_stone(target: Target, ladder: Ladder) -> Evidence:
    """Multiply importance ratios of neighbouring temperatures, each from draws at the lower inverse temperature.

    Parameters
    ----------
    target : Target
    ladder : Ladder

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``ladder`` is not a :class:`Ladder`.
    DrawsError
        If the ladder comes from another target.

    References
    ----------
    Xie, W., Lewis, P. O., Fan, Y., Kuo, L., Chen, M.-H. (2011). Improving marginal
    likelihood estimation for Bayesian phylogenetic model selection. Systematic
    Biology 60, 150-160.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import stepping_stone
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = stepping_stone(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    _check_ladder(ladder, target)
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    log_likelihood = log_likelihood.to(torch.float64)
    steps = ladder.beta.diff()[:, None, None] * log_likelihood[:-1]
    ratios = log_mean_exp(steps)
    # Delta method: the error of a logarithm is the relative error.
    error = _ladder_error((steps - ratios[:, None, None]).exp(), ladder)

    problems, diagnostics = _problems(ladder, target)
    problems += nan_problems
    count = steps[0].numel()
    # Prior draws may have likelihood zero; for the autocorrelation any lowest value represents them.
    lowest = log_likelihood.masked_fill(log_likelihood == -torch.inf, torch.inf).amin((-1, -2), keepdim=True)
    bounded = log_likelihood.maximum(lowest)[:-1]
    independent = (effective_sample_size(bounded) / count).clamp(max=1.0)
    effective = weight_effective_sample_size(steps.flatten(1)) * independent
    worst = int(effective.argmin())
    if not float(effective[worst]) >= MIN_EFFECTIVE:
        problems.append(
            f"step {worst + 1} of the ladder has only {float(effective[worst]):.0f} effective draws: "
            "use more temperatures or longer chains"
        )
    diagnostics |= {
        "effective_draws": float(effective[worst]),
        "largest_step_error": float(log_mean_exp_error(steps).max()),
    }
    z = Evidence(
        "stepping_stone",
        float(ratios.sum()),
        _with_rounding_of_sum(error, ladder.log_likelihood, len(ratios)),
        ladder.num_evaluations,
        tuple(problems),
        diagnostics,
    )
    return from_draws(z, ladder.draws)


# Thermodynamic integration with temperatures added until the discretisation error is small enough.

_MAX_ROUNDS = 4
_MARGIN = 0.25  # target gap as a share of the tolerance, because the pilot estimates the gap roughly
_TOLERANCE = 0.01  # nats
_ROUGH = 1.0  # nats of discretisation error from which the temperatures are only good for another pilot
_LITTLE = 0.25  # of the Monte Carlo error: a smaller gap adds three percent to the standard error


def _refined(target: Target, parts: Parts, seed: int) -> Evidence:
    spend = parts.budget.ladder
    return thermodynamic_integration(
        target,
        ladder=parts.part(Part.LADDER),
        num_chains=spend.num_chains,
        num_warmup=spend.num_warmup,
        # More temperatures need fewer draws at each for the same error.
        num_samples=max(8, spend.num_samples // 2),
        seed=seed,
        progress=parts.progress,
        checkpoint=parts.file("refined"),
    )


@estimator(Part.LADDER, by=_refined)
def thermodynamic_integration(
    target: Target,
    *,
    ladder: Ladder | None = None,
    tolerance: float | None = None,
    num_temperatures: int = 20,
    max_temperatures: int = 200,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    seed: int = 0,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> Evidence:
    """Integrate the mean log likelihood over temperatures, with the discretisation error below a tolerance.

    The rule is that of :func:`modified_path_sampling`; its error is estimated from the third cumulants of the log
    likelihood. Short pilot ladders determine number and positions of the temperatures. The ladder is checked and
    refined up to four times. Only the last ladder enters the estimate; its discretisation error is part of the standard
    error.

    Parameters
    ----------
    target : Target
        Has to support draws from its prior.
    ladder : Ladder, optional
        Replaces the pilot; also used for the estimate if its discretisation error is small enough.
    tolerance : float, optional
        Largest discretisation error, in nats; by default 0.01, or a quarter of the Monte Carlo error if that is more.
    num_temperatures : int, default 20
        Steps of the pilot ladder.
    max_temperatures : int, default 200
        Largest number of steps of a ladder.
    num_chains : int, default 8
        Chains per temperature.
    num_warmup, num_samples : int, default 200 and 500
        Iterations per chain; the pilot makes half and a quarter of them.
    seed : int, default 0
    progress : bool, default True
    checkpoint : path, optional
        Prefix of the files from which interrupted ladders resume.

    Returns
    -------
    Evidence
        Not trusted if the discretisation error exceeds the tolerance, or if too few prior draws support the first
        step.

    Raises
    ------
    DrawsError
        If ``ladder`` comes from another target.
    SettingsError
        If a setting lies outside its domain, or ``ladder`` is not a :class:`Ladder`.

    References
    ----------
    Lartillot, N., Philippe, H. (2006). Computing Bayes factors using thermodynamic
    integration. Systematic Biology 55, 195-207.
    Friel, N., Hurn, M., Wyse, J. (2014). Improving power posterior estimation of
    statistical evidence. Statistics and Computing 24, 709-723.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import thermodynamic_integration
    >>> case = exact.get("beta_binomial")
    >>> z = thermodynamic_integration(case.target(), num_samples=200)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, abs(z.diagnostics["gap"]) < 0.01
    (True, True)
    """
    if tolerance is not None:
        tolerance = real_number("tolerance", tolerance, "(0, inf)")
    num_temperatures = whole_number("num_temperatures", num_temperatures, 4)
    max_temperatures = whole_number("max_temperatures", max_temperatures, num_temperatures)
    num_warmup, num_samples = whole_number("num_warmup", num_warmup, 0), whole_number("num_samples", num_samples, 8)
    generator = new_generator(seed, stream="thermodynamic integration")
    seeds = torch.randint(2**31, (_MAX_ROUNDS + 1,), generator=generator).tolist()

    def draw(number: int, levels: torch.Tensor | None, short: bool) -> Ladder:
        warmup, samples = (num_warmup // 2, max(num_samples // 4, 8)) if short else (num_warmup, num_samples)
        return sample_ladder(
            target,
            num_temperatures,
            num_chains,
            warmup,
            samples,
            seed=seeds[number],
            beta=levels,
            checkpoint=None if checkpoint is None else f"{checkpoint}.{number}",
            progress=progress,
        )

    given = ladder is not None
    current = draw(0, None, True) if ladder is None else ladder
    path, spent, rounds = curve(target, current), current.num_evaluations, 0
    factor, short, wanted = _MARGIN, not given, _wanted(path, current, tolerance)
    while rounds < _MAX_ROUNDS and (short or not _settled(path, wanted)):
        rough = rounds + 1 < _MAX_ROUNDS and not (path.first_step_holds and _gap(path) <= _ROUGH)
        levels = temperatures(path, current, factor * (_ROUGH if rough else wanted), max_temperatures)
        if not short and rounds and len(levels) == len(current.beta) == max_temperatures + 1:
            break  # no further improvement is possible
        rounds, short = rounds + 1, rough
        factor = factor if short else factor / 2
        current = draw(rounds, levels, short)
        spent += current.num_evaluations
        path = curve(target, current)
        wanted = _wanted(path, current, tolerance)
    z = _estimate(target, current, path, wanted, spent, rounds)
    return from_draws(z, current.draws)


def _settled(path: IntegrandCurve, tolerance: float) -> bool:
    return path.first_step_holds and path.has_enough_intervals and _gap(path) <= tolerance


def _wanted(path: IntegrandCurve, ladder: Ladder, tolerance: float | None) -> float:
    """Return the largest discretisation error that may stay: the ``tolerance``, or by default a small one."""
    if tolerance is not None:
        return tolerance
    return max(_TOLERANCE, _LITTLE * path.error(ladder, corrected=True)) if path.first_step_holds else _TOLERANCE


def _gap(path: IntegrandCurve) -> float:
    return abs(float(path.gaps.sum()))


def _estimate(
    target: Target, ladder: Ladder, path: IntegrandCurve, tolerance: float, spent: int, rounds: int
) -> Evidence:
    monte_carlo = path.error(ladder, corrected=True)
    gap = float(path.gaps.sum())
    value = path.trapezoid + float(path.corrections.sum())
    error = math.hypot(monte_carlo, gap)
    problems = path.problems
    if not _gap(path) <= tolerance:
        problems += (
            f"the discretisation gap is still about {abs(gap):.3f}, above the tolerance {tolerance:g}, with "
            f"{len(ladder.beta) - 1} temperatures: raise max_temperatures or num_samples",
        )
    # Importance ratios of the same draws have no discretisation error and so detect errors of the cumulants.
    difference = value - stepping_stone(target, ladder).log_evidence
    if not abs(difference) <= tolerance + 2 * error:
        problems += (
            f"stepping stone on the same draws differs by {-difference:+.3f}: the mean log likelihood jumps between "
            "temperatures; use a ladder with exchange",
        )
    diagnostics = path.diagnostics | {
        "gap": gap,
        "monte_carlo_error": monte_carlo,
        "stepping_stone_difference": difference,
        "num_temperatures": float(len(ladder.beta) - 1),
        "rounds": float(rounds),
    }
    return Evidence("thermodynamic_integration", value, error, spent, problems, diagnostics)


# Generalised stepping stone: the ladder starts from a reference distribution fitted to posterior draws.


def _from_reference(target: Target, parts: Parts, seed: int) -> Evidence:
    spend = parts.budget.ladder
    return generalised_stepping_stone(
        target,
        parts.part(Part.POSTERIOR),
        num_temperatures=spend.num_reference_temperatures,
        num_chains=spend.num_chains,
        num_warmup=spend.num_warmup,
        num_samples=spend.num_samples,
        seed=seed,
        progress=parts.progress,
        checkpoint=parts.file("reference"),
    )


@estimator(Part.POSTERIOR, mixing=False, by=_from_reference)
def generalised_stepping_stone(
    target: Target,
    draws: Draws,
    *,
    num_temperatures: int = 10,
    num_chains: int = 8,
    num_warmup: int = 200,
    num_samples: int = 500,
    seed: int = 0,
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> Evidence:
    """Run stepping stone from a reference distribution fitted to posterior draws instead of the prior.

    The reference has independent coordinates and is fitted to the first half of each chain. It is close to the
    posterior, so a few equal steps suffice, even if the prior is vague or cannot be drawn from. The family is a
    Student-t with two scales in unconstrained space for all parameters, with tails heavier than those of the posterior;
    the authors use one family for each kind of parameter.

    Parameters
    ----------
    target : Target
    draws : Draws
    num_temperatures : int, default 10
        Number of equal steps.
    num_chains : int, default 8
        Chains per temperature.
    num_warmup, num_samples : int, default 200 and 500
        Iterations per chain.
    seed : int, default 0
    progress : bool, default True
    checkpoint : path, optional
        File from which an interrupted ladder resumes.

    Returns
    -------
    Evidence
        Not trusted, in addition to the reasons of :func:`stepping_stone`, if the weights of a step, or those of the
        other posterior draws against the reference, are heavy-tailed, or if the end of the ladder differs from the
        posterior draws.

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to fit the reference.
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Fan, Y., Wu, R., Chen, M.-H., Kuo, L., Lewis, P. O. (2011). Choosing among partition
    models in Bayesian phylogenetics. Molecular Biology and Evolution 28, 523-532.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import generalised_stepping_stone
    >>> case = bk.exact.get("three_taxon_tree")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = generalised_stepping_stone(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    num_temperatures = whole_number("num_temperatures", num_temperatures, 2)
    num_samples = whole_number("num_samples", num_samples, 8)
    reference, rest = fit_reference(draws)
    path = rebased(target, reference.to(draws.unconstrained))
    ladder = sample_ladder(
        path,
        num_temperatures,
        num_chains,
        num_warmup,
        num_samples,
        seed=seed,
        beta=torch.linspace(0, 1, num_temperatures + 1, dtype=torch.float64),
        checkpoint=checkpoint,
        progress=progress,
    )
    z = stepping_stone(path, ladder)
    problems, facts = posterior_problems(draws)
    chains = [f"posterior draws: {problem}" for problem in problems]
    tails, shapes = _tail_problems(reference, ladder, draws, rest)
    missed, apart = _missed_part(ladder, draws.unconstrained[:, rest])
    estimate = replace(
        z,
        method="generalised_stepping_stone",
        num_evaluations=z.num_evaluations + draws.num_gradients,
        warnings=(*z.warnings, *chains, *tails, *missed),
        diagnostics=z.diagnostics | {f"posterior_{k}": v for k, v in facts.items()} | shapes | apart,
    )
    return from_draws(estimate, draws, others=[ladder.posterior])


def fit_reference(draws: Draws) -> tuple[SplitStudentT, slice]:
    """Fit the reference to the first half of every chain; return it and the slice of the rest, or raise DrawsError."""
    half = draws.num_draws // 2
    if half < 8 or half * draws.num_chains < 50:
        raise DrawsError(
            f"{draws.num_chains} chains of {draws.num_draws} draws are too few to fit a reference distribution; "
            "give at least 16 draws a chain and 100 in all"
        )
    return SplitStudentT.fit(draws.unconstrained[:, :half].flatten(0, 1)), slice(half, None)


def _tail_problems(
    reference: SplitStudentT, ladder: Ladder, draws: Draws, rest: slice
) -> tuple[list[str], dict[str, float]]:
    """Check the weights of every step, and of the posterior draws not used to fit the reference."""
    steps = ladder.beta.diff()[:, None, None] * ladder.log_likelihood[:-1]
    step = max(pareto_shape(each) for each in steps)
    seen = draws.unconstrained[:, rest]
    weights = draws.log_density[:, rest] - reference.to(seen).log_prob(seen)
    # The weights of the last step if it were drawn from the posterior itself.
    tail = pareto_shape(ladder.beta.diff()[-1] * weights)
    problems = []
    if not step <= MAX_PARETO_SHAPE:
        problems.append(
            f"the weights of a step have a heavy tail (Pareto k {step:.2f} > {MAX_PARETO_SHAPE}): use more temperatures"
        )
    if not tail <= MAX_PARETO_SHAPE:
        problems.append(
            f"the reference has lighter tails than the posterior (Pareto k {tail:.2f} > {MAX_PARETO_SHAPE}): "
            "use more temperatures, or stepping stone from the prior"
        )
    return problems, {"step_pareto_shape": step, "tail_pareto_shape": tail}


def _missed_part(ladder: Ladder, x: Tensor) -> tuple[list[str], dict[str, float]]:
    """Compare the ladder's draws at ``beta = 1`` with the posterior draws ``x (chains, draws, d)``."""
    end = ladder.posterior.unconstrained
    count = min(end.shape[1], x.shape[1])
    both = torch.cat([_evenly(end, count), _evenly(x, count)]).movedim(-1, 0)  # (d, chains, count)
    quartiles: Sequence[Tensor] = [both.flatten(1).quantile(q, 1)[:, None, None] for q in (0.25, 0.5, 0.75)]
    spread = (quartiles[2] - quartiles[0]).clamp(min=torch.finfo(both.dtype).tiny)
    worst = float(r_hat(((both - quartiles[1]) / spread).tanh()).max())
    problems = []
    if not worst <= 2 * MAX_R_HAT - 1:
        problems.append(
            f"the ladder's last chains and the posterior draws disagree (R-hat of both {worst:.3f}): one of the two "
            "misses a part of the posterior; run both longer"
        )
    return problems, {"posterior_and_ladder_r_hat": worst}


def _evenly(x: Tensor, count: int) -> Tensor:
    """Return ``count`` evenly spaced draws of every chain."""
    return x[:, torch.linspace(0, x.shape[1] - 1, count, device=x.device).round().long()]
