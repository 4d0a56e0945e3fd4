"""Weighted particles: effective sample size, schedules of temperatures, reweighting and resampling.

Log weights are normalised over the last dimension, the particle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BISECTIONS = 60
RESAMPLE_BELOW = 0.9
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


def next_temperature(log_weight: Tensor, log_ratio: Tensor, beta: Tensor, threshold: float) -> Tensor:
    """Return the largest inverse temperature, ``(*batch)``, that keeps the conditional share at ``threshold``."""
    # log_weight, log_ratio: (*batch, n); beta: (*batch). The result exceeds a beta below one, and is exactly one if
    # that step is small enough.
    room = 1 - beta
    # Zero times minus infinity is NaN.
    log_ratio = torch.where(room.unsqueeze(-1) > 0, log_ratio, torch.zeros_like(log_ratio))

    def enough(step: Tensor) -> Tensor:
        return conditional_share(log_weight, step.unsqueeze(-1) * log_ratio) >= threshold

    # No step keeps particles of which none has a likelihood.
    hopeless = ((log_ratio == -torch.inf) | (log_weight == -torch.inf)).all(-1)
    whole = enough(room) | hopeless
    if bool(whole.all()):
        return torch.ones_like(beta)  # as for most of many data
    low, high = torch.zeros_like(room), room
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        good = enough(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    # The upper end of this bracket is positive even if the lower end is still zero.
    return torch.where(whole, torch.ones_like(beta), beta + torch.where(low > 0, low, high))


def next_common_temperature(log_weight: Tensor, log_ratio: Tensor, beta: Tensor, threshold: float) -> Tensor:
    """Return the next inverse temperature of all populations ``(r, n)`` together, from equal ones ``(r,)``."""
    # A step chosen from a population's own particles biases its evidence downward; the bias of a common choice
    # decreases with the number of populations.
    pooled = (log_weight.flatten() - math.log(len(log_weight))).unsqueeze(0)
    reached = next_temperature(pooled, log_ratio.flatten().unsqueeze(0), beta[:1], threshold)
    return reached.expand_as(beta).clone()


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


def survivors(log_weight: Tensor, generator: torch.Generator, below: float = RESAMPLE_BELOW) -> tuple[Tensor, Tensor]:
    """Return the particles to keep, ``(r, n)``, and their weights; populations above ``below`` keep all as they are."""
    needed, n = (effective_share(log_weight) < below).unsqueeze(-1), log_weight.shape[-1]
    index = torch.where(needed, systematic(log_weight, generator), torch.arange(n, device=needed.device))
    return index, torch.where(needed, -math.log(n), log_weight)


def count_distinct(index: Tensor) -> Tensor:
    """Return how many different numbers are in each row, ``(r, n) -> (r,)``."""
    return 1 + (index.sort(-1).values.diff(dim=-1) != 0).sum(-1)


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
