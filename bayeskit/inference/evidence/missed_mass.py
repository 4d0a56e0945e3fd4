"""Posterior mass that no draw has found: at modes that a search ends at, and in the tails of proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayeskit.core.randomness import new_generator
from bayeskit.core.statistics import effective_sample_size, weight_effective_sample_size
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, InitializationError
from bayeskit.inference.evidence.checks import rounding_problems
from bayeskit.inference.evidence.modes import (
    STARTS_BESIDE_DRAWS,
    Peak,
    best_of,
    divided_by_valleys,
    find_modes,
    is_missed,
    num_looks,
    posterior,
    starts_from_prior,
    weigh_peak,
)
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers.smc import GRADIENTS_PER_STEP, PopulationHMC, learn_metric
from bayeskit.inference.samplers.starts import prior_positions
from bayeskit.logdensity.climbing import climb
from bayeskit.logdensity.target import Target

__all__ = [
    "LOOKS",
    "NUM_MOVED",
    "Peaks",
    "WIDER",
    "find_peaks",
    "is_more_than",
    "missed_mass",
    "moved_draws",
    "same_likelihood",
    "share_beyond",
    "with_missed_peak",
    "without_infinity",
]

# --------------------------------------------------------------------------------------------------
# What weighted draws of a proposal, or of the prior, have missed of the posterior.
# --------------------------------------------------------------------------------------------------

#: Climbs from the best draws of the prior, from some of them, from those that valleys divide, and from the heaviest
#: draws.
_NUM_BEST, _NUM_SPREAD, _NUM_DIVIDED, _NUM_HEAVY = 4, 16, 12, 4
#: Ends of climbs that are weighed at most.
_MAX_PEAKS = 8
#: A missing share is said from here on, or from one standard error on.
_MIN_MISSING = 0.01
#: Of the estimate, that one draw may have where a climb ends at a place that no normal distribution fits.
_MAX_SHARE = 0.01
#: The share of draws from which on their likelihoods count as all the same.
_MIN_SAME = 0.999
#: By so much a log weight may exceed the largest of the proposal before it counts as not covered: where the proposal is
#: the posterior, all are the same but for rounding.
_ROUNDING = 0.01
#: Draws that move away from where the proposal has put them, how often, and how far each time in units of the metric.
NUM_MOVED, _NUM_MOVES, _TRAJECTORY, _MAX_STEPS = 500, 20, 1.5, 8
_TARGET_ACCEPTANCE = 0.8
_FAILURES = (BayeskitError, ArithmeticError, RuntimeError, ValueError, TypeError)


def missed_mass(
    target: Target,
    x: Tensor,
    log_weights: Tensor,
    log_z: float,
    standard_error: float,
    *,
    log_prob: Callable[[Tensor], Tensor] | None = None,
    others: Tensor | None = None,
    seed: int = 0,
) -> tuple[list[str], int]:
    """Look for a part of the posterior whose mass is not that of the weighted draws in it.

    Draws that never saw a peak have weights as even as if there were none. So climbs start at the heaviest draws and
    at draws from the prior; what surrounds each end is weighed by draws of its own, and its mass over the estimate has
    to be the weighted share of the draws that lie there. And draws from the prior must not find more mass than the
    error tells of where no draw of the proposal had as large a weight. Values that are rounded to an end of their
    support must not be able to move the estimate, either.

    Parameters
    ----------
    target : Target
    x : Tensor
        Draws, unconstrained, shape ``(n, d)``.
    log_weights : Tensor
        Of the draws, shape ``(n,)``.
    log_z, standard_error : float
        The estimate.
    log_prob : callable, optional
        Log density of the proposal, ``(n, d) -> (n,)``; not needed if that is the prior.
    others : Tensor, optional
        Where further climbs start, shape ``(m, d)``.
    seed : int, default 0

    Returns
    -------
    problems : list of str
    num_evaluations : int

    Examples
    --------
    Two peaks, of which a proposal has seen the right one:

    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.evidence.missed_mass import missed_mass
    >>> target = bk.Target.from_functions(lambda u: -0.5 * (u.abs() - 9).square().sum(-1), lambda u: 0 * u[..., 0], 1)
    >>> x = 9 + torch.randn(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> len(missed_mass(target, x, 0 * x[:, 0], 0.919, 0.01, others=-x[:1])[0])
    1
    """
    if not math.isfinite(log_z):
        return [], 0
    log_weights = log_weights.double()
    starts = [x[log_weights.topk(min(_NUM_HEAVY, len(x))).indices]]
    problems, _ = rounding_problems(target, x, log_weights, standard_error)
    spent = 0
    if target.can_sample_prior:
        looks = num_looks(target)
        prior = target.sample_prior(looks, new_generator(seed, stream="what weighted draws missed"))
        log_prior, log_likelihood = target.evaluate(prior)
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        spent += looks
        starts += [prior[log_likelihood.topk(_NUM_BEST).indices], prior[log_likelihood.isfinite()][:_NUM_SPREAD]]
        divided, count = divided_by_valleys(target, prior, _NUM_DIVIDED)
        starts.append(divided)
        spent += count
        if log_prob is not None:
            log_density = log_prior + log_likelihood
            margin = (100 * torch.finfo(prior.dtype).eps * log_density.abs()).clamp(min=_ROUNDING)
            outside = log_density - log_prob(prior) > log_weights.max() + margin
            if is_more_than((log_likelihood - log_z)[outside], looks, standard_error):
                problems.append("draws from the prior find mass that the proposal does not cover: use nested_sampling")
    if others is not None:
        starts.append(others)
    try:
        missed, count = _missed_peak(target, torch.cat(starts), x, log_weights, log_z, standard_error, log_prob)
    except _FAILURES:
        # The estimate stands; only this look at it is not to be had.
        return problems, spent
    return problems + missed, spent + count


def _missed_peak(
    target: Target,
    starts: Tensor,
    x: Tensor,
    log_weights: Tensor,
    log_z: float,
    standard_error: float,
    log_prob: Callable[[Tensor], Tensor] | None,
) -> tuple[list[str], int]:
    ends, heights, spent = climb(posterior(target), starts[starts.isfinite().all(-1)])
    weights, effective = torch.softmax(log_weights, 0), float(weight_effective_sample_size(log_weights))
    least = min(_MIN_MISSING, standard_error) if standard_error > 0 else _MIN_MISSING
    seen: list[Peak] = []
    best = heights.argsort(descending=True)[: int(heights.isfinite().sum())]
    for end, height in zip(ends[best], heights[best], strict=True):
        if len(seen) == _MAX_PEAKS:
            break
        if any(bool(peak.holds(end)) for peak in seen):
            continue
        peak, count = weigh_peak(target, end)
        spent += count
        if peak is None:
            if log_prob is not None and float(height - log_prob(end[None])) > log_z + math.log(_MAX_SHARE * len(x)):
                return [
                    "the posterior is high where the proposal is not: a single draw there would be "
                    f"{100 * _MAX_SHARE:.0f} % of the estimate or more; use nested_sampling or stepping_stone"
                ], spent
            continue
        seen.append(peak)
        share = float(weights[peak.holds(x)].sum())
        expected = math.exp(min(peak.log_mass - log_z, 700.0))
        # By the share that should be there, so that draws which never saw the peak do not pass for certain.
        likely = min(max(share, expected), 1.0)
        chance = math.sqrt(max(likely * (1 - likely), 1 / effective) / effective)
        if is_missed(expected, share, chance, math.hypot(peak.relative_error, standard_error), least):
            return [
                f"a peak that holds {expected:.3g} times the estimate has {100 * share:.2g} % of the weighted draws, "
                "so they miss a part of the posterior: use nested_sampling or stepping_stone"
            ], spent
    return [], spent


def share_beyond(
    target: Target, x: Tensor, log_weights: Tensor, log_prob: Callable[[Tensor], Tensor], *, seed: int = 0
) -> tuple[float, int]:
    """Return the share of the posterior that lies where weights are larger than any that were drawn.

    The largest weights of few draws do not tell of a region that the proposal visits too seldom to have visited it.
    So some of the draws, resampled by their weights, move by Hamiltonian Monte Carlo as draws of the posterior do, and
    are weighted where they come to.

    Parameters
    ----------
    target : Target
    x : Tensor
        Draws, unconstrained, shape ``(n, d)``.
    log_weights : Tensor
        Of the draws, shape ``(n,)``.
    log_prob : callable
        Log density of the proposal, ``(n, d) -> (n,)``.
    seed : int, default 0

    Returns
    -------
    share : float
    num_evaluations : int
        Gradients among them.

    Examples
    --------
    A proposal that is twice as wide as a normal distribution, and one that is half as wide:

    >>> import bayeskit as bk, torch
    >>> from bayeskit.inference.evidence.missed_mass import share_beyond
    >>> target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u[..., 0], 2)
    >>> x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> for scale in (2.0, 0.5):
    ...     log_prob = torch.distributions.Normal(torch.zeros(2), scale).log_prob
    ...     log_weights = target.log_density(scale * x) - log_prob(scale * x).sum(-1)
    ...     share, _ = share_beyond(target, scale * x, log_weights, lambda u: log_prob(u).sum(-1))
    ...     print(share > 0.01)
    False
    True
    """
    moved, log_density, spent = moved_draws(target, x, log_weights, new_generator(seed, x.device, stream="moved"))
    above = log_density - log_prob(moved) > log_weights.max() + _ROUNDING
    return float(above.to(torch.float64).mean()), spent


def moved_draws(
    target: Target, x: Tensor, log_weights: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Resample draws by their weights and move them by Hamiltonian Monte Carlo, as draws of the posterior do.

    Parameters
    ----------
    target : Target
    x : Tensor
        Unconstrained, shape ``(n, d)``.
    log_weights : Tensor
        Shape ``(n,)``.
    generator : torch.Generator

    Returns
    -------
    x : Tensor
        Shape ``(500, d)``.
    log_density : Tensor
        Shape ``(500,)``.
    num_evaluations : int
        Gradients among them.
    """
    normalised = log_weights.log_softmax(0)
    start = x[torch.multinomial(normalised.exp(), NUM_MOVED, replacement=True, generator=generator)]
    kernel = PopulationHMC(0.2 * _TRAJECTORY, 1, learn_metric(x, normalised), 1.0)
    state, num_calls = kernel.init(target, start), 1
    for _ in range(_NUM_MOVES):
        num_steps = min(_MAX_STEPS, max(1, round(_TRAJECTORY / kernel.step_size)))
        state, info = replace(kernel, num_steps=num_steps).step(target, state, generator=generator)
        change = math.exp(float(info.acceptance_rate.mean()) - _TARGET_ACCEPTANCE)
        kernel = replace(kernel, step_size=min(kernel.step_size * change, _TRAJECTORY))
        num_calls += GRADIENTS_PER_STEP * num_steps
    return state.position, state.log_density, NUM_MOVED * num_calls


def is_more_than(log_terms: Tensor, num_draws: int, standard_error: float) -> bool:
    """Whether what some of the draws add to a mean is more than an error tells.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.missed_mass import is_more_than
    >>> is_more_than(torch.zeros(20), 1000, 0.01), is_more_than(torch.zeros(1), 1000, 1e-9)
    (True, False)
    """
    terms = log_terms.exp() / num_draws
    # Less twice its own error, so that a few hits in a thin tail say nothing.
    return float(terms.sum() - 2 * terms.square().sum().sqrt()) > standard_error


def same_likelihood(log_likelihood: Tensor) -> list[str]:
    """Say where nearly all draws have the same likelihood, so that they tell nothing of where it is larger.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.missed_mass import same_likelihood
    >>> len(same_likelihood(torch.full((5,), -3.0))), same_likelihood(torch.arange(5.0))
    (1, [])
    """
    middle = float(log_likelihood.median())
    rounding = 100 * torch.finfo(log_likelihood.dtype).eps * abs(middle)
    same = float(((log_likelihood - middle).abs() <= rounding).double().mean())
    # A log likelihood of zero is that of a model without data; one of minus infinity, that of a wall.
    if middle == 0.0 or same < _MIN_SAME or not bool((log_likelihood > -torch.inf).all()):
        return []
    return [
        "the likelihood is the same at all draws: if it does not depend on the parameters, it is the evidence; if it "
        "does, the draws have missed where: start chains near the data, or take a narrower prior"
    ]


def without_infinity(log_density: Tensor) -> tuple[Tensor, list[str]]:
    """Count an infinite density as zero, and say so.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.missed_mass import without_infinity
    >>> values, problems = without_infinity(torch.tensor([1.0, torch.inf]))
    >>> values, len(problems)
    (tensor([1., -inf]), 1)
    """
    bad = log_density == torch.inf
    if not bool(bad.any()):
        return log_density, []
    share = 100 * float(bad.double().mean())
    problem = f"the density is infinite at {share:.2g} % of the points and was counted as zero there: mend the model"
    return torch.where(bad, -torch.inf, log_density), [problem]


# --------------------------------------------------------------------------------------------------
# Peaks that no draw has found: the mass about each mode that a search ends at, against the share of draws there.
# --------------------------------------------------------------------------------------------------

#: Searches from draws of the prior, and from points that valleys divide.
_PRIOR_STARTS, _DIVIDED_STARTS = 6, 6
#: A missing share of the posterior is said if it is larger than this, or than the standard error.
#: Part of the width of the draws in each coordinate that their tails may reach beyond.
_MARGIN = 0.25
#: Standard deviations of the distributions that are drawn from to look beyond, in units of that of the draws.
WIDER, LOOKS = (2.0, 4.0, 8.0, 16.0, 32.0), 200
#: What makes a search fail where the density itself may be fine at the draws.
_SEED = 0  # one for all estimators, so that none depends on which was asked before


@dataclass(frozen=True)
class Peaks:
    """The peaks that searches from some draws, and from the prior, ended at.

    Attributes
    ----------
    found : tuple of Peak
        Those that could be weighed, the highest mode first, none inside another.
    num_evaluations : int
        Spent on finding and weighing them.
    """

    found: tuple[Peak, ...]
    num_evaluations: int


@dataclass(frozen=True)
class _Prior:
    """What a target's prior shows, whatever the draws: some draws of it, if there are any, and where climbs end."""

    draws: Tensor | None
    ends: Tensor
    num_evaluations: int


# One search serves all estimators on the same draws, and one from the prior all draws of a target.
_KNOWN: WeakKeyDictionary[Target, WeakKeyDictionary[Draws, Peaks]] = WeakKeyDictionary()
_PRIORS: WeakKeyDictionary[Target, _Prior] = WeakKeyDictionary()


def find_peaks(target: Target, draws: Draws) -> Peaks:
    """Climb from the best of the draws, and from the prior, and weigh what surrounds each mode by importance.

    Parameters
    ----------
    target : Target
    draws : Draws
        Of any temperature. What was found from them once is kept as long as they are.

    Returns
    -------
    Peaks
        None where the density cannot be climbed.

    Examples
    --------
    The slab of this problem holds its chains; the spike holds a hundred times more:

    >>> import math
    >>> import bayeskit as bk
    >>> case = bk.exact.spike_and_slab(5)
    >>> draws = bk.sample(case.target(), 2, 20, 20, progress=False)
    >>> peak = find_peaks(draws.target, draws).found[0]
    >>> abs(peak.log_mass - math.log(0.9) - case.log_evidence) < 0.2
    True
    """
    known = _KNOWN.setdefault(target, WeakKeyDictionary())
    if draws not in known:
        known[draws] = _search(target, draws)
    return known[draws]


def _mass_outside(target: Target, draws: Draws, estimate: Evidence) -> tuple[list[str], int]:
    """Look for mass around the box that the posterior draws fill, by draws from wider normal distributions.

    Chains that all start in a narrow spike never leave it; the broad part around it is no peak that a climb ends at.
    """
    x = draws.unconstrained.reshape(-1, target.dim)
    low, high, deviation = x.amin(0), x.amax(0), x.std(0)
    if not bool((deviation > 0).all()):
        return [], 0
    margin = _MARGIN * (high - low)
    generator = new_generator(_SEED, target.device, "mass outside of draws")
    wider = torch.tensor(WIDER, dtype=x.dtype, device=x.device).repeat_interleave(LOOKS)
    scale = wider.unsqueeze(-1) * deviation
    noise = torch.randn(scale.shape, generator=generator, dtype=x.dtype, device=x.device)
    at = x.mean(0) + scale * noise
    try:
        log_density = target.log_density(at)
    except _FAILURES:
        return [], 0  # the estimate stands; only this look at it is not to be had
    log_proposal = torch.distributions.Normal(x.mean(0), scale).log_prob(at).sum(-1)
    log_terms = (log_density - log_proposal).nan_to_num(nan=-torch.inf) - estimate.log_evidence
    outside = ((at < low - margin) | (at > high + margin)).any(-1)
    log_terms = torch.where(outside, log_terms, -torch.inf).reshape(len(WIDER), LOOKS)
    least = max(estimate.standard_error, _MIN_MISSING)
    if not any(is_more_than(terms, LOOKS, least) for terms in log_terms):
        return [], len(at)
    return [
        "there is mass around the posterior draws that they do not reach, so they miss a part of the posterior; use "
        "nested_sampling, stepping_stone or smc"
    ], len(at)


def with_missed_peak(
    estimate: Evidence, target: Target, draws: Draws, *, known_bias: float = 0.0, others: Sequence[Draws] = ()
) -> Evidence:
    """Return the estimate, with a warning if a peak holds more of the posterior than of the draws, or none shows any.

    A peak that is much narrower than what surrounds it, or far from it, may draw no chain, and no diagnostic of the
    chains notices. If the estimate is right, the mass of a peak over it is the share of the draws that lie there. The
    search depends on no seed, so that all estimators on the same draws share one.

    Parameters
    ----------
    estimate : Evidence
        From `draws`.
    target : Target
    draws : Draws
        Those at inverse temperature one are looked at.
    known_bias : float, default 0
        By how much the estimate is known to be too low, in nats, for other reasons than a missed peak.
    others : sequence of Draws, optional
        Further draws from the posterior that the estimate rests on, which have to show the peaks as well.

    Returns
    -------
    Evidence
        With a warning, too, where values rounded to an end of their support can move it, and their share among the
        diagnostics as `rounded_share`. The search is counted in `num_evaluations`; `missed_share`, the largest share
        of the posterior that a peak should have and its draws do not show, joins the diagnostics, NaN where there was
        no peak to weigh.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import Evidence
    >>> case = bk.exact.spike_and_slab(5)
    >>> draws = bk.sample(case.target(), 2, 20, 20, progress=False)
    >>> with_missed_peak(Evidence("of the slab", 0.0, 0.01, 40), draws.target, draws).trusted
    False
    """
    peaks = find_peaks(target, draws)
    last = draws if bool((draws.beta == 1).all()) else draws.select(draws.beta == 1)
    rounded, share_rounded = rounding_problems(target, last.unconstrained, None, estimate.standard_error)
    estimate = replace(
        estimate,
        warnings=(*estimate.warnings, *same_likelihood(draws.log_likelihood), *rounded),
        diagnostics=estimate.diagnostics | {"rounded_share": share_rounded},
    )
    worst, problems, spent, said = math.nan, estimate.warnings, peaks.num_evaluations, False
    if math.isfinite(estimate.log_evidence):
        outside, looks = _mass_outside(target, last, estimate)
        problems, spent = (*problems, *outside), spent + looks
        least = min(_MIN_MISSING, estimate.standard_error) if estimate.standard_error > 0 else _MIN_MISSING
        for peak, looked in product(peaks.found, (last, *others)):
            expected, share, chance, relative_error = _in_peak(peak, estimate, looked, known_bias)
            worst = expected - share if math.isnan(worst) else max(worst, expected - share)
            missed = is_missed(expected, share, chance, relative_error, least)
            if missed and not said:
                said = True
                problems += (
                    f"a peak that holds {expected:.3g} times the estimate has {100 * share:.2g} % of the draws: they "
                    "miss a part of the posterior; use nested_sampling or laplace_importance_sampling",
                )
    return replace(
        estimate,
        num_evaluations=estimate.num_evaluations + spent,
        warnings=problems,
        diagnostics=estimate.diagnostics | {"missed_share": worst},
    )


def _in_peak(peak: Peak, estimate: Evidence, draws: Draws, known_bias: float) -> tuple[float, float, float, float]:
    """Return the share of the posterior that a peak should have, that of the draws, its error, and how well known."""
    inside = peak.holds(draws.unconstrained).to(torch.float64)
    share = float(inside.mean())
    effective = min(float(effective_sample_size(inside)), inside.numel()) if draws.num_draws >= 8 else draws.num_chains
    expected = math.exp(min(peak.log_mass - estimate.log_evidence - known_bias, 700.0))
    # By the share that should be there, so that draws which never saw the peak do not pass for certain.
    likely = min(max(share, min(expected, 1.0)), 1.0)
    binomial = math.sqrt(max(likely * (1 - likely), 1 / effective) / effective)
    known = estimate.standard_error if math.isfinite(estimate.standard_error) else 0.0
    return expected, share, binomial, math.hypot(peak.relative_error, known)


def _search(target: Target, draws: Draws) -> Peaks:
    found: list[Peak] = []
    spent = 0
    try:
        prior = _PRIORS.get(target) or _PRIORS.setdefault(target, _look_at_prior(target))
        spent = prior.num_evaluations
        # Not the best of many, which may all lie at the feet of the peak that the draws know; and every hill that draws
        # of the posterior or of the prior have seen.
        x, count = draws.unconstrained.flatten(0, 1), num_looks(target)
        seen = x[torch.linspace(0, len(x) - 1, min(count, len(x)), device=x.device).round().long()]
        if prior.draws is not None:
            seen = torch.cat([seen, prior.draws.to(seen)])
        divided, looks = divided_by_valleys(target, seen, _DIVIDED_STARTS)
        ends, cost = _climbed(target, torch.cat([best_of(draws).to(divided), divided]))
        ends, spent = torch.cat([prior.ends.to(ends), ends]), spent + looks + cost
        ends = ends[target.log_density(ends).argsort(descending=True)]
        for end in ends:
            if any(bool(peak.holds(end)) for peak in found):
                continue
            peak, cost = weigh_peak(target, end, seed=_SEED)
            spent += cost
            if peak is not None:
                found.append(peak)
    except _FAILURES:
        # The draws and the estimate stand; only this look at them is not to be had.
        return Peaks(tuple(found), spent)
    return Peaks(tuple(found), spent)


def _look_at_prior(target: Target) -> _Prior:
    start, spent = starts_from_prior(target, _SEED, needed=False)
    start = start[:STARTS_BESIDE_DRAWS]
    draws = prior_positions(target, num_looks(target), new_generator(_SEED, stream="peaks"))
    if draws is not None:
        start = torch.cat([start, draws[:_PRIOR_STARTS].to(start)])
    ends, cost = _climbed(target, start)
    return _Prior(draws, ends, spent + cost)


def _climbed(target: Target, start: Tensor) -> tuple[Tensor, int]:
    """Return where climbs end, nothing where the density is zero at all starts, and evaluations."""
    try:
        return find_modes(target, start=start)
    except InitializationError:
        return start[:0], 0
