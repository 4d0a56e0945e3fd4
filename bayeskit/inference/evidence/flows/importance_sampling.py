"""Importance sampling from a normalizing flow that was fitted to posterior draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    r_hat,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import belongs, finite_chains, weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.flows.fitted_flow import FittedFlow, check_flow, fit_flow, halves
from bayeskit.inference.evidence.mode.student_t import StudentT
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

HEAVY_SHARE, DEGREES_OF_FREEDOM = 0.2, 5.0
MAX_MISSED = 0.01


def flow_importance_sampling(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Sample by importance from a normalizing flow fitted to the first half of each chain.

    One draw in five comes instead from a Student-t distribution with five degrees of freedom whose scale matrix is
    the covariance of the same posterior draws, and every draw is weighed against the mixture: where the tails of the
    flow are lighter than those of the posterior, the weights stay bounded. The second half of the chains serves to
    see whether the proposal covers the posterior.

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
    _, second = halves(draws, target.dim)
    flow = fit_flow(target, draws, seed=seed) if flow is None else check_flow(flow, target)
    proposal = _Defensive(flow)
    x = proposal.sample(num_draws, new_generator(seed, stream="flow importance sampling"))
    log_density, problems = without_nan(target.log_density(x))
    log_weights = (log_density.to(torch.float64) - proposal.log_prob(x)).unsqueeze(0)
    shape, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights[0]))
    problems += weight_problems(shape, effective)
    there = (draws.log_prior + draws.log_likelihood)[:, -second.shape[1] :].to(torch.float64)
    missed = float((there - proposal.log_prob(second) > log_weights.max()).to(torch.float64).mean())
    if missed > MAX_MISSED:
        problems.append(
            f"{100 * missed:.0f} % of the posterior draws lie outside the proposal: use more draws or stepping stone"
        )
    z = Evidence(
        "flow_importance_sampling",
        float(log_mean_exp(log_weights)),
        with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density),
        draws.num_gradients + num_draws,
        tuple(problems),
        {
            "pareto_shape": shape,
            "effective_draws": effective,
            "missed_draws": missed,
            "r_hat": float(r_hat(draws.unconstrained.movedim(-1, 0)).max()),
            "flow_gain": flow.gain,
        },
    )
    return with_missed_peak(z, target, draws, seed=seed)


class _Defensive:
    """Mixture of a flow and a Student-t with wider tails."""

    def __init__(self, flow: FittedFlow) -> None:
        self.flow = flow
        self.heavy = StudentT(flow.location, flow.factor, DEGREES_OF_FREEDOM)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        num_heavy = int((torch.rand(num_draws, generator=generator) < HEAVY_SHARE).sum())
        heavy = self.heavy.sample(num_heavy, generator).to(self.flow.dtype)
        return torch.cat([self.flow.sample(num_draws - num_heavy, generator), heavy])

    def log_prob(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(torch.float64)
        light = self.flow.log_prob(flat) + math.log1p(-HEAVY_SHARE)
        heavy = self.heavy.log_prob(flat) + math.log(HEAVY_SHARE)
        return torch.logaddexp(light, heavy).reshape(x.shape[:-1])
