r"""Probabilities of drawing a set without replacement, and how they change when one draw is known.

The set :math:`S` comes first, in whatever order, with probability

.. math:: p(S) = \int_0^\infty e^{-t} \prod_{s \in S} (1 - e^{-a_s t}) \, dt, \quad a_s = p_s / (1 - p(\cup S)),

because Gumbel noise makes arrival times of exponentials: all of :math:`S` arrive before the first of the others. Were
:math:`s` left out of the support, the same integral without its factor would be the probability of the rest.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import torch
from torch import Tensor

#: Sets up to this size are summed exactly over the orders in which they may have been drawn.
EXACT_SIZE = 4
#: The integral over log t starts where the integrand has vanished, in steps that resolve it.
_FIRST, _STEP = -36.0, 0.2
#: Log rates below which 1 - exp(-rate) is the rate.
_SMALL = -36.0


def log_leave_one_out_ratios(log_probability: Tensor, rest: Tensor) -> Tensor:
    r"""Return logs of :math:`R(S, s) = p^{D \setminus s}(S \setminus s) / p(S)` for each of a set.

    Parameters
    ----------
    log_probability : Tensor
        Of the members, shape `(k, *batch)`.
    rest : Tensor
        Log of the probability of all others, `(*batch)`; minus infinity where there are none.

    Returns
    -------
    Tensor
        Shape `(k, *batch)`.

    References
    ----------
    Kool, W., van Hoof, H., Welling, M. (2020). Estimating gradients for discrete random variables by sampling without
    replacement. ICLR.

    Examples
    --------
    >>> import torch
    >>> log_leave_one_out_ratios(torch.tensor([0.5, 0.3]).log(), torch.tensor(0.2).log()).exp()
    tensor([1.1667, 1.3889])
    """
    whole, one = _log_probabilities(log_probability, rest, (0, 1))
    return one - whole


def log_second_order_ratios(log_probability: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the logs of :func:`log_leave_one_out_ratios`, and of the ratios where one draw is known already.

    Parameters
    ----------
    log_probability, rest : Tensor
        As there; `k` is at least 2.

    Returns
    -------
    first : Tensor
        :math:`\log R(S, s)`, shape `(k, *batch)`.
    second : Tensor
        :math:`\log R^{D \setminus s}(S, s')`, shape `(k, k, *batch)` with `s` first; zeros on the diagonal.
    """
    count = len(log_probability)
    whole, one, two = _log_probabilities(log_probability, rest, (0, 1, 2))
    number = torch.zeros(count, count, dtype=torch.int64, device="cpu")
    first, second = _choices(count, 2).T
    number[first, second] = number[second, first] = torch.arange(len(first), device="cpu")
    ratio = two[number] - one.unsqueeze(1)
    own = torch.eye(count, dtype=torch.bool, device=ratio.device).reshape(count, count, *[1] * rest.dim())
    return one - whole, torch.where(own, 0.0, ratio)


def _log_probabilities(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return the log probability of all of a set but so many, drawn from a support without these, for each choice."""
    method = _by_orders if len(log_probability) <= EXACT_SIZE else _by_quadrature
    return method(log_probability, rest, left_out)


@cache
def _choices(count: int, size: int) -> Tensor:
    """Return the members that may be left out, `(choices, size)`."""
    found = list(itertools.combinations(range(count), size))
    return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(len(found), size)


@cache
def _orders(count: int, left_out: int) -> Tensor:
    """Return the orders of the members that are left, `(choices, orders, members)`."""
    found = [
        list(itertools.permutations([i for i in range(count) if i not in out]))
        for out in itertools.combinations(range(count), left_out)
    ]
    return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(len(found), len(found[0]), count - left_out)


def _by_orders(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return sums over the orders in which members may have been drawn: all terms are positive, nothing cancels."""
    found = []
    for size in left_out:
        drawn = log_probability[_orders(len(log_probability), size)]  # (choices, orders, members, *batch)
        if not drawn.shape[2]:
            found.append(drawn.new_zeros((1, *rest.shape)))
            continue
        remaining = torch.logaddexp(drawn.flip(2).logcumsumexp(2).flip(2), rest)
        found.append((drawn - remaining).sum(2).logsumexp(1))
    return found


def _by_quadrature(log_probability: Tensor, rest: Tensor, left_out: tuple[int, ...]) -> list[Tensor]:
    """Return the integral without some of the factors.

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
    everyone = (factor.sum(1) + density).unsqueeze(1)
    total = density.logsumexp(0)
    return [(everyone - factor[:, _choices(count, size)].sum(2)).logsumexp(0) - total for size in left_out]
