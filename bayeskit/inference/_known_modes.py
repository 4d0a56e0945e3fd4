"""Modes of a posterior with the mass about them, and all that is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import scipy
import torch
from torch import Tensor

from bayeskit._core.randomness import new_generator
from bayeskit._core.texts import short_repr
from bayeskit._logdensity.summands import objectives_of_summands
from bayeskit._logdensity.target import Target
from bayeskit.inference._optimize import lbfgs, quartile_distance, refine_mode

#: Number of draws examined for separate modes, batched or one by one.
_LOOKS, _LOOKS_IN_A_LOOP = 2000, 500
#: Relative position, from the lower of two points, at which a valley is tested, and its least depth in nats.
_PLACE, _VALLEY = 0.35, 0.5
#: Rows of distances per block, few enough for the processor cache.
BLOCK = 64


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


#: Largest number of coordinates that are reflected one by one, and nats, plus one per dimension, within which the
#: density of a reflected point is comparable.
_MOST_REFLECTED, _COMPARABLE = 64, 10.0


def reflections(target: Target, x: Tensor) -> tuple[Tensor, int]:
    """Return points ``(n, d)`` reflected in the origin or in one coordinate, and the evaluations spent.

    These are at most ``n`` points of a density comparable with that of the best point. Modes often come in such pairs:
    signs of loadings or of square roots, and the two sides of the cut of an angle.
    """
    d = x.shape[-1]
    signs = -x.new_ones(1, d)
    if 1 < d <= _MOST_REFLECTED:
        signs = torch.cat([signs, 1 - 2 * torch.eye(d, dtype=x.dtype, device=x.device)])
    points = (signs.unsqueeze(1) * x).flatten(0, 1)
    height = target.log_density(torch.cat([x, points])).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    best = height[len(x) :].topk(min(len(x), len(points))).indices
    return points[best[height[len(x) :][best] > height[: len(x)].max() - _COMPARABLE - d]], len(height)


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

#: Draws that weigh a mode, and one whose width is known along the axes only.
_DRAWS, _ROUGH_DRAWS = 1000, 10_000
#: Probability of the ellipsoid under the normal approximation.
_SHARE = 0.9
#: Smallest effective sample size for the mass of an ellipsoid.
_MIN_EFFECTIVE = 30.0
#: Steps by which the width of a mode is found, and the change of the log density there.
_BISECTIONS, _HALF_A_NAT = 14, 0.5
#: Smallest missing share that is reported, if it also exceeds one standard error.
MIN_MISSING = 0.01
#: A missing share is reported if it exceeds so many standard errors.
_MAX_ERRORS = 5.0


@dataclass(frozen=True)
class WeightedMode:
    """An ellipsoid about a mode, and the posterior mass in it."""

    position: Tensor  # (d,), the mode, unconstrained
    factor: Tensor  # (d, d), lower Cholesky factor of the negative Hessian there
    radius: float  # in standard deviations of the normal distribution about the mode
    log_mass: float  # log of prior times likelihood integrated over the ellipsoid
    relative_error: float  # standard error of the mass over the mass
    found_by: str = "search"  # what kind of search first found it

    __repr__ = short_repr

    def holds(self, x: Tensor) -> Tensor:
        """Return whether points lie inside, ``(*batch, d) -> (*batch)``, bool."""
        return ((x - self.position) @ self.factor).norm(dim=-1) <= self.radius


def weigh_mode(target: Target, end: Tensor, *, seed: int = 0) -> tuple[WeightedMode | None, int]:
    """Return the mode at the ``end (d,)`` of a search with its mass, None if its mass is unknown, and evaluations."""
    refined = refine_mode(target.value_and_grad, end)
    position, precision, spent = refined.position, refined.precision, refined.num_gradients
    if not bool(precision.isfinite().all()):
        return None, spent
    factor, failed = torch.linalg.cholesky_ex(precision)
    mode = None if bool(failed) else _weighted(target, position, factor, _DRAWS, seed)
    spent += _DRAWS
    if mode is not None:
        return mode, spent
    # At an edge, or where the density is flatter than any normal, the curvature does not give the width.
    _, vectors = torch.linalg.eigh(precision)
    widths, looks = half_nat_widths(target.log_density, position[None], vectors.mT)
    factor = torch.linalg.cholesky_ex((vectors / widths[:, 0].amax(0).square()) @ vectors.mT).L
    return _weighted(target, position, factor, _ROUGH_DRAWS, seed), spent + looks + _ROUGH_DRAWS


def _weighted(target: Target, position: Tensor, factor: Tensor, num_draws: int, seed: int) -> WeightedMode | None:
    """Return a mode with the mass of its ellipsoid, None if draws from its normal distribution fail."""
    if not bool(factor.isfinite().all()):
        return None
    generator = new_generator(seed, factor.device, stream="mass of a peak")
    like = {"dtype": factor.dtype, "device": factor.device, "generator": generator}
    noise = torch.randn(num_draws, target.dim, **like)  # type: ignore[call-overload]
    radius = math.sqrt(2 * float(scipy.special.gammaincinv(target.dim / 2, _SHARE)))
    x = position + torch.linalg.solve_triangular(factor.mT, noise.mT, upper=True).mT
    constant = factor.diagonal().log().sum() - 0.5 * target.dim * math.log(2 * math.pi)
    log_weight = target.log_density(x) + 0.5 * noise.square().sum(-1) - constant
    log_weight = torch.where(noise.norm(dim=-1) <= radius, log_weight, -torch.inf)
    log_weight = log_weight.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).to(torch.float64)
    total = float(log_weight.logsumexp(0))
    effective = math.exp(2 * total - float((2 * log_weight).logsumexp(0))) if math.isfinite(total) else 0.0
    if effective < _MIN_EFFECTIVE:
        return None
    error = math.sqrt(max(1 / effective - 1 / num_draws, 1 / num_draws**2))
    return WeightedMode(position, factor, radius, total - math.log(num_draws), error)


def half_nat_widths(log_density: Callable[[Tensor], Tensor], points: Tensor, directions: Tensor) -> tuple[Tensor, int]:
    """Return how far ``points (n, d)`` can move along ``directions (k, d)`` to both sides, ``(2, n, k)``.

    The distance changes the log density by half a nat; of a normal density, at its mode, it is the standard deviation.
    It is found by bisection of its logarithm. The number of evaluations is returned as well.
    """
    n, k = len(points), len(directions)
    low = points.new_full((2, n, k), math.log(torch.finfo(points.dtype).tiny) / 2)
    if not k:
        return low, 0
    high, here = -low, log_density(points).unsqueeze(-1)
    sides = directions * points.new_tensor([1.0, -1.0])[:, None, None, None]  # (2, 1, k, d)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        change = log_density(points.unsqueeze(1) + middle.exp().unsqueeze(-1) * sides) - here
        far = ~(change.abs() < _HALF_A_NAT)
        low, high = torch.where(far, low, middle), torch.where(far, middle, high)
    return (0.5 * (low + high)).exp(), 2 * n * k * _BISECTIONS


def is_missed(expected: float, share: float, chance: float, relative_error: float, standard_error: float) -> bool:
    """Tell whether the ``share`` of draws in a mode is less than ``expected``, beyond all errors and where it matters.

    A mode that no draw has met matters if its mass is larger than the ``standard_error`` of the estimate.
    """
    difference = math.hypot(chance, expected * relative_error)
    least = min(MIN_MISSING, standard_error) if standard_error > 0 else MIN_MISSING
    # ``chance`` is the standard error of ``share``. A large relative error of ``expected`` is normal on the log scale.
    lowest = expected * math.exp(-_MAX_ERRORS * relative_error)
    if share == 0 and 0 < standard_error < lowest:
        return True
    return expected - share > max(least, _MAX_ERRORS * difference) or lowest - share > max(least, _MAX_ERRORS * chance)


# All that is known of the modes of a target.

#: Gradients of a search, and more for each dimension.
_GRADIENTS, _GRADIENTS_PER_DIMENSION = 80, 4
#: Largest number of modes that are weighed when their masses are asked for, and whose shares are shown.
_MOST_WEIGHED, _MOST_SHOWN = 12, 4


class KnownModes:
    """Modes that any search of a target has met: the starts of chains, chains, particles, proposals.

    One store for a target, read by all that judges estimates of it. A mode is weighed when it is first asked for.
    """

    def __init__(self) -> None:
        self.weighted: list[WeightedMode] = []  # highest mass first
        self.unweighted: list[tuple[Tensor, float]] = []  # ends (d,) without a normal approximation, and log densities
        self.unvisited: list[WeightedMode] = []  # in which no chain of a run has been
        self.num_searches = 0  # from independent starts that ended at a point of positive density
        self.has_looked_at_summands = False
        self._waiting: list[tuple[Tensor, str, bool]] = []  # end, who found it, and whether by an independent search

    @classmethod
    def of(cls, target: Target) -> KnownModes:
        """Return the store of a target."""
        found: KnownModes = target.findings.setdefault("known modes", cls())
        return found

    def __repr__(self) -> str:
        return self.summary

    @property
    def shares(self) -> list[float]:
        """Share of each mode in the mass of all that are known, the largest first; copies of a mode count as one."""
        apart: list[WeightedMode] = []
        for mode in self.weighted:
            if not any(bool(other.holds(mode.position)) for other in apart):
                apart.append(mode)
        return torch.tensor([mode.log_mass for mode in apart], dtype=torch.float64).softmax(0).tolist()

    @property
    def unmet(self) -> float:
        """Expected share of starts from which a search ends in a mode that no search has met."""
        # The posterior mean of Boender and Rinnooy Kan (1987) for w modes met by n searches from independent starts.
        modes, count = max(len(self.shares), 1), self.num_searches
        return modes * (modes + 1) / (count * (count - 1)) if count > modes + 2 else 1.0

    @property
    def summary(self) -> str:
        """What is known, in a sentence; empty before any mode has been weighed."""
        if not self.weighted:
            return ""
        shares = self.shares
        shown = ", ".join(f"{100 * share:.3g} %" for share in shares[:_MOST_SHOWN])
        more = " and less" if len(shares) > _MOST_SHOWN else ""
        modes = "one mode is known" if len(shares) == 1 else f"{len(shares)} modes are known, of {shown}{more}"
        rest = f"about {100 * self.unmet:.1g} % of starts may lead to others"
        return f"{modes}, after {self.num_searches} searches; {rest}"

    def note(self, ends: Tensor, found_by: str, *, independent: bool = False) -> None:
        """Keep ends of searches, ``(k, d)``, that were made for another purpose.

        They are ``independent`` if the searches began at points drawn without regard to what is known.
        """
        self._waiting += [(end.detach(), found_by, independent) for end in ends]

    def ends(self, target: Target) -> Tensor:
        """Return the ends that wait to be weighed, ``(k, d)``."""
        nothing = torch.empty(0, target.dim, dtype=target.dtype, device=target.device)
        return torch.stack([end for end, *_ in self._waiting]) if self._waiting else nothing

    def weigh(self, target: Target, *, seed: int = 0) -> int:
        """Weigh the ends that lie in no known mode, the highest first, and return evaluations."""
        if not self._waiting:
            return 0
        ends = self.ends(target)
        heights = target.log_density(ends)
        independent = torch.tensor([each for *_, each in self._waiting], device=heights.device)
        self.num_searches += int((heights.isfinite() & independent).sum())
        waiting, self._waiting, spent = self._waiting, [], len(ends)
        count = 0
        for place in heights.nan_to_num(nan=-torch.inf).argsort(descending=True).tolist():
            end, found_by, _ = waiting[place]
            if not bool(heights[place].isfinite()) or self._is_known(end) or count == _MOST_WEIGHED:
                continue
            count += 1
            mode, cost = weigh_mode(target, end, seed=seed)
            spent += cost
            if mode is None:
                self.unweighted.append((end, float(heights[place])))
            else:
                self.weighted.append(replace(mode, found_by=found_by))
        self.weighted.sort(key=lambda mode: -mode.log_mass)
        return spent

    def search(self, target: Target, starts: Tensor, found_by: str, *, independent: bool = False) -> int:
        """Search from each of the starts, ``(k, d)``, keep the ends, and return evaluations."""
        starts = starts[starts.isfinite().all(-1)]
        if not len(starts):
            return 0
        ends, heights, spent = lbfgs(target.value_and_grad, starts, _GRADIENTS + _GRADIENTS_PER_DIMENSION * target.dim)
        self.note(ends[heights.isfinite()], found_by, independent=independent)
        return spent

    def search_summands(self, target: Target, starts: Tensor, max_iterations: int = 80) -> int:
        """Maximize single terms of sums of exponentials, once for a target, then the density; return evaluations."""
        if self.has_looked_at_summands:
            return 0
        self.has_looked_at_summands, spent = True, 0
        for value_and_gradient in objectives_of_summands(target):
            ends, _, count = lbfgs(value_and_gradient, starts, max_iterations)
            spent += count + self.search(target, ends, "terms of a mixture")
        return spent

    def _is_known(self, end: Tensor) -> bool:
        return any(bool(mode.holds(end)) for mode in self.weighted) or any(
            torch.equal(end, other) for other, _ in self.unweighted
        )


# Checks of estimates against modes, made again when more modes are known.

#: Returns warnings of modes that the draws behind an estimate miss.
ModeCheck = Callable[[Sequence[WeightedMode]], list[str]]
_REMEMBERED: ContextVar[list[ModeCheck] | None] = ContextVar("checks of estimates", default=None)


@contextmanager
def remembered_checks() -> Iterator[list[ModeCheck]]:
    """Collect the checks of the estimates that are made meanwhile."""
    checks: list[ModeCheck] = []
    token = _REMEMBERED.set(checks)
    try:
        yield checks
    finally:
        _REMEMBERED.reset(token)


def check_modes(check: ModeCheck, modes: Sequence[WeightedMode]) -> list[str]:
    """Return the warnings of a check, and remember it for modes that are found later."""
    remembered = _REMEMBERED.get()
    if remembered is not None:
        remembered.append(check)
    return check(modes)
