"""Importance weights whose largest are replaced by quantiles of the distribution that they seem to follow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_TAIL = 5
#: By less than this part of the largest, weights differ by rounding.
SAME_WEIGHT = 1e-12


def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the largest weights by quantiles of a generalised Pareto distribution fitted to them.

    Parameters
    ----------
    log_weights : Tensor
        Shape ``(*batch, draws)``.

    Returns
    -------
    log_weights : Tensor
        Smoothed and normalised, ``(*batch, draws)``; none exceeds the largest raw one. Rows of nothing but ``-inf``
        become uniform, with shape ``inf``.
    shape : Tensor
        Pareto ``k`` of the tail, ``(*batch)``: above 0.7 the weights cannot be relied on. ``inf`` where there are too
        few weights for a fit, ``-inf`` where all of the tail is equal: weights that so many reach are bounded.

    References
    ----------
    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

    Zhang, J., Stephens, M. A. (2009). A new and efficient estimation method for the generalized Pareto distribution.
    Technometrics 51, 316-325.

    Examples
    --------
    >>> import torch
    >>> u = torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> smoothed, shape = pareto_smoothed(-0.5 * u.log())
    >>> round(smoothed.exp().sum().item(), 6), abs(shape.item() - 0.5) < 0.15
    (1.0, True)
    """
    batch, n = log_weights.shape[:-1], log_weights.shape[-1]
    rows = log_weights.reshape(-1, n).to(torch.float64)
    largest = rows.amax(-1, keepdim=True)
    nothing = largest.squeeze(-1) == -torch.inf
    rows = torch.where(nothing.unsqueeze(-1), 0.0, rows - largest)
    length = num_largest(n) - 1
    if length < MIN_TAIL:
        equal = (rows.amin(-1) > -SAME_WEIGHT) & ~nothing
        shape = torch.where(equal, -torch.inf, torch.inf)
        return (rows - rows.logsumexp(-1, keepdim=True)).reshape(log_weights.shape), shape.reshape(batch)
    ordered, order = rows.sort(-1)
    equal = (ordered[:, -length - 1] > -SAME_WEIGHT) & ~nothing
    cutoff = ordered[:, -length - 1].exp().unsqueeze(-1)
    scale, shape, usable = _fitted_beyond(cutoff, ordered[:, -length:].exp())
    usable &= ~equal
    level = (torch.arange(length, dtype=rows.dtype, device=rows.device) + 0.5) / length
    k = shape.unsqueeze(-1)
    quantile = cutoff + scale.unsqueeze(-1) * torch.expm1(-k * torch.log1p(-level)) / k
    tail = torch.where(usable.unsqueeze(-1), quantile.log().clamp(max=0.0), ordered[:, -length:])
    rows = rows.scatter(-1, order[:, -length:], tail)
    shape = torch.where(usable, shape, torch.where(equal, -torch.inf, torch.inf))
    return (rows - rows.logsumexp(-1, keepdim=True)).reshape(log_weights.shape), shape.reshape(batch)


def num_largest(num_weights: int) -> int:
    """Return how many of the largest weights :func:`shape_of_largest` should be given, the cutoff included."""
    return min(num_weights // 5, math.ceil(3 * math.sqrt(num_weights))) + 1


def shape_of_largest(largest: Tensor) -> Tensor:
    """Return the Pareto ``k`` of which :func:`pareto_smoothed` tells, from the largest weights alone.

    Parameters
    ----------
    largest : Tensor
        Log weights in ascending order, ``(m, length)``; the first is the cutoff.

    Returns
    -------
    Tensor
        ``(m,)``; ``inf`` where there are too few weights, ``-inf`` where they are all equal.

    Examples
    --------
    >>> weights = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> largest = weights.sort(-1).values[:, -num_largest(1000):]
    >>> bool((shape_of_largest(largest) - pareto_smoothed(weights)[1]).abs().max() < 1e-12)
    True
    """
    rows = largest - largest[:, -1:]
    equal = rows[:, 0] > -SAME_WEIGHT
    if rows.shape[1] - 1 < MIN_TAIL:
        return torch.where(equal, -torch.inf, torch.inf)
    _, shape, usable = _fitted_beyond(rows[:, :1].exp(), rows[:, 1:].exp())
    return torch.where(equal, -torch.inf, torch.where(usable, shape, torch.inf))


def _fitted_beyond(cutoff: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit what lies beyond cutoffs ``(m, 1)``: scale, shape and whether there was enough to fit, each ``(m,)``."""
    length, excess = tail.shape[-1], tail - cutoff
    # A tail without quartiles of its own, most of it at the cutoff, has no distribution to fit.
    usable = excess[:, length // 4 - 1] > 0
    filler = torch.linspace(0.1, 1.0, length, dtype=tail.dtype, device=tail.device)
    scale, shape = fitted_tail(torch.where(usable.unsqueeze(-1), excess, filler))
    return scale, shape, usable


def fitted_tail(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Fit generalised Pareto distributions by a profile posterior mean.

    Parameters
    ----------
    excess : Tensor
        Ascending and positive, ``(m, n)``: a row for each distribution.

    Returns
    -------
    scale, shape : Tensor
        ``(m,)`` each.
    """
    n = excess.shape[-1]
    count = 30 + int(math.sqrt(n))
    grid = torch.arange(1, count + 1, dtype=excess.dtype, device=excess.device)
    quartile, largest = excess[:, int(n / 4 + 0.5) - 1 : int(n / 4 + 0.5)], excess[:, -1:]
    b = 1 / largest + (1 - (count / (grid - 0.5)).sqrt()) / (3 * quartile)
    shape = torch.log1p(-b.unsqueeze(-1) * excess.unsqueeze(1)).mean(-1)
    log_likelihood = n * ((-b / shape).log() - shape - 1)
    mean = (b * torch.softmax(log_likelihood, -1)).sum(-1, keepdim=True)
    shape = torch.log1p(-mean * excess).mean(-1)
    # A weak prior at 0.5, worth ten observations, steadies short tails.
    return -shape / mean.squeeze(-1), (n * shape + 10 * 0.5) / (n + 10)
