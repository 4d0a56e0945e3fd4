"""A little of a heavy tail in every branch length, so that importance weights are bounded.

A density that was matched to a posterior may fall off faster than the posterior itself: data say little about a very
long branch, and next to nothing about how short a branch without a substitution is. The weight of a draw far out can
then be of any size, and so rare that no diagnostic of the weights at hand sees it missing.

A share of each branch length comes from a log-Cauchy distribution instead, such that in one of five draws one length at
least does. Its density falls off as `1 / (x log(x)**2)`, both towards zero and towards infinity, so that the weight
is bounded whatever power of the length the prior rises or falls by.

References
----------
Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture distributions. Technometrics 37,
185-194.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The share of draws that have a branch length from the heavy tail.
DEFENCE = 0.2
#: The median of the heavy tail, in expected substitutions per site, and the half width at half height of its logarithm.
MEDIAN, WIDTH = 0.1, 2.0
#: Logarithms end this many widths from the median: what lies beyond is no floating-point number any more.
_END = 150.0
_ANGLE = math.atan(_END)


def share_of_tail(num_edges: int) -> float:
    """Return the probability that one of so many branch lengths comes from the heavy tail.

    Examples
    --------
    >>> (1 - share_of_tail(5)) ** 5
    0.8
    """
    return -math.expm1(math.log1p(-DEFENCE) / num_edges)


def defended_draws(near: Tensor, generator: torch.Generator) -> Tensor:
    """Replace a share of branch lengths by draws from the heavy tail.

    Parameters
    ----------
    near : Tensor
        Draws of what is to be defended, shape `(*batch, edges)`.
    generator : torch.Generator

    Returns
    -------
    Tensor
        Shape `(*batch, edges)`.
    """
    uniform = torch.rand((2, *near.shape), generator=generator, dtype=near.dtype, device=near.device)
    far = MEDIAN * (WIDTH * ((2 * uniform[0] - 1) * _ANGLE).tan()).exp()
    return torch.where(uniform[1] < share_of_tail(near.shape[-1]), far, near)


def defended_log_prob(log_near: Tensor, lengths: Tensor) -> Tensor:
    """Return the log density of `defended_draws`.

    Parameters
    ----------
    log_near : Tensor
        Log density of each length by itself, shape `(*batch, edges)`.
    lengths : Tensor
        Shape `(*batch, edges)`.

    Returns
    -------
    Tensor
        Shape `(*batch)`.
    """
    share = share_of_tail(lengths.shape[-1])
    log_length = lengths.log()
    standard = (log_length - math.log(MEDIAN)) / WIDTH
    far = math.log(share / (2 * _ANGLE * WIDTH)) - torch.log1p(standard.square()) - log_length
    far = torch.where(standard.abs() <= _END, far, -torch.inf)
    return torch.logaddexp(log_near + math.log1p(-share), far).sum(-1)
