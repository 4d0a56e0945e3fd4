"""Path sampling: the mean log likelihood integrated over the temperature ladder."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._statistics import log_mean_exp
from bayeskit.inference.evidence.checks import belongs, ladder_error, ladder_problems, with_rounding, without_nan
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target


def path_sampling(target: Target, ladder: Ladder, *, corrected: bool = True, seed: int = 0) -> Evidence:
    """Integrate the expected log likelihood over the inverse temperature (thermodynamic integration).

    The integrand's derivative is the variance of the log likelihood, so the
    trapezoidal rule is corrected for its leading error by the variances at both
    ends of every interval. The first interval, up from the prior, is bridged by its
    importance ratio as in stepping stone, which needs no moments of the log likelihood.

    Parameters
    ----------
    target : Target
    ladder : Ladder
        Draws at every temperature.
    corrected : bool, default True
        Without it the plain trapezoidal rule, whose bias then makes it untrusted
        where it exceeds the Monte Carlo error.
    seed : int, default 0
        As every estimator takes one; nothing is drawn here.

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the ladder comes from another target.

    References
    ----------
    Gelman, A., Meng, X.-L. (1998). Simulating normalizing constants. Statistical
    Science 13, 163-185.
    Friel, N., Hurn, M., Wyse, J. (2014). Improving power posterior estimation of
    statistical evidence. Statistics and Computing 24, 709-723.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import path_sampling
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = path_sampling(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    belongs(ladder.draws, target, posterior=False)
    beta = ladder.beta
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    # Under a heavy-tailed prior the log likelihood has no moments, so the first interval is stepped over.
    first = beta[1] * log_likelihood[:1]
    start = float(log_mean_exp(first))
    tempered, width = log_likelihood[1:], beta[1:].diff()
    mean = tempered.mean((1, 2))
    centred = tempered - mean[:, None, None]
    variance = centred.square().mean((1, 2))
    trapezoid, correction = _integrate(beta[1:], mean, variance)

    weight, slope = torch.zeros_like(mean), torch.zeros_like(mean)
    weight[:-1] += width / 2
    weight[1:] += width / 2
    if corrected:
        slope[:-1] += width.square() / 12
        slope[1:] -= width.square() / 12
    # One series a temperature carries the errors of mean and variance together, correlation included.
    influence = weight[:, None, None] * centred + slope[:, None, None] * centred.square()
    monte_carlo = ladder_error(torch.cat([(first - start).exp(), influence]), ladder)

    problems, diagnostics = ladder_problems(ladder)
    problems += nan_problems
    diagnostics |= {"trapezoid_gap": correction, "monte_carlo_error": monte_carlo}
    if not corrected and abs(correction) > monte_carlo:
        problems.append(
            f"the trapezoidal rule is off by about {correction:.3f}, more than the Monte Carlo error: "
            "use corrected=True or more temperatures"
        )
    left = _remaining_gap(beta[1:], mean, variance) if corrected else 0.0
    if left > monte_carlo:
        problems.append(f"the ladder is too coarse (gap {left:.3f} after correction): use more temperatures")
    return Evidence(
        "path_sampling",
        start + trapezoid + (correction if corrected else 0.0),
        with_rounding(monte_carlo, log_likelihood),
        ladder.num_evaluations,
        tuple(problems),
        diagnostics,
    )


def _integrate(beta: Tensor, mean: Tensor, variance: Tensor) -> tuple[float, float]:
    """Return the trapezoidal integral of ``mean`` and its correction by the derivatives ``variance``."""
    width = beta.diff()
    trapezoid = float((width * (mean[1:] + mean[:-1])).sum()) / 2
    return trapezoid, -float((width.square() * variance.diff()).sum()) / 12


def _remaining_gap(beta: Tensor, mean: Tensor, variance: Tensor) -> float:
    """Estimate the error left by the corrected rule from a ladder of every second temperature.

    The rule is of fourth order, so the two differ by about fifteen times the error of the finer one.
    """
    keep = sorted({*range(0, len(beta), 2), len(beta) - 1})
    fine, coarse = _integrate(beta, mean, variance), _integrate(beta[keep], mean[keep], variance[keep])
    return abs(sum(fine) - sum(coarse)) / 15
