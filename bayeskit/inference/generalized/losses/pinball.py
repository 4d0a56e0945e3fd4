"""The pinball loss, whose minimiser is a quantile."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.inference.generalized.losses.loss import Loss
from bayeskit.inference.generalized.losses.prediction import PredictionLoss, Predictor


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
