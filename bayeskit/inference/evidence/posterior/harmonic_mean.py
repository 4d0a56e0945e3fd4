"""Harmonic mean of the likelihood over posterior draws, kept as a warning."""

from __future__ import annotations

from bayeskit._statistics import log_mean_exp, log_mean_exp_error
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import belongs, finite_chains, with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.posterior.likelihood_weights import check_likelihood_weights
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


@estimator()
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
    finite = finite_chains(draws)
    log_weights = -finite.log_likelihood
    checked = check_likelihood_weights(target, finite, log_weights, seed, "harmonic mean")
    z = Evidence(
        "harmonic_mean",
        -float(log_mean_exp(log_weights)),
        with_rounding(float(log_mean_exp_error(log_weights)), finite.log_likelihood),
        finite.num_gradients + checked.num_evaluations,
        tuple(checked.problems),
        checked.diagnostics,
    )
    return with_missed_peak(z, target, draws)
