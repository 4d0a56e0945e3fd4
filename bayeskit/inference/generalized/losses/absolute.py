"""The absolute error, whose minimiser is the median."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.generalized.losses.loss import Loss
from bayeskit.inference.generalized.losses.prediction import PredictionLoss


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
