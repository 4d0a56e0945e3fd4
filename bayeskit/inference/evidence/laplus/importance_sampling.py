"""Importance sampling from the gamma distributions of Laplus."""

from __future__ import annotations

import math

from bayeskit._settings import real_number, whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import MIN_EFFECTIVE, weight_problems, with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.laplus.families import gamma_family
from bayeskit.inference.evidence.laplus.positive import PositiveDensity, PositiveMode
from bayeskit.inference.evidence.laplus.proposal import Proposal, beyond_reach, within
from bayeskit.inference.evidence.mode.missed import missed_mass
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

#: Of the squared weights along a line, worth in weights larger than any drawn.
MAX_BEYOND = 0.05
#: Of many coordinates far out together, only the few best draws tell: below so many, an error is mostly chance.
FEW = 200


@estimator()
def gamma_laplus_importance_sampling(
    target: Target,
    num_draws: int = 10_000,
    *,
    tail_share: float = 0.3,
    mode: PositiveMode | None = None,
    seed: int = 0,
) -> Evidence:
    """Sample by importance from independent gamma distributions at the posterior mode.

    Their tails are lighter than those of most posteriors of scales and variances. So in part of the draws half of the
    coordinates come from Student-t distributions of their logarithms instead, which fall off more slowly than every
    power, and in the others a single one may. What the draws have not reached is looked for along each coordinate, and
    by climbs from prior draws and from the heaviest of the draws.

    Parameters
    ----------
    target : Target
        All of its sites are positive.
    num_draws : int, default 10,000
    tail_share : float, default 0.3
        Share of the draws in which half of the coordinates come from the wider distributions; below one, and zero for
        the gamma distributions alone, which are the paper's.
    mode : PositiveMode, optional
        That of the target, if it is known already.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If a site is not positive, naming it, the mode is of another target, there are no draws, or the share is not in
        [0, 1).
    ShapeError
        If the mode is of another dimension.

    References
    ----------
    Fourment et al. (2020), as of :func:`gamma_laplus`.

    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
    185-194.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import gamma_laplus_importance_sampling
    >>> case = bk.exact.get("three_taxon_tree")
    >>> z = gamma_laplus_importance_sampling(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    num_draws, tail_share = whole_number("num_draws", num_draws, least=2), real_number("tail_share", tail_share)
    if not 0 <= tail_share < 1:
        raise SettingsError(f"tail_share must be at least 0 and below 1, not {tail_share!r}")
    density = PositiveDensity(target)
    mode, looked = density.own(mode, seed=seed)
    fit = gamma_family(density, mode)
    count = mode.num_evaluations + looked + fit.num_evaluations
    if fit.problems:
        return Evidence("gamma_laplus_importance_sampling", math.nan, math.nan, count, (*mode.problems, *fit.problems))
    proposal = Proposal(fit.distribution, tail_share)
    generator = new_generator(seed, target.device, stream="gamma Laplus importance sampling")
    # A draw that rounds to zero has no logarithm; the smallest number stands for it.
    x = within(proposal.sample(num_draws, generator), target.dtype)
    with one_thread():
        log_density = density.log_density(x)
        log_weights = (log_density.double() - proposal.log_prob(x)).unsqueeze(0)
        beyond, probes = beyond_reach(density, proposal, float(log_weights.max()))
    tail, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights[0]))
    problems = [*mode.problems, *weight_problems(tail, effective)]
    if MIN_EFFECTIVE <= effective < FEW:
        problems.append(f"only {effective:.0f} effective weights, too few for a heavy tail: use more draws")
    if beyond > MAX_BEYOND:
        problems.append(
            "the posterior has heavier tails than the proposal, or another mode: along a coordinate there are larger "
            "weights than any drawn: use bridge sampling"
        )
    log_z = float(log_mean_exp(log_weights))
    error = with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density)
    missed, looks = missed_mass(
        target,
        x.log(),
        log_weights[0],
        log_z,
        error,
        # The density of logarithms, which are the unconstrained coordinates.
        log_prob=lambda u: proposal.log_prob(within(u.exp(), target.dtype)) + u.sum(-1),
        seed=seed,
    )
    return Evidence(
        "gamma_laplus_importance_sampling",
        log_z,
        error,
        num_draws + probes + count + looks,
        (*problems, *missed),
        {"pareto_shape": tail, "effective_draws": effective, "beyond_reach": beyond},
    )
