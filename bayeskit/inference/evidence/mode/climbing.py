"""Short climbs of a function from many points at once."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._torch import one_thread
from bayeskit.inference.evidence.modes import Objective

MEMORY = 12
#: Of a step that led nowhere, the part that is tried next; a gain that ends a climb; the share of a slope that counts.
SHRINK, MIN_GAIN, ENOUGH = 0.15, 1e-3, 1e-4
#: Length of a first step in units of the spread of the points.
FIRST_STEP = 0.1


def climb(objective: Objective, start: Tensor, max_iterations: int = 80) -> tuple[Tensor, Tensor, int]:
    """Climb from all points together by L-BFGS; good for finding hills, not for measuring their tops.

    Parameters
    ----------
    objective : Objective
        Of unconstrained vectors.
    start : Tensor
        Shape ``(n, d)``; their spread tells how long the first steps are.
    max_iterations : int, default 80
        Gradients at each point.

    Returns
    -------
    ends : Tensor
        Shape ``(n, d)``; points without a finite value and slope stay where they are.
    values : Tensor
        Shape ``(n,)``, minus infinity where there is none.
    num_evaluations : int

    Examples
    --------
    >>> import torch
    >>> hill = Objective(lambda u: -u.square().sum(-1), lambda u: (-u.square().sum(-1), -2 * u))
    >>> ends, _, _ = climb(hill, torch.tensor([[1.0, 300.0], [-2.0, 5.0]], dtype=torch.float64))
    >>> bool(ends.abs().max() < 0.1)
    True
    """
    with one_thread():
        return _climb(objective, start, max_iterations)


def _climb(objective: Objective, start: Tensor, max_iterations: int) -> tuple[Tensor, Tensor, int]:
    low, high = start.quantile(0.25, 0), start.quantile(0.75, 0)
    scale = torch.where((high > low) & (high - low).isfinite(), high - low, torch.ones_like(low))

    def evaluate(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = objective.value_and_gradient(start + scale * z)
        slope = scale * slope
        fine = value.isfinite() & slope.isfinite().all(-1)
        return torch.where(fine, value, -torch.inf), torch.where(fine[:, None], slope, 0.0), fine

    z = torch.zeros_like(start)
    value, slope, climbing = evaluate(z)
    count = len(z) * objective.cost
    length = torch.full_like(value, FIRST_STEP)
    direction = slope / slope.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    ratio = torch.zeros_like(value)
    for _ in range(max_iterations):
        expected = length * (direction * slope).sum(-1)
        climbing = climbing & (expected > 0)
        if not bool(climbing.any()):
            break
        tried = z + length[:, None] * direction
        reached, new_slope, fine = evaluate(torch.where(climbing[:, None], tried, z))
        count += len(z) * objective.cost
        accepted = climbing & fine & (reached >= value + ENOUGH * expected)
        step = torch.where(accepted[:, None], tried - z, 0.0)
        bend = torch.where(accepted[:, None], slope - new_slope, 0.0)
        inner, square = (step * bend).sum(-1), bend.square().sum(-1)
        curved = accepted & (inner > 1e-10 * step.norm(dim=-1) * bend.norm(dim=-1))
        # Rows without a usable pair take none: their weight is zero.
        weight = torch.where(curved, 1 / inner.where(curved, torch.ones_like(inner)), 0.0)
        pairs = [*pairs[-MEMORY + 1 :], (step, bend, weight)]
        ratio = torch.where(curved, inner / square.where(curved, torch.ones_like(square)), ratio)
        gain = torch.where(accepted, reached - value, torch.inf)
        z = torch.where(accepted[:, None], tried, z)
        value, slope = torch.where(accepted, reached, value), torch.where(accepted[:, None], new_slope, slope)
        newton = _newton(slope, pairs, ratio)
        uphill = (newton * slope).sum(-1) > 0
        known = uphill & (ratio > 0)
        # Where nothing is known of the curvature, as far again as this step led, and further.
        plain = 4 * length[:, None] * direction.norm(dim=-1, keepdim=True) * slope
        plain = plain / slope.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        convex = accepted & (inner <= 0)
        renewed = torch.where((known & ~convex)[:, None], newton, plain)
        direction = torch.where(accepted[:, None], renewed, direction)
        length = torch.where(accepted, torch.ones_like(length), SHRINK * length)
        done = accepted & (gain < MIN_GAIN) & known & ((newton * slope).sum(-1) < MIN_GAIN)
        climbing = climbing & ~done & (length > torch.finfo(z.dtype).eps)
    return start + scale * z, value, count


def _newton(slope: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], ratio: Tensor) -> Tensor:
    """Return the inverse of the curvature that the last steps showed, times the slope."""
    result, parts = slope, []
    for step, bend, weight in reversed(pairs):
        part = weight * (step * result).sum(-1)
        result = result - part[:, None] * bend
        parts.append(part)
    result = ratio[:, None] * result
    for (step, bend, weight), part in zip(pairs, reversed(parts), strict=True):
        back = weight * (bend * result).sum(-1)
        result = result + (part - back)[:, None] * step
    return result
