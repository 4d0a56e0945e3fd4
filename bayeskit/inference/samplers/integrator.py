"""Positions and momenta moved in turn: the integrator that HMC and the moves of SMC share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluation, Evaluator
from bayeskit._rows import NativeEvaluator
from bayeskit.inference.samplers.metric import Metric


def integrate(
    evaluate: Evaluator,
    metric: Metric,
    q: Tensor,
    p: Tensor,
    step: Tensor,
    beta: Tensor,
    drift: float,
    kicks: Sequence[float],
) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
    """Move positions by ``drift`` steps and then momenta by one of the ``kicks``, as often as there are kicks.

    A density that is compiled row by row is integrated where it is compiled: one call for all of a trajectory.

    Parameters
    ----------
    evaluate : callable
    metric : Metric
    q, p : Tensor
        ``(n, d)``; momenta are whitened.
    step, beta : Tensor
        ``(n,)``
    drift : float
    kicks : sequence of float

    Returns
    -------
    tuple
        Positions and momenta ``(n, d)``, the evaluation of the last position, and the lowest log density of the path,
        ``(n,)``, which is NaN where one is.
    """
    factor, is_dense = metric.factor, metric.is_dense
    if isinstance(evaluate, NativeEvaluator) and metric.directions is None and evaluate.fits(q, factor, is_dense):
        return evaluate.integrate(q, p, step, beta, factor, is_dense, drift, kicks)
    column, lowest = step.unsqueeze(-1), torch.full_like(step, torch.inf)
    for kick in kicks:
        q = torch.addcmul(q, column, metric.to_position(p), value=drift)
        evaluation = evaluate(q, beta)
        lowest = torch.minimum(lowest, evaluation.log_density)
        p = torch.addcmul(p, column, metric.to_momentum(evaluation.gradient), value=kick)
    return q, p, evaluation, lowest
