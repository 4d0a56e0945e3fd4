"""Means over pairs of data, weighted."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def mean_over_pairs(values: Tensor, weights: Tensor | None, statistic: Literal["V", "U"]) -> Tensor:
    """Return the mean of a symmetric function ``(n, n)`` over pairs of data.

    Parameters
    ----------
    values : Tensor
        Shape ``(n, n)``.
    weights : Tensor, optional
        Shape ``(n,)``; a pair has the product of its two.
    statistic : {"V", "U"}
        Over all pairs, or over those of different data.

    Examples
    --------
    >>> import torch
    >>> values = torch.tensor([[1.0, 5.0], [5.0, 1.0]])
    >>> mean_over_pairs(values, None, "V").item(), mean_over_pairs(values, None, "U").item()
    (3.0, 5.0)
    """
    counts = values.new_ones(len(values)) if weights is None else weights.to(values)
    total, pairs = counts @ values @ counts, counts.sum().square()
    if statistic == "U":
        total = total - (counts.square() * values.diagonal()).sum()
        pairs = pairs - counts.square().sum()
    return total / pairs
