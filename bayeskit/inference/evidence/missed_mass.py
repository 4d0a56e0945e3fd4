"""Posterior mass missed by the draws: at modes found by a search, and in the tails of proposals."""

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

# Posterior mass missed by weighted draws of a proposal or of the prior.

#: Number of mode searches from the best prior draws, from random prior draws, from draws separated by valleys, and
#: from the draws of largest weight.
_NUM_BEST, _NUM_SPREAD, _NUM_DIVIDED, _NUM_HEAVY = 4, 16, 12, 4
#: Largest number of modes that are weighed.
_MAX_PEAKS = 8
#: Smallest missing share that is reported, if it also exceeds one standard error.
_MIN_MISSING = 0.01
#: Largest share of the estimate in one draw if a search ends at a point without a normal approximation.
_MAX_SHARE = 0.01
#: Share of draws of equal likelihood above which all count as equal.
_MIN_SAME = 0.999
#: Excess over the largest log weight of the proposal from which a point counts as not covered. If the proposal is the
#: posterior, all weights are equal up to rounding.
_ROUNDING = 0.01
#: Number of proposal draws that are moved, number of moves, trajectory length in units of the metric, and most steps.
NUM_MOVED, _NUM_MOVES, _TRAJECTORY, _MAX_STEPS = 500, 20, 1.5, 8
_TARGET_ACCEPTANCE = 0.8
#: Errors of a search; the density may still be valid at the draws.
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
    """Return warnings of posterior mass that draws ``x (n, d)`` of ``log_weights (n,)`` miss, and evaluations.

    ``log_prob``, ``(n, d) -> (n,)``, is the proposal's, None for the prior; ``others (m, d)`` start further climbs.
    """
    if not math.isfinite(log_z):
        return [], 0
    log_weights = log_weights.double()
    # Draws that missed a mode have weights as even as if it did not exist. Mode searches therefore start at the draws
    # of largest weight and at prior draws, and the mass of each mode is compared with the weighted share of draws
    # there.
    starts = [x[log_weights.topk(min(_NUM_HEAVY, len(x))).indices]]
    problems, _ = rounding_problems(target, x, log_weights, standard_error)
    spent = 0
    if target.can_sample_prior:
        looks = num_looks(target)
        prior = target.sample_prior(looks, seed=new_generator(seed, stream="what weighted draws missed"))
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
            # Only if no draw of the proposal had as large a weight.
            outside = log_density - log_prob(prior) > log_weights.max() + margin
            if is_more_than((log_likelihood - log_z)[outside], looks, standard_error):
                problems.append("draws from the prior find mass that the proposal does not cover: use nested_sampling")
    if others is not None:
        starts.append(others)
    try:
        missed, count = _missed_peak(target, torch.cat(starts), x, log_weights, log_z, standard_error, log_prob)
    except _FAILURES:
        # The estimate stands; only this check is not available.
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
        # The binomial error of the expected share, so that draws that never saw the mode do not appear certain.
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
    """Return the posterior's share where weights exceed ``log_weights (n,)`` of draws ``x (n, d)``, and evaluations."""
    # Weights give no information on a region that the proposal has probably not visited: move some draws by MCMC and
    # weigh them at their new positions.
    moved, log_density, spent = moved_draws(target, x, log_weights, new_generator(seed, x.device, stream="moved"))
    above = log_density - log_prob(moved) > log_weights.max() + _ROUNDING
    return float(above.to(torch.float64).mean()), spent


def moved_draws(
    target: Target, x: Tensor, log_weights: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Resample ``x (n, d)`` by weight, move by HMC; return ``(500, d)``, log densities ``(500,)`` and evaluations."""
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
    """Tell whether some of ``num_draws`` terms add more to their mean than an error, with room for their own error."""
    terms = log_terms.exp() / num_draws
    # Minus twice its error, so that a few hits in a thin tail are not significant.
    return float(terms.sum() - 2 * terms.square().sum().sqrt()) > standard_error


def same_likelihood(log_likelihood: Tensor) -> list[str]:
    """Return a warning if nearly all draws have the same likelihood, and cannot tell where it is larger."""
    middle = float(log_likelihood.median())
    rounding = 100 * torch.finfo(log_likelihood.dtype).eps * abs(middle)
    same = float(((log_likelihood - middle).abs() <= rounding).double().mean())
    # A zero log likelihood means a model without data; minus infinity means the edge of the support.
    if middle == 0.0 or same < _MIN_SAME or not bool((log_likelihood > -torch.inf).all()):
        return []
    return [
        "the likelihood is the same at all draws: if it does not depend on the parameters, it is the evidence; if it "
        "does, the draws have missed where: start chains near the data, or take a narrower prior"
    ]


def without_infinity(log_density: Tensor) -> tuple[Tensor, list[str]]:
    """Return log densities with infinity as minus infinity, and a warning if there was any."""
    bad = log_density == torch.inf
    if not bool(bad.any()):
        return log_density, []
    share = 100 * float(bad.double().mean())
    problem = f"the density is infinite at {share:.2g} % of the points and was counted as zero there: mend the model"
    return torch.where(bad, -torch.inf, log_density), [problem]


# Missed modes: the mass about each mode found by a search, compared with the share of draws there.

#: Number of searches from prior draws, and from points separated by valleys.
_PRIOR_STARTS, _DIVIDED_STARTS = 6, 6
#: Tails may extend beyond the draws by this share of their width in each coordinate.
_MARGIN = 0.25
#: Standard deviations of the probe distributions, in units of that of the draws, and number of probes each.
WIDER, LOOKS = (2.0, 4.0, 8.0, 16.0, 32.0), 200
_SEED = 0  # one for all estimators, so that none depends on which was asked before


@dataclass(frozen=True)
class Peaks:
    """The peaks at which searches from some draws, and from the prior, ended."""

    found: tuple[Peak, ...]  # those that could be weighed, the highest mode first, none inside another
    num_evaluations: int


@dataclass(frozen=True)
class _Prior:
    """What a target's prior shows, whatever the draws: some draws of it, if there are any, and where climbs end."""

    draws: Tensor | None
    ends: Tensor
    num_evaluations: int


# One search serves all estimators on the same draws; one search from the prior serves all draws of a target.
_KNOWN: WeakKeyDictionary[Target, WeakKeyDictionary[Draws, Peaks]] = WeakKeyDictionary()
_PRIORS: WeakKeyDictionary[Target, _Prior] = WeakKeyDictionary()


def find_peaks(target: Target, draws: Draws) -> Peaks:
    """Return the peaks that climbs from draws, of any temperature, and from the prior end at; kept with the draws."""
    known = _KNOWN.setdefault(target, WeakKeyDictionary())
    if draws not in known:
        known[draws] = _search(target, draws)
    return known[draws]


def _mass_outside(target: Target, draws: Draws, estimate: Evidence) -> tuple[list[str], int]:
    """Return a warning if wider normal draws find mass outside the box of the posterior draws, and evaluations."""
    # Chains that all start in a narrow peak never leave it; no mode search ends in the broad part around it.
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
    """Return the estimate with a warning if a peak holds more of the posterior than of the draws at beta one.

    The estimate is known to be ``known_bias`` nats too low; ``others`` are draws that must show the peaks as well.
    """
    # No chain may visit a narrow or distant mode, and no chain diagnostic detects that. If the estimate is right, the
    # mass of a mode over it is the share of draws there. The search has a fixed seed, so estimators on the same draws
    # share it.
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
    # The binomial error of the expected share, so that draws that never saw the mode do not appear certain.
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
        # The best of many draws may all belong to one mode, so one point per mode seen by posterior or prior draws is
        # added.
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
        # The draws and the estimate stand; only this check is not available.
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
