"""Losses of a score for one of two labels: functions of the margin, label times score."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.inference.generalized.losses.loss import Data, Loss, columns
from bayeskit.inference.generalized.losses.prediction import PredictionLoss

__all__ = ["Exponential", "Hinge", "Logistic", "MarginLoss", "SmoothHinge"]


@dataclass(frozen=True)
class MarginLoss(PredictionLoss):
    """A function of the margin ``label * score``: labels are -1 and +1, the sign of a score is its guess.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``, the scores; the data are then ``(covariates, labels)``. By default
        the parameter itself is the score of every label.
    """

    @abstractmethod
    def of_margin(self, margin: Tensor) -> Tensor:
        """Return the loss of margins, entry by entry."""

    def of(self, outcome: Tensor, prediction: Tensor) -> Tensor:
        """Return the loss, entry by entry."""
        return self.of_margin(outcome * prediction)

    def check(self, data: Data) -> None:
        """Refuse labels other than -1 and +1.

        Raises
        ------
        DataError
            Naming the first datum with another label.
        """
        labels = columns(data)[-1]
        wrong = ((labels != 1) & (labels != -1)).reshape(len(labels), -1).any(-1)
        if not bool(wrong.any()):
            return
        first = int(wrong.nonzero()[0])
        coded = bool(((labels == 0) | (labels == 1)).all())
        raise DataError(
            f"labels must be -1 or +1, but that of datum {first} is {labels[first].tolist()} "
            f"({int(wrong.sum())} such data in all)" + ("; for labels 0 and 1 give 2 * labels - 1" if coded else "")
        )


# The hinge loss of support vector machines.


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


# The logistic loss: minus the log likelihood of logistic regression.


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


# The exponential loss, which AdaBoost minimises.


@dataclass(frozen=True)
class Exponential(MarginLoss):
    """``exp(-label * score)`` for labels -1 and +1.

    The expected loss is smallest at half the log odds of the label. Labels that contradict their score cost
    exponentially: a single wrong label can decide, unlike under :class:`Logistic`.

    Parameters
    ----------
    predict : callable, optional
        ``(parameter, covariates) -> (n, ...)``, the scores; the data are then ``(covariates, labels)``. By default
        the parameter itself is the score of every label.

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
