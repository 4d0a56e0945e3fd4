"""The hinge loss of support vector machines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.generalized.losses.loss import Loss
from bayeskit.inference.generalized.losses.margin import MarginLoss


@dataclass(frozen=True)
class Hinge(MarginLoss):
    """``max(0, 1 - label * score)`` for labels -1 and +1.

    Zero for all scores on the right side and at least one away from it: on labels that a direction of the parameter
    separates, an improper prior gives no posterior.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``, the scores; the data are then ``(covariates, labels)``. By default
        the parameter itself is the score of every label.

    References
    ----------
    Cortes, C., Vapnik, V. (1995). Support-vector networks. Machine Learning 20, 273-297. Polson, N. G., Scott, S. L.
    (2011). Data augmentation for support vector machines. Bayesian Analysis 6, 1-23.

    Examples
    --------
    >>> import torch
    >>> Hinge().pointwise(torch.tensor(0.5), torch.tensor([1.0, -1.0]))
    tensor([0.5000, 1.5000])
    """

    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the loss of margins, entry by entry."""
        return (1 - margin).relu()

    def smoothed(self, width: float | Tensor) -> Loss:
        """Return the loss with ``(z + sqrt(z**2 + width**2)) / 2`` in place of ``max(0, z)``."""
        return SmoothHinge(self.predict, width)


@dataclass(frozen=True)
class SmoothHinge(MarginLoss):
    """``(z + sqrt(z**2 + width**2)) / 2`` with ``z = 1 - label * score``: the hinge with a round corner.

    Parameters
    ----------
    predict : callable, optional
        As for :class:`Hinge`.
    width : float, default 1.0
        Positive.

    Examples
    --------
    >>> import torch
    >>> SmoothHinge(width=4.0).pointwise(torch.tensor(-2.0), torch.tensor([1.0]))
    tensor([4.])
    """

    width: float | Tensor = 1.0

    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the loss of margins, entry by entry."""
        z = 1 - margin
        width = torch.as_tensor(self.width, dtype=z.dtype, device=z.device)
        return (z + (z.square() + width.square()).sqrt()) / 2
