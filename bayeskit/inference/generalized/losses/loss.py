"""What a loss is: a number for each datum, or one for all of them, as a function of a parameter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import DataError, ShapeError

__all__ = ["Data", "FunctionLoss", "Loss", "PointwiseLoss", "as_data", "columns", "num_data", "taken"]

Data = Tensor | tuple[Tensor, ...]
"""One tensor or several, whose leading dimension is the data."""


def columns(data: Data) -> tuple[Tensor, ...]:
    """Return the tensors that data consist of."""
    return data if isinstance(data, tuple) else (data,)


def num_data(data: Data) -> int:
    """Return the number of data."""
    return len(columns(data)[0])


def taken(data: Data, rows: Tensor) -> Data:
    """Return the data of these rows."""
    return tuple(x[rows] for x in data) if isinstance(data, tuple) else data[rows]


class Loss(ABC):
    """A loss of a parameter, given data.

    Losses are frozen dataclasses of settings. They take one parameter and one data set at a time, without branching
    on values, so that ``torch.func.vmap`` can batch them over parameters, weights and data sets.

    Attributes
    ----------
    bounded : bool
        Whether the loss of a datum stays below a bound however far the parameter goes, so that
        ``exp(-weight * loss)`` does not fall off and only a proper prior gives a posterior.
    """

    bounded: bool = False

    @abstractmethod
    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the loss of all data.

        Parameters
        ----------
        parameter : Tensor, or whatever the prior returns
        data : Tensor or tuple of Tensor
            Shapes ``(n, ...)``.
        weights : Tensor, optional
            Shape ``(n,)``: how often each datum counts, by default once. The empirical law that the loss looks at
            has these weights; they need not be whole numbers, and sum to ``n`` where the loss is to be comparable.

        Returns
        -------
        Tensor
            A scalar.
        """

    def check(self, data: Data) -> None:  # noqa: B027  most losses take any data
        """Refuse data that this loss cannot deal with.

        Raises
        ------
        DataError, ShapeError
        """

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return a twice differentiable loss that differs only within about ``width`` of kinks; itself by default."""
        return self

    def residuals(self, parameter: Any, data: Data) -> Tensor:
        """Return numbers whose typical size is the scale on which kinks are sharp, and widths of smoothing are taken.

        By default outcomes, the last tensor of the data, about their median; of outcomes most of which are the same,
        such as labels, about their mean; and where all are, the outcomes themselves. A loss that wraps another one
        returns the residuals of that.
        """
        outcome = columns(data)[-1]
        outcome = outcome if outcome.is_floating_point() else outcome.to(torch.get_default_dtype())
        away, about_mean = outcome - outcome.median(), outcome - outcome.mean()
        # Without branching, since data sets may be batched.
        away = torch.where(away.abs().median() > 0, away, about_mean)
        return torch.where((outcome == outcome.median()).all(), outcome, away)


class PointwiseLoss(Loss):
    """A loss that is the sum over data of each one's own."""

    @abstractmethod
    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``.

        Parameters
        ----------
        parameter : Tensor, or whatever the prior returns
        data : Tensor or tuple of Tensor
            Shapes ``(n, ...)``.
        """

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the sum over data, weighted where ``weights (n,)`` are given."""
        each = self.pointwise(parameter, data)
        if weights is None:
            return each.sum()
        if weights.shape != each.shape:
            raise ShapeError(f"weights must be {tuple(each.shape)}, not {tuple(weights.shape)}")
        return (weights * each).sum()


@dataclass(frozen=True)
class FunctionLoss(PointwiseLoss):
    """A loss written by the user.

    Parameters
    ----------
    function : callable
        ``(parameter, data) -> (n,)``, in torch, without branching on values.
    bounded : bool, default False
        Whether the loss stays below a bound however far the parameter goes.

    Examples
    --------
    >>> import torch
    >>> loss = FunctionLoss(lambda mean, x: (x - mean).abs().log1p())
    >>> loss.total(torch.tensor(1.0), torch.tensor([1.0, 2.0])).item()
    0.693147...
    """

    function: Callable[[Any, Any], Tensor]
    bounded: bool = False

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        return self.function(parameter, data)


def as_data(data: Any) -> Data:
    """Return data as finite real tensors of one leading dimension, ``(n, ...)``; DataError or ShapeError otherwise."""
    several = isinstance(data, (tuple, list)) and any(isinstance(x, (Tensor, np.ndarray)) for x in data)
    given = data if several else (data,)
    try:
        tensors = tuple(torch.as_tensor(x) for x in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data must be numbers, as tensors (n, ...): {error}") from error
    if any(x.dim() == 0 for x in tensors) or len({len(x) for x in tensors}) != 1:
        raise ShapeError(
            "data must be tensors (n, ...) of one leading dimension n, not of shapes "
            f"{[tuple(x.shape) for x in tensors]}"
        )
    if len(tensors[0]) == 0:
        raise DataError("there are no data")
    if any(x.is_complex() for x in tensors):
        raise DataError("data must be real numbers; give real and imaginary parts as columns")
    for position, x in enumerate(tensors):
        bad = ~x.isfinite().reshape(len(x), -1).all(-1)
        if bool(bad.any()):
            which = f"column {position} of the data" if len(tensors) > 1 else "the data"
            raise DataError(
                f"{which} is not finite for {int(bad.sum())} data, the first of them datum {int(bad.nonzero()[0])}; "
                "drop or impute missing values"
            )
    return tensors if several else tensors[0]
