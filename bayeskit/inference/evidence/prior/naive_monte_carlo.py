"""Naive Monte Carlo: the mean of the likelihood over prior draws."""

from __future__ import annotations

from bayeskit._settings import whole_number
from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.mode.missed import missed_mass, same_likelihood, without_infinity
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


@estimator()
def naive_monte_carlo(target: Target, num_draws: int = 10_000, *, seed: int = 0) -> Evidence:
    """Average the likelihood over draws from the prior.

    Unbiased, and useless as soon as the posterior is much narrower than the prior;
    it then says so. Climbs from the best draws look for a peak that the others missed.

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
    prior = target.sample_prior(num_draws, new_generator(seed, stream="naive Monte Carlo"))
    log_likelihood, problems = without_nan(target.log_likelihood(prior).unsqueeze(0))
    log_likelihood, infinite = without_infinity(log_likelihood)
    shape = pareto_shape(log_likelihood)
    effective = float(weight_effective_sample_size(log_likelihood[0]))
    log_z = float(log_mean_exp(log_likelihood))
    error = with_rounding(float(independent_log_mean_exp_error(log_likelihood)), log_likelihood)
    missed, spent = missed_mass(target, prior, log_likelihood[0], log_z, error, seed=seed)
    problems += (infinite or weight_problems(shape, effective)) + missed + same_likelihood(log_likelihood)
    return Evidence(
        "naive_monte_carlo",
        log_z,
        error,
        num_draws + spent,
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective},
    )
