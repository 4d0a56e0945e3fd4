"""The logistic loss: minus the log likelihood of logistic regression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.generalized.losses.margin import MarginLoss


@dataclass(frozen=True)
class Logistic(MarginLoss):
    """``log(1 + exp(-label * score))`` for labels -1 and +1.

    With weight one, minus the log likelihood of logistic regression. Where some direction of the parameter separates
    the labels, the loss falls along it without end: with an improper prior there is then no posterior.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``, the scores; the data are then ``(covariates, labels)``. By default
        the parameter itself is the score of every label.

    References
    ----------
    Cox, D. R. (1958). The regression analysis of binary sequences. JRSS B 20, 215-242. Albert, A., Anderson, J. A.
    (1984). On the existence of maximum likelihood estimates in logistic regression models. Biometrika 71, 1-10.

    Examples
    --------
    >>> import torch
    >>> Logistic().pointwise(torch.tensor(1.0), torch.tensor([1.0, -1.0]))
    tensor([0.3133, 1.3133])
    """

    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the loss of margins, entry by entry."""
        return -torch.nn.functional.logsigmoid(margin)
