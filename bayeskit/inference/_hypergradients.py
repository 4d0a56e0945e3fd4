"""Hypergradients: how a loss at the solution of an optimisation changes with the numbers that this depends on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayeskit._core.inputs import check_memory, whole_number
from bayeskit._core.texts import short_repr
from bayeskit.errors import InitializationError, SettingsError, ShapeError

_METHODS = ("cholesky", "conjugate_gradients", "neumann")
#: Relative decrease that a step along a descent direction has to reach, and largest number of halvings of the step.
_ENOUGH, _MAX_HALVINGS = 1e-4, 40
#: Products for the largest eigenvalue, of conjugate gradients for each parameter, and least number of the latter.
_POWERS, _PRODUCTS, _LEAST_PRODUCTS = 100, 10, 100
#: Relative residual of the linear system above which a hypergradient is not trusted, in double precision.
_MAX_RESIDUAL = 1e-6


@dataclass(frozen=True, eq=False)
class Hypergradient:
    """A gradient by hyperparameters, and the solution of the inner problem; made by :func:`hypergradient`.

    Attributes
    ----------
    gradient : Tensor
        Of the outer loss at the solution by the hyperparameters, in their shape.
    parameters : Tensor
        The solution of the inner problem, in the shape of the start.
    outer : float
        The outer loss at the solution.
    inner : float
        The inner loss at the solution.
    residual : float
        Norm of what is left of the linear system over that of its right side: zero if solved.
    num_products : int
        Products of the Hessian with a vector.
    warnings : tuple of str
        Reasons not to rely on the gradient, each with its remedy.

    Examples
    --------
    The series for the inverse of 1 and 9 needs many terms for 1:

    >>> import torch
    >>> from bayeskit.inference._hypergradients import hypergradient
    >>> start, c = torch.zeros(2, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    >>> bend = torch.tensor([1.0, 9.0], dtype=torch.float64)
    >>> def inner(x, c):
    ...     return 0.5 * (bend * x.square()).sum() - c * x.sum()
    >>> def outer(x, c):
    ...     return x.sum()
    >>> exact = hypergradient(inner, outer, start, c)
    >>> series = hypergradient(inner, outer, start, c, method="neumann", num_terms=10)
    >>> round(float(exact.gradient), 4), round(float(series.gradient), 4), series.trusted
    (1.1111, 0.8032, False)
    """

    gradient: Tensor
    parameters: Tensor
    outer: float
    inner: float
    residual: float
    num_products: int
    warnings: tuple[str, ...] = ()

    __repr__ = short_repr

    @property
    def trusted(self) -> bool:
        """True if the linear system was solved."""
        return not self.warnings and bool(self.gradient.isfinite().all())


def hypergradient(
    inner: Callable[[Tensor, Tensor], Tensor],
    outer: Callable[[Tensor, Tensor], Tensor],
    parameters: Tensor,
    hyperparameters: Tensor,
    *,
    method: Literal["cholesky", "conjugate_gradients", "neumann"] = "cholesky",
    num_terms: int = 500,
    max_steps: int = 100,
) -> Hypergradient:
    r"""Return the gradient of an outer loss at the minimum of an inner one by the hyperparameters.

    With :math:`\theta^*(\lambda) = \arg\min_\theta f(\theta, \lambda)` and the outer loss :math:`g`, the implicit
    function theorem gives

    .. math::
       \frac{d g}{d \lambda} = \frac{\partial g}{\partial \lambda}
       - \frac{\partial^2 f}{\partial \lambda\, \partial \theta}
       \left[\frac{\partial^2 f}{\partial \theta^2}\right]^{-1} \frac{\partial g}{\partial \theta}

    at :math:`\theta^*`, where the gradient of :math:`f` by :math:`\theta` vanishes. The minimum is found by Newton's
    method with a line search, from ``parameters``. No step of an optimiser is kept in memory.

    Parameters
    ----------
    inner, outer : callable
        Losses ``(parameters, hyperparameters) -> scalar``, of torch operations; the inner one is twice differentiable.
    parameters : Tensor
        Start of the search, of any shape, with a positive definite Hessian from there to the minimum.
    hyperparameters : Tensor
        Of any shape. For a positive one, give its logarithm, and the gradient is by the logarithm.
    method : {"cholesky", "conjugate_gradients", "neumann"}, default "cholesky"
        How the linear system is solved: from the whole Hessian, which takes one product for each parameter, from
        products until it is solved, or by the first ``num_terms`` terms of the series
        :math:`\alpha \sum_k (I - \alpha H)^k`, with :math:`1 / \alpha` the largest eigenvalue of the Hessian ``H``.
        The series is there to be compared: it needs several times as many terms as the condition number of ``H``, and
        a truncated one is biased towards zero in the flat directions.
    num_terms : int, default 500
        For "neumann".
    max_steps : int, default 100
        Of Newton's method; with 0, ``parameters`` have to be the minimum.

    Returns
    -------
    Hypergradient
        Not trusted if the system is not solved, as by a series of too few terms.

    Raises
    ------
    InitializationError
        If a loss is not finite, the Hessian of the inner loss is not positive definite, or the gradient of the inner
        loss does not vanish after ``max_steps``.
    ShapeError
        If a loss is no scalar.
    SettingsError
        If the method is unknown, a count is too small, or the Hessian does not fit into memory.

    References
    ----------
    Bengio, Y. (2000). Gradient-based optimization of hyperparameters. Neural Computation 12, 1889-1900.
    Pedregosa, F. (2016). Hyperparameter optimization with approximate gradient. International Conference on Machine
    Learning, 737-746.
    Lorraine, J., Vicol, P., Duvenaud, D. (2020). Optimizing millions of hyperparameters by implicit differentiation.
    International Conference on Artificial Intelligence and Statistics, 1540-1552.

    Examples
    --------
    The minimum of ``(x - 1)**2 + c x**2`` is ``1 / (1 + c)``, the derivative of its square by ``log c`` at ``c = 1`` is
    ``-1 / 4``:

    >>> import torch
    >>> from bayeskit.inference._hypergradients import hypergradient
    >>> start, log_c = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    >>> found = hypergradient(lambda x, log_c: (x - 1) ** 2 + log_c.exp() * x**2, lambda x, log_c: x**2, start, log_c)
    >>> float(found.parameters), float(found.gradient)
    (0.5, -0.25)
    """
    if method not in _METHODS:
        raise SettingsError(f"method must be one of {', '.join(map(repr, _METHODS))}, not {method!r}")
    num_terms, max_steps = whole_number("num_terms", num_terms, 1), whole_number("max_steps", max_steps, 0)
    if method == "cholesky":
        m = parameters.numel()
        check_memory(f"the Hessian has {m} x {m} entries: their number", m * m, 2 * parameters.element_size())
    fixed = hyperparameters.detach().to(parameters)
    with torch.enable_grad():
        near = _minimum(inner, parameters.detach(), fixed, method, max_steps)
        theta, free = near.theta, fixed.clone().requires_grad_()
        loss = _scalar("outer", outer(theta, free))
        by_theta, direct = _gradients(loss, [theta, free])
        if method == "neumann":
            shift = near.by_series(by_theta, num_terms)
        else:
            shift = near.solved(by_theta)
        left = by_theta - near.product(shift)
        (slope,) = _gradients(_scalar("inner", inner(theta, free)), [theta], create_graph=True)
        (indirect,) = _gradients((slope * shift).sum(), [free])
    size = float(by_theta.norm())
    residual = float(left.norm()) / size if size > 0 else 0.0
    warnings = []
    if not residual <= max(_MAX_RESIDUAL, math.sqrt(torch.finfo(left.dtype).eps)):
        after = f"after {num_terms} terms of the series" if method == "neumann" else f"by method={method!r}"
        warnings.append(
            f"{after}, {residual:.2g} of the right side are left over, so the gradient is wrong by an unknown amount; "
            f"remedy: method={'conjugate_gradients' if method == 'neumann' else 'cholesky'!r}"
        )
    return Hypergradient(
        direct - indirect,
        theta.detach(),
        float(loss.detach()),
        near.value,
        residual,
        near.num_products,
        tuple(warnings),
    )


class _Place:
    """The inner loss at one vector of parameters: value, gradient, and products with the Hessian."""

    def __init__(
        self, inner: Callable[[Tensor, Tensor], Tensor], theta: Tensor, fixed: Tensor, dense: bool, count: int
    ) -> None:
        self.theta = theta.clone().requires_grad_()
        loss = _scalar("inner", inner(self.theta, fixed))
        (self._slope,) = _gradients(loss, [self.theta], create_graph=True)
        self.value, self.gradient, self.num_products = float(loss.detach()), self._slope.detach(), count
        self._dense = dense
        self._factor: Tensor | None = None

    def product(self, v: Tensor) -> Tensor:
        """Return the Hessian times a direction, in the shape of the parameters."""
        self.num_products += 1
        if not self._slope.requires_grad:
            return torch.zeros_like(v)
        (found,) = _gradients(self._slope, [self.theta], v, retain_graph=True)
        return found

    def solved(self, b: Tensor) -> Tensor:
        """Return the inverse Hessian times ``b``; InitializationError where it is not positive definite."""
        return self._by_factor(b) if self._dense else self._by_conjugate_gradients(b)

    def _by_factor(self, b: Tensor) -> Tensor:
        if self._factor is None:
            eye = torch.eye(b.numel(), dtype=b.dtype, device=b.device)
            hessian = torch.stack([self.product(row.reshape(b.shape)).flatten() for row in eye])
            hessian = 0.5 * (hessian + hessian.T)
            self._scale = hessian.diagonal().rsqrt()
            self._factor, failed = torch.linalg.cholesky_ex(self._scale[:, None] * hessian * self._scale)
            # A singular matrix may be factorised for its rounding errors.
            definite = not bool(failed) and bool(self._factor.isfinite().all())
            if not (definite and float(self._factor.diagonal().square().min()) > len(eye) * torch.finfo(b.dtype).eps):
                raise self._not_definite(float(torch.linalg.eigvalsh(hessian.nan_to_num()).min()))
        right = (self._scale * b.flatten()).unsqueeze(-1)
        return (self._scale * torch.cholesky_solve(right, self._factor)[:, 0]).reshape(b.shape)

    def _by_conjugate_gradients(self, b: Tensor) -> Tensor:
        found, left = torch.zeros_like(b), b.clone()
        direction, square = left, float(left.square().sum())
        enough = torch.finfo(b.dtype).eps ** 1.6 * square
        for _ in range(max(_PRODUCTS * b.numel(), _LEAST_PRODUCTS)):
            if square <= enough:
                break
            image = self.product(direction)
            bend = float((direction * image).sum())
            if not bend > 0:
                raise self._not_definite(bend / float(direction.square().sum()))
            found = found + square / bend * direction
            left = left - square / bend * image
            before, square = square, float(left.square().sum())
            direction = left + square / before * direction
        return found

    def by_series(self, b: Tensor, num_terms: int) -> Tensor:
        """Return the first terms of the series of the inverse Hessian times ``b``."""
        top = torch.ones_like(b)
        for _ in range(_POWERS):
            top = top / top.norm()
            top = self.product(top)
        scale = 1 / float(top.norm())
        found, term = torch.zeros_like(b), scale * b
        for _ in range(num_terms):
            found = found + term
            term = term - scale * self.product(term)
        return found

    def _not_definite(self, curvature: float) -> InitializationError:
        return InitializationError(
            f"the Hessian of the inner loss is not positive definite where the loss is {self.value:.6g}: it has a "
            f"direction of curvature {curvature:.3g}; remedy: start closer to the minimum, or add a penalty to the loss"
        )


def _minimum(
    inner: Callable[[Tensor, Tensor], Tensor], start: Tensor, fixed: Tensor, method: str, max_steps: int
) -> _Place:
    """Return the minimum by Newton's method, until rounding keeps steps from becoming shorter."""
    dense, eps = method == "cholesky", torch.finfo(start.dtype).eps
    place = _Place(inner, start, fixed, dense, 0)
    if not (math.isfinite(place.value) and bool(place.gradient.isfinite().all())):
        raise InitializationError(
            "the inner loss or its gradient is not finite at the given parameters; start elsewhere"
        )
    step = -place.solved(place.gradient)
    expected = -float((place.gradient * step).sum())
    for _ in range(max_steps):
        if expected <= eps**1.8 * abs(place.value):
            break
        rounding, length = 16 * eps * abs(place.value), 1.0
        for _ in range(_MAX_HALVINGS):
            tried = _Place(inner, place.theta.detach() + length * step, fixed, dense, place.num_products)
            if tried.value <= place.value - _ENOUGH * length * expected + rounding:
                break
            length *= 0.5
        else:
            break
        new = -tried.solved(tried.gradient)
        left = -float((tried.gradient * new).sum())
        if left > 0.1 * expected and expected <= rounding:
            place.num_products = tried.num_products
            break
        place, step, expected = tried, new, left
    distance, size = float(step.norm()), float(place.theta.detach().norm())
    if expected > eps * abs(place.value) and distance > math.sqrt(eps) * size:
        raise InitializationError(
            f"the gradient of the inner loss does not vanish after {max_steps} steps of Newton's method: its norm is "
            f"{float(place.gradient.norm()):.3g}, and the next step has length {distance:.3g}; remedy: raise "
            "max_steps, or start closer to the minimum"
        )
    return place


def _scalar(name: str, loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ShapeError(f"the {name} loss has shape {tuple(loss.shape)}; return one number, such as a sum or a mean")
    return loss.reshape(())


def _gradients(
    of: Tensor,
    by: list[Tensor],
    weights: Tensor | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return gradients, zero where there is no dependence."""
    if not of.requires_grad:
        return tuple(torch.zeros_like(x) for x in by)
    found: tuple[Tensor, ...] = torch.autograd.grad(
        of, by, weights, create_graph=create_graph, retain_graph=retain_graph, materialize_grads=True
    )
    return found
