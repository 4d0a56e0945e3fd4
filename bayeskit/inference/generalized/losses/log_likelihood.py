"""Minus a log likelihood: the loss whose posterior of weight one is the ordinary one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit.errors import ModelError, ShapeError
from bayeskit.inference.generalized.losses.densities import Model, law_of, unvalidated
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss

__all__ = ["NegativeLogLikelihood"]


@dataclass(frozen=True)
class NegativeLogLikelihood(PointwiseLoss):
    r"""Minus the log density of each outcome.

    Weight one gives the ordinary posterior, another weight the power (or tempered, fractional) posterior.

    Parameters
    ----------
    distribution : callable
        ``parameter -> distribution`` of a datum; ``(parameter, *covariates) -> distributions`` where the data are
        ``(*covariates, outcomes)``. Its batch shape broadcasts against the outcomes'; log densities of the entries of
        an outcome ``(n, ...)`` are summed.
    bounded : bool, default False
        Whether the log density of a datum stays above a bound however far the parameter goes, as that of a mixture
        with a fixed component does.

    Raises
    ------
    ModelError
        If ``distribution`` returns no distribution.
    ShapeError
        If it does not fit the outcomes.

    Notes
    -----
    An outcome outside of the distribution's support has an infinite loss.

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
    """Whether entries of outcomes belong to the support; refuse shapes that do not fit."""
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
    """Whether a shape broadcasts against another without changing it."""
    return len(shape) <= len(other) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))
