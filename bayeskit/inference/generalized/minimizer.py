"""Where a loss is smallest: Newton's method for many weightings of the data, or many data sets, at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, hessian, vmap

from bayeskit._torch import one_thread, validation_kept
from bayeskit.errors import ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss, columns
from bayeskit.inference.generalized.posterior import GibbsPosterior

STEPS = 60
HALVINGS = 24
TOLERANCE = 1e-9
WIDTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the kinks' smoothing, in units of the data's spread


class Minimum(NamedTuple):
    """Where a loss is smallest.

    Attributes
    ----------
    position : Tensor
        Unconstrained, ``(d,)`` or, where there are ``R`` weightings or data sets, ``(R, d)``.
    value : Tensor
        The loss there, ``()`` or ``(R,)``.
    converged : Tensor
        Boolean, ``()`` or ``(R,)``: Newton's decrement is negligible.
    """

    position: Tensor
    value: Tensor
    converged: Tensor


def minimize(
    posterior: GibbsPosterior,
    *,
    weights: Tensor | None = None,
    data: Data | None = None,
    prior_weight: float = 0.0,
    start: Tensor | None = None,
    seed: int = 0,
) -> Minimum:
    """Return the parameter with the smallest loss, in unconstrained coordinates.

    Newton's method with a damped Hessian and a line search, all rows in one batch. Losses with kinks are followed
    through smoothed versions of them, ever closer to the loss itself.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its loss, data and parameter; its weight does not matter, and its prior only by ``prior_weight``.
    weights : Tensor, optional
        Weights of the data, ``(R, n)``: a row each is minimised.
    data : Tensor or tuple of Tensor, optional
        Other data sets, ``(R, n, ...)``, in place of the posterior's own.
    prior_weight : float, default 0.0
        Of minus the log prior density (over unconstrained space), which is added.
    start : Tensor, optional
        Where to begin, ``(d,)`` or ``(R, d)``. By default the best of some draws from the prior and zero for the
        posterior's own data; then the minimum of those for all weightings.
    seed : int, default 0
        Of these draws.

    Returns
    -------
    Minimum

    Raises
    ------
    ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> median = minimize(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x))
    >>> round(median.position.item(), 4), bool(median.converged)
    (2.0, True)
    """
    rows = _num_rows(posterior, weights, data)
    own = _Problem(posterior, posterior.loss, prior_weight)
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        if start is None:
            first = _best_start(own, posterior, seed)
            # Weightings of one data set have their minima near one another; other data sets need not.
            start = _descend(own, first[None], None, None).position[0] if data is None and rows else first
        start = start.to(posterior.dtype).expand(rows or 1, -1)
        if start.shape[-1] != posterior.dim:
            raise ShapeError(f"start must be (d,) or (R, d) with d = {posterior.dim}, not {tuple(start.shape)}")
        found = _descend(own, start, weights, data)
    return found if rows else Minimum(*(x[0] for x in found))


def _num_rows(posterior: GibbsPosterior, weights: Tensor | None, data: Data | None) -> int:
    """Return the number of weightings or data sets; zero where there is only the posterior's own."""
    sizes = set()
    if weights is not None:
        n = posterior.num_data if data is None else columns(data)[0].shape[1]
        if weights.dim() != 2 or weights.shape[1] != n:
            raise ShapeError(f"weights must be (R, {n}), not {tuple(weights.shape)}")
        sizes.add(len(weights))
    if data is not None:
        own = columns(posterior.data)
        if len(own) != len(columns(data)) or any(
            x.dim() != y.dim() + 1 or x.shape[2:] != y.shape[1:] for x, y in zip(columns(data), own, strict=True)
        ):
            raise ShapeError(
                f"data sets must be stacked, (R, n, ...), not {[tuple(x.shape) for x in columns(data)]} for data of "
                f"shapes {[tuple(y.shape) for y in own]}"
            )
        sizes.update(len(x) for x in columns(data))
    if len(sizes) > 1:
        raise ShapeError(f"weights and data must have one number of rows, not {sorted(sizes)}")
    return sizes.pop() if sizes else 0


@dataclass(frozen=True)
class _Problem:
    """What is minimised, as a function of one vector, one weighting, one data set."""

    posterior: GibbsPosterior
    loss: Loss
    prior_weight: float

    def __call__(self, u: Tensor, weights: Tensor | None, data: Any) -> Tensor:
        parameter = self.posterior.prior.parameter(u)
        value = self.loss.total(parameter, self.posterior.data if data is None else data, weights)
        if self.prior_weight:
            value = value - self.prior_weight * self.posterior.prior.log_density(u)
        return value

    def batched(self, function: Callable[..., Any], u: Tensor, weights: Tensor | None, data: Any) -> Any:
        """Apply a transform of this function to each row."""
        dims = (0, None if weights is None else 0, None if data is None else 0)
        return vmap(function, in_dims=dims)(u, weights, data)


def _best_start(problem: _Problem, posterior: GibbsPosterior, seed: int) -> Tensor:
    draws = posterior.prior.start(20, seed).to(posterior.dtype)
    candidates = torch.cat([torch.zeros_like(draws[:1]), draws])
    values = problem.batched(problem, candidates, None, None)
    return candidates[values.nan_to_num(nan=math.inf).argmin()]


def _descend(problem: _Problem, start: Tensor, weights: Tensor | None, data: Any) -> Minimum:
    """Minimise the loss, or ever less smoothed versions of it."""
    loss = problem.loss
    if loss.smoothed(1.0) is loss:
        return _newton(problem, start, weights, data)
    position = start
    for width in WIDTHS:
        found = _newton(replace(problem, loss=loss.smoothed(width * _spread(problem, data))), position, weights, data)
        position = found.position
    return Minimum(position, problem.batched(problem, position, weights, data), found.converged)


def _spread(problem: _Problem, data: Any) -> float:
    """Return a typical size of the outcomes' deviations, the scale on which kinks are sharp."""
    outcome = columns(problem.posterior.data if data is None else data)[-1].double()
    return max(float((outcome - outcome.median()).abs().mean()), 1e-12)


def _newton(problem: _Problem, start: Tensor, weights: Tensor | None, data: Any) -> Minimum:
    position = start.clone()
    done = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    value = problem.batched(problem, position, weights, data)
    for _ in range(STEPS):
        gradient, value = problem.batched(grad_and_value(problem), position, weights, data)
        curvature = problem.batched(hessian(problem), position, weights, data)
        step, decrement = _step(gradient, curvature)
        done = done | (decrement <= TOLERANCE * (1 + value.abs()) * 1e-3)
        if bool(done.all()):
            break
        position, moved = _search(problem, position, step, value, decrement, ~done, weights, data)
        done = done | (~moved & (decrement <= 1e-6 * (1 + value.abs())))
        if not bool(moved.any()):
            break
    return Minimum(position, problem.batched(problem, position, weights, data), done)


def _step(gradient: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Return a direction of descent, ``(R, d)``, and Newton's decrement, ``(R,)``."""
    values, vectors = torch.linalg.eigh(curvature.nan_to_num(0.0, 0.0, 0.0))
    # Saddles are left by the curvature's size; flat directions are not trusted beyond a part of the largest.
    scale = values.abs()
    scale = torch.maximum(scale, scale.amax(-1, keepdim=True) * 1e-10).clamp_min(1e-12)
    along = (vectors.mT @ gradient.nan_to_num(0.0, 0.0, 0.0)[..., None])[..., 0]
    step = -(vectors @ (along / scale)[..., None])[..., 0]
    return step, (along.square() / scale).sum(-1)


def _search(
    problem: _Problem,
    position: Tensor,
    step: Tensor,
    value: Tensor,
    decrement: Tensor,
    active: Tensor,
    weights: Tensor | None,
    data: Any,
) -> tuple[Tensor, Tensor]:
    """Halve the steps of rows until each lowers its loss enough; return positions, and which rows have moved."""
    size = torch.ones_like(value)
    waiting = active.clone()
    result, moved = position.clone(), torch.zeros_like(active)
    for _ in range(HALVINGS):
        trial = position + size[:, None] * step
        reached = problem.batched(problem, trial, weights, data)
        good = waiting & (reached <= value - 1e-4 * size * decrement) & (reached < value)
        result = torch.where(good[:, None], trial, result)
        moved, waiting = moved | good, waiting & ~good
        if not bool(waiting.any()):
            break
        size = torch.where(waiting, size / 2, size)
    return result, moved
