r"""Probabilities of drawing a set without replacement, and how they change when one draw is known.

The set :math:`S` comes first, in whatever order, with probability

.. math:: p(S) = \int_0^\infty e^{-t} \prod_{s \in S} (1 - e^{-a_s t}) \, dt, \quad a_s = p_s / (1 - p(\cup S)),

because Gumbel noise makes arrival times of exponentials: all of :math:`S` arrive before the first of the others. Were
:math:`s` left out of the support, the same integral without its factor would be the probability of the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Sets up to this size are summed exactly over the orders in which they may have been drawn.
EXACT_SIZE = 4
#: The integral over log t starts where the integrand has vanished, in steps that resolve it.
_FIRST, _STEP = -36.0, 0.2
#: Log rates below which 1 - exp(-rate) is the rate.
_SMALL = -36.0


def leave_one_out_ratios(log_probability: Tensor, rest: Tensor, order: int = 1) -> Tensor:
    r"""Return :math:`R(S, s) = p^{D \setminus s}(S \setminus s) / p(S)` for each of a set.

    Parameters
    ----------
    log_probability : Tensor
        Of the members, shape `(k, *batch)`.
    rest : Tensor
        Log of the probability of all others, `(*batch)`; minus infinity where there are none.
    order : int, default 1
        2 for :math:`R^{D \setminus s}(S, s')`, where one draw is known already; ones on the diagonal.

    Returns
    -------
    Tensor
        Shape `(k, *batch)`, or `(k, k, *batch)` with the draw known already first.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2020). Estimating gradients for discrete random variables by sampling without
    replacement. ICLR.

    Examples
    --------
    >>> import torch
    >>> leave_one_out_ratios(torch.tensor([0.5, 0.3]).log(), torch.tensor(0.2).log())
    tensor([1.1667, 1.3889])
    """
    count = len(log_probability)
    method = _by_orders if count <= EXACT_SIZE else _by_quadrature
    out = torch.eye(count, dtype=torch.bool, device=log_probability.device)
    if order == 1:
        found = method(log_probability, rest, torch.cat([torch.zeros_like(out[:1]), out]))
        return (found[1:] - found[0]).exp()
    pairs = (out.unsqueeze(1) | out.unsqueeze(0)).flatten(0, 1)
    found = method(log_probability, rest, torch.cat([out, pairs]))
    one, two = found[:count], found[count:].unflatten(0, (count, count))
    return (two - one.unsqueeze(1)).exp()


def _by_quadrature(log_probability: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Return the log of the integral without some of the factors, `(cases, k)` to `(cases, *batch)`.

    Over log t the integrand is analytic and falls off doubly exponentially on one side and exponentially on the other,
    so that the trapezoid rule is exact to rounding.
    """
    count = len(log_probability)
    # Where members are improbable, the integrand is a power of t times exp(-t): of width 1 / sqrt(count) at log count.
    step = min(_STEP, 0.4 / math.sqrt(count + 1))
    last = math.log(count + 1) + 4.25
    x = torch.arange(_FIRST, last, step, dtype=log_probability.dtype, device=log_probability.device)
    x = x.reshape(-1, *[1] * log_probability.dim())
    log_rate = (log_probability - rest + x).clamp_max(50.0)
    factor = torch.where(log_rate < _SMALL, log_rate, (-torch.expm1(-log_rate.clamp_min(_SMALL).exp())).log())
    density = (x - x.exp()).squeeze(1)
    everyone = factor.sum(1) + density
    total = density.logsumexp(0)
    cases = [
        (everyone - factor[:, case].sum(1) if any(case) else everyone).logsumexp(0) - total
        for case in left_out.tolist()
    ]
    return torch.stack(cases)


def _by_orders(log_probability: Tensor, rest: Tensor, left_out: Tensor) -> Tensor:
    """Return the log of the probability of each set by adding its members one after the other.

    Those left out are not in the support either. All terms are positive: nothing cancels.
    """
    count = len(log_probability)
    ones = (1,) * rest.dim()
    member = torch.where(left_out.reshape(*left_out.shape, *ones), -torch.inf, log_probability)  # (cases, k, *batch)
    subsets = torch.arange(1 << count, device=rest.device)
    drawn = (subsets.unsqueeze(1) >> torch.arange(count, device=rest.device) & 1).bool()  # (subsets, k)
    waiting = torch.where(drawn.reshape(len(drawn), 1, count, *ones), -torch.inf, member)
    remaining = torch.logaddexp(waiting.logsumexp(2), rest)  # (subsets, cases, *batch)
    reached = torch.full_like(remaining, -torch.inf)
    reached[0] = 0.0
    sizes = drawn.sum(1)
    for size in range(1, count + 1):
        level = subsets[sizes == size]
        before = level.unsqueeze(1) & ~(1 << torch.arange(count, device=rest.device))  # (level, k)
        step = reached[before] + member.movedim(1, 0) - remaining[before]
        ways = drawn[level].reshape(*before.shape, 1, *ones) & (member.movedim(1, 0) > -torch.inf)
        reached[level] = torch.where(ways, step, -torch.inf).logsumexp(1)
    whole = ((~left_out).long() << torch.arange(count, device=rest.device)).sum(1)
    return reached[whole, torch.arange(len(left_out), device=rest.device)]
