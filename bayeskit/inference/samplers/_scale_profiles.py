"""Marginal densities of the scales of a model: all other coordinates are integrated out by Laplace's approximation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._logdensity.own_density import OwnDensity
from bayeskit._logdensity.target import Target
from bayeskit.inference._optimize import negative_hessian, saddle_free_inverse

_MOST_SCALES = 3
_AT_THE_ENDS, _SMALL = 20.0, 1e-6  # unconstrained values at which a number from zero on is known, and their ratio
_MOST_MOVES = 4  # steps by which the maximum along another scale is sought
_FAR = (4.0, 12.0)  # the same where a distribution seems to end, in widths
_NEWTON, _AT_REST, _LENGTHS = 6, 0.01, (1.0, 0.5, 0.25, 0.1, 0.01)
_MOST_KNOTS, _SMALLEST_STEP = 96, 1e-3  # of one scale, and in units of its width
_FLAT, _STEEP, _FASTER = 0.5, 1.5, 1.7  # changes in nats between neighbouring knots, and the growth of steps
_NEGLIGIBLE = 11.0  # nats below the mass of the highest segment


def scales_of(target: Target) -> list[int]:
    """Return the coordinates of numbers from zero on; none where there are many, or where the density is a user's own.

    The functions of a user are asked for no values far from the draws.
    """
    if isinstance(target.density, OwnDensity):
        return []
    ends = torch.full((2, target.dim), _AT_THE_ENDS, dtype=target.dtype, device=target.device)
    ends[0] = -_AT_THE_ENDS
    values, columns = dict[str, Tensor](), list[int]()
    with density_may_fail():
        values = target.constrain(ends)
    for site in target.sites if values else ():
        value = values[site.name].reshape(2, -1)
        if value.shape[1] != site.stop - site.start:
            continue
        positive = (value[0] >= 0) & (value[0] < _SMALL * value[1])
        columns += [site.start + place for place in positive.nonzero().flatten().tolist()]
    return columns if len(columns) <= _MOST_SCALES else []


class Knot(NamedTuple):
    """A point of a marginal density: the others at their maximum, and Laplace's approximation of their integral."""

    position: Tensor  # (d,)
    log_density: float  # marginal
    log_volume: float  # what the integral over other scales adds to it
    width: Tensor  # (d,), standard deviations given the scale of a knot; zero for coordinates that are kept
    num_gradients: int


def _profile(target: Target, start: Tensor, free: Tensor) -> Knot:
    """Maximise over the coordinates ``free (d,)`` of ``start (d,)`` by Newton's method."""

    def whole(w: Tensor) -> Tensor:
        u = start.expand(*w.shape[:-1], -1).clone()
        u[..., free] = w
        return u

    def value_and_gradient(w: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = target.value_and_grad(whole(w))
        return value, gradient[..., free]

    w = start[free]
    if not len(w):
        return Knot(start, float(target.log_density(start)), 0.0, torch.zeros_like(start), 1)
    spent, lengths = 1, torch.tensor(_LENGTHS, dtype=start.dtype, device=start.device).unsqueeze(-1)
    (value,), (slope,) = value_and_gradient(w[None])
    covariance, log_width = torch.zeros_like(w).diag(), torch.full_like(value, -torch.inf)
    for _ in range(_NEWTON):
        precision, looks = negative_hessian(value_and_gradient, w)
        spent += looks
        if not bool(precision.isfinite().all() & slope.isfinite().all()):
            return Knot(whole(w), -math.inf, 0.0, torch.zeros_like(start), spent)
        covariance, log_width = saddle_free_inverse(precision)
        step = covariance @ slope
        if not float(step @ slope) > _AT_REST:
            break
        tried, slopes = value_and_gradient(w + lengths * step)
        spent += len(tried)
        best = int(tried.nan_to_num(nan=-torch.inf).argmax())
        if not float(tried[best]) > float(value):
            break
        w, value, slope = w + lengths[best] * step, tried[best], slopes[best]
        # Where the other coordinates are normal, one step ends at the mode, and the curvature is the same there.
        if best == 0 and float(slope @ covariance @ slope) < _AT_REST**2:
            break
    height = float(value) + float(log_width) + 0.5 * len(w) * math.log(2 * math.pi)
    width = torch.zeros_like(start).masked_scatter(free, covariance.diagonal().sqrt())
    return Knot(whole(w), height, 0.0, width, spent)


def knot_at(target: Target, start: Tensor, column: int, widths: Mapping[int, float]) -> Knot:
    """Return the marginal density of one scale at ``start (d,)``: all other coordinates are integrated out.

    Coordinates that are no scales have a maximum, which Newton's method finds; along each of the other scales the
    maximum of their integral is sought by steps of its width, and Laplace's approximation taken from the last three.
    """
    free = torch.ones(len(start), dtype=torch.bool, device=start.device)
    free[list(widths)] = False
    best = _profile(target, start, free)
    spent, log_volume, deviations = best.num_gradients, 0.0, dict[int, float]()
    for place, width in widths.items():
        if place == column:
            continue
        for _ in range(_MOST_MOVES):
            lower, upper = (_profile(target, _moved(best.position, place, by), free) for by in (-width, width))
            spent += lower.num_gradients + upper.num_gradients
            centre, best = best, max((best, lower, upper), key=lambda one: one.log_density)
            bend = (2 * centre.log_density - lower.log_density - upper.log_density) / width**2
            if best is centre:
                break
        if not (best is centre and 0 < bend < math.inf):
            bend = 1 / width**2
        else:
            shift = 0.5 * (upper.log_density - lower.log_density) / (bend * width)
            between = _profile(target, _moved(best.position, place, shift), free)
            spent += between.num_gradients
            best = max((best, between), key=lambda one: one.log_density)
        deviations[place] = bend**-0.5
        log_volume += 0.5 * math.log(2 * math.pi / bend)
    width_of = best.width.clone()
    for place, deviation in deviations.items():
        width_of[place] = deviation
    return Knot(best.position, best.log_density + log_volume, log_volume, width_of, spent)


def _moved(point: Tensor, place: int, by: float) -> Tensor:
    point = point.clone()
    point[place] += by
    return point


def knots_along(
    target: Target, start: Tensor, column: int, widths: Mapping[int, float], budget: int
) -> tuple[list[Knot], int]:
    """Follow the marginal density of a scale in both directions until its mass is negligible.

    ``widths`` are rough standard deviations of all scales.
    """
    width, others, spent = widths[column], {place: size for place, size in widths.items() if place != column}, 0

    def at(points: list[Tensor]) -> Knot:
        nonlocal spent
        tried = [knot_at(target, point, column, widths) for point in points]
        spent += sum(one.num_gradients for one in tried)
        return max(tried, key=lambda one: one.log_density)

    first = at([start])
    knots, top = [first], -math.inf
    if not (math.isfinite(first.log_density) and 0 < width < math.inf):
        return [], spent
    for side in (-1.0, 1.0):
        last, step, closed = first, 0.5 * width, False
        while len(knots) < _MOST_KNOTS and spent < budget:
            found = at([_moved(last.position, column, side * step)])
            change = abs(found.log_density - last.log_density)
            if not change <= _STEEP and step > _SMALLEST_STEP * width and last.log_density > top - _NEGLIGIBLE:
                step *= 0.5
                continue
            if not math.isfinite(found.log_density):
                break
            mass = max(found.log_density, last.log_density) + math.log(step)
            if mass < top - _NEGLIGIBLE:
                # Other scales may have another maximum, beyond a valley.
                moves = [(place, sign * by * size) for place, size in others.items() for by in _FAR for sign in (-1, 1)]
                found = at([found.position, *(_moved(found.position, *move) for move in moves)])
                mass = found.log_density + math.log(step)
            top, last = max(top, mass), found
            knots.append(found)
            closed = mass < top - _NEGLIGIBLE
            if closed:
                break
            step *= _FASTER if change < _FLAT else 1.0
        if not closed:
            return [], spent
    return sorted(knots, key=lambda one: float(one.position[column])), spent
