"""New live points by rejection: prior draws above the threshold, which remember nothing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.inference.samplers.nested.slice import ConstrainedSlice, SliceState
from bayeskit.target import Target

MAX_ROUNDS = 4
MAX_ROWS = 2
"""Prior draws that are evaluated at once, in multiples of the points that are wanted."""


class Found(NamedTuple):
    """Points above a threshold, as many as were found but no more than wanted."""

    points: SliceState
    num_evaluations: int
    num_nan: Tensor  # (), evaluations whose likelihood was not a number


def draw_above(
    target: Target, kernel: ConstrainedSlice, num_points: int, share: float, generator: torch.Generator
) -> Found:
    """Draw from the prior what lies above the threshold of a kernel.

    Such points are independent of all others and of each other, which moved copies are only if they move far enough;
    on a funnel, whose scale changes slowly, they do not.

    Parameters
    ----------
    target : Target
        It must be able to draw from its prior.
    kernel : ConstrainedSlice
        Whose threshold it is.
    num_points : int
        How many are wanted.
    share : float in (0, 1]
        Expected share of the prior above the threshold.
    generator : torch.Generator

    Returns
    -------
    Found
        Fewer points than wanted where the share is smaller than was said.

    Examples
    --------
    >>> import torch
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import ConstrainedSlice, Metric
    >>> target = exact.get("beta_binomial").target()
    >>> generator = torch.Generator().manual_seed(0)
    >>> ensemble = target.sample_prior(20, generator)
    >>> level = torch.tensor(-4.0, dtype=torch.float64)
    >>> kernel = ConstrainedSlice(level, torch.zeros_like(level), Metric.dense(torch.eye(1).double()), ensemble)
    >>> points = draw_above(target, kernel, 10, 0.5, generator).points
    >>> len(points.position), bool((points.log_likelihood > -4).all())
    (10, True)
    """
    parts: list[SliceState] = []
    found, spent = 0, 0
    num_nan = torch.zeros((), dtype=torch.int64, device=kernel.threshold.device)
    for _ in range(MAX_ROUNDS * math.ceil(1 / (MAX_ROWS * share))):
        rows = min(math.ceil(1.2 * (num_points - found) / share), MAX_ROWS * num_points)
        position = target.sample_prior(rows, generator).to(target.device)
        log_prior, log_likelihood = target.evaluate(position, compiled=False)
        spent, num_nan = spent + rows, num_nan + log_likelihood.isnan().sum()
        log_likelihood = log_likelihood.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        label = torch.rand(rows, dtype=torch.float64, device=position.device, generator=generator)
        # A draw may overflow, as a wide prior does in single precision: it is refused, as slices refuse it.
        above = kernel.above(log_likelihood, label) & log_prior.isfinite() & position.isfinite().all(-1)
        parts.append(SliceState(*(x[above] for x in (position, log_prior, log_likelihood, label))))
        found += len(parts[-1].label)
        if found >= num_points:
            break
    return Found(SliceState(*(torch.cat(column)[:num_points] for column in zip(*parts, strict=True))), spent, num_nan)
