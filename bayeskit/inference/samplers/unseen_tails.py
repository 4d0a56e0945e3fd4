"""Posterior mass that the chains of a run have never met, or hardly ever, along the scales of a model."""

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
from bayeskit.inference.samplers.scale_profiles import Knot, knot_at, scales_of
from bayeskit.logdensity.target import Target

__all__ = ["UnseenTail", "unseen_tails"]

_SHARE_OF_COST = 0.05  # of the run's gradients
_STEPS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # beyond the ends, in standard deviations
_TAIL, _IN_TAIL, _MOST_IN_TAIL = 0.01, 20.0, 0.1  # share of draws in the tail, how many they are at least, and most
_STARTS = 4  # draws from which the density of the first point is sought
_LEAST_SHARE, _LEAST_VARIANCE = 0.01, 0.1  # of the posterior, and relative to the variance of the draws
_EXPECTED = 5.0  # times one over the effective draws: beyond the last of them lies more with probability exp(-5)
_ENOUGH_TO_COUNT, _CARRY_THE_SPREAD = 2000, 30  # draws in all, and the least number of which a variance is to consist
_REMEDY = "run longer, or integrate out what it scales by bk.marginalize"


class UnseenTail(NamedTuple):
    """Posterior mass where a scale is smaller or larger than in any draw, or than in all draws but a few."""

    share: float  # of the posterior
    warning: str


def unseen_tails(draws: Draws) -> list[UnseenTail]:
    """Return the mass beyond the smallest or the largest draws of a scale, where it matters; found once for all draws.

    In the neck of a funnel, or on the plateau on which a vague prior leaves a scale that the data do not need, chains
    spend little time and seldom come. What they never met, R-hat and effective sizes do not show. The density is
    followed to 32 standard deviations beyond the draws, across valleys. A spread that rests on a few draws, as where
    chains came a few times, is said as well.
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
            scales = scales_of(target)
            for column in scales:
                found, spent = _of_scale(target, draws, column, scales, left)
                left -= spent
                if found or left <= 0:
                    return found
    except (BayeskitError, ArithmeticError, RuntimeError, ValueError):
        return []  # the density fails at a distant point; the draws stand
    return []


def _of_scale(
    target: Target, draws: Draws, column: int, scales: list[int], budget: int
) -> tuple[list[UnseenTail], int]:
    """Return the mass beyond the draws of one coordinate, and the gradients spent."""
    x = draws.unconstrained.flatten(0, 1)
    values = x[:, column].double()
    mean, sd, spent = float(values.mean()), float(values.std()), 0
    size = float(effective_sample_size(draws.unconstrained[..., column]).clamp(max=len(x)))
    if (few := _few_that_carry(values - mean)) is not None:
        number, farthest = few
        name, there = _named(target, x[farthest], column)
        seen = (
            f"the spread of {name} on the unconstrained scale rests on about {number} of {len(x)} draws, near "
            f"{there:.3g}, so how much of the posterior lies there is hardly known: {_REMEDY}"
        )
        return [UnseenTail(number / len(x), seen)], 0
    tail = max(_TAIL, _IN_TAIL / size) if sd > 0 and size > 0 else 1.0
    if tail > _MOST_IN_TAIL:
        return [], 0
    for side in (-1.0, 1.0):
        outward = side * values
        order = outward.argsort(descending=True)
        inside, near, far = (float(outward[order[int(share * len(x))]]) for share in (tail, 2 * tail, 0.5 * tail))
        if not far > near:
            continue
        starts, end = x[(outward - inside).abs().argsort()[:_STARTS]], x[order[0]]
        around = x[order[: max(2, int(2 * tail * len(x)))]]
        widths = {place: float(around[:, place].std()) for place in scales}
        tried = [knot_at(target, start, column, widths) for start in starts]  # other scales may have several maxima
        found = max(tried, key=_height)
        here, at, path = _height(found), found.position, list[tuple[float, float]]()
        spent += sum(one.num_gradients for one in tried)
        if not math.isfinite(here):
            continue
        for step in _STEPS:
            at = at.clone()
            at[column] = end[column] + side * step * sd
            found = knot_at(target, at, column, widths)
            at, spent = found.position, spent + found.num_gradients
            path.append((float(at[column]), _height(found) - here))
            if spent > budget:
                break
        density = 1.5 * tail / (far - near)
        share, square = (density * part for part in _beyond(path, mean))
        if share > max(_EXPECTED / size, _LEAST_SHARE if square < _LEAST_VARIANCE * sd**2 else 0.0):
            share /= 1 + share  # of all that is known
            return [UnseenTail(share, _said(target, end, column, side, share))], spent
        if spent > budget:
            break
    return [], spent


def _few_that_carry(away: Tensor) -> tuple[int, int] | None:
    """Return of how many deviations ``(n,)`` the variance consists, and the largest; None where they are enough."""
    if len(away) < _ENOUGH_TO_COUNT:
        return None
    square = away.square()
    number = float(square.sum() ** 2 / square.square().sum())
    return (math.ceil(number), int(square.argmax())) if number < _CARRY_THE_SPREAD else None


def _height(knot: Knot) -> float:
    """Return the marginal density with other scales at their maximum, whose width is too rough far from the draws."""
    return knot.log_density - knot.log_volume


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
    name, value = _named(target, end, column)
    return (
        f"about {100 * share:.2g} % of the posterior lies where {name} is {'below' if side < 0 else 'above'} "
        f"{value:.3g}, where no chain has been: {_REMEDY}"
    )


def _named(target: Target, point: Tensor, column: int) -> tuple[str, float]:
    """Return the name of a coordinate and its value as the model has it."""
    site = next(site for site in target.sites if site.start <= column < site.stop)
    value = target.constrain(point)[site.name].flatten()[column - site.start]
    return repr(target.names[column]), float(value)
