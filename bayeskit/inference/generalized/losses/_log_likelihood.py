"""Negative log likelihood as a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit.errors import ModelError, ShapeError
from bayeskit.inference.generalized.losses._densities import Model, law_of
from bayeskit.inference.generalized.losses._loss import Data, PointwiseLoss, unvalidated


@dataclass(frozen=True)
class NegativeLogLikelihood(PointwiseLoss):
    r"""Negative log density of each outcome.

    Weight one gives the ordinary posterior, other weights the power (tempered, fractional) posterior. The loss of an
    outcome outside the support is infinite.

    Parameters
    ----------
    distribution : callable
        ``parameter -> distribution`` of one datum, or ``(parameter, *covariates) -> distributions`` for data
        ``(*covariates, outcomes)``. The batch shape broadcasts against that of the outcomes; log densities of the
        entries of an outcome are summed.
    bounded : bool, default False
        Whether the loss stays bounded as the parameter tends to infinity, as for a mixture with a fixed component.

    Raises
    ------
    ModelError
        If ``distribution`` does not return a distribution.
    ShapeError
        If the distribution does not fit the outcomes.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130. Grunwald, P., van Ommen, T. (2017). Inconsistency of Bayesian inference for misspecified linear
    models, and a proposal for repairing it. Bayesian Analysis 12, 1069-1103.

    Examples
    --------
    >>> import torch
    >>> from torch.distributions import Poisson
    >>> loss = NegativeLogLikelihood(lambda log_rate: Poisson(log_rate.exp()))
    >>> loss.pointwise(torch.tensor(0.0), torch.tensor([0.0, 2.0]))
    tensor([1.0000, 1.6931])
    """

    distribution: Model
    bounded: bool = False

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        law, outcomes = law_of(self.distribution, parameter, data)
        if not isinstance(law, Distribution):
            raise ModelError(f"NegativeLogLikelihood needs a function that returns a distribution, not {law!r:.80}")
        inside = _inside(law, outcomes)
        with unvalidated():
            each = torch.where(inside, -law.log_prob(outcomes), torch.inf)
        return each.flatten(1).sum(-1) if each.dim() > 1 else each


def _inside(law: Distribution, outcomes: Tensor) -> Tensor:
    """Return whether entries of outcomes are in the support; ShapeError if the distribution does not fit."""
    entries = outcomes.dim() - len(law.event_shape)
    shape = outcomes.shape[: max(entries, 0)]
    if entries < 1 or outcomes.shape[entries:] != law.event_shape or not _fits(law.batch_shape, shape):
        raise ShapeError(
            f"a distribution of batch shape {tuple(law.batch_shape)} and event shape {tuple(law.event_shape)} "
            f"does not fit outcomes of shape {tuple(outcomes.shape)}"
        )
    inside: Tensor = law.support.check(outcomes)  # type: ignore[union-attr]
    return inside


def _fits(shape: torch.Size, other: torch.Size) -> bool:
    """Return whether a shape broadcasts to another."""
    return len(shape) <= len(other) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))
