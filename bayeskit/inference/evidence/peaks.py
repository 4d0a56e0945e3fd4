"""Peaks that no draw has found: the mass about each mode that a search ends at, against the share of draws there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayeskit._statistics import effective_sample_size
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError, InitializationError
from bayeskit.inference.evidence.mode.missed import is_more_than, same_likelihood
from bayeskit.inference.evidence.mode.peak import Peak, is_missed, weigh_peak
from bayeskit.inference.evidence.modes import (
    STARTS_BESIDE_DRAWS,
    best_of,
    divided_by_valleys,
    find_modes,
    num_looks,
    starts_from_prior,
)
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.rounding import rounding_problems
from bayeskit.inference.samplers.initial import from_prior
from bayeskit.target import Target

#: Searches from draws of the prior, and from points that valleys divide.
PRIOR_STARTS, DIVIDED_STARTS = 6, 6
#: A missing share of the posterior is said if it is larger than this, or than the standard error.
MIN_MISSING = 0.01
#: Part of the width of the draws in each coordinate that their tails may reach beyond.
MARGIN = 0.25
#: Standard deviations of the distributions that are drawn from to look beyond, in units of that of the draws.
WIDER, LOOKS = (2.0, 4.0, 8.0, 16.0, 32.0), 200
#: What makes a search fail where the density itself may be fine at the draws.
_FAILURES = (BayeskitError, ArithmeticError, RuntimeError, ValueError, TypeError)
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
    margin = MARGIN * (high - low)
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
    least = max(estimate.standard_error, MIN_MISSING)
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
        least = min(MIN_MISSING, estimate.standard_error) if estimate.standard_error > 0 else MIN_MISSING
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
        divided, looks = divided_by_valleys(target, seen, DIVIDED_STARTS)
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
    draws = from_prior(target, num_looks(target), new_generator(_SEED, stream="peaks"))
    if draws is not None:
        start = torch.cat([start, draws[:PRIOR_STARTS].to(start)])
    ends, cost = _climbed(target, start)
    return _Prior(draws, ends, spent + cost)


def _climbed(target: Target, start: Tensor) -> tuple[Tensor, int]:
    """Return where climbs end, nothing where the density is zero at all starts, and evaluations."""
    try:
        return find_modes(target, start=start)
    except InitializationError:
        return start[:0], 0
