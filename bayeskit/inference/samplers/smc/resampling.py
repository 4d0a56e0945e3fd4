"""Weighted particles: how many they are worth, how far they can be tempered, and resampling.

Log weights are normalised over their last dimension, the particle.
"""

from __future__ import annotations

import torch
from torch import Tensor

BISECTIONS = 60


def effective_share(log_weight: Tensor) -> Tensor:
    """Effective number of particles over their number, ``(*batch, n) -> (*batch)``.

    Examples
    --------
    >>> import torch
    >>> float(effective_share(torch.tensor([0.5, 0.5, 0.0, 0.0]).log()))
    0.5
    """
    return (-(2 * log_weight).logsumexp(-1)).exp() / log_weight.shape[-1]


def conditional_share(log_weight: Tensor, log_ratio: Tensor) -> Tensor:
    """Effective share left by one more reweighting, relative to the share before.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(*batch, n)``.
    log_ratio : Tensor
        Logarithm of the factors that the weights are to be multiplied by, ``(*batch, n)``. Particles
        where it is ``-inf`` do not count: no step is small enough to keep those.

    Returns
    -------
    Tensor
        Shape ``(*batch)``; one if all factors are equal.

    References
    ----------
    Zhou, Y., Johansen, A. M., Aston, J. A. D. (2016). Toward automatic model comparison: an adaptive
    sequential Monte Carlo approach. Journal of Computational and Graphical Statistics 25, 701-726.
    """
    alive = torch.where(log_ratio == -torch.inf, -torch.inf, log_weight)
    first, second = (alive + log_ratio).logsumexp(-1), (alive + 2 * log_ratio).logsumexp(-1)
    return (2 * first - second - alive.logsumexp(-1)).exp()


def next_temperature(log_weight: Tensor, log_likelihood: Tensor, beta: Tensor, threshold: float) -> Tensor:
    """Raise the inverse temperature as far as the conditional effective share stays at ``threshold``.

    Parameters
    ----------
    log_weight, log_likelihood : Tensor
        Shape ``(*batch, n)``.
    beta : Tensor
        Where the particles are, shape ``(*batch)``, below one.
    threshold : float
        Between 0 and 1.

    Returns
    -------
    Tensor
        Shape ``(*batch)``, above ``beta``; exactly one if that is not too far.

    Examples
    --------
    >>> import torch
    >>> log_likelihood = torch.linspace(-100, 0, 1000, dtype=torch.float64)
    >>> log_weight = torch.full_like(log_likelihood, 1e-3).log()
    >>> beta = next_temperature(log_weight, log_likelihood, torch.tensor(0.0, dtype=torch.float64), 0.9)
    >>> round(float(conditional_share(log_weight, beta * log_likelihood)), 3)
    0.9
    """
    room = 1 - beta
    low, high = torch.zeros_like(room), room

    def enough(step: Tensor) -> Tensor:
        return conditional_share(log_weight, step.unsqueeze(-1) * log_likelihood) >= threshold

    whole = enough(room)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        good = enough(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    # The upper end of a bracket this narrow is above zero even where the lower one still is zero.
    return torch.where(whole, torch.ones_like(beta), beta + torch.where(low > 0, low, high))


def systematic(log_weight: Tensor, generator: torch.Generator) -> Tensor:
    """Resample each row: one uniform number places ``n`` equidistant points on the cumulative weights.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(r, n)``.
    generator : torch.Generator

    Returns
    -------
    Tensor
        Indices ``(r, n)`` in increasing order. Each particle is drawn its weight times ``n`` times, rounded
        up or down such that the expectation is exact.

    References
    ----------
    Kitagawa, G. (1996). Monte Carlo filter and smoother for non-Gaussian nonlinear state space models.
    Journal of Computational and Graphical Statistics 5, 1-25.

    Examples
    --------
    >>> import torch
    >>> weight = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    >>> systematic(weight.log(), torch.Generator().manual_seed(0))
    tensor([[0, 0, 1, 2]])
    """
    r, n = log_weight.shape
    like = {"dtype": log_weight.dtype, "device": log_weight.device}
    cumulative = log_weight.exp().cumsum(-1)
    cumulative = cumulative / cumulative[:, -1:]
    start = torch.rand(r, 1, generator=generator, **like)  # type: ignore[call-overload]
    points = (torch.arange(n, **like) + start) / n  # type: ignore[call-overload]
    return torch.searchsorted(cumulative, points, right=True).clamp(max=n - 1)


def bounded(x: Tensor, log_weight: Tensor, limit: float = 4.0) -> tuple[Tensor, Tensor]:
    """Standardise columns by weighted quartiles and cut off their tails, so that every moment exists.

    Parameters
    ----------
    x : Tensor
        Shape ``(n, k)``.
    log_weight : Tensor
        Shape ``(n,)``.
    limit : float, default 4
        In units of the scale.

    Returns
    -------
    standardised : Tensor
        Shape ``(n, k)``, within ``limit`` of zero.
    scale : Tensor
        Shape ``(k,)``, positive: the standard deviation of the normal distribution with these quartiles.
    """
    ordered, order = x.sort(0)
    cumulative = log_weight.exp()[order].cumsum(0).mT.contiguous()
    levels = torch.arange(1, 4, dtype=cumulative.dtype, device=x.device) / 4
    index = torch.searchsorted(cumulative, levels.expand(x.shape[1], 3).contiguous()).clamp(max=len(x) - 1)
    low, middle, high = ordered.gather(0, index.mT)
    scale = (high - low) / 1.349
    scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
    return ((x - middle) / scale).clamp(-limit, limit), scale
