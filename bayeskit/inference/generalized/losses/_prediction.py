"""Prediction losses, of the parameter itself or of a function of parameter and covariates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.extend import real_number
from bayeskit.inference.generalized.losses._loss import Data, Loss, PointwiseLoss, columns

Predictor = Callable[[Any, Tensor], Tensor]
"""``(parameter, covariates (n, ...)) -> (n, ...)``."""


def linear(coefficients: Tensor, covariates: Tensor) -> Tensor:
    """Return ``covariates @ coefficients``, ``(k,), (n, k) -> (n,)``, in the dtype of the coefficients.

    Raises
    ------
    ShapeError
        If there is no coefficient for each covariate.

    Examples
    --------
    >>> import torch
    >>> linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.5], [1.0, 3.0]]))
    tensor([2., 7.])
    """
    if not coefficients.shape or coefficients.shape[:1] != covariates.shape[-1:]:
        raise ShapeError(
            f"coefficients has the shape {tuple(coefficients.shape)} and covariates {tuple(covariates.shape)}; "
            "give one coefficient for each column of covariates"
        )
    return covariates.to(coefficients.dtype) @ coefficients


@dataclass(frozen=True)
class PredictionLoss(PointwiseLoss):
    """Base class of losses of outcome and prediction.

    Parameters
    ----------
    predict : callable, optional
        Predictions ``(parameter, covariates) -> (n, ...)`` for data ``(covariates, outcomes)``. By default data are
        outcomes alone, and the parameter is the prediction of every outcome.
    """

    predict: Predictor | None = None

    @abstractmethod
    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the elementwise loss, of the broadcast shape."""

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, summed over the entries of an outcome, ``(n,)``."""
        if self.predict is None:
            if isinstance(data, tuple):
                raise ShapeError(
                    f"{type(self).__name__} got covariates and outcomes, but no predict=, such as losses.linear"
                )
            outcome, prediction = data, parameter
            if not isinstance(parameter, Tensor) or parameter.dim() >= outcome.dim():
                shape = tuple(parameter.shape) if isinstance(parameter, Tensor) else type(parameter).__name__
                raise ShapeError(
                    f"a parameter of shape {shape} cannot predict outcomes of shape {tuple(outcome.shape[1:])}; "
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
        # Labels may be integers or booleans, for which torch does not define subtraction.
        each = self.of(outcome if outcome.is_floating_point() else outcome.to(prediction.dtype), prediction)
        if each.shape != outcome.shape:
            raise ShapeError(
                f"a parameter of shape {tuple(prediction.shape)} cannot predict data of shape {tuple(outcome.shape)}"
            )
        return each.flatten(1).sum(-1) if each.dim() > 1 else each

    def residuals(self, parameter: Any, data: Data) -> Tensor:
        """Return outcomes minus predictions."""
        outcome = columns(data)[-1]
        prediction = parameter if self.predict is None else self.predict(parameter, columns(data)[0])
        return outcome.to(prediction.dtype) - prediction


@dataclass(frozen=True)
class Absolute(PredictionLoss):
    """Absolute error ``|y - prediction|``, minimised by the median.

    Its parameter ``predict`` is that of :class:`PredictionLoss`.

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
    """Smoothed absolute error ``sqrt((y - prediction)**2 + width**2)``.

    Parameters
    ----------
    predict
        As for :class:`PredictionLoss`.
    width : float, default 1.0
        Smoothing width, positive.

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


@dataclass(frozen=True)
class HalfSquared(PredictionLoss):
    """Half the squared error, ``(y - prediction)**2 / 2``, minimised by the mean.

    Up to a constant it is minus the log density of a normal distribution with unit variance.

    Its parameter ``predict`` is that of :class:`PredictionLoss`.

    Examples
    --------
    >>> import torch
    >>> HalfSquared().pointwise(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
    tensor([0., 2.])
    """

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        return (outcome - prediction).square() / 2


@dataclass(frozen=True)
class Huber(PredictionLoss):
    """Huber loss of ``r = y - prediction``: ``r**2 / 2`` up to a threshold ``c``, ``c * (|r| - c / 2)`` beyond.

    The gradient of a datum is at most the threshold, so outliers have bounded influence. The loss has no kinks and is
    not bounded.

    Parameters
    ----------
    threshold : float
        ``c``, positive, in units of the outcome. At 1.345 standard deviations the efficiency for normal data is 95 %.
    predict
        As for :class:`PredictionLoss`.

    Raises
    ------
    SettingsError
        If ``threshold`` is not a positive number.

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
        real_number("threshold", self.threshold, "(0, inf)")

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        pull = residual.clamp(-self.threshold, self.threshold)
        return pull * (residual - pull / 2)


@dataclass(frozen=True)
class Pinball(PredictionLoss):
    r"""Pinball loss of ``r = y - prediction``: ``level * r`` for positive ``r``, otherwise ``(level - 1) * r``.

    It is minimised by the (conditional) quantile; at level 1/2 it is half the absolute error. ``exp(-loss)`` is an
    asymmetric Laplace density up to the factor ``level * (1 - level)``, but the posterior does not require that model.

    Parameters
    ----------
    level : float
        Probability of the quantile, in (0, 1).
    predict
        As for :class:`PredictionLoss`.

    Raises
    ------
    SettingsError
        If ``level`` is not in (0, 1).

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
        real_number("level", self.level, "(0, 1)")

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        residual = outcome - prediction
        return residual.abs() / 2 + (self.level - 0.5) * residual

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return the loss with ``sqrt(r**2 + width**2)`` in place of ``|r|``."""
        return SmoothPinball(self.level, width, predict=self.predict)


@dataclass(frozen=True)
class SmoothPinball(PredictionLoss):
    """Smoothed pinball loss ``sqrt(r**2 + width**2) / 2 + (level - 1/2) * r``.

    Parameters
    ----------
    level : float
        In (0, 1).
    width : float, default 1.0
        Smoothing width, positive.
    predict
        As for :class:`PredictionLoss`.

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
