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
_FIRST, _STEP = -40.0, 0.125
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
    everyone = torch.ones(count, dtype=torch.bool, device=log_probability.device)
    without = everyone & ~torch.eye(count, dtype=torch.bool, device=log_probability.device)
    if order == 1:
        sets = torch.cat([everyone.unsqueeze(0), without])
        found = method(log_probability, rest, sets)
        return (found[1:] - found[0]).exp()
    pairs = (without.unsqueeze(1) & without.unsqueeze(0)).flatten(0, 1)
    found = method(log_probability, rest, torch.cat([without, pairs]))
    one, two = found[:count], found[count:].unflatten(0, (count, count))
    return (two - one.unsqueeze(1)).exp()


def _by_quadrature(log_probability: Tensor, rest: Tensor, sets: Tensor) -> Tensor:
    """Return the log of the integral for each set, `(sets, *batch)`.

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
    product = torch.einsum("sk,nk...->ns...", sets.to(factor.dtype), factor)
    x = x.squeeze(1)
    density = x - x.exp()
    return (product + density.unsqueeze(1)).logsumexp(0) - density.logsumexp(0)


def _by_orders(log_probability: Tensor, rest: Tensor, sets: Tensor) -> Tensor:
    """Return the log of the probability of each set by adding its members one after the other.

    Each set is drawn from a support of its members and the rest. All terms are positive: nothing cancels.
    """
    count = len(log_probability)
    found = []
    for members in sets.tolist():
        chosen = [i for i in range(count) if members[i]]
        reached = {0: torch.zeros_like(rest)}
        for size in range(len(chosen)):
            following: dict[int, list[Tensor]] = {}
            for subset, log_reached in reached.items():
                if subset.bit_count() != size:
                    continue
                left = [i for i in chosen if not subset >> i & 1]
                remaining = torch.logaddexp(rest, log_probability[left].logsumexp(0))
                for i in left:
                    following.setdefault(subset | 1 << i, []).append(log_reached + log_probability[i] - remaining)
            reached = {subset: torch.stack(terms).logsumexp(0) for subset, terms in following.items()}
        found.append(next(iter(reached.values())))
    return torch.stack(found)
