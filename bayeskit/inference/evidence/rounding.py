"""Values that are rounded to an end of their support, where a likelihood cannot see how far beyond it they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit.target import Target

#: Coordinates nearer to zero than this, in units of the logarithm of the rounding unit, round to no end.
_NEAR = 0.8


def rounding_problems(
    target: Target, points: Tensor, log_weights: Tensor | None, standard_error: float
) -> tuple[list[str], float]:
    """Say whether rounded values can move an estimate by a standard error.

    Parameters
    ----------
    target : Target
    points : Tensor
        Draws, particles or proposals, ``(*batch, d)``.
    log_weights : Tensor, optional
        With which the points stand for the posterior, ``(*batch)``; equal by default.
    standard_error : float
        Of the log evidence.

    Returns
    -------
    problems : list of str
    share : float
        Of the posterior, where values are rounded and the likelihood depends on how.
    """
    points = points.reshape(-1, points.shape[-1])
    weights = torch.ones_like(points[:, 0]) if log_weights is None else log_weights.reshape(-1).softmax(0)
    weights = weights / weights.sum()
    # Few points lie so far out; the model is run for those alone.
    far = -_NEAR * float(torch.log(torch.tensor(torch.finfo(points.dtype).eps)))
    rows = ((points.abs() > far).any(-1) & points.isfinite().all(-1)).nonzero().flatten()
    if not len(rows):
        return [], 0.0
    change, rounded = target.rounding(points[rows])
    moved = -torch.expm1(-change.abs().nan_to_num(nan=0.0))
    share = float((weights[rows] * moved).sum())
    if not share > standard_error:
        return [], share
    affected = [name for name, where in rounded.items() if bool((where & (moved > 0)).any())]
    return [
        f"{100 * share:.2g} % of the posterior lies where values of {', '.join(map(repr, affected))} are rounded to "
        "an end of their support, and the likelihood depends on how far from it they are: write the likelihood in the "
        "unconstrained value, such as Bernoulli(logits=...), or take a prior with less mass at the end"
    ], share
