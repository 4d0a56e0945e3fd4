"""Control variates and sampling weights for minibatch gradients, which keep their mean and shrink their variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit._core.randomness import one_thread
from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit._logdensity.target import Target
from bayeskit.errors import InitializationError
from bayeskit.inference._optimize import InverseHessian, LBFGSState, lbfgs_path
from bayeskit.inference.samplers._starts import starting_points

_STARTS = 4
_MAX_GRADIENTS = 500  # gradients of all data
_MAX_MEMORY = 40
NUM_REFERENCES = 32  # points at which weights are optimal on average
_UNIFORM = 0.05  # share of uniform probabilities, so that no row has none
_ROWS_AT_ONCE = 4096


class WeightedJoint(Protocol):
    """Log prior and estimated log likelihood of ``u (d,)`` from ``rows (B,)``, weighted if weights are given."""

    def __call__(self, u: Tensor, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return two scalars."""
        ...


class Anchor(NamedTuple):
    """A point with its density and gradient from all data."""

    position: Tensor  # (*batch, d)
    log_density: Tensor  # (*batch,)
    gradient: Tensor  # (*batch, d)

    @classmethod
    def at(cls, target: Target, position: Tensor) -> Anchor:
        """Return the anchors of the full ``target`` at points ``(n, d)``."""
        return cls(position, *target.value_and_grad(position))


@dataclass(frozen=True, eq=False)
class RowEstimate:
    r"""The estimate of a log density at a point from some rows, as one differentiable function.

    With the estimate :math:`\hat h` of the rows, the log density :math:`h` of all data, and an anchor :math:`a`, it is
    :math:`\hat h(u) + h(a) - \hat h(a) + (\nabla h(a) - \nabla \hat h(a)) \cdot (u - a)`, which has the mean
    :math:`h(u)`, as its gradient has the mean :math:`\nabla h(u)`.
    """

    joint: WeightedJoint
    probabilities: Tensor | None = None  # (N,), with which rows are drawn
    anchor: Anchor | None = None  # that does not move

    def __call__(self, u: Tensor, rows: Tensor, *moving: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log prior and the estimated log likelihood; ``moving`` is the anchor of a chain."""
        log_prior, log_likelihood = self._plain(u, rows)
        anchor = Anchor(*moving) if moving else self.anchor
        if anchor is None:
            return log_prior, log_likelihood

        def at_anchor(a: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            value = sum(self._plain(a, rows), a.new_zeros(()))
            return value, (value,)

        gradient, log_density = gradient_and_rest(at_anchor, anchor.position)
        slope = (anchor.gradient - gradient) @ (u - anchor.position)
        return log_prior, log_likelihood + anchor.log_density - log_density + slope

    def _plain(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.probabilities is None:
            return self.joint(u, rows)
        return self.joint(u, rows, 1 / (rows.shape[0] * self.probabilities[rows]))


class NormalAtMode(NamedTuple):
    """A normal approximation at a mode, by the curvature that a search estimated."""

    position: Tensor  # (d,)
    curvature: InverseHessian  # of one search
    scale: Tensor  # (d,)

    def draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw from the normal approximation, ``(num_draws, d)``."""
        if not self.curvature.pairs:  # the search took no step
            return self.position.expand(num_draws, -1)
        return self.position + self.scale * self.curvature.draws(num_draws, generator)[:, 0]


def normal_at_mode(target: Target, generator: torch.Generator, start: Tensor | None = None) -> NormalAtMode:
    """Search for a mode of the full ``target`` from prior draws, or from one ``start (d,)``; return the highest."""
    n = _STARTS if start is None else 1
    points = starting_points(target, n, torch.ones(n).to(target.device, target.dtype), generator, start)
    evaluate = target.evaluator(n, _MAX_GRADIENTS)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        found = evaluate(u, u.new_ones(n))
        return found.log_density, found.gradient

    scale = torch.ones_like(points[0])
    memory = min(_MAX_MEMORY, max(12, 2 * target.dim))
    last: LBFGSState
    with one_thread():
        *_, last = lbfgs_path(value_and_gradient, points, _MAX_GRADIENTS, scale, memory)
    best = last.value.argmax().reshape(1)
    if not bool(last.value[best].isfinite()):
        raise InitializationError("no search for a mode found a finite density; give control=a point of high density")
    return NormalAtMode(last.position[best[0]], last.curvature.of(best), scale)


def optimal_probabilities(
    joint: WeightedJoint, num_rows: int, points: Tensor, anchor: Tensor | None, loops: bool
) -> Tensor:
    r"""Return probabilities of rows ``(N,)`` that minimise the gradient's variance, on average over ``points (k, d)``.

    They are proportional to the root mean square of :math:`|\nabla \ell_i(u) - \nabla \ell_i(a)|` over the points,
    without an anchor of :math:`|\nabla \ell_i(u)|`, mixed with some uniform probability.
    """
    one, nothing = points.new_ones(1), points.new_zeros(1)

    def slope(u: Tensor, row: Tensor) -> Tensor:
        """Return the gradient of the log likelihood of one row: its part that is linear in the weight."""

        def value(v: Tensor) -> tuple[Tensor, tuple[()]]:
            return joint(v, row.reshape(1), one)[1] - joint(v, row.reshape(1), nothing)[1], ()

        return gradient_and_rest(value, u)[0]

    def square(u: Tensor, row: Tensor) -> Tensor:
        change = slope(u, row) if anchor is None else slope(u, row) - slope(anchor, row)
        return change.square().sum()

    rows = torch.arange(num_rows, device=points.device)
    total = points.new_zeros(num_rows)
    with one_thread(), torch.no_grad():
        for u in points:
            if loops:
                total += torch.stack([square(u, row) for row in rows])
            else:
                total += torch.func.vmap(square, in_dims=(None, 0), chunk_size=_ROWS_AT_ONCE)(u, rows)
    size = total.sqrt()
    share = size / size.sum() if bool((size.sum() > 0) & size.sum().isfinite()) else torch.full_like(size, 1 / num_rows)
    return (1 - _UNIFORM) * share + _UNIFORM / num_rows
