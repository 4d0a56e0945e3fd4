"""What estimators that weigh posterior draws by their likelihood alone must be checked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._statistics import effective_sample_size, pareto_shape, weight_effective_sample_size
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.inference.evidence.checks import posterior_problems, weight_problems, without_nan
from bayeskit.inference.evidence.posterior.tails import largest_shape
from bayeskit.target import Target

MAX_MISSED_PRIOR = 0.05
PRIOR_DRAWS = 1000


class Checked(NamedTuple):
    """What was found.

    Attributes
    ----------
    problems : list of str
    diagnostics : dict of float
    prior : Tensor or None
        Log likelihoods of draws from the prior, ``(n,)``; None for a target that cannot draw from it.
    """

    problems: list[str]
    diagnostics: dict[str, float]
    prior: Tensor | None

    @property
    def num_evaluations(self) -> int:
        """Evaluations spent."""
        return 0 if self.prior is None else len(self.prior)


def check_likelihood_weights(target: Target, draws: Draws, log_weights: Tensor, seed: int, stream: str) -> Checked:
    """Check chains, weights, and whether draws from the prior lie where no posterior draw has been.

    Parameters
    ----------
    target : Target
    draws : Draws
        From the posterior of ``target``.
    log_weights : Tensor
        Of the draws, a function of their likelihood, ``(chains, draws)``.
    seed : int
        For draws from the prior.
    stream : str
        Keeps their numbers apart from those of other estimators.
    """
    problems, diagnostics = posterior_problems(draws)
    shape = pareto_shape(log_weights)
    count = log_weights.numel()
    slowness = max(1.0, count / float(effective_sample_size(draws.log_likelihood)))
    effective = float(weight_effective_sample_size(log_weights.flatten())) / slowness
    limit = largest_shape(count, slowness)
    if not shape <= limit:
        problems.append(
            f"the weights may have infinite variance (Pareto k {shape:.2f} > {limit:.2f}, one half less the error of "
            "the fit): use bridge sampling"
        )
    problems += weight_problems(0.0, effective)
    diagnostics |= {"pareto_shape": shape, "effective_weights": effective}
    if not target.can_sample_prior:
        return Checked(problems, diagnostics, None)
    prior, bad = without_nan(
        target.log_likelihood(target.sample_prior(PRIOR_DRAWS, new_generator(seed, stream=stream)))
    )
    missed = float((prior < draws.log_likelihood.min()).to(torch.float64).mean())
    diagnostics["missed_prior"] = missed
    if missed > MAX_MISSED_PRIOR:
        problems.append(
            f"the draws never reach the likelihoods of {100 * missed:.0f} % of the prior, so the estimate is "
            "too high: use bridge sampling"
        )
    return Checked(problems + bad, diagnostics, prior)
