"""Posterior mass beyond the ends of what the chains of a run have visited, along the scales of a model."""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayeskit.core.randomness import one_thread
from bayeskit.core.statistics import effective_sample_size
from bayeskit.draws import Draws
from bayeskit.errors import BayeskitError
from bayeskit.inference.peaks import negative_hessian
from bayeskit.logdensity.climbing import ClimbObjective
from bayeskit.logdensity.target import Target

__all__ = ["UnseenTail", "unseen_tails"]

_SHARE_OF_COST = 0.05  # of the run's gradients
_MOST_SCALES = 8  # that are looked at
_AT_THE_ENDS, _SMALL = 20.0, 1e-6  # unconstrained values at which a number from zero on is known, and their ratio
_STEPS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # beyond the ends, in standard deviations
_INSIDE, _ABOUT = 0.01, (0.005, 0.02)  # share of draws beyond the first point, and beyond the quantiles about it
_OUTERMOST = 0.1  # share of draws that show how the other scales change
_NEGLIGIBLE = 8.0  # nats below the density of the first point
_LEAST_SHARE, _LEAST_VARIANCE = 0.01, 0.1  # of the posterior, and relative to the variance of the draws
_EXPECTED = 10.0  # times one over the number of draws: what lies beyond the last of them with probability exp(-10)
_NEWTON, _AT_REST, _LENGTHS = 6, 0.01, (1.0, 0.5, 0.25, 0.1)


class _Profile(NamedTuple):
    """The maximum over some coordinates."""

    position: Tensor  # (d,)
    log_density: float  # of the marginal distribution of the others, by Laplace's approximation
    num_gradients: int


class UnseenTail(NamedTuple):
    """Posterior mass where a scale is smaller or larger than in any draw."""

    share: float  # of the posterior
    warning: str


def unseen_tails(draws: Draws) -> list[UnseenTail]:
    """Return the mass beyond the smallest or the largest draws of a scale, where it matters; found once for all draws.

    In the neck of a funnel, or on the plateau on which a vague prior leaves a scale that the data do not need, chains
    spend little time and seldom come. What they never met, R-hat and effective sizes do not show.
    """
    target = draws.target
    if target is None:
        return []
    known: WeakKeyDictionary[Draws, list[UnseenTail]] = target.findings.setdefault("unseen tails", WeakKeyDictionary())
    if draws not in known:
        known[draws] = _searched(target, draws)
    return known[draws]


def _searched(target: Target, draws: Draws) -> list[UnseenTail]:
    left = int(_SHARE_OF_COST * draws.num_gradients)
    try:
        with one_thread(), torch.no_grad():
            columns = _scales(target)
            free = torch.ones(target.dim, dtype=torch.bool, device=target.device)
            free[columns] = False
            for column in columns:
                found, spent = _of_scale(target, draws, column, free, left)
                left -= spent
                if found or left <= 0:
                    return found
    except (BayeskitError, ArithmeticError, RuntimeError, ValueError):
        return []  # the density fails at a distant point; the draws stand
    return []


def _scales(target: Target) -> list[int]:
    """Return the coordinates of positive numbers, those of the smallest sites first."""
    ends = torch.full((2, target.dim), _AT_THE_ENDS, dtype=target.dtype, device=target.device)
    ends[0] = -_AT_THE_ENDS
    values, columns = target.constrain(ends), []
    for site in sorted(target.sites, key=lambda site: site.stop - site.start):
        value = values[site.name].reshape(2, -1)
        if value.shape[1] != site.stop - site.start:
            continue
        positive = (value[0] >= 0) & (value[0] < _SMALL * value[1])
        columns += [site.start + place for place in positive.nonzero().flatten().tolist()]
    return columns[:_MOST_SCALES]


def _of_scale(target: Target, draws: Draws, column: int, free: Tensor, budget: int) -> tuple[list[UnseenTail], int]:
    """Return the mass beyond the draws of one coordinate, and the gradients spent."""
    x = draws.unconstrained.flatten(0, 1)
    values = x[:, column].double()
    mean, sd, spent = float(values.mean()), float(values.std()), 0
    if not sd > 0:
        return [], 0
    by_chance = _EXPECTED / float(effective_sample_size(draws.unconstrained[..., column]).clamp(max=len(x)))
    for side in (-1.0, 1.0):
        outward = side * values
        inside, near, far = outward.quantile(1 - outward.new_tensor([_INSIDE, _ABOUT[1], _ABOUT[0]])).tolist()
        if not far > near:
            continue
        density, end = (_ABOUT[1] - _ABOUT[0]) / (far - near), x[outward.argmax()]
        found = _profile(target, x[(outward - inside).abs().argmin()], free)
        middle, ridge = found.log_density, _ridge(x, outward, column, free)
        at, last, points = end, 0.0, list[tuple[float, float]]()
        spent += found.num_gradients
        for step in _STEPS:
            # The other scales stay, or go on along the ridge of the outermost draws.
            ahead = side * (step - last) * sd * ridge
            stays = torch.where(free, at, at + ahead * (ridge == 1))
            tried = [_profile(target, point, free) for point in (stays, at + ahead)[: 1 + bool(step)]]
            found, last = max(tried, key=lambda one: one.log_density), step
            at, spent = found.position, spent + sum(one.num_gradients for one in tried)
            points.append((float(at[column]), found.log_density - middle))
            if not points[-1][1] > -_NEGLIGIBLE or spent > budget:
                break
        share, square = _beyond(points, mean)
        share, square = density * share, density * square
        if share > by_chance and (share > _LEAST_SHARE or square > _LEAST_VARIANCE * sd**2):
            share /= 1 + share  # of all that is known
            return [UnseenTail(share, _said(target, end, column, side, share))], spent
    return [], spent


def _ridge(x: Tensor, outward: Tensor, column: int, free: Tensor) -> Tensor:
    """Return by how much scales change with one of them among its outermost draws, ``(d,)``, zero where ``free``."""
    some = x[outward.argsort(descending=True)[: max(2, int(_OUTERMOST * len(x)))]]
    some = some - some.mean(0)
    ridge = (some * some[:, column : column + 1]).sum(0) / some[:, column].square().sum()
    ridge = torch.where(free, 0.0, ridge).nan_to_num(nan=0.0)
    ridge[column] = 1.0
    return ridge


def _profile(target: Target, start: Tensor, free: Tensor) -> _Profile:
    """Maximise over the coordinates ``free (d,)`` of ``start (d,)`` by Newton's method."""

    def whole(w: Tensor) -> Tensor:
        u = start.expand(*w.shape[:-1], -1).clone()
        u[..., free] = w
        return u

    def value_and_gradient(w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = target.value_and_grad(whole(w))
        return value, gradient[..., free]

    objective = ClimbObjective(lambda w: target.log_density(whole(w)), value_and_gradient)
    w = start[free]
    if not len(w):
        return _Profile(start, float(target.log_density(start)), 1)
    spent, lengths = 1, torch.tensor(_LENGTHS, dtype=start.dtype, device=start.device).unsqueeze(-1)
    (value,), (slope,) = value_and_gradient(w[None])
    half_log_det = math.inf
    for _ in range(_NEWTON):
        precision, looks = negative_hessian(target, w, objective)
        spent += looks
        factor, failed = torch.linalg.cholesky_ex(precision)
        if bool(failed) or not bool(factor.isfinite().all()):
            return _Profile(whole(w), -math.inf, spent)
        half_log_det = float(factor.diagonal().log().sum())
        step = torch.cholesky_solve(slope.unsqueeze(-1), factor).squeeze(-1)
        if not float(step @ slope) > _AT_REST:
            break
        tried, slopes = value_and_gradient(w + lengths * step)
        spent += len(tried)
        best = int(tried.nan_to_num(nan=-torch.inf).argmax())
        if not float(tried[best]) > float(value):
            break
        w, value, slope = w + lengths[best] * step, tried[best], slopes[best]
        # Where the other coordinates are normal, one step ends at the mode, and the curvature is the same there.
        if best == 0 and float(torch.cholesky_solve(slope.unsqueeze(-1), factor).squeeze(-1) @ slope) < _AT_REST**2:
            break
    height = float(value) - half_log_det + 0.5 * len(w) * math.log(2 * math.pi)
    return _Profile(whole(w), height, spent)


def _beyond(points: list[tuple[float, float]], mean: float) -> tuple[float, float]:
    """Return the integrals of a density, and of the density times the squared distance from a mean, over points."""
    share = square = 0.0
    for (a, log_a), (b, log_b) in zip(points, points[1:], strict=False):
        # The logarithm is linear in between.
        high, low = max(log_a, log_b), min(log_a, log_b)
        rest = high - low
        part = abs(b - a) * math.exp(min(high, 700.0)) * (-math.expm1(-rest) / rest if rest > 1e-6 else 1.0)
        share += part
        square += part * min((a - mean) ** 2, (b - mean) ** 2)
    return share, square


def _said(target: Target, end: Tensor, column: int, side: float, share: float) -> str:
    site = next(site for site in target.sites if site.start <= column < site.stop)
    value = float(target.constrain(end)[site.name].flatten()[column - site.start])
    there = "below" if side < 0 else "above"
    return (
        f"about {100 * share:.2g} % of the posterior lies where {target.names[column]!r} is {there} {value:.3g}, where "
        "no chain has been: run longer, or integrate out what it scales by bk.marginalize"
    )
