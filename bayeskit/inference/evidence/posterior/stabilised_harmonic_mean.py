"""Harmonic mean with a small share of imagined draws from the prior, kept as a warning."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit._statistics import mean_error
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import belongs, finite_chains, with_rounding
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.posterior.likelihood_weights import check_likelihood_weights
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target

MAX_ITERATIONS = 10_000
TOLERANCE = 1e-10
MAX_SHIFT = 0.25


@estimator()
def stabilised_harmonic_mean(target: Target, draws: Draws, *, delta: float = 0.01, seed: int = 0) -> Evidence:
    """Harmonic mean over posterior draws and imagined prior draws whose likelihood is the estimate itself.

    With a share ``delta`` of draws from the prior among those of the posterior, importance sampling from the mixture
    has bounded weights ``1 / (delta Z + (1 - delta) L)``. Here the prior is not drawn from: its ``delta n / (1 -
    delta)`` likelihoods are taken to be the estimate, which is found by iteration. On the way they cancel, and what
    is solved is ``mean of (L - Z) / (delta Z + (1 - delta) L) = 0`` over the posterior draws alone.

    The error is finite and the delta method gives it, but the limit is not the evidence, mostly larger: prior draws
    would add a term that is zero only where they all have the likelihood that was imagined. Draws from the prior
    measure that term and so how far the limit is off; where this is not small beside the standard error, and where
    it cannot be measured, the estimate is not trusted.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    delta : float, default 0.01
        Share of the imagined draws, above 0 and below 1.
    seed : int, default 0
        For the prior draws of the diagnostic.

    Returns
    -------
    Evidence
        Its diagnostic ``shift`` is by how much the limit lies above the log evidence, to first order;
        ``imagined_share`` that of the imagined draws in the sum of weights.

    Raises
    ------
    DrawsError
        If the draws come from another target.
    SettingsError
        If ``delta`` does not lie between 0 and 1.

    References
    ----------
    Newton, M. A., Raftery, A. E. (1994). Approximate Bayesian inference with the weighted likelihood bootstrap.
    Journal of the Royal Statistical Society B 56, 3-48. The fourth of their estimators.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.posterior import stabilised_harmonic_mean
    >>> case = bk.exact.get("beta_binomial")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = stabilised_harmonic_mean(draws.target, draws)
    >>> z.trusted
    False
    """
    delta = real_number("delta", delta, between=(0, 1))
    belongs(draws, target)
    finite = finite_chains(draws)
    log_likelihood = finite.log_likelihood.to(torch.float64)
    log_z, converged = _fixed_point(log_likelihood, delta)
    balance, slope = _balance(log_likelihood - log_z, delta)
    slope_mean = float(slope.mean())
    log_weights = -_log_mixture(log_likelihood - log_z, delta)
    checked = check_likelihood_weights(target, finite, log_weights, seed, "stabilised harmonic mean")
    # Where the iteration stops between likelihoods that are far apart, none of them is near the estimate.
    per_slope = 1 / slope_mean if slope_mean > 0 else math.inf
    problems, error = checked.problems, float(mean_error(balance)) * per_slope
    if not converged:
        problems.append(f"the estimate did not converge in {MAX_ITERATIONS} iterations: use a larger delta")
    imagined = delta / (1 - delta)
    diagnostics = checked.diagnostics | {"imagined_share": imagined / (imagined + float(log_weights.exp().mean()))}
    if checked.prior is None:
        problems.append(
            "without draws from the prior it cannot be told how far the estimate's limit is from the log evidence: "
            "give the target a sample_prior, or use bridge sampling"
        )
    else:
        missing, _ = _balance(checked.prior.to(torch.float64) - log_z, delta)
        per_shift = imagined * per_slope
        shift = -per_shift * float(missing.mean())
        doubt = per_shift * float(missing.std()) / math.sqrt(len(missing))
        diagnostics |= {"shift": shift, "shift_error": doubt}
        # Whatever is not sure to be small counts as large.
        if not abs(shift) + 2 * doubt <= MAX_SHIFT * error:
            # Beyond a nat the first order says no more than that: the shift itself has an upper limit.
            amount = f"to first order by {shift:+.2g} +- {doubt:.1g} nats" if abs(shift) < 1 else "by a nat or more"
            problems.append(f"its limit is off the log evidence, {amount}: use bridge sampling")
    z = Evidence(
        "stabilised_harmonic_mean",
        log_z,
        with_rounding(error, finite.log_likelihood),
        finite.num_gradients + checked.num_evaluations,
        tuple(problems),
        diagnostics,
    )
    return with_missed_peak(z, target, draws)


def _log_mixture(log_ratio: Tensor, delta: float) -> Tensor:
    """Return the logarithm of ``delta + (1 - delta) r``, where ``r`` is likelihood over evidence."""
    return torch.logaddexp(torch.full_like(log_ratio, math.log(delta)), log_ratio + math.log1p(-delta))


def _balance(log_ratio: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return ``(r - 1) / (delta + (1 - delta) r)``, whose mean is zero at the solution, and its slope in ``log r``."""
    log_mixture = _log_mixture(log_ratio, delta)
    value = (log_ratio - log_mixture).exp() - (-log_mixture).exp()
    return value, (log_ratio - 2 * log_mixture).exp()


def _fixed_point(log_likelihood: Tensor, delta: float) -> tuple[float, bool]:
    """Return the log of the weighted mean of likelihoods that gives back itself, and whether it was reached."""
    flat = log_likelihood.flatten()
    log_z = float(flat.median())
    for _ in range(MAX_ITERATIONS):
        log_weights = -_log_mixture(flat - log_z, delta)
        change = float((flat - log_z + log_weights).logsumexp(0) - log_weights.logsumexp(0))
        log_z += change
        if abs(change) < TOLERANCE * max(1.0, abs(log_z)):
            return log_z, True
        if not math.isfinite(log_z):
            break
    return log_z, False
