"""Peaks: modes of a posterior with the mass about them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor

from bayeskit.core.randomness import new_generator
from bayeskit.core.texts import short_repr
from bayeskit.logdensity.climbing import ClimbObjective, quartile_distance
from bayeskit.logdensity.target import Target

__all__ = [
    "BLOCK",
    "Peak",
    "divided_by_valleys",
    "is_missed",
    "negative_hessian",
    "num_looks",
    "posterior",
    "weigh_peak",
]

#: Largest number of recomputed Hessians; a step length wrong by more than this factor triggers one.
_MAX_SCALINGS, _MAX_STEP_RATIO = 8, 30.0
#: Number of draws examined for separate modes, batched or one by one.
_LOOKS, _LOOKS_IN_A_LOOP = 2000, 500
#: Relative position, from the lower of two points, at which a valley is tested, and its least depth in nats.
_PLACE, _VALLEY = 0.35, 0.5
#: Rows of distances per block, few enough for the processor cache.
BLOCK = 64


def posterior(target: Target) -> ClimbObjective:
    """Log of prior times likelihood as a density over unconstrained space."""
    return ClimbObjective(target.log_density, target.value_and_grad)


def negative_hessian(target: Target, mode: Tensor, objective: ClimbObjective | None = None) -> tuple[Tensor, int]:
    """Return the negative Hessian ``(d, d)`` of an objective, by default the log posterior, and evaluations."""
    climbed = objective or posterior(target)
    # Central differences of the exact gradient; each step is a small share of the coordinate's scale, estimated from
    # the curvature along it.
    small = torch.finfo(target.dtype).eps ** (1 / 3)
    resolved = small**2 * mode.abs()
    step, spent = small * mode.abs().clamp(min=1.0), 0
    for _ in range(_MAX_SCALINGS):
        precision = _differences(climbed, mode, step)
        spent += 2 * target.dim * climbed.cost
        bend = precision.diagonal().abs()
        # A step to a non-finite density was too long; without curvature no scale is available.
        right = torch.where(bend.isfinite(), small / bend.sqrt(), small * step)
        right = torch.where(bend > 0, right, step) if bool(bend.isfinite().all()) else right
        right = torch.maximum(right.clamp(max=1e3 * step), resolved)
        wrong = (right > _MAX_STEP_RATIO * step) | (step > _MAX_STEP_RATIO * right)
        if not bool(wrong.any()):
            break
        step = torch.where(wrong, right, step)
    return precision, spent


def _differences(climbed: ClimbObjective, mode: Tensor, step: Tensor) -> Tensor:
    d, offsets = len(mode), torch.diag(step)
    upper, lower = mode + offsets, mode - offsets
    _, gradient = climbed.value_and_gradient(torch.cat([upper, lower]))
    # The steps as rounded by the floating-point format.
    hessian = (gradient[:d] - gradient[d:]) / (upper - lower).diagonal().unsqueeze(-1)
    return -0.5 * (hessian + hessian.T)


def num_looks(target: Target) -> int:
    """Return the number of points examined for separate modes: fewer if they are evaluated one by one."""
    return _LOOKS_IN_A_LOOP if target.loops else _LOOKS


def divided_by_valleys(target: Target, x: Tensor, at_most: int) -> tuple[Tensor, int]:
    """Return points of ``x (n, d)`` separated by a valley from their nearest higher neighbour, and evaluations."""
    spent, log_density = len(x), target.log_density(x)
    fine = log_density.isfinite() & x.isfinite().all(-1)
    order = log_density.where(fine, -torch.inf).argsort(descending=True, stable=True)[: int(fine.sum())]
    x, log_density = x[order], log_density[order]
    if len(x) < 2:
        return x, spent
    # Within a mode with convex level sets, no point between two others is lower than both, so each visited mode keeps
    # at least one point; the highest of all comes first.
    nearest = _nearest_before(x / quartile_distance(x))
    between = target.log_density(torch.lerp(x[1:], x[nearest], _PLACE)).nan_to_num(nan=-torch.inf)
    divided = between < log_density[1:] - _VALLEY
    return torch.cat([x[:1], x[1:][divided]])[:at_most], spent + len(x) - 1


def _nearest_before(x: Tensor) -> Tensor:
    """Return the index of the nearest earlier point of each point but the first, ``(n, d) -> (n - 1,)``."""
    x = x - x.median(0).values
    half = 0.5 * x.square().sum(-1)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).triu()
    nearest = []
    for begin in range(0, len(x), BLOCK):
        rows = x[begin : begin + BLOCK]
        end = begin + len(rows)
        distance = torch.addmm(half[:end], rows, x[:end].T, alpha=-1)  # half its square, less row constants
        distance[:, begin:].masked_fill_(later[: len(rows), : len(rows)], torch.inf)
        nearest.append(distance.argmin(1))
    return torch.cat(nearest)[1:]


# The ellipsoid about a mode and its posterior mass.

_PEAK_DRAWS = 1000
#: Probability of the ellipsoid under the normal approximation.
_PEAK_SHARE = 0.9
#: Smallest effective sample size for the mass of an ellipsoid.
_MIN_EFFECTIVE = 30.0
#: A missing share is reported if it exceeds so many standard errors.
_MAX_ERRORS = 5.0


@dataclass(frozen=True)
class Peak:
    """An ellipsoid about a mode, and the posterior mass in it."""

    position: Tensor  # (d,), the mode, unconstrained
    factor: Tensor  # (d, d), lower Cholesky factor of the negative Hessian there
    radius: float  # in standard deviations of the normal distribution about the mode
    log_mass: float  # log of prior times likelihood integrated over the ellipsoid
    relative_error: float  # standard error of the mass over the mass

    __repr__ = short_repr

    def holds(self, x: Tensor) -> Tensor:
        """Return whether points lie inside, ``(*batch, d) -> (*batch)``, bool."""
        return ((x - self.position) @ self.factor).norm(dim=-1) <= self.radius


def weigh_peak(target: Target, mode: Tensor, *, seed: int = 0) -> tuple[Peak | None, int]:
    """Return the peak about ``mode (d,)`` by importance sampling, None if that fails, and evaluations."""
    precision, spent = negative_hessian(target, mode)
    factor, failed = torch.linalg.cholesky_ex(precision)
    if bool(failed) or not bool(factor.isfinite().all()):
        return None, spent
    generator = new_generator(seed, factor.device, stream="mass of a peak")
    like = {"dtype": factor.dtype, "device": factor.device, "generator": generator}
    noise = torch.randn(_PEAK_DRAWS, target.dim, **like)  # type: ignore[call-overload]
    radius = math.sqrt(2 * float(scipy.special.gammaincinv(target.dim / 2, _PEAK_SHARE)))
    x = mode + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
    constant = factor.diagonal().log().sum() - 0.5 * target.dim * math.log(2 * math.pi)
    log_weight = target.log_density(x) + 0.5 * noise.square().sum(-1) - constant
    log_weight = torch.where(noise.norm(dim=-1) <= radius, log_weight, -torch.inf)
    log_weight = log_weight.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).to(torch.float64)
    total = float(log_weight.logsumexp(0))
    effective = math.exp(2 * total - float((2 * log_weight).logsumexp(0))) if math.isfinite(total) else 0.0
    if effective < _MIN_EFFECTIVE:
        return None, spent + _PEAK_DRAWS
    error = math.sqrt(max(1 / effective - 1 / _PEAK_DRAWS, 1 / _PEAK_DRAWS**2))
    return Peak(mode, factor, radius, total - math.log(_PEAK_DRAWS), error), spent + _PEAK_DRAWS


def is_missed(expected: float, share: float, chance: float, relative_error: float, least: float) -> bool:
    """Tell whether the ``share`` of draws in a peak is less than ``expected`` by ``least`` and beyond all errors."""
    difference = math.hypot(chance, expected * relative_error)
    # ``chance`` is the standard error of ``share``. A large relative error of ``expected`` is normal on the log scale.
    lowest = expected * math.exp(-_MAX_ERRORS * relative_error)
    return expected - share > max(least, _MAX_ERRORS * difference) or lowest - share > max(least, _MAX_ERRORS * chance)
