"""Posterior mass missed by weighted draws: at modes found by a search, and in the tails of proposals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.statistics import weight_effective_sample_size
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.inference._known_modes import (
    KnownModes,
    ModeCheck,
    WeightedMode,
    check_modes,
    divided_by_valleys,
    is_missed,
    num_looks,
    reflections,
)
from bayeskit.inference.evidence._judging._densities import rounding_problems
from bayeskit.inference.samplers._population_moves import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.inference.samplers._populations import learn_metric, num_trajectory_steps

# Posterior mass missed by weighted draws of a proposal or of the prior.

#: Number of mode searches from the best prior draws, from random prior draws, from draws separated by valleys, and
#: from the draws of largest weight.
_NUM_BEST, _NUM_SPREAD, _NUM_DIVIDED, _NUM_HEAVY = 4, 16, 12, 4
#: Number of starts from which single terms of a mixture are maximized.
_FOR_SUMMANDS = 4
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
#: Tail shares whose limits moved draws may cross, the step of these moves over that of the run, and their number. If
#: no flow has more than this many standard errors after the first two, there are no others.
_TAILS, _SHORTER, _MOST_MOVES, _DOUBT = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2), 0.25, 4, 2.0
#: Fewest draws beyond a limit, in the half of the draws that the limit comes from.
_FEWEST_IN_TAIL = 4
#: Probability that draws of the posterior appear not to be, and share of a standard error that a flow has to have:
#: a few moves find only a part of what is missing.
_FALSE_ALARM, _PART_OF_ERROR = 1e-4, 1 / 3


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

    ``log_prob``, ``(n, d) -> (n,)``, is the proposal's, None for the prior; ``others (m, d)`` start further searches.
    """
    if not math.isfinite(log_z):
        return [], 0
    log_weights = log_weights.double()
    # Draws that missed a mode have weights as even as if it did not exist. Mode searches therefore start at the draws
    # of largest weight and at prior draws, and the mass of each mode is compared with the weighted share of draws
    # there.
    heavy = x[log_weights.topk(min(_NUM_HEAVY, len(x))).indices]
    mirrored, spent = reflections(target, heavy)
    starts = [heavy, mirrored]
    problems, _ = rounding_problems(target, x, log_weights, standard_error)
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
            if exceeds_error((log_likelihood - log_z)[outside], looks, standard_error):
                problems.append("draws from the prior find mass that the proposal does not cover: use nested_sampling")
    if others is not None:
        starts.append(others)
    with density_may_fail():  # the estimate stands; only this check is not available
        missed, count = _missed_mode(target, torch.cat(starts), x, log_weights, log_z, standard_error, log_prob)
        return problems + missed, spent + count
    return problems, spent


def _missed_mode(
    target: Target,
    starts: Tensor,
    x: Tensor,
    log_weights: Tensor,
    log_z: float,
    standard_error: float,
    log_prob: Callable[[Tensor], Tensor] | None,
) -> tuple[list[str], int]:
    known = KnownModes.of(target)
    spent = known.search(target, starts, "proposals")
    spent += known.search_summands(target, starts[:_FOR_SUMMANDS]) + known.weigh(target)
    if log_prob is not None:
        largest = log_z + math.log(_MAX_SHARE * len(x))
        if any(height - float(log_prob(end[None])) > largest for end, height in known.unweighted):
            return [
                "the posterior is high where the proposal is not: a single draw there would be "
                f"{100 * _MAX_SHARE:.0f} % of the estimate or more; use nested_sampling or stepping_stone"
            ], spent
    return check_modes(weighted_check(x, log_weights, log_z, standard_error), known.weighted), spent


def weighted_check(x: Tensor, log_weights: Tensor, log_z: float, standard_error: float) -> ModeCheck:
    """Return the check whether weighted draws ``x (n, d)`` behind an estimate miss a mode."""
    weights, effective = torch.softmax(log_weights, 0), float(weight_effective_sample_size(log_weights))

    def check(modes: Sequence[WeightedMode]) -> list[str]:
        for mode in modes:
            share = float(weights[mode.holds(x)].sum())
            expected = math.exp(min(mode.log_mass - log_z, 700.0))
            # The binomial error of the expected share, so that draws that never saw the mode do not appear certain.
            likely = min(max(share, expected), 1.0)
            chance = math.sqrt(max(likely * (1 - likely), 1 / effective) / effective)
            if is_missed(expected, share, chance, math.hypot(mode.relative_error, standard_error), standard_error):
                return [
                    f"a mode with a mass of {expected:.3g} times the estimate has {100 * share:.2g} % of the weighted "
                    "draws, so they miss a part of the posterior: use nested_sampling or stepping_stone"
                ]
        return []

    return check


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


def unreached_by_moves(target: Target, draws: Draws, standard_error: float, calls: float) -> tuple[list[str], int]:
    """Return a warning if shorter steps take draws to where the run's moves did not, and evaluations.

    ``calls`` are the run's gradient evaluations per draw. This check spends no more, and is left out where that is less
    than one move, or where the draws have no step size.
    """
    # Moves whose step suits most of the posterior are rejected in a narrow part, such as where a scale is small. No
    # replicate gets there, so that their spread does not show what is missing. Under detailed balance as many draws
    # enter a set as leave it, whatever the moves; a net flow means that the draws are not yet of the posterior.
    alive = draws.log_likelihood.flatten().isfinite()
    x, step_size = draws.unconstrained.flatten(0, 1)[alive], draws.sample_stats.get("step_size")
    if step_size is None or len(x) * max(_TAILS) < 2 * _FEWEST_IN_TAIL or not math.isfinite(standard_error):
        return [], 0
    step = _SHORTER * float(step_size.mean())
    num_steps = num_trajectory_steps(step)
    num_moves = min(_MOST_MOVES, int(calls / (GRADIENTS_PER_STEP * num_steps)))
    if num_moves < 1:
        return [], 0
    even = torch.full((len(x),), -math.log(len(x)), dtype=torch.float64, device=x.device)
    # As many planned calls as the run had, so that what was compiled for it is used.
    kernel = PopulationHMC(step, num_steps, learn_metric(x, even), 1.0, planned_calls=max(1, int(calls)))
    generator = new_generator(0, x.device, stream="shorter steps")
    with one_thread(), torch.no_grad():
        state = kernel.init(target, x)
        seen, flow = [torch.cat([x, state.log_likelihood.unsqueeze(1)], 1)], _Flow(0.0, 0.0, 0, False)
        for move in range(num_moves):
            state, _ = kernel.step(target, state, generator=generator)
            seen.append(torch.cat([state.position, state.log_likelihood.unsqueeze(1)], 1))
            if move == 1 or move == num_moves - 1:
                flow = _net_flow(seen)
                if flow.errors < _DOUBT:
                    break
    spent = (1 + GRADIENTS_PER_STEP * num_steps * (len(seen) - 1)) * len(x)
    num_flows = 2 * len(_TAILS) * seen[0].shape[1]
    surprising = -float(torch.special.ndtri(torch.tensor(_FALSE_ALARM / num_flows, dtype=torch.float64)))
    if not (flow.errors > surprising and flow.share > _PART_OF_ERROR * standard_error):
        return [], spent
    side = "low" if flow.is_low else "high"
    seen_there = f"with shorter steps {100 * flow.share:.2g} % of the particles move to {side} values of"
    if flow.column == target.dim:
        return [
            f"{seen_there} the log likelihood that the run did not reach: use stepping_stone or nested_sampling"
        ], spent
    return [
        f"{seen_there} {target.names[flow.column]} (unconstrained) that the run did not reach: use stepping_stone or "
        "nested_sampling, or, if it is a scale, write what it governs as location + scale * standard normal"
    ], spent


class _Flow(NamedTuple):
    """Share of draws in a tail after moves, less that before."""

    share: float
    errors: float  # the same in standard errors
    column: int
    is_low: bool


def _net_flow(seen: Sequence[Tensor]) -> _Flow:
    """Return the most significant net flow into a tail of a column, from the first of several ``(n, k)`` on."""
    first, *others = seen
    n, k = first.shape
    half = n // 2
    # Copies, which resampling makes and puts next to each other, enter and leave together.
    distinct = torch.cat([first.new_zeros(1, dtype=torch.bool), (first.diff(dim=0) != 0).any(1)]).cumsum(0)
    best = _Flow(0.0, 0.0, 0, False)
    for column, is_low in product(range(k), (True, False)):
        sign = 1.0 if is_low else -1.0
        start, moved = sign * first[:, column], sign * torch.stack([x[:, column] for x in others])
        # Limits of one half come from the other: a limit from the same draws would have a known number beyond it.
        ordered = [part.sort().values for part in (start[half:], start[:half])]
        for tail in (tail for tail in _TAILS if tail * half >= _FEWEST_IN_TAIL):
            limits = torch.stack([part[round(tail * len(part))] for part in ordered])
            limit = limits.repeat_interleave(torch.tensor([half, n - half], device=limits.device))
            change = (moved < limit).to(torch.float64).mean(0) - (start < limit).to(torch.float64)
            together = torch.zeros(n, dtype=torch.float64, device=change.device).index_add(0, distinct, change)
            errors = float(change.sum() / together.square().sum().clamp(min=1.0).sqrt())
            if errors > best.errors:
                best = _Flow(float(change.mean()), errors, column, is_low)
    return best


def exceeds_error(log_terms: Tensor, num_draws: int, standard_error: float) -> bool:
    """Tell whether some of ``num_draws`` terms add more to their mean than an error, with room for their own error."""
    terms = log_terms.exp() / num_draws
    # Minus twice its error, so that a few hits in a thin tail are not significant.
    return float(terms.sum() - 2 * terms.square().sum().sqrt()) > standard_error


def same_likelihood(target: Target, log_likelihood: Tensor) -> list[str]:
    """Return a warning if nearly all draws have the same likelihood, and cannot tell where it is larger."""
    if target.has_constant_likelihood:
        return []  # it is larger nowhere
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
