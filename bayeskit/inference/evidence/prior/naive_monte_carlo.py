"""Naive Monte Carlo: the mean of the likelihood over prior draws."""

from __future__ import annotations

from bayeskit._statistics import (
    independent_log_mean_exp_error,
    log_mean_exp,
    pareto_shape,
    weight_effective_sample_size,
)
from bayeskit._torch import new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence.checks import weight_problems, with_rounding, without_nan
from bayeskit.inference.evidence.result import Evidence
from bayeskit.target import Target


def naive_monte_carlo(target: Target, num_draws: int = 10_000, *, seed: int = 0) -> Evidence:
    """Average the likelihood over draws from the prior.

    Unbiased, and useless as soon as the posterior is much narrower than the prior;
    it then says so.

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
        If there are no draws, or the target cannot draw from its prior.

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
    if num_draws < 1:
        raise SettingsError(f"num_draws must be at least 1, not {num_draws}")
    prior = target.sample_prior(num_draws, new_generator(seed, stream="naive Monte Carlo"))
    log_likelihood, problems = without_nan(target.log_likelihood(prior).unsqueeze(0))
    shape = pareto_shape(log_likelihood)
    effective = float(weight_effective_sample_size(log_likelihood[0]))
    return Evidence(
        "naive_monte_carlo",
        float(log_mean_exp(log_likelihood)),
        with_rounding(float(independent_log_mean_exp_error(log_likelihood)), log_likelihood),
        num_draws,
        tuple(problems + weight_problems(shape, effective)),
        {"pareto_shape": shape, "effective_draws": effective},
    )
