"""Scores: the gradient of a log density with respect to the data, which needs no normaliser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.inference.generalized.losses.densities import unvalidated

LogDensity = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n,)``: log densities of data, up to a number that depends on the parameter alone."""

Score = Callable[..., Tensor]
"""``(parameter, x (n, ...)) -> (n, ...)``: its gradient with respect to each datum."""


def score_of(log_density: LogDensity) -> Score:
    """Return the score of a log density by automatic differentiation.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` or ``(parameter, *covariates, x) -> (n,)`` for data ``x`` of shape ``(n, ...)``,
        each on its own, up to a constant.

    Returns
    -------
    callable
        With the same arguments, of the shape of ``x``.

    Raises
    ------
    ShapeError
        When called, if ``log_density`` does not return one number for each datum.

    Examples
    --------
    >>> import torch
    >>> score = score_of(lambda mean, x: -(x - mean) ** 2 / 2)
    >>> score(torch.tensor(1.0), torch.tensor([0.0, 3.0]))
    tensor([ 1., -2.])
    """

    def score(parameter: Any, *data: Tensor) -> Tensor:
        def summed(x: Tensor) -> Tensor:
            with unvalidated():
                each = log_density(parameter, *data[:-1], x)
            if each.shape != x.shape[:1]:
                raise ShapeError(
                    f"log_density returns shape {tuple(each.shape)} instead of ({len(x)},) for data of shape "
                    f"{tuple(x.shape)}"
                )
            return each.sum()

        gradient: Tensor = torch.func.grad(summed)(data[-1])
        return gradient

    return score


def own_derivatives(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function of each datum, and the derivative of each of its entries with respect to the same of ``x``.

    Parameters
    ----------
    function : callable
        ``(n, ...) -> (n, ...)``, each datum on its own.
    x : Tensor
        Shape ``(n, ...)``.

    Returns
    -------
    value, derivative : Tensor
        Shape ``(n, ...)``: the diagonal of the Jacobian matrix of each datum.

    Raises
    ------
    ShapeError
        If the function does not return the shape of ``x``.
    """
    value, pull = torch.func.vjp(function, x)[:2]
    if value.shape != x.shape:
        raise ShapeError(f"expected a function that keeps the shape {tuple(x.shape)}, not one to {tuple(value.shape)}")
    size = x[0].numel()
    directions = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *x.shape[1:])
    rows = torch.func.vmap(lambda e: pull(e.expand_as(x))[0] * e)(directions)
    return value, rows.sum(0)
