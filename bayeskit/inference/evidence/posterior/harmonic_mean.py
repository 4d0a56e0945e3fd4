"""Harmonic mean of the likelihood over posterior draws, kept as a warning."""

from __future__ import annotations

import torch

from bayeskit._statistics import (
    effective_sample_size,
    log_mean_exp,
    log_mean_exp_error,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import (
    belongs,
    finite_chains,
    posterior_problems,
    weight_problems,
    with_rounding,
)
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

MAX_MISSED_PRIOR = 0.05
PRIOR_DRAWS = 1000


def harmonic_mean(target: Target, draws: Draws, *, seed: int = 0) -> Evidence:
    """Harmonic mean of the likelihood over posterior draws.

    Its variance is infinite unless the prior is narrower than the likelihood, and
    draws of any feasible number miss the part of the prior that decides it. Restricted
    to the draws' range of likelihoods, it estimates the evidence divided by the prior
    mass of that range; that mass is measured with prior draws, and where it is not
    nearly one the estimate is not trusted.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    seed : int, default 0
        For the prior draws of the diagnostic.

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target.

    References
    ----------
    Newton, M. A., Raftery, A. E. (1994). Approximate Bayesian inference with the
    weighted likelihood bootstrap. Journal of the Royal Statistical Society B 56, 3-48.
    Neal, R. M. (1994). Discussion of the same, p. 41.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence import harmonic_mean
    >>> target = bk.exact.get("linreg10").target()
    >>> draws = bk.sample(target, num_chains=4, num_warmup=200, num_samples=500, progress=False)
    >>> harmonic_mean(target, draws).trusted
    False
    """
    belongs(draws, target)
    draws = finite_chains(draws)
    log_weights = -draws.log_likelihood
    shape = pareto_shape(log_weights)
    autocorrelation = float(effective_sample_size(draws.log_likelihood)) / draws.log_likelihood.numel()
    effective = float(weight_effective_sample_size(log_weights.flatten())) * min(1.0, autocorrelation)
    problems, diagnostics = posterior_problems(draws)
    if not shape <= 0.5:
        problems.append(f"the weights have infinite variance (Pareto k {shape:.2f} > 0.5): use bridge sampling")
    problems += [p for p in weight_problems(0.0, effective)]
    num_extra = 0
    if target.can_sample_prior:
        prior = target.log_likelihood(target.sample_prior(PRIOR_DRAWS, new_generator(seed, stream="harmonic mean")))
        num_extra = PRIOR_DRAWS
        missed = float((prior < draws.log_likelihood.min()).to(torch.float64).mean())
        diagnostics["missed_prior"] = missed
        if missed > MAX_MISSED_PRIOR:
            problems.append(
                f"the draws never reach the likelihoods of {100 * missed:.0f} % of the prior, so the estimate is "
                "too high: use bridge sampling"
            )
    diagnostics |= {"pareto_shape": shape, "effective_weights": effective}
    return Evidence(
        "harmonic_mean",
        -float(log_mean_exp(log_weights)),
        with_rounding(float(log_mean_exp_error(log_weights)), draws.log_likelihood),
        draws.num_gradients + num_extra,
        tuple(problems),
        diagnostics,
    )
