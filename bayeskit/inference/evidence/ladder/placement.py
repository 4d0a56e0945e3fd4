"""Where to put temperatures so that every interval of a ladder costs the same error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._statistics import weight_effective_sample_size
from bayeskit.inference.evidence.ladder._integration import Curve
from bayeskit.inference.samplers import Ladder

FIRST_SHARE = 0.5  # of the prior draws that count, effectively, in the step up from the prior
LEAST_INTERVALS = 6
WIDEST_RATIO = 2.0  # of neighbouring temperatures, where a pilot did not look


def temperatures(path: Curve, ladder: Ladder, gap: float, most: int) -> Tensor:
    """Return a ladder whose integral would miss about ``gap``, or less, in at most ``most`` steps.

    Half of the temperatures go where the rule's estimated error asks for them, so that it becomes equal in
    all intervals, and half to equal intervals of thermodynamic length, the integral of the standard deviation
    of the log likelihood: there the Monte Carlo errors are equal, and no interval is left open
    because chance made its error look small.

    Parameters
    ----------
    path : Curve
        Of ``ladder``.
    ladder : Ladder
        The pilot.
    gap : float
        In nats.
    most : int

    Returns
    -------
    Tensor
        Increasing from 0 to 1, shape ``(steps + 1,)``.

    References
    ----------
    Calderhead, B., Girolami, M. (2009). Estimating Bayes factors via thermodynamic
    integration and population MCMC. Computational Statistics and Data Analysis 53, 4028-4045.
    """
    first = _first(ladder)
    gaps, length = path.gaps.abs(), path.width * ((path.variance[1:] + path.variance[:-1]) / 2).sqrt()
    fifth = gaps.pow(0.2)  # an interval of the rule misses the fifth power of its width
    share = fifth / fifth.sum().clamp(min=1e-300) + length / length.sum().clamp(min=1e-300)
    share = (share / share.sum().clamp(min=1e-300)).clamp(min=1e-6)
    # Cut into n * share parts, an interval misses so many fourth powers less.
    wanted = (float((gaps / share.pow(4)).sum()) / gap) ** 0.25
    count = math.ceil(max(wanted, float(length.sum()), LEAST_INTERVALS))

    logs = path.beta.to(torch.float64).log()
    travelled = torch.cat([share.new_zeros(1), share.cumsum(0)]).to(torch.float64)
    low = float(logs[0])
    extra = logs.new_zeros(0)
    if math.log(first) < low:
        # Below the pilot's first temperature nothing is known but that the prior's step must become shorter.
        steps = math.ceil((low - math.log(first)) / math.log(WIDEST_RATIO))
        extra = torch.linspace(math.log(first), low, steps + 1, dtype=torch.float64, device=logs.device)[:-1]
        begin = 0.0
    else:
        begin = float(_interpolate(logs.new_tensor([math.log(first)]), logs, travelled))
    left = max(1.0 - begin / float(travelled[-1]), 1e-6)
    inner = max(2, min(math.ceil(count * left), most - 1 - len(extra)))
    levels = torch.linspace(begin, float(travelled[-1]), inner + 1, dtype=torch.float64, device=logs.device)
    inside = torch.cat([extra, _interpolate(levels, travelled, logs)]).exp()
    inside[-1] = 1.0
    return torch.cat([inside.new_zeros(1), inside])


def _first(ladder: Ladder) -> float:
    """Return the temperature up to which half of the prior draws still count, at most a half."""
    log_likelihood = ladder.log_likelihood[0].flatten()
    log_likelihood = log_likelihood[log_likelihood > -torch.inf]
    log_likelihood = (log_likelihood - log_likelihood.median()).to(torch.float64)
    low, high = -60.0, math.log(0.5)
    for _ in range(40):
        middle = (low + high) / 2
        share = float(weight_effective_sample_size(math.exp(middle) * log_likelihood)) / len(log_likelihood)
        low, high = (middle, high) if share >= FIRST_SHARE else (low, middle)
    return math.exp(low)


def _interpolate(x: Tensor, known: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly between increasing points."""
    right = torch.searchsorted(known, x).clamp(1, len(known) - 1)
    low, high = known[right - 1], known[right]
    return values[right - 1] + (values[right] - values[right - 1]) * (x - low) / (high - low)
