"""Losses of a score for one of two labels: functions of the margin, label times score."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.inference.generalized.losses.loss import Data, columns
from bayeskit.inference.generalized.losses.prediction import PredictionLoss


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
