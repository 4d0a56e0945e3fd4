"""Path sampling: the mean log likelihood integrated over the temperature ladder."""

from __future__ import annotations

import torch

from bayeskit.inference.evidence.checks import belongs, ladder_problems
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.evidence.statistics import mean_error
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target


def path_sampling(target: Target, ladder: Ladder, *, corrected: bool = True) -> Evidence:
    """Integrate the expected log likelihood over the inverse temperature (thermodynamic integration).

    The integrand's derivative is the variance of the log likelihood, so the
    trapezoidal rule is corrected for its leading error by the variances at both
    ends of every interval. What the correction changed, and how much of it is left
    at half as many temperatures, goes into the standard error.

    Parameters
    ----------
    target : Target
    ladder : Ladder
        Draws at every temperature.
    corrected : bool, default True
        Without it the plain trapezoidal rule, whose bias then makes it untrusted
        where it exceeds the Monte Carlo error.

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
    belongs(ladder.draws, target)
    log_likelihood = ladder.log_likelihood
    beta = ladder.beta
    mean = log_likelihood.mean((1, 2))
    centred = log_likelihood - mean[:, None, None]
    variance = centred.square().mean((1, 2))
    width = beta.diff()
    trapezoid = float((width * (mean[1:] + mean[:-1])).sum() / 2)
    correction = -float((width.square() * variance.diff()).sum() / 12)

    weight = torch.zeros_like(beta)
    weight[:-1] += width / 2
    weight[1:] += width / 2
    slope = torch.zeros_like(beta)
    if corrected:
        slope[:-1] += width.square() / 12
        slope[1:] -= width.square() / 12
    # One series a temperature carries the errors of mean and variance together, correlation included.
    influence = weight[:, None, None] * centred + slope[:, None, None] * centred.square()
    monte_carlo = float(mean_error(influence).square().sum().sqrt())

    problems, diagnostics = ladder_problems(log_likelihood, ladder.draws.sample_stats.get("diverging"))
    diagnostics |= {"trapezoid_gap": correction, "monte_carlo_error": monte_carlo}
    if not corrected and abs(correction) > monte_carlo:
        problems.append(
            f"the trapezoidal rule is off by about {correction:.3f}, more than the Monte Carlo error: "
            "use corrected=True or more temperatures"
        )
    left = _remaining_gap(beta, mean, variance) if corrected else 0.0
    if left > monte_carlo:
        problems.append(f"the ladder is too coarse (gap {left:.3f} after correction): use more temperatures")
    return Evidence(
        "path_sampling",
        trapezoid + (correction if corrected else 0.0),
        monte_carlo,
        ladder.num_evaluations,
        tuple(problems),
        diagnostics,
    )


def _remaining_gap(beta: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> float:
    """Bound the error of the corrected rule: a sixteenth of what halving the ladder changes.

    The corrected rule is of fourth order, so the difference between the whole ladder
    and every second temperature is about fifteen times the error of the former.
    """

    def rule(b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> float:
        width = b.diff()
        return float((width * (m[1:] + m[:-1])).sum() / 2 - (width.square() * v.diff()).sum() / 12)

    last = len(beta) - 1
    keep = sorted({*range(0, last + 1, 2), last})
    return abs(rule(beta, mean, variance) - rule(beta[keep], mean[keep], variance[keep])) / 15
