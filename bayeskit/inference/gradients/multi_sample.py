"""The multi-sample bound, and its gradient for draws that carry none."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def leave_one_out_bound(log_weight: Tensor) -> Tensor:
    """Return the bound with each particle's weight replaced by the geometric mean of the others.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)`` with ``K >= 2``.

    Returns
    -------
    Tensor
        Shape ``(K, *batch)``: what the bound would have been without looking at particle ``k``.

    Examples
    --------
    >>> import torch
    >>> leave_one_out_bound(torch.tensor([1.0, 3.0]))
    tensor([3., 1.])
    """
    count = len(log_weight)
    finite = log_weight.isfinite()
    known = torch.where(finite, log_weight, 0.0)
    others = (known.sum(0) - known) / (count - 1)
    # One weight of zero among the others makes their geometric mean zero; taken from a sum it would make it NaN.
    others = torch.where((~finite).sum(0) > (~finite).long(), -torch.inf, others)
    peak = log_weight.amax(0)
    weight = (log_weight - peak).exp()
    # The sum without particle k is taken anew where subtracting would cancel, and in logarithms throughout: the
    # others may be too small for a number beside the largest.
    without = (weight.sum(0) - weight).log() + peak
    top = log_weight.argmax(0, keepdim=True)
    without = without.scatter(0, top, log_weight.scatter(0, top, -torch.inf).logsumexp(0, keepdim=True))
    return torch.logaddexp(without, others) - math.log(count)


def importance_weighted_estimate(log_weight: Tensor, log_score: Tensor | None = None) -> Tensor:
    """Return the bound, with a gradient that is right whatever the guide draws.

    Parameters
    ----------
    log_weight : Tensor
        Shape ``(K, *batch)``.
    log_score : Tensor, optional
        Log density under the guide of draws that carry no gradient, ``(K, *batch)``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    References
    ----------
    Mnih, A., Rezende, D. (2016). Variational inference for Monte Carlo objectives. ICML.
    """
    bound = log_weight.logsumexp(0) - math.log(len(log_weight))
    if log_score is None:
        return bound
    detached = log_weight.detach()
    signal = bound.detach() - (leave_one_out_bound(detached) if len(detached) > 1 else 0.0)
    surrogate = bound + (signal * log_score).sum(0)
    return bound.detach() + (surrogate - surrogate.detach())
