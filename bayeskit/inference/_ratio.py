"""The ratio of two normalising constants from draws of both densities."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

#: Overlap below which a ratio says nothing, however even its terms are.
LEAST_OVERLAP = 1e-4

_STEPS = 200  # of Newton or of bisection; eight are usual
_TOLERANCE = 1e-14  # relative, in double precision


class BidirectionalRatio(NamedTuple):
    """Log ratios ``(...)``, and the probabilities that a draw is of the other density, ``(..., n)`` and ``(..., m)``.

    A log ratio is minus or plus infinity where the one density is zero at all draws of the other. The overlap ``(...)``
    is one for equal densities, and near zero where hardly a draw could be of the other one.
    """

    log_ratio: Tensor
    of_numerator: Tensor
    of_denominator: Tensor
    overlap: Tensor


def bidirectional_ratio(numerator: Tensor, denominator: Tensor, effective: float | None = None) -> BidirectionalRatio:
    """Solve Bennett's equation for the log ratio of two normalising constants.

    ``numerator (..., n)`` and ``denominator (..., m)`` are log ratios of the unnormalised densities at draws of the one
    and of the other. With ``h`` the probability of a draw to come from the other density, given the log ratio ``c``,

        n mean h(numerator draws) = m mean h(denominator draws),

    whose left side increases in ``c`` and whose right side decreases. The solution is the fixed point of the optimal
    bridge, and the maximum likelihood of the classes in noise-contrastive estimation. Draws of the numerator that
    depend on one another count as ``effective`` draws.
    """
    a, b = numerator.to(torch.float64), denominator.to(torch.float64)
    worth, count = float(effective or a.shape[-1]), b.shape[-1]
    odds = math.log(worth / count)

    def log_shares(c: Tensor) -> tuple[Tensor, Tensor]:
        at = c.unsqueeze(-1)
        return logsigmoid(at - odds - a), logsigmoid(b - at + odds)

    both = torch.cat([a, b], -1)
    finite = both.isfinite()
    low = both.where(finite, torch.inf).amin(-1) - abs(odds) - 40
    high = both.where(finite, -torch.inf).amax(-1) + abs(odds) + 40
    c = a.median(-1).values.clamp(low, high)
    for _ in range(_STEPS):
        # The logarithms of both sides are nearly linear, also where the densities hardly overlap.
        sides = log_shares(c)
        rest = sides[0].logsumexp(-1) + math.log(worth / a.shape[-1]) - sides[1].logsumexp(-1)
        slope = sum((side.softmax(-1) * -side.expm1()).sum(-1) for side in sides)
        low, high = torch.where(rest < 0, c, low), torch.where(rest < 0, high, c)
        newton = c - rest / slope
        inside = (newton > low) & (newton < high)
        following = torch.where(inside, newton, (low + high) / 2)
        done = bool(((following - c).abs() <= _TOLERANCE * c.abs().clamp(min=1.0)).all())
        c = following
        if done:
            break
    # Without draws of the one density where the other has mass, one side is zero for all ratios.
    c = torch.where((b == -torch.inf).all(-1), -torch.inf, torch.where((a == torch.inf).all(-1), torch.inf, c))
    one, other = (side.exp() for side in log_shares(c))
    return BidirectionalRatio(c, one, other, (1 + worth / count) * one.mean(-1))
