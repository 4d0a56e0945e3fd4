"""Loss minimisers by a batched Newton method, and the information matrices at the minimiser."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from bayeskit.core.randomness import one_thread
from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, FunctionLoss, Loss, columns, taken, unvalidated
from bayeskit.inference.generalized.posterior import GibbsPosterior, check_pooled_by_sum, check_pooling

__all__ = [
    "BANDWIDTH",
    "InformationMatrices",
    "Minimum",
    "Total",
    "WIDTHS",
    "hessian_of_loss",
    "influence",
    "information_matrices",
    "minimize",
    "residual_spread",
    "smooth_total",
]

# Newton's method for many weightings of the data, or many data sets, in one batch.

_STEPS = 60
_HALVINGS = 24
_CANDIDATES = 20
_STARTS = 5
_TOLERANCE = 1e-12
_NEAR = 1e-3
_CENTRED = 0.05  # tolerance of early smoothed versions, relative to the smoothing error of the loss
WIDTHS = tuple(0.3 * 5.0**-k for k in range(9))  # smoothing widths of kinks, in units of the residual scale


class Minimum(NamedTuple):
    """Minimiser of a loss.

    Attributes
    ----------
    position : Tensor
        Unconstrained minimiser, ``(d,)``, or ``(R, d)`` for ``R`` weightings or data sets.
    value : Tensor
        Loss at the minimiser, ``()`` or ``(R,)``.
    converged : Tensor
        Boolean, ``()`` or ``(R,)``: whether the Newton decrement and the Newton step are negligible.
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
    """Minimise the total loss over unconstrained parameters.

    Newton's method with a damped Hessian and line search, for all rows in one batch. A loss with kinks is replaced by
    smoothed versions of decreasing width, with extrapolated starting points. The minimum may be local.

    Parameters
    ----------
    posterior : GibbsPosterior
        Loss, data and parameter space; its weight has no effect, its prior only through ``prior_weight``.
    weights : Tensor, optional
        Weights of the data, ``(R, n)``; each row defines a minimisation.
    data : Tensor or tuple of Tensor, optional
        Data sets ``(R, n, ...)`` in place of the posterior's data; each defines a minimisation.
    prior_weight : float, default 0.0
        Weight of minus the log prior density (over unconstrained space), which is added to the loss.
    start : Tensor, optional
        Starting point, ``(d,)`` or ``(R, d)``. By default the best five of zero and 20 prior draws for the posterior's
        data. Weightings start from the resulting minimum, each data set from the best of it and the 21 candidates.

    Raises
    ------
    SettingsError
        If losses are not pooled by the sum or mean.
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
    check_pooling(posterior)
    rows = _num_rows(posterior, weights, data)
    with one_thread(), unvalidated(), torch.no_grad():
        problem = _Problem(posterior, posterior.loss, prior_weight, weights, data)
        start = _start(problem, seed) if start is None else start.to(posterior.dtype)
        if start.dim() not in (1, 2) or start.shape[-1] != posterior.dim or start.shape[:-1] not in ((), (rows or 1,)):
            raise ShapeError(
                f"start must be ({posterior.dim},){f' or ({rows}, {posterior.dim})' if rows else ''}, "
                f"not {tuple(start.shape)}"
            )
        found = _descend(problem, start.expand(rows or 1, -1))
    return found if rows else Minimum(*(x[0] for x in found))


def residual_spread(posterior: GibbsPosterior, u: Tensor, data: Data | None = None) -> Tensor:
    """Return the residual scale, the median absolute residual at ``u (d,)``, positive, ``()``."""
    given = posterior.loss.residuals(posterior.prior.parameter(u), posterior.data if data is None else data)
    size = given.to(posterior.dtype).abs()
    # The median is robust; the mean is a fallback if most residuals are zero.
    return torch.maximum(size.median(), 1e-3 * size.mean()).clamp_min(1e-12)


def _num_rows(posterior: GibbsPosterior, weights: Tensor | None, data: Data | None) -> int:
    """Return the number of weightings or data sets; zero if none are given."""
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
    """Objective of the minimisation: the loss of each row of weights or data sets as a function of one vector."""

    posterior: GibbsPosterior
    loss: Loss
    prior_weight: float
    weights: Tensor | None
    data: Any

    def of(self, rows: Tensor) -> _Problem:
        """Return the problem restricted to some rows."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, weights=weights, data=None if self.data is None else taken(self.data, rows))

    def one(self, u: Tensor, weights: Tensor | None, data: Any) -> Tensor:
        """Return the loss of one row at one vector ``(d,)``."""
        data = self.posterior.data if data is None else data
        value = self.loss.total(self.posterior.prior.parameter(u), data, weights)
        return value - self.prior_weight * self.posterior.prior.log_density(u) if self.prior_weight else value

    def derivatives(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, gradients and Hessians at each row's vector, ``(R, d) -> (R), (R, d), (R, d, d)``."""

        def first(u: Tensor, weights: Tensor | None, data: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, value = grad_and_value(self.one)(u, weights, data)
            return gradient, (value, gradient)

        with warnings.catch_warnings():
            # torch loops over operations it cannot batch, such as second derivatives of the simplex transform.
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            curvature, (value, gradient) = self.batched(jacrev(first, has_aux=True), u)
        return value, gradient, curvature

    def values(self, u: Tensor) -> Tensor:
        """Return the loss at each row's vector, ``(R, d) -> (R)``, with nan replaced by infinity."""
        value: Tensor = self.batched(self.one, u)
        return value.nan_to_num(nan=math.inf, posinf=math.inf)

    def batched(self, function: Callable[..., Any], u: Tensor) -> Any:
        """Apply a transform of :meth:`one` to each row."""
        dims = (0, None if self.weights is None else 0, None if self.data is None else 0)
        return vmap(function, in_dims=dims)(u, self.weights, self.data)


def _start(problem: _Problem, seed: int) -> Tensor:
    """Return the starting point, ``(d,)`` or, for data sets, ``(R, d)``."""
    own = replace(problem, weights=None, data=None)
    draws = problem.posterior.prior.start(_CANDIDATES, seed).to(problem.posterior.dtype)
    candidates = torch.cat([torch.zeros_like(draws[:1]), draws])
    if problem.weights is None and problem.data is None:
        return _best(own, candidates)
    # Minima of weightings of one data set are close to one another; those of different data sets need not be.
    candidates = torch.cat([_best(own, candidates)[None], candidates])
    if problem.data is None:
        return candidates[0]
    num_rows = len(columns(problem.data)[0])
    values = torch.stack([problem.values(u.expand(num_rows, -1)) for u in candidates])
    return candidates[values.argmin(0)]


def _best(problem: _Problem, candidates: Tensor) -> Tensor:
    """Minimise from the best few starting points and return the best minimum."""
    found = _descend(problem, candidates[problem.values(candidates).argsort()[:_STARTS]])
    return found.position[found.value.nan_to_num(nan=math.inf).argmin()]


def _descend(problem: _Problem, start: Tensor) -> Minimum:
    """Minimise the loss, through smoothed versions of decreasing width if it has kinks."""
    loss = problem.loss
    if loss.smoothed(1.0) is loss:
        return _newton(problem, start, start.new_zeros(len(start)))
    position, converged = start, torch.zeros(len(start), dtype=torch.bool, device=start.device)
    path: list[tuple[float, Tensor]] = []
    for step, width in enumerate(WIDTHS):
        width *= _spread(problem, position)
        smooth = replace(problem, loss=loss.smoothed(width))
        position = _ahead(smooth, path, width, position)
        # Except for the last two widths, the minimisation need not be more accurate than the smoothing.
        rough = _CENTRED * (smooth.values(position) - problem.values(position)).abs()
        position, _, converged = _newton(smooth, position, 0.0 * rough if step >= len(WIDTHS) - 2 else rough)
        path.append((width, position))
    position = _ahead(problem, path, 0.0, position)
    return Minimum(position, problem.values(position), converged)


def _spread(problem: _Problem, position: Tensor) -> float:
    """Return the residual scale, averaged over rows."""
    each = problem.batched(lambda u, weights, data: residual_spread(problem.posterior, u, data), position)
    return float(each.mean())


def _ahead(problem: _Problem, path: list[tuple[float, Tensor]], width: float, position: Tensor) -> Tensor:
    """Extrapolate the minima linearly to a smaller width, for rows in which that lowers the loss."""
    if len(path) < 2 or path[-2][0] <= path[-1][0]:
        return position
    (before, first), (last, second) = path[-2:]
    guess = second + (width - last) / (last - before) * (second - first)
    return torch.where((problem.values(guess) < problem.values(position))[:, None], guess, position)


def _newton(problem: _Problem, start: Tensor, missing: Tensor) -> Minimum:
    """Minimise a smooth loss until the Newton decrement is at most ``missing (R,)`` or negligible."""
    position = start.clone()
    done = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    active = torch.arange(len(start), device=start.device)
    for _ in range(_STEPS):
        rows = problem.of(active)
        value, gradient, curvature = rows.derivatives(position[active])
        step, decrement = _step(gradient, curvature)
        # A loss that decreases to an infimum at infinity has a small decrement but a long step.
        near = step.norm(dim=-1) <= _NEAR * (1 + position[active].norm(dim=-1))
        stop = (near & (decrement <= _TOLERANCE * (1 + value.abs()))) | (decrement <= missing[active])
        done[active] = stop
        last = position[active] + step
        lower = stop & (rows.values(last) <= value)
        position[active[lower]] = last[lower]
        go = (~stop).nonzero()[:, 0]
        if not len(go):
            break
        active, value, step, decrement = active[go], value[go], step[go], decrement[go]
        trial, moved = _search(problem.of(active), position[active], step, value, decrement)
        position[active] = trial
        # A row without a decrease by the line search has converged to within rounding.
        done[active] = ~moved & (decrement <= 1e-6 * (1 + value.abs()))
        active = active[moved]
        if not len(active):
            break
    return Minimum(position, problem.values(position), done)


def _step(gradient: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Return a descent direction, ``(R, d)``, and the Newton decrement, ``(R,)``."""
    values, vectors = torch.linalg.eigh(curvature.nan_to_num(0.0, 0.0, 0.0))
    # Absolute eigenvalues give a descent direction at saddles; small ones are bounded relative to the largest.
    scale = values.abs()
    scale = torch.maximum(scale, scale.amax(-1, keepdim=True) * 1e-10).clamp_min(1e-200)
    along = (vectors.mT @ gradient.nan_to_num(0.0, 0.0, 0.0)[..., None])[..., 0]
    step = -(vectors @ (along / scale)[..., None])[..., 0]
    return step, (along.square() / scale).sum(-1)


def _search(
    problem: _Problem, position: Tensor, step: Tensor, value: Tensor, decrement: Tensor
) -> tuple[Tensor, Tensor]:
    """Backtrack until each row's loss decreases sufficiently; return positions and which rows moved."""
    result, moved = position.clone(), torch.zeros(len(position), dtype=torch.bool, device=position.device)
    waiting, size = torch.arange(len(position), device=position.device), 1.0
    for _ in range(_HALVINGS):
        trial = position[waiting] + size * step[waiting]
        reached = problem.of(waiting).values(trial)
        good = (reached <= value[waiting] - 1e-4 * size * decrement[waiting]) & (reached < value[waiting])
        result[waiting[good]], moved[waiting[good]] = trial[good], True
        waiting, size = waiting[~good], size / 2
        if not len(waiting):
            break
    return result, moved


# Information matrices at the minimiser: curvature, gradient covariance and their sandwich.

Total = Callable[..., Tensor]
BANDWIDTH = 0.75
_NORMAL_MEDIAN = 0.6745  # median absolute value of a standard normal variable


class InformationMatrices(NamedTuple):
    """Curvature and gradient covariance of the loss of one datum, in unconstrained coordinates.

    Attributes
    ----------
    position : Tensor
        Minimiser of the loss, ``(d,)``.
    gradient_covariance : Tensor
        ``I``, covariance of the gradient of one datum's loss, ``(d, d)``; for a loss that is not pointwise, of the
        derivative of the total gradient with respect to the weight of a datum.
    mean_hessian : Tensor
        ``J``, Hessian of the total loss divided by ``n``, ``(d, d)``.
    """

    position: Tensor
    gradient_covariance: Tensor
    mean_hessian: Tensor
    num_data: int

    @property
    def sandwich(self) -> Tensor:
        """Asymptotic covariance of the minimiser, ``J^-1 I J^-1 / n``, ``(d, d)``."""
        half = torch.linalg.solve(self.mean_hessian, self.gradient_covariance)
        return torch.linalg.solve(self.mean_hessian, half.mT) / self.num_data

    @property
    def posterior_covariance(self) -> Tensor:
        """Asymptotic covariance of the posterior with weight one, ``J^-1 / n``, ``(d, d)``."""
        return torch.linalg.inv(self.mean_hessian) / self.num_data


def influence(posterior: GibbsPosterior, position: Tensor, data: Data | None = None) -> Tensor:
    """Return derivatives of the loss gradient at ``position (d,)`` with respect to data weights, ``(n, d)``."""
    data = posterior.data if data is None else data
    ones = torch.ones(len(columns(data)[0]), dtype=posterior.dtype, device=posterior.device)

    def gradient(weights: Tensor) -> Tensor:
        return grad(_total(posterior, posterior.loss, data))(position, weights)  # type: ignore[no-any-return]

    return jacrev(gradient)(ones).mT  # type: ignore[no-any-return]


def hessian_of_loss(
    posterior: GibbsPosterior, position: Tensor, data: Data | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the mean Hessian of the loss at ``position (d,)``, ``(d, d)``; a kernel estimate if it has kinks."""
    data = posterior.data if data is None else data
    # For a loss with kinks: Richardson extrapolation of Hessians at two smoothing widths that decrease with n. For the
    # median of 200 data the relative standard error is about 0.1, and the bias about -1/7 if the density has a kink at
    # the median.
    # Reverse mode twice, because forward mode triggers deprecation warnings in torch.
    result: Tensor = jacrev(grad(smooth_total(posterior, position, data)))(position, weights) / len(columns(data)[0])
    return result


def smooth_total(posterior: GibbsPosterior, position: Tensor, data: Data | None = None) -> Total:
    """Return the total loss ``(u (d,), weights (n,) or None) -> ()``, smoothed if it has kinks."""
    data = posterior.data if data is None else data
    if posterior.loss.smoothed(1.0) is posterior.loss:
        return _total(posterior, posterior.loss, data)
    scale = residual_spread(posterior, position, data).detach() / _NORMAL_MEDIAN
    width = BANDWIDTH * scale * len(columns(data)[0]) ** -0.2  # stays a tensor: data sets may be batched
    narrow = _total(posterior, posterior.loss.smoothed(width), data)  # type: ignore[arg-type]
    wide = _total(posterior, posterior.loss.smoothed(2 * width), data)  # type: ignore[arg-type]
    # For square-root smoothing, the Hessian of the combination is a nonnegative kernel with finite variance; those of
    # the two terms have infinite variance.
    return lambda u, weights=None: (4 * narrow(u, weights) - wide(u, weights)) / 3


def information_matrices(posterior: GibbsPosterior, at: Tensor | None = None) -> InformationMatrices:
    r"""Return the curvature and gradient covariance of the loss at its minimiser.

    The asymptotic covariance of the minimiser is :math:`J^{-1} I J^{-1} / n`, that of the posterior with weight one is
    :math:`J^{-1} / n`. One weight makes them equal only if ``I`` is a multiple of ``J``.

    Parameters
    ----------
    at : Tensor, optional
        Unconstrained vector, ``(d,)``; by default the minimiser of the loss.

    Raises
    ------
    SettingsError
        If losses are not pooled by the sum.
    ShapeError
        If ``at`` is not ``(d,)``.
    DataError
        If the mean Hessian is not positive definite, for instance for a user function with kinks; use
        :class:`~bayeskit.inference.generalized.losses.prediction.Absolute` or a loss with ``smoothed`` then.

    References
    ----------
    White, H. (1982). Maximum likelihood estimation of misspecified models. Econometrica 50, 1-25. Powell, J. L. (1991).
    Estimation of monotonic regression models under quantile restrictions (the curvature of losses with kinks).

    See Also
    --------
    bayeskit.inference.generalized.checks.residual_mismatch : ratios of the two covariances by direction.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    >>> found = information_matrices(GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x))
    >>> found.mean_hessian.item(), round(found.gradient_covariance.item(), 4)  # one, and the variance of the data
    (1.0, 4.6667)
    """
    check_pooled_by_sum(posterior, "curvature and gradient covariance are")
    if at is None:
        at = minimize(posterior).position
    if tuple(at.shape) != (posterior.dim,):
        raise ShapeError(f"at must be ({posterior.dim},), not {tuple(at.shape)}")
    with one_thread(), unvalidated():
        each, mean_hessian = influence(posterior, at), hessian_of_loss(posterior, at)
    centred = each - each.mean(0)
    if not bool((torch.linalg.eigvalsh(mean_hessian) > 0).all()):
        raise DataError(
            "the mean Hessian of the loss is not positive definite at its minimiser: if the loss has kinks, use "
            "losses.Absolute(predict=...) or losses.Pinball(level, predict=...), or subclass PointwiseLoss with "
            "smoothed(); otherwise the data may not identify all unknowns, see propriety_check"
            if isinstance(posterior.loss, FunctionLoss)
            else "the mean Hessian of the loss is not positive definite at its minimiser: the data do not identify all "
            "unknowns, or the search ended on a plateau of a bounded loss; run propriety_check, or give "
            "at=minimize(posterior, start=...).position"
        )
    return InformationMatrices(at, centred.mT @ centred / len(each), mean_hessian, len(each))


def _total(posterior: GibbsPosterior, loss: Loss, data: Any) -> Total:
    return lambda u, weights=None: loss.total(posterior.prior.parameter(u), data, weights)
