"""Importance sampling from a normalizing flow that was fitted to posterior draws."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    r_hat,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import belongs, finite_chains, weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.coverage import missed_draws
from bayeskit.inference.evidence.flows.fitted_flow import (
    DEGREES_OF_FREEDOM,
    TAIL_SHARE,
    FittedFlow,
    check_flow,
    fit_flow,
    halves,
    shape_that_matters,
)
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.mode.student_t import StudentT
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

#: Of the draws, from the prior.
PRIOR_SHARE = 0.1
#: Parts of the proposal that come from what was fitted; the prior is the last.
NUM_FITTED = 3
#: Draws of a part from which on its own variance says enough.
MIN_PART = 10


@estimator()
def flow_importance_sampling(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Sample by importance from a normalizing flow fitted to the first half of each chain.

    A tenth of the draws come from the prior, if the target can draw from it, which reaches what neither the posterior
    draws nor a flow fitted to them have seen; where a density is NaN there, it counts as zero, and how often is told
    by the diagnostic ``nan_from_prior``. Of the others three in ten come from wider distributions, half of them from
    the flow that starts from Student-t noise with five degrees of freedom, half from a Student-t distribution whose
    scale matrix is the covariance of the posterior draws. Every draw is weighed against the mixture: where the tails of
    the flow are lighter than those of the posterior, the weights stay bounded. All posterior draws serve to see whether
    the proposal covers the posterior.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    flow : FittedFlow, optional
        What :func:`fit_flow` made of ``draws``; made here by default.
    num_draws : int, default 10,000
        From the proposal.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target or are too few to be split.
    SettingsError
        If there are fewer than two draws, or the flow has another dimension.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
    185-194.

    Papamakarios, G., Nalisnick, E., Rezende, D. J., Mohamed, S., Lakshminarayanan, B. (2021). Normalizing flows for
    probabilistic modeling and inference. Journal of Machine Learning Research 22(57).

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.flows import flow_importance_sampling
    >>> case = bk.exact.get("linreg10")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = flow_importance_sampling(draws.target, draws)
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.standard_error < 0.02
    (True, True)
    """
    belongs(draws, target)
    num_draws = whole_number("num_draws", num_draws, least=2)
    draws = finite_chains(draws)
    halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else check_flow(flow, target)
    proposal = _Defensive(flow, target)
    parts = proposal.sample(num_draws, new_generator(seed, stream="flow importance sampling"))
    x, counts = torch.cat(parts), [len(part) for part in parts]
    log_prior, log_likelihood = target.evaluate(x)
    log_density = log_prior + log_likelihood
    fitted, drawn_from_prior = log_density.split([sum(counts[:NUM_FITTED]), sum(counts[NUM_FITTED:])])
    _, problems = without_nan(fitted)
    nan_from_prior = float(drawn_from_prior.isnan().double().mean()) if len(drawn_from_prior) else 0.0
    # Far out in the prior a draw may overflow, and nothing is known there.
    log_density = torch.where(log_density.isnan(), -torch.inf, log_density)
    log_weights = log_density.to(torch.float64) - proposal.log_prob(x, log_prior)
    log_weights = torch.where(log_density == -torch.inf, -torch.inf, log_weights).unsqueeze(0)
    total, largest = float(log_mean_exp(log_weights)), float(log_weights.max())
    there = proposal.log_prob(draws.unconstrained, draws.log_prior).flatten()
    above = (draws.log_prior + draws.log_likelihood).flatten() - there
    shape = shape_that_matters(log_weights, above)
    effective = float(weight_effective_sample_size(log_weights[0]))
    problems += weight_problems(shape, effective)
    problems += missed_draws(lambda _: there, draws, largest)
    z = Evidence(
        "flow_importance_sampling",
        total,
        with_rounding(_error(log_weights[0], counts, total), log_density),
        draws.num_gradients + num_draws,
        tuple(problems),
        {
            "pareto_shape": shape,
            "effective_draws": effective,
            "log_largest_weight": max(largest, float(above.max())) - total,
            "r_hat": float(r_hat(draws.unconstrained.movedim(-1, 0)).max()),
            "flow_gain": flow.gain,
            "nan_from_prior": nan_from_prior,
        },
    )
    return with_missed_peak(z, target, draws)


def _error(log_weights: Tensor, counts: list[int], log_mean: float) -> float:
    """Return the standard error of the log mean weight, where how many draws each part gives is not left to chance."""
    if min(count for count in counts if count) < MIN_PART or log_mean == -math.inf:
        return float(independent_log_mean_exp_error(log_weights.unsqueeze(0)))
    part = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return float(stratified_log_mean_exp_error(log_weights, part.to(log_weights.device)))


class _Defensive:
    """Mixture of a flow, the same from wider noise, a Student-t distribution and, where it can be had, the prior."""

    def __init__(self, flow: FittedFlow, target: Target) -> None:
        self.flow, self.target = flow, target
        self.prior_share = PRIOR_SHARE if target.can_sample_prior else 0.0
        zero, one = torch.zeros_like(flow.location), torch.eye(flow.dim).to(flow.location)
        self.wider = StudentT(zero, one, DEGREES_OF_FREEDOM)

    def sample(self, num_draws: int, generator: torch.Generator) -> list[Tensor]:
        """Draw from each part its share, rounded up or down at random such that it is right on average."""
        fitted = 1 - self.prior_share
        shares = [fitted * (1 - TAIL_SHARE), fitted * TAIL_SHARE / 2, fitted * TAIL_SHARE / 2]
        offset = float(torch.rand((), dtype=torch.float64, generator=generator))
        ends = [math.floor(num_draws * end + offset) for end in accumulate(shares)]
        ends[-1] = ends[-1] if self.prior_share else num_draws
        light, noise, plain, prior = (last - first for first, last in pairwise([0, *ends, num_draws]))
        parts = [self.flow.sample(light, generator)]
        wider = self.wider.sample(noise + plain, generator)
        parts += [self.flow.from_noise(wider[:noise]), self.flow.from_white(wider[noise:])]
        if prior:
            parts.append(self.target.sample_prior(prior, generator).to(parts[0]))
        return parts

    def log_prob(self, x: Tensor, log_prior: Tensor) -> Tensor:
        of_flow = self.flow.defensive_log_prob(x)
        if not self.prior_share:
            return of_flow
        of_prior = log_prior.to(of_flow).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return torch.logaddexp(math.log1p(-self.prior_share) + of_flow, math.log(self.prior_share) + of_prior)
