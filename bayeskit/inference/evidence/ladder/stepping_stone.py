"""Stepping stone: a product of small importance ratios up the temperature ladder."""

from __future__ import annotations

import torch

from bayeskit._statistics import (
    effective_sample_size,
    log_mean_exp,
    log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit.inference.evidence.checks import (
    MIN_EFFECTIVE,
    ladder_error,
    ladder_problems,
    without_nan,
)
from bayeskit.inference.evidence.judgement import estimator
from bayeskit.inference.evidence.ladder._integration import check_ladder, with_rounding_of_sum
from bayeskit.inference.evidence.peaks import with_missed_peak
from bayeskit.inference.evidence.result import Evidence
from bayeskit.inference.samplers import Ladder
from bayeskit.target import Target


@estimator()
def stepping_stone(target: Target, ladder: Ladder) -> Evidence:
    """Multiply the ratios of neighbouring normalising constants, each estimated below its step.

    Parameters
    ----------
    target : Target
    ladder : Ladder
        Draws at every temperature.

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``ladder`` is none.
    DrawsError
        If it comes from another target.

    References
    ----------
    Xie, W., Lewis, P. O., Fan, Y., Kuo, L., Chen, M.-H. (2011). Improving marginal
    likelihood estimation for Bayesian phylogenetic model selection. Systematic
    Biology 60, 150-160.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.evidence import stepping_stone
    >>> from bayeskit.inference.samplers import sample_ladder
    >>> case = exact.get("beta_binomial")
    >>> z = stepping_stone(case.target(), sample_ladder(case.target(), 20, num_warmup=100, num_samples=200))
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error
    True
    """
    check_ladder(ladder, target)
    log_likelihood, nan_problems = without_nan(ladder.log_likelihood)
    log_likelihood = log_likelihood.to(torch.float64)
    steps = ladder.beta.diff()[:, None, None] * log_likelihood[:-1]
    ratios = log_mean_exp(steps)
    # By the delta method the error of a logarithm is that of its relative terms.
    error = ladder_error((steps - ratios[:, None, None]).exp(), ladder)

    problems, diagnostics = ladder_problems(ladder)
    problems += nan_problems
    count = steps[0].numel()
    # Draws from the prior may have no likelihood at all; how often chains return there is told by any lowest value.
    lowest = log_likelihood.masked_fill(log_likelihood == -torch.inf, torch.inf).amin((-1, -2), keepdim=True)
    bounded = log_likelihood.maximum(lowest)[:-1]
    independent = (effective_sample_size(bounded) / count).clamp(max=1.0)
    effective = weight_effective_sample_size(steps.flatten(1)) * independent
    worst = int(effective.argmin())
    if not float(effective[worst]) >= MIN_EFFECTIVE:
        problems.append(
            f"step {worst + 1} of the ladder rests on {float(effective[worst]):.0f} effective draws: "
            "use more temperatures or longer chains"
        )
    diagnostics |= {
        "effective_draws": float(effective[worst]),
        "largest_step_error": float(log_mean_exp_error(steps).max()),
    }
    z = Evidence(
        "stepping_stone",
        float(ratios.sum()),
        with_rounding_of_sum(error, ladder.log_likelihood, len(ratios)),
        ladder.num_evaluations,
        tuple(problems),
        diagnostics,
    )
    return with_missed_peak(z, target, ladder.draws)
