"""Half the squared error, whose minimiser is the mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayeskit.inference.generalized.losses.prediction import PredictionLoss


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
