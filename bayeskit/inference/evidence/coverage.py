"""Whether a proposal reaches everything that the posterior holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit.draws import Draws

MIN_MISSED_SHARE = 0.01


def missed_draws(log_prob: Callable[[Tensor], Tensor], draws: Draws | None, largest: float) -> list[str]:
    """Ask whether posterior draws lie where no draw of the proposal had as large a weight.

    Parameters
    ----------
    log_prob : callable
        Log density of the proposal in unconstrained space, ``(n, d) -> (n,)``.
    draws : Draws or None
        From the posterior; without them nothing is asked.
    largest : float
        Largest log weight among the draws of the proposal.

    Returns
    -------
    list of str
        One warning where more than 1 % of the posterior draws have a larger weight.

    Examples
    --------
    >>> from bayeskit.inference.evidence.coverage import missed_draws
    >>> missed_draws(lambda x: x.sum(-1), None, 0.0)
    []
    """
    if draws is None:
        return []
    x = draws.unconstrained.flatten(0, 1)
    log_weights = (draws.log_prior + draws.log_likelihood).flatten() - log_prob(x)
    share = float((log_weights > largest).to(torch.float64).mean())
    if share <= MIN_MISSED_SHARE:
        return []
    return [f"{100 * share:.0f} % of the posterior draws lie outside the proposal: use bridge sampling"]
