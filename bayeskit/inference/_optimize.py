"""Maximization of functions with gradients: L-BFGS from many starting points or from one, Newton steps, and Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import scipy
import torch
from torch import Tensor

from bayeskit._core.randomness import one_thread
from bayeskit._logdensity.own_density import ValueAndGradient

# L-BFGS from many starting points at once.

_MEMORY = 12
#: Factor that shortens a rejected step; gain below which a search ends; Armijo constant of sufficient increase.
_SHRINK, _MIN_GAIN, _ENOUGH = 0.15, 1e-3, 1e-4
#: Length of a first step in units of the spread of the points.
_FIRST_STEP = 0.1


class InverseHessian(NamedTuple):
    """L-BFGS estimates ``H`` of the inverse of the negative Hessian, one for each start, in scaled coordinates."""

    diagonal: Tensor  # (n, d), or (n, 1) where it is one number; zero where nothing is known
    # One BFGS update of the diagonal matrix a pair, the oldest first.
    pairs: tuple[tuple[Tensor, Tensor, Tensor], ...]  # step (n, d), change of slope (n, d), 1 / their product (n,) or 0

    def of(self, rows: Tensor) -> InverseHessian:
        """Return the estimates of some of the searches."""
        return InverseHessian(self.diagonal[rows], tuple((s[rows], b[rows], w[rows]) for s, b, w in self.pairs))

    def times(self, vector: Tensor) -> Tensor:
        """Return ``H vector``, ``(*batch, n, d) -> (*batch, n, d)``, by the two-loop recursion."""
        result, parts = vector, []
        for step, bend, weight in reversed(self.pairs):
            part = weight * (step * result).sum(-1)
            result = result - part.unsqueeze(-1) * bend
            parts.append(part)
        result = self.diagonal * result
        for (step, bend, weight), part in zip(self.pairs, reversed(parts), strict=True):
            back = weight * (bend * result).sum(-1)
            result = result + (part - back).unsqueeze(-1) * step
        return result

    def draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw from ``N(0, H)``, shape ``(num_draws, n, d)``: an update projects a draw and puts noise on its step."""
        like = {"dtype": self.diagonal.dtype, "device": self.diagonal.device, "generator": generator}
        n, d = self.pairs[0][0].shape
        draw = self.diagonal.sqrt() * torch.randn(num_draws, n, d, **like)  # type: ignore[call-overload]
        for step, bend, weight in self.pairs:
            noise = weight.sqrt() * torch.randn(num_draws, n, **like)  # type: ignore[call-overload]
            draw = draw + (noise - weight * (bend * draw).sum(-1)).unsqueeze(-1) * step
        return draw

    def log_determinant(self) -> Tensor:
        """Return ``log |H|``, shape ``(n,)``: each pair multiplies it by old over observed curvature."""
        steps, bends, weights = (torch.stack(column) for column in zip(*self.pairs, strict=True))
        result = self.diagonal.log().expand_as(steps[0]).sum(-1)
        towards = weights * (bends * steps.unsqueeze(1)).sum(-1)  # (pair, earlier pair, n)
        images, shares = torch.zeros_like(steps), torch.zeros_like(weights)  # H^-1 step, 1 / its product with the step
        for k, (step, weight) in enumerate(zip(steps, weights, strict=True)):
            away = shares[:k] * (images[:k] * step).sum(-1)
            change = towards[k, :k].unsqueeze(-1) * bends[:k] - away.unsqueeze(-1) * images[:k]
            images[k] = step / self.diagonal + change.sum(0)
            before = (step * images[k]).sum(-1)
            used = (weight > 0) & (before > 0)
            shares[k] = torch.where(used, 1 / before, 0.0)
            result = result + torch.where(used, (before * weight).log(), 0.0)
        return result


class LBFGSState(NamedTuple):
    """State of ``n`` searches after one more gradient."""

    position: Tensor  # (n, d)
    value: Tensor  # (n,)
    slope: Tensor  # (n, d), with respect to scaled coordinates
    moved: Tensor  # (n,), bool: the step was accepted
    curvature: InverseHessian
    num_gradients: int


def lbfgs(value_and_gradient: ValueAndGradient, start: Tensor, max_iterations: int = 80) -> tuple[Tensor, Tensor, int]:
    """Maximize from each row of ``start`` ``(n, d)`` by L-BFGS; return ends, values ``(n,)`` and number of gradients.

    Ends are near modes, not at them; rows without a finite value and slope stay, with the value ``-inf``.
    """
    with one_thread():
        *_, last = lbfgs_path(value_and_gradient, start, max_iterations)
    return last.position, last.value, last.num_gradients


def quartile_distance(points: Tensor) -> Tensor:
    """Return the distance of the quartiles of each coordinate, ``(n, d) -> (d,)``, or one if it is zero or infinite."""
    low, high = points.quantile(points.new_tensor([0.25, 0.75]), 0)
    return torch.where((high > low) & (high - low).isfinite(), high - low, torch.ones_like(low))


def lbfgs_path(
    value_and_gradient: ValueAndGradient,
    start: Tensor,
    max_iterations: int,
    scale: Tensor | None = None,
    memory: int = _MEMORY,
) -> Iterator[LBFGSState]:
    """Yield the start ``(n, d)`` and then the state of L-BFGS after each gradient; ``scale (d,)`` is the unit."""
    scale = quartile_distance(start) if scale is None else scale

    def evaluate(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, slope = value_and_gradient(start + scale * z)
        slope = scale * slope
        fine = value.isfinite() & slope.isfinite().all(-1)
        return torch.where(fine, value, -torch.inf), torch.where(fine[:, None], slope, 0.0), fine

    z = torch.zeros_like(start)
    value, slope, active = evaluate(z)
    count = len(z)
    length = torch.full_like(value, _FIRST_STEP)
    direction = slope / slope.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    ratio, diagonal = torch.zeros_like(value), torch.zeros_like(z)
    yield LBFGSState(start, value, slope, torch.zeros_like(active), InverseHessian(diagonal, ()), count)
    for _ in range(max_iterations):
        expected = length * (direction * slope).sum(-1)
        active = active & (expected > 0)
        if not bool(active.any()):
            break
        tried = z + length[:, None] * direction
        reached, new_slope, fine = evaluate(torch.where(active[:, None], tried, z))
        count += len(z)
        accepted = active & fine & (reached >= value + _ENOUGH * expected)
        step = torch.where(accepted[:, None], tried - z, 0.0)
        bend = torch.where(accepted[:, None], slope - new_slope, 0.0)
        inner, square = (step * bend).sum(-1), bend.square().sum(-1)
        curved = accepted & (inner > 1e-10 * step.norm(dim=-1) * bend.norm(dim=-1))
        # Rows without a usable pair get weight zero.
        weight = torch.where(curved, 1 / inner.where(curved, torch.ones_like(inner)), 0.0)
        pairs = [*pairs[-memory + 1 :], (step, bend, weight)]
        ratio = torch.where(curved, inner / square.where(curved, torch.ones_like(square)), ratio)
        gain = torch.where(accepted, reached - value, torch.inf)
        z = torch.where(accepted[:, None], tried, z)
        value, slope = torch.where(accepted, reached, value), torch.where(accepted[:, None], new_slope, slope)
        diagonal = torch.where(curved.unsqueeze(-1), _updated(diagonal, step, bend, weight, ratio), diagonal)
        yield LBFGSState(start + scale * z, value, slope, accepted, InverseHessian(diagonal, tuple(pairs)), count)
        quasi_newton = InverseHessian(ratio.unsqueeze(-1), tuple(pairs)).times(slope)
        uphill = (quasi_newton * slope).sum(-1) > 0
        known = uphill & (ratio > 0)
        # Where the curvature is unknown, along the gradient, four times as far as this step.
        plain = 4 * length[:, None] * direction.norm(dim=-1, keepdim=True) * slope
        plain = plain / slope.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        convex = accepted & (inner <= 0)
        renewed = torch.where((known & ~convex)[:, None], quasi_newton, plain)
        direction = torch.where(accepted[:, None], renewed, direction)
        length = torch.where(accepted, torch.ones_like(length), _SHRINK * length)
        done = accepted & (gain < _MIN_GAIN) & known & ((quasi_newton * slope).sum(-1) < _MIN_GAIN)
        active = active & ~done & (length > torch.finfo(z.dtype).eps)


def _updated(diagonal: Tensor, step: Tensor, bend: Tensor, weight: Tensor, ratio: Tensor) -> Tensor:
    """Return the diagonal ``(n, d)`` of an inverse Hessian after a BFGS pair (Gilbert and Lemarechal 1989)."""
    # One number for all coordinates, as in the steps, is that of the shortest axis: far too small for a determinant.
    before = torch.where(diagonal > 0, diagonal, ratio.unsqueeze(-1))
    known = (before * bend.square()).sum(-1, keepdim=True)
    spread = (step.square() / before).sum(-1, keepdim=True)
    after = weight.unsqueeze(-1) * (known / before + bend.square() - known * (step / before).square() / spread)
    return torch.where((after > 0) & after.isfinite(), 1 / after, before)


# L-BFGS from one starting point, as exact as rounding allows.


class SearchEnd(NamedTuple):
    """The end of a search for a maximum."""

    position: np.ndarray  # (d,)
    value: float  # -inf if the start has none
    gradient: np.ndarray  # (d,)
    num_iterations: int
    finished: bool  # not by a limit of iterations or evaluations, and not stopped


def scipy_lbfgs(
    value_and_gradient: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    bounds: Sequence[tuple[float, float]] | None = None,
    stop: Callable[[], bool] | None = None,
    **options: float,
) -> SearchEnd:
    """Maximize from ``start (d,)`` by SciPy's L-BFGS-B, until ``stop`` after an iteration says so.

    The function returns a value and a gradient ``(d,)``; where they are not finite, no step of the search ends.
    """
    iterate = evaluated = start, math.inf, np.zeros_like(start)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal iterate, evaluated
        value, gradient = value_and_gradient(x)
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            # A barrier just high enough to reject the step of the line search.
            origin, height, slope = iterate
            return height + 10 * (1 + abs(float(slope @ (x - origin)))), np.zeros_like(x)
        evaluated = x.copy(), -value, -gradient
        if not math.isfinite(iterate[1]):
            iterate = evaluated
        return -value, -gradient

    def accepted(_: np.ndarray) -> None:
        nonlocal iterate
        iterate = evaluated
        if stop is not None and stop():
            raise StopIteration

    found = scipy.optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, callback=accepted, options={"maxls": 50, **options}
    )
    finished = found.status in (0, 2)  # converged, or to within rounding
    return SearchEnd(found.x, -float(found.fun), -found.jac, int(found.nit), finished)


# Curvature by differences of gradients, and Newton steps at a mode.

#: Largest number of recomputed Hessians; a step length wrong by more than this factor triggers one.
_MAX_SCALINGS, _MAX_STEP_RATIO = 8, 30.0
#: Largest number of Newton steps at a mode, and predicted gain after which no further step is needed.
_MAX_STEPS, _CLOSE = 5, 1e-8
#: Smallest curvature of an axis, relative to the curvatures along the coordinates.
_LEAST_OF_UNIT = 1e-4


def negative_hessian(value_and_gradient: ValueAndGradient, mode: Tensor) -> tuple[Tensor, int]:
    """Return the negative Hessian ``(d, d)`` at a mode ``(d,)``, and the number of gradients."""
    # Central differences of the exact gradient; each step is a small share of the coordinate's scale, estimated from
    # the curvature along it.
    small = torch.finfo(mode.dtype).eps ** (1 / 3)
    resolved = small**2 * mode.abs()
    step, spent = small * mode.abs().clamp(min=1.0), 0
    for _ in range(_MAX_SCALINGS):
        precision = _differences(value_and_gradient, mode, step)
        spent += 2 * len(mode)
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


def _differences(value_and_gradient: ValueAndGradient, mode: Tensor, step: Tensor) -> Tensor:
    d, offsets = len(mode), torch.diag(step)
    upper, lower = mode + offsets, mode - offsets
    _, gradient = value_and_gradient(torch.cat([upper, lower]))
    # The steps as rounded by the floating-point format.
    hessian = (gradient[:d] - gradient[d:]) / (upper - lower).diagonal().unsqueeze(-1)
    return -0.5 * (hessian + hessian.T)


def saddle_free_inverse(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return inverses of symmetric matrices ``(*batch, d, d)``, and half of their log determinants, ``(*batch)``.

    On a saddle, negative curvatures count as positive, so that a Newton step leads uphill.
    """
    # Scaled to a unit diagonal, so that the bound of small curvatures does not depend on units.
    smallest = torch.finfo(precision.dtype).tiny ** 0.5
    scale = precision.diagonal(dim1=-2, dim2=-1).abs().clamp(min=smallest).rsqrt()
    curvature, axes = torch.linalg.eigh(scale[..., :, None] * precision * scale[..., None, :])
    curvature, axes = curvature.abs().clamp(min=_LEAST_OF_UNIT), scale[..., :, None] * axes
    inverse = (axes / curvature[..., None, :]) @ axes.mT
    return inverse, scale.log().sum(-1) - 0.5 * curvature.log().sum(-1)


class RefinedMode(NamedTuple):
    """The end of Newton steps at a maximum."""

    position: Tensor  # (d,)
    value: float
    gain: float  # predicted, of one more step; infinite without a positive definite negative Hessian
    precision: Tensor  # (d, d), negative Hessian
    num_gradients: int


def refine_mode(
    value_and_gradient: ValueAndGradient, end: Tensor, gains: tuple[float, float] = (5e-11, 0.05)
) -> RefinedMode:
    """Take Newton steps from the ``end (d,)`` of a search, while their predicted gains lie between two numbers."""
    # Newton steps do not depend on units. They start only close to a maximum, so that other end points are reported.
    precision, spent = negative_hessian(value_and_gradient, end)
    value, gradient = (found[0] for found in value_and_gradient(end.unsqueeze(0)))
    spent, gain = spent + 1, math.inf
    for _ in range(_MAX_STEPS):
        scale = precision.diagonal().rsqrt()
        factor, failed = torch.linalg.cholesky_ex(scale[:, None] * precision * scale)
        if bool(failed) or not bool(factor.isfinite().all()):
            gain = math.inf
            break
        step = scale * torch.cholesky_solve((scale * gradient)[:, None], factor)[:, 0]
        gain = 0.5 * float(step @ gradient)
        if not gains[0] < gain < gains[1]:
            break
        reached, slope = (found[0] for found in value_and_gradient((end + step).unsqueeze(0)))
        spent += 1
        # At the maximum the gradient tells more than the value, which is rounded.
        slopes = (scale * slope)[:, None]
        left = 0.5 * float((slopes * torch.cholesky_solve(slopes, factor)).sum())
        if not (left < gain and bool(reached.isfinite())):
            break
        end, value, gradient, is_close, gain = end + step, reached, slope, gain < _CLOSE, left
        precision, differences = negative_hessian(value_and_gradient, end)
        spent += differences
        if is_close:
            break
    return RefinedMode(end, float(value), gain, precision, spent)


# Newton's method for many functions in one batch.

_ITERATIONS, _HALVINGS, _TOLERANCE, _NEAR = 60, 24, 1e-12, 1e-3
#: Smallest curvature along an axis, relative to the largest.
_LEAST_CURVATURE = 1e-10


class NewtonProblem(Protocol):
    """Functions of vectors ``(d,)`` to be maximized, one for each row of a batch, evaluated for some ``rows (m,)``."""

    def values(self, position: Tensor, rows: Tensor) -> Tensor:
        """Return the values at ``position (m, d)``, ``(m,)``, minus infinity where there is none."""
        ...

    def derivatives(self, position: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values ``(m,)``, gradients ``(m, d)`` and negative Hessians ``(m, d, d)``."""
        ...


def newton(problem: NewtonProblem, start: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
    """Maximize from ``start (n, d)`` by Newton's method with line search; return ends and whether they converged.

    A row has converged when the Newton decrement, twice the predicted gain, is at most ``missing (n,)`` or negligible.
    """
    position = start.clone()
    done = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    active = torch.arange(len(start), device=start.device)
    for _ in range(_ITERATIONS):
        value, gradient, precision = problem.derivatives(position[active], active)
        step, decrement = _newton_step(gradient, precision)
        # A function that rises to a supremum at infinity has a small decrement but a long step.
        near = step.norm(dim=-1) <= _NEAR * (1 + position[active].norm(dim=-1))
        stop = (near & (decrement <= _TOLERANCE * (1 + value.abs()))) | (decrement <= missing[active])
        done[active] = stop
        last = position[active] + step
        higher = stop & (problem.values(last, active) >= value)
        position[active[higher]] = last[higher]
        go = (~stop).nonzero()[:, 0]
        if not len(go):
            break
        active, value, step, decrement = active[go], value[go], step[go], decrement[go]
        trial, moved = _backtracked(problem, active, position[active], step, value, decrement)
        position[active] = trial
        # A row without an increase by the line search has converged to within rounding.
        done[active] = ~moved & (decrement <= 1e-6 * (1 + value.abs()))
        active = active[moved]
        if not len(active):
            break
    return position, done


def _newton_step(gradient: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return an uphill direction, ``(n, d)``, and the Newton decrement, ``(n,)``."""
    values, vectors = torch.linalg.eigh(precision.nan_to_num(0.0, 0.0, 0.0))
    # Absolute eigenvalues lead uphill from saddles too (Dauphin et al. 2014); small ones are bounded.
    scale = values.abs()
    scale = torch.maximum(scale, scale.amax(-1, keepdim=True) * _LEAST_CURVATURE).clamp_min(1e-200)
    along = (vectors.mT @ gradient.nan_to_num(0.0, 0.0, 0.0)[..., None])[..., 0]
    step = (vectors @ (along / scale)[..., None])[..., 0]
    return step, (along.square() / scale).sum(-1)


def _backtracked(
    problem: NewtonProblem, rows: Tensor, position: Tensor, step: Tensor, value: Tensor, decrement: Tensor
) -> tuple[Tensor, Tensor]:
    """Halve the steps until each row's value increases sufficiently; return positions and which rows moved."""
    result, moved = position.clone(), torch.zeros(len(position), dtype=torch.bool, device=position.device)
    waiting, size = torch.arange(len(position), device=position.device), 1.0
    for _ in range(_HALVINGS):
        trial = position[waiting] + size * step[waiting]
        reached = problem.values(trial, rows[waiting])
        good = (reached >= value[waiting] + _ENOUGH * size * decrement[waiting]) & (reached > value[waiting])
        result[waiting[good]], moved[waiting[good]] = trial[good], True
        waiting, size = waiting[~good], size / 2
        if not len(waiting):
            break
    return result, moved


# Stochastic gradients.


def adam_path(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    num_steps: int,
    learning_rate: float,
    *,
    final_share: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    inside: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield the position after each step of Adam (Kingma and Ba 2015) towards a maximum, of the shape of ``start``.

    The learning rate falls linearly to its ``final_share``; ``inside`` maps each position to one that is allowed.
    """
    position = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([position], lr=learning_rate, betas=betas, eps=eps, maximize=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final_share, total_iters=num_steps)
    for _ in range(num_steps):
        position.grad = gradient(position.detach().clone())
        optimizer.step()
        schedule.step()
        if inside is not None:
            with torch.no_grad():
                position.copy_(inside(position))
        yield position.detach().clone()
