"""Directions in which an improper prior is flat and the loss does not grow."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bayeskit._torch import new_generator, one_thread, validation_kept
from bayeskit.inference.generalized.prior import Prior

STARTS = 3
RANDOM = 16  # random directions
AXES = 32  # at most so many coordinates are followed
MOST_COEFFICIENTS = 64  # of which a combination without any effect is looked for
SLOWEST = 0.5  # mass along a ray is finite only where the density falls faster than distance ** -1

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``(m, d)`` -> log prior and minus the weighted loss, ``(m,)`` each."""


def direction_of_recession(joint: Joint, prior: Prior, largest: float, seed: int) -> Tensor | None:
    """Return a direction of the improper coordinates in which the posterior has mass without end, if one is found.

    Two kinds are looked for, from several points each: rays, along which the density does not fall between two far
    distances, as where a predictor or a pooling bounds the loss; and combinations of coefficients that the loss does
    not depend on, as where covariates are collinear. Either holds in a neighbourhood of the points, so that the mass
    is infinite. Narrower regions are left to
    :func:`~bayeskit.inference.generalized.checks.propriety.propriety_check`.

    Parameters
    ----------
    joint : callable
        Batched log prior and log likelihood.
    prior : Prior
        An improper one.
    largest : float
        The largest absolute value among the data: what is far is far from them, too.
    seed : int
        Of points and random directions.

    Returns
    -------
    Tensor or None
        A unit vector, ``(d,)``.
    """
    search = _Search(joint, prior, max(1.0, largest), seed)
    with one_thread(), validation_kept(), torch.inference_mode(False), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)  # far away, nothing is valid
        try:
            found = search.bounded_ray()
            found = search.without_effect() if found is None else found
        except (RuntimeError, ValueError, ArithmeticError):
            return None  # a loss that fails so far away tells nothing
    return None if found is None else found / found.norm()


class _Search:
    """Points to start from, and how far is far in each coordinate."""

    def __init__(self, joint: Joint, prior: Prior, largest: float, seed: int) -> None:
        self.joint, self.largest = joint, largest
        self.points = prior.start(STARTS + min(prior.dim, MOST_COEFFICIENTS) + 8, seed)
        self.generator = new_generator(seed, stream="recession")
        improper = torch.zeros_like(self.points[0], dtype=torch.bool)
        curved = torch.zeros_like(improper)
        values = prior.values(self.points[0])
        for site in prior.sites:
            own = slice(site.start, site.stop)
            improper[own] = site.name in prior.improper
            curved[own] = not torch.equal(values[site.name].reshape(-1), self.points[0, own])
        self.free, self.curved = improper.nonzero()[:, 0], curved
        numbers = torch.finfo(self.points.dtype)
        self.precision = numbers.eps
        bend = math.log(numbers.max) / 2.4  # squares of its exponential do not overflow
        self.far = torch.full_like(self.points[0], largest * numbers.eps**-0.75).masked_fill(curved, bend / 2)
        self.farther = torch.full_like(self.points[0], largest * numbers.eps**-1.5).masked_fill(curved, bend)

    def bounded_ray(self) -> Tensor | None:
        """Return a direction along which the density does not fall, whatever the start."""
        directions = self._directions()
        near = (self.points[:STARTS, None] + directions * self.far).flatten(0, 1)
        far = (self.points[:STARTS, None] + directions * self.farther).flatten(0, 1)
        before, after = (sum(self.joint(u)).reshape(STARTS, -1) for u in (near, far))  # type: ignore[union-attr]
        bent = (directions[:, self.curved] != 0).any(-1)
        doublings = torch.where(bent, math.log(2.0), math.log(self.precision**-0.75)).to(before)
        endless = before.isfinite() & after.isfinite() & (after - before > -SLOWEST * doublings)
        found = endless.all(0).nonzero()[:, 0]
        return directions[found[0]] if len(found) else None

    def _directions(self) -> Tensor:
        """Return axes and random directions of the improper coordinates, each both ways, ``(m, d)``."""
        axes = torch.eye(len(self.curved)).to(self.points)[self.free[:AXES]]
        shape = (RANDOM if len(self.free) > 1 else 0, len(self.free))
        random = axes.new_zeros(shape[0], len(self.curved))
        random[:, self.free] = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(random)
        both = torch.cat([axes, random / random.abs().amax(-1, keepdim=True)])
        return torch.cat([both, -both])

    def without_effect(self) -> Tensor | None:
        """Return a combination of unconstrained coefficients that changes nothing."""
        free = self.free[~self.curved[self.free]]
        if not 1 < len(free) <= MOST_COEFFICIENTS:
            return None
        null = self._null_space(free)
        if not len(null):
            return None
        candidates = null.new_zeros(len(null), len(self.curved))
        candidates[:, free] = null
        generic = self._directions()[-RANDOM:]
        start = self.points[:STARTS, None]
        here = self.joint(start[:, 0])[1][:, None]
        changed, usual = (
            (self.joint((start + u * self.far).flatten(0, 1))[1].reshape(STARTS, -1) - here).abs()
            for u in (candidates, generic)
        )
        # What is left of a combination that cancels is rounding, out of what others change.
        limit = math.sqrt(self.precision) * usual.median(-1, keepdim=True).values
        found = ((changed <= limit) & limit.isfinite()).all(0).nonzero()[:, 0]
        return candidates[found[0]] if len(found) else None

    def _null_space(self, free: Tensor) -> Tensor:
        """Return vectors ``(k, len(free))`` orthogonal to the loss's gradients at all points."""
        points = self.points.clone()
        points[::2, free] *= self.largest  # among the data, too, so that absolute errors have both signs
        with torch.enable_grad():
            points.requires_grad_()
            (slopes,) = torch.autograd.grad(self.joint(points)[1].sum(), points)
        slopes = slopes[:, free]
        slopes = slopes[slopes.isfinite().all(-1)]
        tiny = torch.finfo(slopes.dtype).tiny
        slopes = slopes / slopes.norm(dim=-1, keepdim=True).clamp_min(tiny)
        # The scale of a covariate is no sign of collinearity.
        scale = slopes.norm(dim=0)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        padded = torch.cat([slopes / scale, torch.zeros(len(free), len(free)).to(slopes)])
        _, size, rows = torch.linalg.svd(padded, full_matrices=False)
        null = rows[size <= self.precision**0.6 * size[0]] / scale
        return null / null.abs().amax(-1, keepdim=True)
