"""Importance sampling from a normalizing flow that was fitted to posterior draws."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    r_hat,
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
from bayeskit.inference.evidence.mode.student_t import StudentT
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


def flow_importance_sampling(
    target: Target, draws: Draws, *, flow: FittedFlow | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Sample by importance from a normalizing flow fitted to the first half of each chain.

    Three draws in ten come from wider distributions, and every draw is weighed against the mixture: half of them from
    the flow that starts from Student-t noise with five degrees of freedom, half from a Student-t distribution whose
    scale matrix is the covariance of the posterior draws. Where the tails of the flow are lighter than those of the
    posterior, the weights stay bounded. All posterior draws serve to see whether the proposal covers the posterior.

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
    proposal = _Defensive(flow)
    x = proposal.sample(num_draws, new_generator(seed, stream="flow importance sampling"))
    log_density, problems = without_nan(target.log_density(x))
    log_weights = (log_density.to(torch.float64) - proposal.log_prob(x)).unsqueeze(0)
    total, largest = float(log_mean_exp(log_weights)), float(log_weights.max())
    there = proposal.log_prob(draws.unconstrained).flatten()
    above = (draws.log_prior + draws.log_likelihood).flatten() - there
    shape = shape_that_matters(log_weights, above)
    effective = float(weight_effective_sample_size(log_weights[0]))
    problems += weight_problems(shape, effective)
    problems += missed_draws(lambda _: there, draws, largest)
    z = Evidence(
        "flow_importance_sampling",
        total,
        with_rounding(float(independent_log_mean_exp_error(log_weights)), log_density),
        draws.num_gradients + num_draws,
        tuple(problems),
        {
            "pareto_shape": shape,
            "effective_draws": effective,
            "log_largest_weight": max(largest, float(above.max())) - total,
            "r_hat": float(r_hat(draws.unconstrained.movedim(-1, 0)).max()),
            "flow_gain": flow.gain,
        },
    )
    return with_missed_peak(z, target, draws)


class _Defensive:
    """Mixture of a flow, the same flow from wider noise, and a Student-t distribution."""

    def __init__(self, flow: FittedFlow) -> None:
        self.flow = flow
        zero, one = torch.zeros_like(flow.location), torch.eye(flow.dim).to(flow.location)
        self.wider = StudentT(zero, one, DEGREES_OF_FREEDOM)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        kind = torch.rand(num_draws, generator=generator)
        wide, plain = int((kind < TAIL_SHARE).sum()), int((kind < TAIL_SHARE / 2).sum())
        light = self.flow.sample(num_draws - wide, generator)
        wider = self.wider.sample(wide, generator)
        from_flow = self.flow.from_noise(wider[plain:])
        return torch.cat([light, from_flow, self.flow.from_white(wider[:plain])])

    def log_prob(self, x: Tensor) -> Tensor:
        return self.flow.defensive_log_prob(x)
