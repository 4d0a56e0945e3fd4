"""Huber's loss: squared near zero, absolute far from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.inference.generalized.losses.prediction import PredictionLoss, Predictor


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
