"""Losses over pairs of data: what they refuse, and weighted means."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data
from bayeskit.inference.generalized.losses.stein_kernels import check_bandwidth
from bayeskit.inference.kernel_discrepancy import Kernel


def check_pairs(name: str, data: Data, kernel: Kernel, statistic: Literal["V", "U"]) -> None:
    """Refuse what a kernel over pairs of data cannot deal with.

    Parameters
    ----------
    name : str
        Of the loss.
    data : Tensor
        Shape ``(n, ...)``.
    kernel : Kernel
    statistic : {"V", "U"}

    Raises
    ------
    ShapeError
        If there are covariates.
    DataError
        If data are whole numbers, a single one for a U-statistic, or tied where they have to tell the bandwidth.
    """
    if isinstance(data, tuple):
        raise ShapeError(f"{name} takes one tensor of data, not covariates and outcomes")
    if not data.is_floating_point():
        raise DataError(f"{name} takes data of a floating type, not whole numbers; convert them if they are continuous")
    if statistic == "U" and len(data) < 2:
        raise DataError("the U-statistic needs two data at least")
    check_bandwidth(kernel, data)


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
