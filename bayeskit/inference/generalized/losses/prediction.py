"""Losses of predictions: the parameter itself is the prediction, or a function makes one of it and covariates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns

Predictor = Callable[[Any, Tensor], Tensor]
"""``(parameter, covariates (n, ...)) -> (n, ...)``."""


def linear(coefficients: Tensor, covariates: Tensor) -> Tensor:
    """Predict ``covariates @ coefficients``: ``(k,)``, ``(n, k)`` -> ``(n,)``, in the coefficients' dtype.

    Examples
    --------
    >>> import torch
    >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.5], [1.0, 3.0]]))
    tensor([2., 7.])
    """
    return covariates.to(coefficients.dtype) @ coefficients


@dataclass(frozen=True)
class PredictionLoss(PointwiseLoss):
    """A function of outcome and prediction.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``; the data are then ``(covariates, outcomes)``. By default the
        parameter itself predicts every outcome, and the data are outcomes alone.
    """

    predict: Predictor | None = None

    @abstractmethod
    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss of predictions, entry by entry, of the broadcast shape."""

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``: the sum over the entries of an outcome."""
        if self.predict is None:
            if isinstance(data, tuple):
                raise ShapeError(
                    f"{type(self).__name__} got covariates and outcomes, but no predict=, such as losses.linear"
                )
            outcome, prediction = data, parameter
            if not isinstance(parameter, Tensor) or parameter.dim() >= outcome.dim():
                shape = tuple(parameter.shape) if isinstance(parameter, Tensor) else type(parameter).__name__
                raise ShapeError(
                    f"a parameter of shape {shape} predicts no single outcome of shape {tuple(outcome.shape[1:])}; "
                    "give predict=, such as losses.linear"
                )
        else:
            if not isinstance(data, tuple) or len(data) != 2:
                raise ShapeError(f"{type(self).__name__} with predict= takes data (covariates, outcomes)")
            outcome, prediction = data[1], self.predict(parameter, data[0])
            if prediction.shape != outcome.shape:
                raise ShapeError(
                    f"predict returned shape {tuple(prediction.shape)} for outcomes of shape {tuple(outcome.shape)}"
                )
        # Labels may be whole numbers or truth values, of which torch takes no differences.
        each = self.of(outcome if outcome.is_floating_point() else outcome.to(prediction.dtype), prediction)
        if each.shape != outcome.shape:
            raise ShapeError(
                f"a parameter of shape {tuple(prediction.shape)} predicts no outcomes of shape {tuple(outcome.shape)}"
            )
        return each.flatten(1).sum(-1) if each.dim() > 1 else each

    def residuals(self, parameter: Any, data: Data) -> Tensor:
        """Return outcomes minus predictions."""
        outcome = columns(data)[-1]
        prediction = parameter if self.predict is None else self.predict(parameter, columns(data)[0])
        return outcome.to(prediction.dtype) - prediction
