"""Importance sampling from a Laplace fit with Student-t tails."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._pareto_smoothing import pareto_smoothed
from bayeskit._settings import real_number, whole_number
from bayeskit._statistics import (
    log_mean_exp,
    pareto_shape,
    replicates_log_mean_error,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.coverage import MIN_MISSED_SHARE, missed_draws
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.mode.missed import (
    NUM_MOVED,
    is_more_than,
    missed_mass,
    moved_draws,
    same_likelihood,
    share_beyond,
    without_infinity,
)
from bayeskit.inference.evidence.mode.student_t import DefensiveStudentT, StudentT, scale_factor
from bayeskit.inference.evidence.modes import Mode, find_mode, require_draws
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

MAX_ROUNDS, PILOT_DRAWS, MAX_PILOT_DRAWS = 15, 4000, 10_000
#: More dimensions than this are many: there the radius of heavy tails hides what shape the proposal has.
FEW_DIMENSIONS = 50
#: There a last refit is taken if the noise of its draws costs no more than so many nats.
MAX_LOSS = 0.1
#: Independent sets of quasi-random draws, and of how many draws at least.
NUM_SETS, LEAST_SET = 32, 8
#: A smaller share of effective draws is refused; one below the larger number is looked at by draws that move.
MIN_SHARE, MAX_SHARE = 0.01, 0.5
#: Tails of the pilot rounds and of the draws that guard against heavier ones than those chosen; their share, and how
#: much wider they are than what is lacking, where the proposal fits and where it does not.
GUARD_DF, GUARD, GUARD_OF_MISFIT = 5.0, (0.1, 2.0), (0.5, 1.5)
#: How many times wider than the proposal the draws are that look for mass outside it, and their number at each width.
PROBE_WIDTHS, NUM_PROBES = (3.0, 6.0, 10.0), 500
#: How many standard deviations from the middle tails are compared along the axes; they count if the posterior holds so
#: much there, in standard errors of the estimate, and so much of it is left further out, more than of a power of -3.
FAR, MIN_TAIL, MIN_LEFT = (30.0, 100.0), 0.1, 0.1
CHOICES = (3.0, 5.0, 10.0, 20.0, 50.0, 200.0)
MANY_CHOICES = (*CHOICES, 1000.0, 10_000.0)


class _Pilot(NamedTuple):
    """Draws of a round: effective share, proposal, what was refitted to them, points and log weights."""

    share: float
    proposal: StudentT
    refitted: StudentT
    x: Tensor
    log_weights: Tensor


@estimator()
def laplace_importance_sampling(
    target: Target,
    num_draws: int = 32_768,
    *,
    degrees_of_freedom: float | None = None,
    smoothed: bool = True,
    draws: Draws | None = None,
    mode: Mode | None = None,
    seed: int = 0,
) -> Evidence:
    """Sample by importance from a multivariate Student-t at the posterior mode.

    Scale matrix is the inverse of the negative Hessian in unconstrained space; the
    t tails cover what the Gaussian approximation misses. Short pilot rounds refit the
    t to their own weighted draws as long as that helps, which repairs a skewed
    posterior or a mode far from the mass (the scale of a hierarchical model). They
    also choose how heavy the tails are; a tenth of the draws then comes from a wider
    t with 5 degrees of freedom, placed where the choice has too few; half of them
    where no t is like the posterior. There, some draws move by Hamiltonian Monte
    Carlo to see what the proposal lacks, and whether the posterior lies where the
    final weights are larger than any that were drawn. The estimate comes from the
    last proposal alone.

    Parameters
    ----------
    target : Target
    num_draws : int, default 32,768
        Draws of the final round, taken in up to 32 sets of equal size, whole multiples of which are used. Within a set
        they fill the proposal more evenly than chance would; the spread of the sets is the error.
    degrees_of_freedom : float, optional
        Of all draws, above 2; by default the pilot rounds choose.
    smoothed : bool, default True
        Replace the largest weights by quantiles of a generalised Pareto distribution fitted to them.
    draws : Draws, optional
        Posterior draws, to start the search for the mode and to see whether the
        proposal covers them.
    mode : Mode, optional
        Of the target, if it is known already.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If there are fewer than two draws, ``degrees_of_freedom`` is not above 2, or the mode is of another target.
    InitializationError
        If no search for the mode ends at a finite density.
    DrawsError, ShapeError
        If draws or mode are of another target.

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo
    integration. Econometrica 57, 1317-1339.

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture
    distributions. Technometrics 37, 185-194.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed
    importance sampling. Journal of Machine Learning Research 25(72).

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import laplace_importance_sampling
    >>> z = laplace_importance_sampling(exact.get("beta_binomial").target(), seed=1)
    >>> abs(z.log_evidence + 2.3978953) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    if degrees_of_freedom is not None:
        degrees_of_freedom = real_number("degrees_of_freedom", degrees_of_freedom, (2, math.inf))
    require_draws(draws, target)
    mode = mode or find_mode(target, seed=seed, draws=draws)
    spent = mode.require(target) + mode.num_evaluations + (0 if draws is None else draws.num_gradients)
    generator = new_generator(seed, stream="laplace importance sampling")
    proposal, pilots = _adapted(target, mode, degrees_of_freedom, generator)
    # The proposal depends on the pilot rounds, so only this last round enters the estimate.
    num_sets = max(2, min(NUM_SETS, num_draws // LEAST_SET))
    size = math.ceil(num_draws / num_sets)
    proposal = proposal.with_share_of(size)
    x = torch.cat([proposal.spread(size, generator) for _ in range(num_sets)])
    log_prior, log_likelihood = target.evaluate(x)
    log_density, problems = without_nan(log_prior + log_likelihood)
    log_density, infinite = without_infinity(log_density)
    log_weights = (log_density - proposal.log_prob(x)).unsqueeze(0)
    shape, largest = pareto_shape(log_weights), float(log_weights.max())
    effective = float(weight_effective_sample_size(log_weights[0]))
    counted = _smoothed(log_weights) if smoothed else log_weights
    log_z = float(log_mean_exp(counted))
    sets = log_mean_exp(counted.reshape(num_sets, 1, size)) - log_z
    error = float(replicates_log_mean_error(sets.unsqueeze(0))[0])
    beyond, moves = 0.0, 0
    if effective < MAX_SHARE * len(x):
        beyond, moves = share_beyond(target, x, log_weights[0], proposal.log_prob, seed=seed)
        # What lies beyond the largest weight is missing in the estimate, and smoothing draws in what is before it.
        certain = max(0.0, beyond - math.sqrt(beyond * (1 - beyond) / NUM_MOVED))
        error = math.hypot(error, certain, log_z - float(log_mean_exp(log_weights)))
    error = with_rounding(error, log_density)
    missed, looks = missed_mass(
        target, x, log_weights[0], log_z, error, log_prob=proposal.log_prob, others=mode.others, seed=seed
    )
    around, probes = _missed_around(target, proposal, log_z, largest, error, generator)
    if not effective >= MIN_SHARE * len(x):
        # Where so few count, that the draws are spread evenly hides how little of the posterior they have seen.
        problems.append(
            f"only {100 * effective / len(x):.2g} % of the draws count, so the proposal is unlike the posterior: "
            "use bridge sampling"
        )
    problems += (infinite or weight_problems(shape, effective)) + around + missed
    if beyond > MIN_MISSED_SHARE:
        problems.append(
            f"{100 * beyond:.2g} % of the posterior lies where weights are larger than any that were drawn: use bridge "
            "sampling or stepping stone"
        )
    problems += same_likelihood(log_likelihood) + missed_draws(proposal.log_prob, draws, largest)
    return Evidence(
        "laplace_importance_sampling",
        log_z,
        error,
        len(x) + spent + pilots + looks + probes + moves,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "degrees_of_freedom": _main(proposal).df},
    )


def _adapted(
    target: Target, mode: Mode, degrees_of_freedom: float | None, generator: torch.Generator
) -> tuple[StudentT | DefensiveStudentT, int]:
    """Return a proposal that pilot rounds have fitted to the posterior, and the evaluations they took."""
    d = target.dim
    num_draws = max(PILOT_DRAWS, min(40 * d, MAX_PILOT_DRAWS))
    tails = GUARD_DF if d <= FEW_DIMENSIONS else d / 4
    start = StudentT(mode.position, scale_factor(mode.precision), degrees_of_freedom or tails)
    best = last = _pilot(target, start, num_draws, generator)
    rounds, stalls = 1, 0
    while rounds < MAX_ROUNDS and stalls < 3 and best.share < 0.5:
        rounds += 1
        last = _pilot(target, last.refitted, num_draws, generator)
        stalls = 0 if last.share > 1.1 * best.share else stalls + 1
        best = last if last.share > best.share else best
    too_few = d > FEW_DIMENSIONS and d * (d + 3) > 4 * MAX_LOSS * best.share * num_draws
    chosen = best.proposal if stalls or too_few else best.refitted
    spent = rounds * num_draws
    if degrees_of_freedom is not None:
        return chosen, spent
    if best.share >= MAX_SHARE:
        log_density = best.log_weights + best.proposal.log_prob(best.x)
        return _with_tails(chosen, best.proposal, best.x, best.log_weights, log_density, *GUARD), spent
    # What the proposal lacks, its own draws hardly show.
    x, log_density, moves = moved_draws(target, best.x, best.log_weights, generator)
    equal = torch.zeros_like(log_density)
    return _with_tails(chosen, best.proposal, x, equal, log_density, *GUARD_OF_MISFIT), spent + moves


def _pilot(target: Target, proposal: StudentT, num_draws: int, generator: torch.Generator) -> _Pilot:
    x = proposal.sample(num_draws, generator)
    log_weights = target.log_density(x) - proposal.log_prob(x)
    # Where the density is infinite or not a number it counts as zero.
    log_weights = log_weights.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    share = float(weight_effective_sample_size(log_weights).nan_to_num(nan=0.0)) / num_draws
    return _Pilot(share, proposal, _refit(x, log_weights, proposal), x, log_weights)


def _main(proposal: StudentT | DefensiveStudentT) -> StudentT:
    return proposal.main if isinstance(proposal, DefensiveStudentT) else proposal


def _smoothed(log_weights: Tensor) -> Tensor:
    """Smooth the largest weights, without the normalisation that smoothing brings."""
    smooth = pareto_smoothed(log_weights)[0].to(log_weights.dtype)
    # Weights below the tail are only moved, all by the same.
    moved = (log_weights - smooth)[log_weights <= log_weights.median()]
    moved = moved[moved.isfinite()]
    return smooth + moved.median() if len(moved) else log_weights


def _missed_around(
    target: Target,
    proposal: StudentT | DefensiveStudentT,
    log_z: float,
    largest: float,
    standard_error: float,
    generator: torch.Generator,
) -> tuple[list[str], int]:
    """Ask whether wider draws, or points far out along axes, find more mass than the error tells.

    Only where no draw of the proposal had as large a weight.
    """
    main, spent = _main(proposal), 0
    for width in PROBE_WIDTHS:
        probe = StudentT(main.location, width * main.factor, GUARD_DF)
        x = probe.sample(NUM_PROBES, generator)
        log_density = target.log_density(x).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        spent += NUM_PROBES
        outside = log_density - proposal.log_prob(x) > largest
        if is_more_than((log_density - probe.log_prob(x) - log_z)[outside], NUM_PROBES, standard_error):
            problem = "wider draws find mass that the proposal does not cover: use bridge sampling or stepping stone"
            return [problem], spent
    axes = torch.cat([main.factor.T, torch.diag(main.factor.norm(dim=1))])
    far = torch.tensor(FAR, dtype=axes.dtype, device=axes.device)[:, None, None]
    x = main.location + far * torch.cat([axes, -axes])
    log_density = target.log_density(x).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    spent += log_density.numel()
    # The share of the posterior at such distances, were it as wide across the axis as it is in the middle.
    near, further = (log_density - log_z - main.log_prob(main.location[None])).exp() * far[..., 0]
    heavy = (near > MIN_TAIL * standard_error) & (further > MIN_LEFT * near)
    if bool((heavy & (log_density[0] - proposal.log_prob(x[0]) > largest)).any()):
        return ["the tails are heavier than those of the proposal: use bridge sampling or nested_sampling"], spent
    return [], spent


def _with_tails(
    fitted: StudentT,
    current: StudentT,
    x: Tensor,
    log_weights: Tensor,
    log_density: Tensor,
    guard_share: float,
    guard_width: float,
) -> StudentT | DefensiveStudentT:
    """Choose the degrees of freedom under which the weights have the smallest third moment.

    The third moment, unlike the second, is mostly that of the tail: where it is small, the normal distribution that a
    standard error speaks of is near. A part of the draws goes where the choice has too few.
    """
    many = len(fitted.location) > FEW_DIMENSIONS
    covariance = fitted.factor * math.sqrt(fitted.df / (fitted.df - 2))
    lowest = math.inf
    chosen: StudentT | DefensiveStudentT = fitted
    for df in MANY_CHOICES if many else CHOICES:
        main = StudentT(fitted.location, covariance * math.sqrt((df - 2) / df), df)
        if many:
            # Of the draws that the choice lacks there are too few for a fit, and twice as wide is nowhere near.
            guard = StudentT(fitted.location, fitted.factor, GUARD_DF)
        else:
            lacking = _refit(x, log_weights + log_density - main.log_prob(x), current)
            guard = StudentT(lacking.location, guard_width * lacking.factor, lacking.df)
        candidate = DefensiveStudentT(main, guard, guard_share)
        log_ratio = log_density - candidate.log_prob(x)
        moment = float((log_weights + 2 * log_ratio).logsumexp(0))
        if moment < lowest:
            lowest, chosen = moment, candidate
    return chosen


def _refit(x: Tensor, log_weights: Tensor, current: StudentT) -> StudentT:
    """Fit location and scale to the weighted draws.

    Weights too uneven to carry a covariance are flattened by a power; what that
    misses, the next round finds.
    """
    d = x.shape[1]
    weights = _flattened(log_weights, needed=max(100.0, 10.0 * d))
    mean = weights @ x
    centred = x - mean
    covariance = (weights * centred.T) @ centred
    df = current.df
    # A t with df degrees of freedom has covariance df / (df - 2) times its scale matrix.
    scale = covariance * (df - 2) / df
    effective = float(1 / weights.square().sum())
    trust = effective / (effective + d)
    blended = trust * scale + (1 - trust) * current.factor @ current.factor.T
    factor, failed = torch.linalg.cholesky_ex(blended)
    return current if bool(failed) else StudentT(mean, factor, df)


def _flattened(log_weights: Tensor, needed: float) -> Tensor:
    """Normalised weights, raised to the largest power up to one that leaves ``needed`` effective draws."""
    low, high = 0.0, 1.0
    if float(weight_effective_sample_size(log_weights)) < needed:
        for _ in range(30):
            middle = 0.5 * (low + high)
            enough = float(weight_effective_sample_size(middle * log_weights)) >= needed
            low, high = (middle, high) if enough else (low, middle)
        return torch.softmax(low * log_weights, 0)
    return torch.softmax(log_weights, 0)
