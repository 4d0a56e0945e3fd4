"""Weighted particles: effective sample size, schedules of temperatures, reweighting and resampling.

Log weights are normalised over the last dimension, the particle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "conditional_share",
    "effective_share",
    "next_temperature",
    "reweighted",
    "sigmoid_schedule",
    "standardised",
    "systematic",
]


_BISECTIONS = 60
_STEEPNESS = 4.0  # of the sigmoid schedule


def effective_share(log_weight: Tensor) -> Tensor:
    """Return the effective number of particles over their number, ``(*batch, n) -> (*batch)``."""
    return (-(2 * log_weight).logsumexp(-1)).exp() / log_weight.shape[-1]


def conditional_share(log_weight: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the effective share left by a reweighting, relative to that before, ``(*batch)`` (Zhou et al. 2016)."""
    # Both arguments are (*batch, n). Particles of log ratio -inf are ignored: no temperature step could keep them.
    alive = torch.where(log_ratio == -torch.inf, -torch.inf, log_weight)
    first, second = (alive + log_ratio).logsumexp(-1), (alive + 2 * log_ratio).logsumexp(-1)
    return (2 * first - second - alive.logsumexp(-1)).exp()


def next_temperature(log_weight: Tensor, log_likelihood: Tensor, beta: Tensor, threshold: float) -> Tensor:
    """Return the largest inverse temperature, ``(*batch)``, that keeps the conditional share at ``threshold``."""
    # log_weight, log_likelihood: (*batch, n); beta: (*batch), below one. The result exceeds beta and is exactly one if
    # that step is small enough.
    room = 1 - beta
    low, high = torch.zeros_like(room), room

    def enough(step: Tensor) -> Tensor:
        return conditional_share(log_weight, step.unsqueeze(-1) * log_likelihood) >= threshold

    whole = enough(room)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        good = enough(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    # The upper end of this bracket is positive even if the lower end is still zero.
    return torch.where(whole, torch.ones_like(beta), beta + torch.where(low > 0, low, high))


def sigmoid_schedule(num_temperatures: int) -> Tensor:
    """Return ``num_temperatures + 1`` inverse temperatures from 0 to 1, dense at both ends.

    References
    ----------
    Wu, Y., Burda, Y., Salakhutdinov, R., Grosse, R. (2017). On the quantitative analysis of decoder-based generative
    models. ICLR.

    Examples
    --------
    >>> sigmoid_schedule(2)
    tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    raw = torch.linspace(-_STEEPNESS, _STEEPNESS, num_temperatures + 1, dtype=torch.float64).sigmoid()
    return (raw - raw[0]) / (raw[-1] - raw[0])


def reweighted(log_weight: Tensor, log_ratio: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply weights ``(r, n)`` by ``exp(step * log_ratio)``; also return log increments and conditional shares."""
    step = step.unsqueeze(-1)
    # Waiting populations have step size zero; zero times minus infinity is NaN.
    change = torch.where(step > 0, step * log_ratio, torch.zeros_like(log_ratio))
    left = conditional_share(log_weight, change).nan_to_num(nan=0.0)
    log_weight = log_weight + change
    increment = log_weight.logsumexp(-1)
    # A population of zero likelihood has an increment of minus infinity and gets equal weights.
    alive = increment.isfinite().unsqueeze(-1)
    return torch.where(alive, log_weight - increment.unsqueeze(-1), -math.log(log_weight.shape[-1])), increment, left


def systematic(log_weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return indices of systematic resampling in increasing order, ``(r, n) -> (r, n)`` (Kitagawa 1996)."""
    r, n = log_weight.shape
    like = {"dtype": log_weight.dtype, "device": log_weight.device}
    cumulative = log_weight.exp().cumsum(-1)
    cumulative = cumulative / cumulative[:, -1:]
    start = torch.rand(r, 1, generator=generator, **like)  # type: ignore[call-overload]
    points = (torch.arange(n, **like) + start) / n  # type: ignore[call-overload]
    return torch.searchsorted(cumulative, points, right=True).clamp(max=n - 1)


def standardised(x: Tensor, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x (n, k)`` relative to its weighted quartiles, and the scale, ``(k,)``."""
    # The scale is the standard deviation of the normal distribution with these quartiles.
    ordered, order = x.sort(0)
    cumulative = log_weight.exp()[order].cumsum(0).mT.contiguous()
    levels = torch.arange(1, 4, dtype=cumulative.dtype, device=x.device) / 4
    index = torch.searchsorted(cumulative, levels.expand(x.shape[1], 3).contiguous()).clamp(max=len(x) - 1)
    low, middle, high = ordered.gather(0, index.mT)
    scale = (high - low) / 1.349
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    return (x - middle) / scale, scale
