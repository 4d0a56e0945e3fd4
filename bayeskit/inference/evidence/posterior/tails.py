"""How heavy the tail of weights may seem before the variance of their mean is in doubt."""

from __future__ import annotations

import math

from bayeskit._pareto_smoothing import num_largest

INFINITE_VARIANCE = 0.5


def largest_shape(num_weights: int, slowness: float = 1.0) -> float:
    """Return the largest fitted Pareto ``k`` at which weights may pass for ones of finite variance.

    The mean of raw weights has a standard error only where ``k`` is below one half. The fit knows ``k`` up to about
    ``(1 + k) / sqrt(t)`` where it rests on the ``t`` largest weights, and weights whose largest happened not to be
    drawn have both a small fit and a small error, so that the fit must lie below one half by that much.

    Parameters
    ----------
    num_weights : int
        That the fit has seen.
    slowness : float, default 1.0
        Draws that are worth one independent draw, at least 1.

    Examples
    --------
    >>> [round(largest_shape(n), 2) for n in (400, 1000, 4000, 100_000)]
    [0.31, 0.35, 0.39, 0.45]
    """
    effective = max((num_largest(num_weights) - 1) / max(slowness, 1.0), 1.0)
    return INFINITE_VARIANCE - (1 + INFINITE_VARIANCE) / math.sqrt(effective)
