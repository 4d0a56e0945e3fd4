"""What weighted draws of a proposal, or of the prior, have missed of the posterior."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bayeskit._climbing import climb
from bayeskit._statistics import weight_effective_sample_size
from bayeskit._torch import new_generator
from bayeskit.errors import BayeskitError
from bayeskit.inference.evidence.mode.peak import Peak, is_missed, weigh_peak
from bayeskit.inference.evidence.modes import divided_by_valleys, num_looks, posterior
from bayeskit.inference.evidence.rounding import rounding_problems
from bayeskit.inference.samplers.smc.pilot import learn_metric
from bayeskit.inference.samplers.smc.population_hmc import GRADIENTS_PER_STEP, PopulationHMC
from bayeskit.target import Target

#: Climbs from the best draws of the prior, from some of them, from those that valleys divide, and from the heaviest
#: draws.
NUM_BEST, NUM_SPREAD, NUM_DIVIDED, NUM_HEAVY = 4, 16, 12, 4
#: Ends of climbs that are weighed at most.
MAX_PEAKS = 8
#: A missing share is said from here on, or from one standard error on.
MIN_MISSING = 0.01
#: Of the estimate, that one draw may have where a climb ends at a place that no normal distribution fits.
MAX_SHARE = 0.01
#: The share of draws from which on their likelihoods count as all the same.
MIN_SAME = 0.999
#: By so much a log weight may exceed the largest of the proposal before it counts as not covered: where the proposal is
#: the posterior, all are the same but for rounding.
ROUNDING = 0.01
#: Draws that move away from where the proposal has put them, how often, and how far each time in units of the metric.
NUM_MOVED, NUM_MOVES, TRAJECTORY, MAX_STEPS = 500, 20, 1.5, 8
TARGET_ACCEPTANCE = 0.8
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
    >>> from bayeskit.inference.evidence.mode.missed import missed_mass
    >>> target = bk.Target.from_functions(lambda u: -0.5 * (u.abs() - 9).square().sum(-1), lambda u: 0 * u[..., 0], 1)
    >>> x = 9 + torch.randn(1000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> len(missed_mass(target, x, 0 * x[:, 0], 0.919, 0.01, others=-x[:1])[0])
    1
    """
    if not math.isfinite(log_z):
        return [], 0
    log_weights = log_weights.double()
    starts = [x[log_weights.topk(min(NUM_HEAVY, len(x))).indices]]
    problems, _ = rounding_problems(target, x, log_weights, standard_error)
    spent = 0
    if target.can_sample_prior:
        looks = num_looks(target)
        prior = target.sample_prior(looks, new_generator(seed, stream="what weighted draws missed"))
        log_prior, log_likelihood = target.evaluate(prior)
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        spent += looks
        starts += [prior[log_likelihood.topk(NUM_BEST).indices], prior[log_likelihood.isfinite()][:NUM_SPREAD]]
        divided, count = divided_by_valleys(target, prior, NUM_DIVIDED)
        starts.append(divided)
        spent += count
        if log_prob is not None:
            log_density = log_prior + log_likelihood
            margin = (100 * torch.finfo(prior.dtype).eps * log_density.abs()).clamp(min=ROUNDING)
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
    least = min(MIN_MISSING, standard_error) if standard_error > 0 else MIN_MISSING
    seen: list[Peak] = []
    best = heights.argsort(descending=True)[: int(heights.isfinite().sum())]
    for end, height in zip(ends[best], heights[best], strict=True):
        if len(seen) == MAX_PEAKS:
            break
        if any(bool(peak.holds(end)) for peak in seen):
            continue
        peak, count = weigh_peak(target, end)
        spent += count
        if peak is None:
            if log_prob is not None and float(height - log_prob(end[None])) > log_z + math.log(MAX_SHARE * len(x)):
                return [
                    "the posterior is high where the proposal is not: a single draw there would be "
                    f"{100 * MAX_SHARE:.0f} % of the estimate or more; use nested_sampling or stepping_stone"
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
    >>> from bayeskit.inference.evidence.mode.missed import share_beyond
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
    above = log_density - log_prob(moved) > log_weights.max() + ROUNDING
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
    kernel = PopulationHMC(0.2 * TRAJECTORY, 1, learn_metric(x, normalised), 1.0)
    state, num_calls = kernel.init(target, start), 1
    for _ in range(NUM_MOVES):
        num_steps = min(MAX_STEPS, max(1, round(TRAJECTORY / kernel.step_size)))
        state, info = replace(kernel, num_steps=num_steps).step(target, state, generator=generator)
        change = math.exp(float(info.acceptance_rate.mean()) - TARGET_ACCEPTANCE)
        kernel = replace(kernel, step_size=min(kernel.step_size * change, TRAJECTORY))
        num_calls += GRADIENTS_PER_STEP * num_steps
    return state.position, state.log_density, NUM_MOVED * num_calls


def is_more_than(log_terms: Tensor, num_draws: int, standard_error: float) -> bool:
    """Whether what some of the draws add to a mean is more than an error tells.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence.mode.missed import is_more_than
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
    >>> from bayeskit.inference.evidence.mode.missed import same_likelihood
    >>> len(same_likelihood(torch.full((5,), -3.0))), same_likelihood(torch.arange(5.0))
    (1, [])
    """
    middle = float(log_likelihood.median())
    rounding = 100 * torch.finfo(log_likelihood.dtype).eps * abs(middle)
    same = float(((log_likelihood - middle).abs() <= rounding).double().mean())
    # A log likelihood of zero is that of a model without data; one of minus infinity, that of a wall.
    if middle == 0.0 or same < MIN_SAME or not bool((log_likelihood > -torch.inf).all()):
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
    >>> from bayeskit.inference.evidence.mode.missed import without_infinity
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
