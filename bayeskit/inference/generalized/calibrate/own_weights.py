"""The largest learning rate at which the region of each bootstrap replicate still covers what plays the truth."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.inference.generalized.coverage.functionals import Functional
from bayeskit.inference.generalized.coverage.replicate_draws import MAX_SHAPE
from bayeskit.inference.generalized.coverage.replicates import ReplicatePosteriors

DOUBLINGS = 10  # how far from the draws' weight a replicate's own is looked for: a factor of a thousand
HALVINGS = 30


class OwnWeights(NamedTuple):
    """Own weights of replicates, and whether they can be relied on.

    Attributes
    ----------
    weight : Tensor
        ``(R,)``: zero where the region covers at no weight that was visited, infinite where it does at every.
    pareto_shape : Tensor
        Of the importance weights there, or at the last weight visited, ``(R,)``.
    trusted : Tensor
        Boolean, ``(R,)``: whether these weights can be relied on, and the mode was found.
    """

    weight: Tensor
    pareto_shape: Tensor
    trusted: Tensor


def replicate_weights(
    replicates: ReplicatePosteriors,
    truth: Tensor,
    level: float,
    functional: Functional | None = None,
    seed: int = 0,
) -> OwnWeights:
    """Return the largest learning rate at which each replicate's region still covers the truth.

    From the draws' own weight outward, twice as far at a time and with new draws wherever the old ones no longer
    say anything, until coverage changes; then by bisection in the logarithm.

    Parameters
    ----------
    replicates : ReplicatePosteriors
    truth : Tensor
        Unconstrained, ``(d,)``.
    level : float
    functional : Functional, optional
        Of one number, whose equal-tailed interval takes the place of the highest-posterior-density region.
    seed : int, default 0
        Of new draws.
    """
    replicates, near, far, covered, changed = _bracketed(replicates, truth, level, functional, seed)
    low, high = torch.minimum(near, far).log(), torch.maximum(near, far).log()
    evaluated = _Evaluated(replicates, truth, functional)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        inside = evaluated.entry_level(middle.exp()) <= level
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    inner = torch.where(changed, (0.5 * (low + high)).exp(), far)
    shape = replicates.pareto_shape_at(inner)
    own = torch.where(changed, inner, torch.where(covered, torch.inf, 0.0))
    return OwnWeights(own, shape, (shape <= MAX_SHAPE) & replicates.fits.converged)


def _bracketed(
    replicates: ReplicatePosteriors, truth: Tensor, level: float, functional: Functional | None, seed: int
) -> tuple[ReplicatePosteriors, Tensor, Tensor, Tensor, Tensor]:
    """Return replicates with draws that hold there, the last two weights visited, and whether coverage changed."""
    near, far = replicates.weight.clone(), replicates.weight.clone()
    covered = _Evaluated(replicates, truth, functional).entry_level(near) <= level
    factor = torch.where(covered, 2.0, 0.5).to(near)
    changed, rows = torch.zeros_like(covered), torch.arange(len(near), device=near.device)
    for _ in range(DOUBLINGS):
        far[rows] = far[rows] * factor[rows]
        weight, some = far[rows], replicates.taken(rows)
        usable = some.pareto_shape_at(weight) <= MAX_SHAPE
        lost = (~usable).nonzero()[:, 0]
        if len(lost):
            fresh = some.taken(lost).redrawn(weight[lost], seed)
            some, replicates = some.replaced(lost, fresh), replicates.replaced(rows[lost], fresh)
            usable[lost] = fresh.pareto_shape <= MAX_SHAPE
        # Where even new draws are of no use, coverage there is unknown, and counts neither way.
        inside = _Evaluated(some, truth, functional).entry_level(weight) <= level
        now = usable & (inside != covered[rows])
        changed[rows[now]] = True
        same = usable & ~now
        near[rows[same]] = weight[same]
        rows = rows[~now]
        if not len(rows):
            break
    return replicates, near, far, covered, changed


class _Evaluated:
    """What is evaluated once to know at which level the truth enters regions, for all learning rates."""

    def __init__(self, replicates: ReplicatePosteriors, truth: Tensor, functional: Functional | None) -> None:
        self.replicates, self.truth, self.functional = replicates, truth, functional
        if functional is None:
            self.there = replicates.evaluated_at(truth)
        else:
            self.value, self.each = functional(truth), replicates.evaluated(functional)

    def entry_level(self, weight: Tensor) -> Tensor:
        """Return the level at which the truth enters each region at learning rates ``(R,)``."""
        if self.functional is None:
            return self.replicates.hpd_level(self.truth, weight, evaluated=self.there)
        return self.replicates.central_level(self.functional, self.value, weight, evaluated=self.each)[:, 0]
