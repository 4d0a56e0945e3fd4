"""Margin losses for binary classification: functions of label times score."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.generalized.losses._loss import Data, Loss, columns, refuse
from bayeskit.inference.generalized.losses._prediction import PredictionLoss


@dataclass(frozen=True)
class MarginLoss(PredictionLoss):
    """Base class of functions of the margin ``label * score``, with labels -1 and +1.

    Parameters
    ----------
    predict : callable, optional
        Scores ``(parameter, covariates) -> (n, ...)`` for data ``(covariates, labels)``; by default the parameter is
        the score of every label.
    """

    @abstractmethod
    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the elementwise loss of margins."""

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the elementwise loss of labels and scores."""
        return self.of_margin(outcome * prediction)

    def check(self, data: Data) -> None:
        """Raise DataError, with the first such datum, for labels other than -1 and +1."""
        labels = columns(data)[-1]
        coded = bool(((labels == 0) | (labels == 1)).all())
        remedy = "; for labels 0 and 1 give 2 * labels - 1" if coded else ""
        refuse("labels", labels, (labels != 1) & (labels != -1), "-1 or +1", remedy)


@dataclass(frozen=True)
class Hinge(MarginLoss):
    """Hinge loss ``max(0, 1 - label * score)`` of support vector machines, for labels -1 and +1.

    The loss is zero for margins of at least one. If the labels are separable, the posterior under an improper prior is
    improper.

    Its parameter ``predict`` is that of :class:`MarginLoss`.

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
    """Smoothed hinge loss ``(z + sqrt(z**2 + width**2)) / 2`` with ``z = 1 - label * score``.

    Parameters
    ----------
    predict
        As for :class:`MarginLoss`.
    width : float, default 1.0
        Smoothing width, positive.

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


@dataclass(frozen=True)
class Logistic(MarginLoss):
    """Logistic loss ``log(1 + exp(-label * score))`` for labels -1 and +1.

    It is the negative log likelihood of logistic regression. If the labels are separable, the posterior under an
    improper prior is improper.

    Its parameter ``predict`` is that of :class:`MarginLoss`.

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


@dataclass(frozen=True)
class Exponential(MarginLoss):
    """Exponential loss ``exp(-label * score)`` of AdaBoost, for labels -1 and +1.

    The expected loss is minimised by half the log odds of the label. The loss grows exponentially in the negative
    margin, so it is less robust to wrong labels than :class:`Logistic`.

    Its parameter ``predict`` is that of :class:`MarginLoss`.

    References
    ----------
    Freund, Y., Schapire, R. E. (1997). A decision-theoretic generalization of on-line learning and an application to
    boosting. Journal of Computer and System Sciences 55, 119-139. Friedman, J., Hastie, T., Tibshirani, R. (2000).
    Additive logistic regression: a statistical view of boosting. Annals of Statistics 28, 337-407.

    Examples
    --------
    >>> import torch
    >>> Exponential().pointwise(torch.tensor(1.0), torch.tensor([1.0, -1.0]))
    tensor([0.3679, 2.7183])
    """

    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the loss of margins, entry by entry."""
        return (-margin).exp()
