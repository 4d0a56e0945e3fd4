"""Cox partial likelihood of proportional hazards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses._loss import Data, Loss, refuse
from bayeskit.inference.generalized.losses._prediction import Predictor, linear

_SHIFT = 8
"""Shift of the argument of Stirling's series, which makes its first terms exact to rounding."""


@dataclass(frozen=True)
class CoxPartialLikelihood(Loss):
    r"""Minus the log partial likelihood of the Cox proportional hazards model.

    The hazard is a baseline function of time, left unspecified, times :math:`\exp(\eta_i)`. Each event contributes the
    probability that it happened to this datum, given the risk set,

    .. math:: \ell(\theta) = \sum_{i: \text{event}} w_i \Big( \log \sum_{j: t_j \ge t_i} w_j e^{\eta_j} - \eta_i \Big).

    Risk sets couple the data, so the loss is not pointwise.

    Parameters
    ----------
    ties : {"efron", "breslow"}, default "efron"
        Risk sets of tied events. ``"breslow"`` uses the full risk set, as above; under ``"efron"`` the ``l``-th of
        ``m`` tied events, ``l = 0..m-1``, has the tied events in its risk set with weight ``1 - l / m``, which
        approximates the mean over their possible orders.
    predict : callable, default :func:`linear`
        ``(parameter, covariates) -> (n,)``, the log relative hazards :math:`\eta`.

    Raises
    ------
    SettingsError
        If ``ties`` is unknown.

    Notes
    -----
    Data are ``(covariates (n, ...), time (n,), event (n,))``, with ``event`` 1 for events and 0 for censored times. A
    datum censored at the time of an event is in its risk set. Only the order of times matters.

    A datum of weight two equals two data, also under Efron's rule, whose product over ``l`` is extended to positive
    weights by Gamma functions. (Software with case weights keeps ``m`` as the number of rows; the two agree if weights
    are one.) An event of weight other than one is therefore tied with itself, also in bootstraps and in sandwich
    covariances. For data without ties use ``"breslow"`` there, which is the same loss for weights of one; with more
    than about 200 data the difference is small.

    The loss decreases forever along a direction of the parameter in which every failing datum has the largest hazard of
    its risk set; the posterior under an improper prior is then improper.

    References
    ----------
    Cox, D. R. (1975). Partial likelihood. Biometrika 62, 269-276. Breslow, N. (1974). Covariance analysis of censored
    survival data. Biometrics 30, 89-99. Efron, B. (1977). The efficiency of Cox's likelihood function for censored
    data. JASA 72, 557-565. Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief
    distributions. JRSS B 78, 1103-1130.

    Examples
    --------
    >>> import torch
    >>> covariates = torch.tensor([[0.0], [1.0], [2.0]])
    >>> time, event = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 1, 0])
    >>> CoxPartialLikelihood().total(torch.tensor([0.0]), (covariates, time, event))  # one of three, then the last
    tensor(1.0986)
    """

    ties: Literal["efron", "breslow"] = "efron"
    predict: Predictor = linear

    def __post_init__(self) -> None:
        if self.ties not in ("efron", "breslow"):
            raise SettingsError(f"ties must be 'efron' or 'breslow', not {self.ties!r}")

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the total loss, with weights in events and risk sets; see :meth:`Loss.total`."""
        covariates, time, event = _parts(data)
        score = self.predict(parameter, covariates)
        if score.shape != time.shape:
            raise ShapeError(f"predict returned shape {tuple(score.shape)} for times of shape {tuple(time.shape)}")
        weights = torch.ones_like(score) if weights is None else weights.to(score.dtype)
        if weights.shape != time.shape:
            raise ShapeError(f"weights must be {tuple(time.shape)}, one for each datum, not {tuple(weights.shape)}")
        time, order = torch.sort(time)
        score, weights = score[order], weights[order]
        counted = weights * event[order].to(score.dtype)
        start = torch.searchsorted(time, time)  # the first datum of the same time
        small = torch.finfo(score.dtype).tiny ** 0.25  # negligible, but keeps derivatives finite
        log_hazard = score + (weights + small).log()  # differentiable at weight zero
        log_sums = log_hazard.flip(0).logcumsumexp(0).flip(0)
        at_risk = log_sums[start]
        # torch's second derivative is nan for sums that do not enter the loss; the last term makes all of them enter.
        loss = (counted * (at_risk - score)).sum() + small**3 * log_sums.sum()
        if self.ties == "breslow":
            return loss
        share = counted * (score - at_risk).exp()
        num_events, shares = (torch.zeros_like(score).index_add(0, start, x) for x in (counted, share))
        return loss + _efron(num_events, shares).sum()

    def check(self, data: Data) -> None:
        """Raise DataError or ShapeError for data without events, negative times, and events other than 0 and 1."""
        covariates, time, event = _parts(data)
        if time.dim() != 1 or event.dim() != 1 or (self.predict is linear and covariates.dim() != 2):
            raise ShapeError(
                "data must be covariates (n, k), time (n,) and event (n,), not of shapes "
                f"{[tuple(x.shape) for x in (covariates, time, event)]}"
            )
        refuse("event", event, (event != 0) & (event != 1), "1, or 0 where censored")
        refuse("time", time, time < 0, "zero or more")
        if not bool((event == 1).any()):
            raise DataError(
                f"all {len(event)} data are censored, from datum 0 at time {float(time[0]):g} on: without an event the "
                "partial likelihood does not depend on the parameter; check that event is 1 for events"
            )


def _parts(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    if not isinstance(data, tuple) or len(data) != 3:
        given = f"{len(data)} tensors" if isinstance(data, tuple) else "one tensor"
        raise ShapeError(f"CoxPartialLikelihood takes data (covariates, time, event), not {given}")
    return data


def _efron(num_events: Tensor, shares: Tensor) -> Tensor:
    """Return the log product over ``l`` of ``1 - share * l / m`` for event weights ``m (n,)`` and ``shares (n,)``."""
    # With a = m / share this is lgamma(a + 1) - lgamma(a - m + 1) - m log(a). Its large terms nearly cancel, so
    # differences are taken before logarithms, in Stirling's series and in the products that shift it.
    some = num_events > 0
    m = torch.where(some, num_events, 1.0)
    a = m / torch.where(some, shares, 1.0).clamp_min(torch.finfo(m.dtype).eps)
    low = a - m + 1
    x, y = low + _SHIFT, a + 1 + _SHIFT
    stirling = (x - 0.5) * (m / x).log1p() + m * ((1 + _SHIFT) / a).log1p() - m + _series(y) - _series(x)
    # (z + k) (z + 7 - k) = z (z + 7) + k (7 - k), so four quotients shift by eight.
    above, below = (z * (z + _SHIFT - 1) for z in (a + 1, low))
    shifted = math.prod((above + c) / (below + c) for c in (0, 6, 10, 12))
    return torch.where(some, stirling - shifted.log(), 0.0)  # type: ignore[union-attr]


def _series(x: Tensor) -> Tensor:
    """Return the remainder of Stirling's formula for the log Gamma function, for ``x`` above :data:`_SHIFT`."""
    square, total = x.square().reciprocal(), torch.zeros_like(x)
    for coefficient in (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12):
        total = total * square + coefficient
    return total / x
