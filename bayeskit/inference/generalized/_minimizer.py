"""Minimizers of losses by a batched Newton method, and the information matrices at the minimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from bayeskit.errors import DataError, ShapeError
from bayeskit.extend import newton, one_thread
from bayeskit.inference.generalized._posterior import GibbsPosterior, check_pooled_by_sum, check_pooling
from bayeskit.inference.generalized.losses._loss import Data, FunctionLoss, Loss, columns, taken, unvalidated

# Newton's method for many weightings of the data, or many data sets, in one batch.

_CANDIDATES = 20
_STARTS = 5
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
        found = _minimized(problem, start.expand(rows or 1, -1))
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

    def values(self, position: Tensor, rows: Tensor) -> Tensor:
        """Return minus the loss of some rows, each at its vector, as a :class:`NewtonProblem`."""
        return -self.of(rows).losses(position)

    def derivatives(self, position: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return values and gradients of minus the loss of some rows, and Hessians of the loss."""

        def first(u: Tensor, weights: Tensor | None, data: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, value = grad_and_value(self.one)(u, weights, data)
            return gradient, (value, gradient)

        with warnings.catch_warnings():
            # torch loops over operations it cannot batch, such as second derivatives of the simplex transform.
            warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
            curvature, (value, gradient) = self.of(rows).batched(jacrev(first, has_aux=True), position)
        return -value, -gradient, curvature

    def losses(self, u: Tensor) -> Tensor:
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
    values = torch.stack([problem.losses(u.expand(num_rows, -1)) for u in candidates])
    return candidates[values.argmin(0)]


def _best(problem: _Problem, candidates: Tensor) -> Tensor:
    """Minimise from the best few starting points and return the best minimum."""
    found = _minimized(problem, candidates[problem.losses(candidates).argsort()[:_STARTS]])
    return found.position[found.value.nan_to_num(nan=math.inf).argmin()]


def _minimized(problem: _Problem, start: Tensor) -> Minimum:
    """Minimise the loss, through smoothed versions of decreasing width if it has kinks."""
    loss = problem.loss
    if loss.smoothed(1.0) is loss:
        position, converged = newton(problem, start, start.new_zeros(len(start)))
        return Minimum(position, problem.losses(position), converged)
    position, converged = start, torch.zeros(len(start), dtype=torch.bool, device=start.device)
    path: list[tuple[float, Tensor]] = []
    for step, width in enumerate(WIDTHS):
        width *= _spread(problem, position)
        smooth = replace(problem, loss=loss.smoothed(width))
        position = _ahead(smooth, path, width, position)
        # Except for the last two widths, the minimisation need not be more accurate than the smoothing.
        rough = _CENTRED * (smooth.losses(position) - problem.losses(position)).abs()
        position, converged = newton(smooth, position, 0.0 * rough if step >= len(WIDTHS) - 2 else rough)
        path.append((width, position))
    position = _ahead(problem, path, 0.0, position)
    return Minimum(position, problem.losses(position), converged)


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
    return torch.where((problem.losses(guess) < problem.losses(position))[:, None], guess, position)


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
        :class:`~bayeskit.inference.generalized.losses.Absolute` or a loss with ``smoothed`` then.

    References
    ----------
    White, H. (1982). Maximum likelihood estimation of misspecified models. Econometrica 50, 1-25. Powell, J. L. (1991).
    Estimation of monotonic regression models under quantile restrictions (the curvature of losses with kinks).

    See Also
    --------
    bayeskit.inference.generalized._checks.residual_mismatch : ratios of the two covariances by direction.

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
