"""Base classes of losses: pointwise, or of all data jointly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit.errors import DataError, ShapeError
from bayeskit.extend import as_numbers, validation_kept

Data = Tensor | tuple[Tensor, ...]
"""One tensor or a tuple of tensors, each with the data as leading dimension."""


def columns(data: Data) -> tuple[Tensor, ...]:
    """Return the data as a tuple of tensors."""
    return data if isinstance(data, tuple) else (data,)


def num_data(data: Data) -> int:
    """Return the number of data."""
    return len(columns(data)[0])


def taken(data: Data, rows: Any) -> Data:
    """Return the data with indices or a slice ``rows``."""
    return tuple(x[rows] for x in data) if isinstance(data, tuple) else data[rows]


@contextmanager
def unvalidated() -> Iterator[None]:
    """Disable validation of distributions, which branches on values and cannot be batched."""
    with validation_kept():
        Distribution.set_default_validate_args(False)
        yield


def refuse(name: str, values: Tensor, wrong: Tensor, domain: str, remedy: str = "") -> None:
    """Raise DataError, with the first such datum, if any datum is ``wrong (n, ...)``."""
    rows = wrong.reshape(len(wrong), -1).any(-1)
    if bool(rows.any()):
        first = int(rows.nonzero()[0])
        value = f"{values[first].item():g}" if values.dim() == 1 else values[first].tolist()
        such = f"{value} ({int(rows.sum())} such data in all){remedy}"
        raise DataError(f"{name} must be {domain}, but that of datum {first} is {such}")


class Loss(ABC):
    """Base class of losses, functions of a parameter and data.

    Losses are frozen dataclasses. They are evaluated for one parameter and one data set, without branching on values,
    so that ``torch.func.vmap`` can batch them over parameters, weights and data sets.

    Attributes
    ----------
    bounded : bool
        Whether the loss of a datum stays bounded as the parameter tends to infinity; the posterior is then improper
        under an improper prior.
    """

    bounded: bool = False

    @abstractmethod
    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the total loss, scalar.

        ``weights (n,)`` are those of the data in the empirical distribution, one by default; losses are comparable for
        weights that sum to ``n``.
        """

    def check(self, data: Data) -> None:  # noqa: B027  most losses take any data
        """Raise DataError or ShapeError if the loss does not support the data."""

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return a twice differentiable loss that differs within about ``width`` of kinks; by default the loss."""
        return self

    def residuals(self, parameter: Any, data: Data) -> Tensor:
        """Return residuals, whose median absolute value is the unit of smoothing widths.

        By default outcomes, the last tensor of the data, minus their median; minus their mean if the median absolute
        deviation is zero; outcomes themselves if all are equal. A loss that wraps another loss returns its residuals.
        """
        outcome = columns(data)[-1]
        outcome = outcome if outcome.is_floating_point() else outcome.to(torch.get_default_dtype())
        away, about_mean = outcome - outcome.median(), outcome - outcome.mean()
        # No branching, since data sets may be batched.
        away = torch.where(away.abs().median() > 0, away, about_mean)
        return torch.where((outcome == outcome.median()).all(), outcome, away)


class PointwiseLoss(Loss):
    """Base class of losses that are sums over data."""

    @abstractmethod
    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``, for one parameter and data of shapes ``(n, ...)``."""

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the sum over data, weighted by ``weights (n,)`` if given."""
        each = self.pointwise(parameter, data)
        if weights is None:
            return each.sum()
        if weights.shape != each.shape:
            raise ShapeError(f"weights must be {tuple(each.shape)}, not {tuple(weights.shape)}")
        return (weights * each).sum()


@dataclass(frozen=True)
class FunctionLoss(PointwiseLoss):
    """User-defined pointwise loss.

    Parameters
    ----------
    function : callable
        ``(parameter, data) -> (n,)``, in torch, without branching on values.
    bounded : bool, default False
        Whether the loss stays bounded as the parameter tends to infinity.

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
    tensors = tuple(as_numbers("data", x) for x in given)
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
