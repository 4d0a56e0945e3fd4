"""Estimators that weight draws by the likelihood alone: naive Monte Carlo and harmonic means."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import (
    effective_sample_size,
    independent_log_mean_exp_error,
    log_mean_exp,
    log_mean_exp_error,
    mean_error,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._densities import with_rounding, without_infinity, without_nan
from bayeskit.inference.evidence._judging._missed_mass import missed_mass, same_likelihood
from bayeskit.inference.evidence._judging._weights import largest_shape, weight_problems
from bayeskit.inference.evidence._methods import Part
from bayeskit.inference.evidence._result import Evidence

# Checks of estimators that weight posterior draws by the likelihood alone.

_MAX_MISSED_PRIOR = 0.05
_PRIOR_DRAWS = 1000


class _Checked(NamedTuple):
    """Warnings on weights, with diagnostics and log likelihoods of prior draws."""

    problems: list[str]
    diagnostics: dict[str, float]
    prior: Tensor | None  # (n,), log likelihoods of prior draws; None for a target that cannot draw from its prior

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations."""
        return 0 if self.prior is None else len(self.prior)


def _check_likelihood_weights(target: Target, draws: Draws, log_weights: Tensor, seed: int, stream: str) -> _Checked:
    """Check ``log_weights (chains, draws)``, and whether the draws reach likelihoods of prior draws."""
    problems = []
    shape = pareto_shape(log_weights)
    count = log_weights.numel()
    slowness = max(1.0, count / float(effective_sample_size(draws.log_likelihood)))
    effective = float(weight_effective_sample_size(log_weights.flatten())) / slowness
    limit = largest_shape(count, slowness)
    if not shape <= limit:
        problems.append(
            f"the weights may have infinite variance (Pareto k {shape:.2f} > {limit:.2f}, the threshold 0.5 minus its "
            "fitting error): use bridge sampling"
        )
    problems += weight_problems(0.0, effective)
    diagnostics = {"pareto_shape": shape, "effective_weights": effective}
    if not target.can_sample_prior:
        return _Checked(problems, diagnostics, None)
    prior, bad = without_nan(
        target.log_likelihood(target.sample_prior(_PRIOR_DRAWS, seed=new_generator(seed, stream=stream)))
    )
    missed = float((prior < draws.log_likelihood.min()).to(torch.float64).mean())
    diagnostics["missed_prior"] = missed
    if missed > _MAX_MISSED_PRIOR:
        problems.append(
            f"{100 * missed:.0f} % of the prior has likelihoods below those of all draws, so the estimate is too "
            "high: use bridge sampling"
        )
    return _Checked(problems + bad, diagnostics, prior)


# Naive Monte Carlo: the mean of the likelihood over prior draws.


@estimator(Part.PRIOR)
def naive_monte_carlo(target: Target, num_draws: int = 10_000, *, seed: int = 0) -> Evidence:
    """Average the likelihood over draws from the prior.

    The estimate is unbiased, but has a huge variance if the posterior is much narrower than the prior; it is then not
    trusted. Mode searches from the best draws check for missed modes.

    Parameters
    ----------
    target : Target
    num_draws : int, default 10,000
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If there are fewer than two draws, or the target cannot draw from its prior.

    References
    ----------
    Hammersley, J. M., Handscomb, D. C. (1964). Monte Carlo Methods. Methuen.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import naive_monte_carlo
    >>> z = naive_monte_carlo(exact.get("beta_binomial").target(), seed=1)
    >>> abs(z.log_evidence + 2.3978953) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    prior = target.sample_prior(num_draws, seed=new_generator(seed, stream="naive Monte Carlo"))
    log_likelihood, problems = without_nan(target.log_likelihood(prior).unsqueeze(0))
    log_likelihood, infinite = without_infinity(log_likelihood)
    shape = pareto_shape(log_likelihood)
    effective = float(weight_effective_sample_size(log_likelihood[0]))
    log_z = float(log_mean_exp(log_likelihood))
    error = with_rounding(float(independent_log_mean_exp_error(log_likelihood)), log_likelihood)
    missed, spent = missed_mass(target, prior, log_likelihood[0], log_z, error, seed=seed)
    problems += (infinite or weight_problems(shape, effective)) + missed + same_likelihood(target, log_likelihood)
    return Evidence(
        "naive_monte_carlo",
        log_z,
        error,
        num_draws + spent,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective},
    )


# Harmonic mean of the likelihood over posterior draws, included as a warning example.


@estimator(Part.POSTERIOR, Part.LIKELIHOOD, kind="unstable")
def harmonic_mean(target: Target, draws: Draws, *, seed: int = 0) -> Evidence:
    """Estimate the log evidence by the harmonic mean of the likelihood over posterior draws.

    The variance is infinite unless the prior is narrower than the likelihood, and no feasible number of draws reaches
    the part of the prior that dominates the mean. Restricted to the likelihoods of the draws, the harmonic mean
    estimates the evidence divided by the prior mass of that range. Prior draws estimate this mass; if it is not close
    to one, the estimate is not trusted.

    Parameters
    ----------
    target : Target
    draws : Draws
    seed : int, default 0
        Seed of the prior draws of the diagnostic.

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
    log_weights = -draws.log_likelihood
    checked = _check_likelihood_weights(target, draws, log_weights, seed, "harmonic mean")
    return Evidence(
        "harmonic_mean",
        -float(log_mean_exp(log_weights)),
        with_rounding(float(log_mean_exp_error(log_weights)), draws.log_likelihood),
        draws.num_gradients + checked.num_evaluations,
        tuple(checked.problems),
        checked.diagnostics,
    )


# Harmonic mean with a small share of imaginary prior draws, included as a warning example.

MAX_ITERATIONS = 10_000
_TOLERANCE = 1e-10
_MAX_SHIFT = 0.25


@estimator(Part.POSTERIOR, Part.LIKELIHOOD, kind="unstable")
def stabilised_harmonic_mean(target: Target, draws: Draws, *, delta: float = 0.01, seed: int = 0) -> Evidence:
    """Estimate the log evidence by the harmonic mean with a small share of imaginary prior draws.

    Importance sampling from a mixture of prior (share ``delta``) and posterior has bounded weights
    ``1 / (delta Z + (1 - delta) L)``. This estimator does not draw from the prior: it sets the
    ``delta n / (1 - delta)`` prior likelihoods equal to the estimate and iterates. They then cancel, and the estimate
    solves ``mean of (L - Z) / (delta Z + (1 - delta) L) = 0`` over the posterior draws alone.

    The standard error is finite (delta method), but the estimator is inconsistent; its limit usually exceeds the
    evidence. Prior draws estimate the asymptotic bias. If the bias is not small relative to the standard error, or
    cannot be estimated, the estimate is not trusted.

    Parameters
    ----------
    target : Target
    draws : Draws
    delta : float, default 0.01
        Share of imaginary prior draws, between 0 and 1.
    seed : int, default 0
        Seed of the prior draws of the diagnostic.

    Returns
    -------
    Evidence
        Diagnostics: ``shift`` is the asymptotic bias of the log evidence, to first order; ``imagined_share`` is the
        share of the imaginary draws in the sum of weights.

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
    >>> from bayeskit.inference.evidence._likelihood_weights import stabilised_harmonic_mean
    >>> case = bk.exact.get("beta_binomial")
    >>> draws = bk.sample(case.target(), num_warmup=200, num_samples=500, progress=False)
    >>> z = stabilised_harmonic_mean(draws.target, draws)
    >>> z.trusted
    False
    """
    delta = real_number("delta", delta, "(0, 1)")
    log_likelihood = draws.log_likelihood.to(torch.float64)
    log_z, converged = _fixed_point(log_likelihood, delta)
    balance, slope = _balance(log_likelihood - log_z, delta)
    slope_mean = float(slope.mean())
    log_weights = -_log_mixture(log_likelihood - log_z, delta)
    checked = _check_likelihood_weights(target, draws, log_weights, seed, "stabilised harmonic mean")
    # If the iteration stops between distant likelihoods, none of them is close to the estimate.
    per_slope = 1 / slope_mean if slope_mean > 0 else math.inf
    problems, error = checked.problems, float(mean_error(balance)) * per_slope
    if not converged:
        problems.append(f"the estimate did not converge in {MAX_ITERATIONS} iterations: use a larger delta")
    imagined = delta / (1 - delta)
    diagnostics = checked.diagnostics | {"imagined_share": imagined / (imagined + float(log_weights.exp().mean()))}
    if checked.prior is None:
        problems.append(
            "without draws from the prior the asymptotic bias of the estimate is unknown: give the target a "
            "sample_prior, or use bridge sampling"
        )
    else:
        missing, _ = _balance(checked.prior.to(torch.float64) - log_z, delta)
        per_shift = imagined * per_slope
        shift = -per_shift * float(missing.mean())
        doubt = per_shift * float(missing.std()) / math.sqrt(len(missing))
        diagnostics |= {"shift": shift, "shift_error": doubt}
        # A bias that is not certainly small counts as large.
        if not abs(shift) + 2 * doubt <= _MAX_SHIFT * error:
            # Above one nat the first-order value is only indicative: the shift itself has an upper limit.
            amount = f"by {shift:+.2g} +- {doubt:.1g} nats to first order" if abs(shift) < 1 else "by at least a nat"
            problems.append(f"its limit differs from the log evidence, {amount}: use bridge sampling")
    return Evidence(
        "stabilised_harmonic_mean",
        log_z,
        with_rounding(error, draws.log_likelihood),
        draws.num_gradients + checked.num_evaluations,
        tuple(problems),
        diagnostics,
    )


def _log_mixture(log_ratio: Tensor, delta: float) -> Tensor:
    """Return the logarithm of ``delta + (1 - delta) r``, where ``r`` is likelihood over evidence."""
    return torch.logaddexp(torch.full_like(log_ratio, math.log(delta)), log_ratio + math.log1p(-delta))


def _balance(log_ratio: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return ``(r - 1) / (delta + (1 - delta) r)``, whose mean is zero at the solution, and its slope in ``log r``."""
    log_mixture = _log_mixture(log_ratio, delta)
    value = (log_ratio - log_mixture).exp() - (-log_mixture).exp()
    return value, (log_ratio - 2 * log_mixture).exp()


def _fixed_point(log_likelihood: Tensor, delta: float) -> tuple[float, bool]:
    """Return the log of the fixed point of the weighted mean of likelihoods, and whether it was reached."""
    flat = log_likelihood.flatten()
    log_z = float(flat.median())
    for _ in range(MAX_ITERATIONS):
        log_weights = -_log_mixture(flat - log_z, delta)
        change = float((flat - log_z + log_weights).logsumexp(0) - log_weights.logsumexp(0))
        log_z += change
        if abs(change) < _TOLERANCE * max(1.0, abs(log_z)):
            return log_z, True
        if not math.isfinite(log_z):
            break
    return log_z, False
