"""Modes of densities of positive coordinates, many densities at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: Coordinates below this count as zero.
SHORTEST = 1e-9
#: Multiples of a step that are tried together: short ones far from a mode, long ones on the way to zero.
MULTIPLES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
#: The largest change of the logarithm of a coordinate in one simple step.
LARGEST_CHANGE = 3.0


#: From positions to log densities and their gradients.
ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


class Modes(NamedTuple):
    """Modes and what a density does around them.

    Attributes
    ----------
    position : Tensor
        Shape `(densities, dim)`.
    value : Tensor
        Log density, shape `(densities,)`.
    gradient, second : Tensor
        First and second derivatives by each coordinate, shape `(densities, dim)`.
    num_evaluations : int
        Of the density or its gradient, for each density.
    converged : Tensor
        Whether no step leads higher, shape `(densities,)`, bool.
    """

    position: Tensor
    value: Tensor
    gradient: Tensor
    second: Tensor
    num_evaluations: int
    converged: Tensor


def climb_to_modes(
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    value_and_gradient: ValueAndGradient | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-12,
) -> Modes:
    """Climb to a mode of each of several densities of positive coordinates, by Newton's method.

    The density is that of the coordinates themselves; only the steps are taken in their logarithms, where a log
    likelihood is closer to a parabola and a coordinate whose mode is at zero can go on towards it. All densities
    climb together; the Hessian is by differences of the exact gradient.

    Parameters
    ----------
    log_density : callable
        Log densities `(points, densities)` of positions `(points, densities, dim)`; differentiable, unless the
        gradient comes from `value_and_gradient`.
    start : Tensor
        Where to start, positive, shape `(densities, dim)`.
    value_and_gradient : callable, optional
        The same log densities and their gradients `(points, densities, dim)`.
    max_iterations : int, default 100
    tolerance : float, default 1e-12
        A density is at its mode once the best step gains less than this share of its absolute value.

    Returns
    -------
    Modes

    Examples
    --------
    >>> import torch
    >>> rate = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    >>> modes = climb_to_modes(lambda x: (x.log() - rate * x).sum(-1), torch.ones(2, 1, dtype=torch.float64))
    >>> modes.position.squeeze(-1)
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    evaluate = value_and_gradient or (lambda x: _value_and_gradient(log_density, x))
    x, dim = start.clamp(min=SHORTEST), start.shape[-1]
    multiples = torch.tensor(MULTIPLES, dtype=x.dtype, device=x.device)[:, None, None]
    count, rows = 0, torch.arange(len(x), device=x.device)
    for _ in range(max_iterations):
        value, gradient = (result[0] for result in evaluate(x[None]))
        hessian = _hessian(evaluate, x)
        with torch.no_grad():
            tried = (x * (multiples * _step(x, gradient, hessian)).exp()).clamp(min=SHORTEST)
            reached = log_density(tried).nan_to_num(nan=-torch.inf)
        count += 1 + 2 * dim + len(MULTIPLES)
        best, which = reached.max(0)
        converged = best - value <= tolerance * value.abs().clamp(min=1.0)
        if bool(converged.all()):
            break
        x = torch.where((best > value)[:, None], tried[which, rows], x)
    return Modes(x, value, gradient, hessian.diagonal(dim1=-2, dim2=-1), count, converged)


def _value_and_gradient(log_density: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(True)
        value = log_density(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def _hessian(evaluate: ValueAndGradient, x: Tensor) -> Tensor:
    """Return the Hessian of each density, `(densities, dim, dim)`; one-sided differences at the end of the line."""
    count, dim = x.shape
    step = torch.finfo(x.dtype).eps ** (1 / 3) * x.clamp(min=1e-2)
    offset = torch.diag_embed(step).movedim(0, 1)  # (dim, densities, dim)
    upper, lower = x + offset, (x - offset).clamp(min=SHORTEST)
    _, gradient = evaluate(torch.cat([upper, lower]))
    width = (upper - lower).diagonal(dim1=0, dim2=2)  # (densities, dim)
    hessian = (gradient[:dim] - gradient[dim:]).movedim(0, 1) / width[..., None]
    return 0.5 * (hessian + hessian.mT)


def _step(x: Tensor, gradient: Tensor, hessian: Tensor) -> Tensor:
    """Return an uphill step of the logarithms of the coordinates."""
    slope = gradient * x
    precision = -hessian * x[:, :, None] * x[:, None, :] - torch.diag_embed(slope)
    # Scaled to a diagonal of ones: coordinates near zero have next to no curvature left.
    scale = precision.diagonal(dim1=-2, dim2=-1).abs().clamp(min=torch.finfo(x.dtype).eps).sqrt()
    values, vectors = torch.linalg.eigh(precision / scale[:, :, None] / scale[:, None, :])
    # Where the density is not concave, uphill all the same.
    values = values.abs().clamp(min=1e-4)
    turned = vectors.mT @ (slope / scale)[..., None]
    step = (vectors @ (turned / values[..., None])).squeeze(-1) / scale
    return step.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
