"""The exponential loss, which AdaBoost lowers step by step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayeskit.inference.generalized.losses.margin import MarginLoss


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
