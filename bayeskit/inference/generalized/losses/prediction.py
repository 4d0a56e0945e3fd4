"""Losses of predictions: the parameter itself is the prediction, or a function makes one of it and of inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayeskit.core.inputs import real_number
from bayeskit.errors import ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss, PointwiseLoss, columns

__all__ = [
    "Absolute",
    "HalfSquared",
    "Huber",
    "Pinball",
    "PredictionLoss",
    "Predictor",
    "SmoothAbsolute",
    "SmoothPinball",
    "linear",
]

# Losses of predictions: the prediction is the parameter, or a function of it and covariates.

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


# The absolute error, whose minimiser is the median.


@dataclass(frozen=True)
class Absolute(PredictionLoss):
    """``|y - prediction|``.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``; the data are then ``(covariates, outcomes)``. By default the
        parameter itself predicts every outcome.

    Examples
    --------
    >>> import torch
    >>> Absolute().pointwise(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    tensor([0., 2.])
    """

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        return (outcome - prediction).abs()

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return the loss with ``sqrt(r**2 + width**2)`` in place of ``|r|``."""
        return SmoothAbsolute(self.predict, width)


@dataclass(frozen=True)
class SmoothAbsolute(PredictionLoss):
    """``sqrt((y - prediction)**2 + width**2)``: the absolute error with a round bottom.

    Parameters
    ----------
    predict : callable, optional
        As for :class:`Absolute`.
    width : float, default 1.0
        Positive.

    Examples
    --------
    >>> import torch
    >>> SmoothAbsolute(width=4.0).pointwise(torch.tensor(0.0), torch.tensor([0.0, 3.0]))
    tensor([4., 5.])
    """

    width: float | Tensor = 1.0

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        width = torch.as_tensor(self.width, dtype=residual.dtype, device=residual.device)
        return (residual.square() + width.square()).sqrt()


# Half the squared error, whose minimiser is the mean.


@dataclass(frozen=True)
class HalfSquared(PredictionLoss):
    """``(y - prediction)**2 / 2``: with weight one, minus the log density of a normal of unit variance.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``; the data are then ``(covariates, outcomes)``. By default the
        parameter itself predicts every outcome.

    Examples
    --------
    >>> import torch
    >>> HalfSquared().pointwise(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    tensor([0., 2.])
    """

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        return (outcome - prediction).square() / 2


# Huber's loss: squared near zero, absolute far from it.


@dataclass(frozen=True)
class Huber(PredictionLoss):
    """``r**2 / 2`` for a residual ``r = y - prediction`` up to a threshold ``c``, ``c * (|r| - c / 2)`` beyond.

    No datum pulls with more than the threshold, so that outliers hardly matter, while near its minimiser the loss is
    as precise as half the squared error. It has no kink, and is not bounded.

    Parameters
    ----------
    threshold : float
        Positive, in the units of the outcome. 1.345 standard deviations of the bulk lose 5 % of the precision that
        the mean has for normal data.
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``; the data are then ``(covariates, outcomes)``. By default the
        parameter itself predicts every outcome.

    Raises
    ------
    SettingsError
        If the threshold is not a positive number.

    References
    ----------
    Huber, P. J. (1964). Robust estimation of a location parameter. Annals of Mathematical Statistics 35, 73-101.

    Examples
    --------
    >>> import torch
    >>> Huber(2.0).pointwise(torch.tensor(1.0), torch.tensor([0.0, 1.0, 11.0]))
    tensor([ 0.5000,  0.0000, 18.0000])
    """

    threshold: float
    predict: Predictor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        real_number("threshold", self.threshold, between=(0.0, float("inf")))

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        pull = residual.clamp(-self.threshold, self.threshold)
        return pull * (residual - pull / 2)


# The pinball loss, whose minimiser is a quantile.


@dataclass(frozen=True)
class Pinball(PredictionLoss):
    r"""``level * r`` for a positive residual ``r = y - prediction``, ``(level - 1) * r`` for a negative one.

    Its minimiser is the quantile of this level, given the covariates where there are some; with level one half it is
    half the absolute error. With weight one, ``exp(-loss)`` is an asymmetric Laplace density up to
    ``level * (1 - level)``, but the posterior means something without that model.

    Parameters
    ----------
    level : float
        Probability of the quantile, in (0, 1).
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``; the data are then ``(covariates, outcomes)``. By default the
        parameter itself predicts every outcome.

    Raises
    ------
    SettingsError
        If the level does not lie in (0, 1).

    References
    ----------
    Koenker, R., Bassett, G. (1978). Regression quantiles. Econometrica 46, 33-50. Yu, K., Moyeed, R. A. (2001).
    Bayesian quantile regression. Statistics & Probability Letters 54, 437-447.

    Examples
    --------
    >>> import torch
    >>> Pinball(0.25).pointwise(torch.tensor(2.0), torch.tensor([1.0, 2.0, 10.0]))
    tensor([0.7500, 0.0000, 2.0000])
    """

    level: float
    predict: Predictor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        real_number("level", self.level, between=(0.0, 1.0))

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        return residual.abs() / 2 + (self.level - 0.5) * residual

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return the loss with ``sqrt(r**2 + width**2)`` in place of ``|r|``."""
        return SmoothPinball(self.level, width, predict=self.predict)


@dataclass(frozen=True)
class SmoothPinball(PredictionLoss):
    """``sqrt(r**2 + width**2) / 2 + (level - 1/2) * r``: the pinball loss with a round bottom.

    Parameters
    ----------
    level : float
        In (0, 1).
    width : float, default 1.0
        Positive.
    predict : callable, optional
        As for :class:`Pinball`.

    Examples
    --------
    >>> import torch
    >>> SmoothPinball(0.25, width=4.0).pointwise(torch.tensor(0.0), torch.tensor([0.0, 3.0, -3.0]))
    tensor([2.0000, 1.7500, 3.2500])
    """

    level: float
    width: float | Tensor = 1.0
    predict: Predictor | None = field(default=None, kw_only=True)

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        width = torch.as_tensor(self.width, dtype=residual.dtype, device=residual.device)
        return (residual.square() + width.square()).sqrt() / 2 + (self.level - 0.5) * residual
