"""Posterior mass that the chains of a run have never met, or hardly ever, along the scales of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.randomness import one_thread
from bayeskit._core.statistics import effective_sample_size
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target
from bayeskit.inference.samplers._scale_profiles import Knot, knot_at, scales_of

_SHARE_OF_COST = 0.05  # of the run's gradients, and as many again across valleys
_STEPS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # beyond the ends, in standard deviations
_TAIL, _IN_TAIL, _MOST_IN_TAIL = 0.01, 20.0, 0.1  # share of draws in the tail, how many they are at least, and most
_STARTS = 4  # draws from which the density of the first point is sought
_NEGLIGIBLE = 8.0  # nats below the density of the first point
_LEAST_SHARE, _LEAST_VARIANCE = 0.01, 0.1  # of the posterior, and relative to the variance of the draws
# Effective draws expected beyond the last of them: there are five or more with probability exp(-5). The density in the
# tail of a small run is rough, so that more must be expected.
_EXPECTED, _EXPECTED_OF_FEW, _ENOUGH_FOR_A_TAIL = 5.0, 10.0, 1000
_ENOUGH_FOR_A_SIZE = 4  # draws per chain
_ENOUGH_TO_COUNT, _CARRY_THE_SPREAD = 2000, 30  # draws in all, and the least number of which a variance is to consist
_REMEDY = "run longer, or integrate out what it scales by bk.marginalize"


class UnseenTail(NamedTuple):
    """Posterior mass where a scale is smaller or larger than in any draw, or than in all draws but a few."""

    share: float  # of the posterior
    warning: str


class TailSearch(NamedTuple):
    """What a search beyond the draws of each scale has found."""

    found: list[UnseenTail]
    is_complete: bool  # whether the model has scales, and each was followed to negligible densities on both sides
    num_gradients: int


def unseen_tails(draws: Draws) -> TailSearch:
    """Return the mass beyond the smallest or the largest draws of a scale, where it matters; found once for all draws.

    In the neck of a funnel, or on the plateau on which a vague prior leaves a scale that the data do not need, chains
    spend little time and seldom come. What they never met, R-hat and effective sizes do not show. The density is
    followed to 32 standard deviations beyond the draws, across valleys. A warning is also given where the variance of a
    scale comes from fewer than 30 draws.
    """
    if not draws.target.has_density:
        return TailSearch([], False, 0)
    known: WeakKeyDictionary[Draws, TailSearch]
    known = draws.target.findings.setdefault("unseen tails", WeakKeyDictionary())
    if draws not in known:
        known[draws] = _searched(draws.target, draws)
    return known[draws]


def scales_are_known(draws: Draws) -> bool:
    """Tell whether the model has scales, and all were followed beyond the draws without finding mass that matters."""
    tails = unseen_tails(draws)
    return tails.is_complete and not tails.found


def _searched(target: Target, draws: Draws) -> TailSearch:
    budget, paths = int(_SHARE_OF_COST * draws.num_gradients), list[_Path]()
    if draws.num_draws < _ENOUGH_FOR_A_SIZE or draws.log_density.numel() < _IN_TAIL / _MOST_IN_TAIL:
        return TailSearch([], False, 0)
    with one_thread(), torch.no_grad():
        scales = scales_of(target)
        for column in scales:
            if (few := _carried_by_few(target, draws, column)) is not None:
                return TailSearch([few], False, 0)
        for column, side in product(scales, (-1.0, 1.0)):
            left = budget - _spent(paths)
            if left > 0 and (path := _Path.begun(target, draws, column, side, scales)) is not None:
                paths.append(path)
                path.follow(left - path.spent, across_valleys=False)
                if (found := path.tail()) is not None:
                    return TailSearch([found], False, _spent(paths))
        is_complete = bool(scales) and len(paths) == 2 * len(scales) and all(path.has_ended for path in paths)
        budget += _spent(paths)
        for path in paths:
            path.follow(budget - _spent(paths), across_valleys=True)
            if (found := path.tail()) is not None:
                return TailSearch([found], False, _spent(paths))
    return TailSearch([], is_complete, _spent(paths))


def _carried_by_few(target: Target, draws: Draws, column: int) -> UnseenTail | None:
    """Return the mass of the draws of which the variance of a coordinate consists, if they are few."""
    x = draws.unconstrained.flatten(0, 1)
    square = (x[:, column].double() - x[:, column].double().mean()).square()
    number = float(square.sum() ** 2 / square.square().sum())
    if len(x) < _ENOUGH_TO_COUNT or not number < _CARRY_THE_SPREAD:
        return None
    name, there = _named(target, x[square.argmax()], column)
    seen = (
        f"the variance of {name} on the unconstrained scale comes from about {number:.0f} of {len(x)} draws, the "
        f"farthest at {there:.3g}, so how much of the posterior lies there is hardly known: {_REMEDY}"
    )
    return UnseenTail(number / len(x), seen)


@dataclass
class _Path:
    """Marginal densities of a scale beyond its smallest or largest draw, relative to that of a draw in the tail."""

    target: Target
    column: int
    side: float  # -1 for small values, 1 for large ones
    end: Tensor  # (d,), the smallest or largest draw
    mean: float
    sd: float
    size: float  # effective number of draws
    density: float  # of the draws, where the path begins
    height: float  # log of the marginal density there, up to a constant
    at: Tensor  # (d,), the last point
    widths: dict[int, float]  # of all scales in the tail
    spent: int  # gradients
    points: list[tuple[float, float]] = field(default_factory=list)  # coordinates and log densities

    @classmethod
    def begun(cls, target: Target, draws: Draws, column: int, side: float, scales: list[int]) -> _Path | None:
        """Return a path that begins in the tail of the draws; None where they are too few."""
        x = draws.unconstrained.flatten(0, 1)
        values = x[:, column].double()
        mean, sd = float(values.mean()), float(values.std())
        size = float(effective_sample_size(draws.unconstrained[..., column]).clamp(max=len(x)))
        tail = max(_TAIL, _IN_TAIL / size) if sd > 0 and size > 0 else 1.0
        if tail > _MOST_IN_TAIL:
            return None
        outward = side * values
        order = outward.argsort(descending=True)
        inside, near, far = (float(outward[order[int(share * len(x))]]) for share in (tail, 2 * tail, 0.5 * tail))
        if not far > near:
            return None
        around = x[order[: max(2, int(2 * tail * len(x)))]]
        widths = {place: float(around[:, place].std()) for place in scales}
        # Other scales may have several maxima.
        starts = x[(outward - inside).abs().argsort()[:_STARTS]]
        tried = [_knot(target, start, column, widths) for start in starts]
        first = max(tried, key=_height)
        height, spent, density = _height(first), sum(one.num_gradients for one in tried), 1.5 * tail / (far - near)
        end, at = x[order[0]], first.position
        return cls(target, column, side, end, mean, sd, size, density, height, at, widths, spent)

    @property
    def has_ended(self) -> bool:
        """Whether the density has become negligible."""
        return bool(self.points) and self.points[-1][1] < -_NEGLIGIBLE

    def follow(self, budget: int, *, across_valleys: bool) -> None:
        """Add points, to the first of negligible density or ``across_valleys``, while gradients are left."""
        last = self.spent + budget if math.isfinite(self.height) else -math.inf
        for step in _STEPS[len(self.points) :]:
            if self.spent >= last or (self.has_ended and not across_valleys):
                break
            at = self.at.clone()
            at[self.column] = self.end[self.column] + self.side * step * self.sd
            found = _knot(self.target, at, self.column, self.widths)
            self.at = found.position
            self.spent += found.num_gradients
            self.points.append((float(at[self.column]), _height(found) - self.height))

    def tail(self) -> UnseenTail | None:
        """Return the mass beyond the draws if it matters."""
        share, square = (self.density * part for part in _beyond(self.points, self.mean))
        matters = share > _LEAST_SHARE or square >= _LEAST_VARIANCE * self.sd**2
        expected = _EXPECTED if self.size >= _ENOUGH_FOR_A_TAIL else _EXPECTED_OF_FEW
        if not (matters and share > expected / self.size):
            return None
        share /= 1 + share  # of all that is known
        name, value = _named(self.target, self.end, self.column)
        return UnseenTail(
            share,
            f"about {100 * share:.2g} % of the posterior lies where {name} is {'below' if self.side < 0 else 'above'} "
            f"{value:.3g}, where no chain has been: {_REMEDY}",
        )


def _spent(paths: list[_Path]) -> int:
    return sum(path.spent for path in paths)


def _knot(target: Target, start: Tensor, column: int, widths: Mapping[int, float]) -> Knot:
    """Return a knot, without density where that of the target fails at a distant point."""
    with density_may_fail():
        return knot_at(target, start, column, widths)
    return Knot(start, -math.inf, 0.0, torch.zeros_like(start), 1)


def _height(knot: Knot) -> float:
    """Return the marginal density with other scales at their maximum, whose width is too rough far from the draws."""
    height = knot.log_density - knot.log_volume
    return -math.inf if math.isnan(height) else height


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


def _named(target: Target, point: Tensor, column: int) -> tuple[str, float]:
    """Return the name of a coordinate and its value as the model has it."""
    site = next(site for site in target.sites if site.start <= column < site.stop)
    value = target.constrain(point)[site.name].flatten()[column - site.start]
    return repr(target.names[column]), float(value)
