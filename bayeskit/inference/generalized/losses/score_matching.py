"""Score matching: the distance between gradients of log densities, for models whose normaliser is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bayeskit.errors import DataError
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns
from bayeskit.inference.generalized.losses.scores import LogDensity, own_derivatives, score_of


@dataclass(frozen=True)
class ScoreMatching(PointwiseLoss):
    r"""Hyvarinen's loss of a density known up to its normaliser.

    .. math:: \ell(\theta, x) = \sum_j \tfrac12\, h_j(x)\, s_j(x)^2 + \partial_j \big(h_j(x)\, s_j(x)\big),
        \qquad s = \nabla_x \log p_\theta,

    with all :math:`h_j = 1` by default: half the squared score plus the trace of the Hessian. Up to a constant its
    mean is the Fisher divergence between the law of the data and the model. Quadratic in the natural parameter of an
    exponential family; see :func:`~bayeskit.inference.generalized.gaussian_posterior`.

    Parameters
    ----------
    log_density : callable
        ``(parameter, x) -> (n,)`` for data ``x`` of shape ``(n, ...)``, twice differentiable in ``x``, up to a
        constant; ``(parameter, *covariates, x) -> (n,)`` where the data are ``(*covariates, x)``.
    weight : callable, optional
        ``h: x -> `` positive numbers of the shape of ``x``, that vanish where the support ends, such as ``x**2`` for
        positive data.
    bounded : bool, default False
        Whether the loss stays below a bound however far the parameter goes, as for a normal law's scale.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6, 695-709.

    Hyvarinen, A. (2007). Some extensions of score matching. Computational Statistics and Data Analysis 51, 2499-2512.

    Yu, S., Drton, M., Shojaie, A. (2019). Generalized score matching for non-negative data. JMLR 20, 76.

    Examples
    --------
    >>> import torch
    >>> loss = ScoreMatching(lambda mean, x: -(x - mean) ** 2 / 2)
    >>> loss.pointwise(torch.tensor(0.0), torch.tensor([0.0, 2.0]))
    tensor([-1.,  1.])
    """

    log_density: LogDensity
    weight: Callable[[Tensor], Tensor] | None = None
    bounded: bool = False

    def check(self, data: Data) -> None:
        """Refuse data without derivatives.

        Raises
        ------
        DataError
            If they are whole numbers by type.
        """
        if not columns(data)[-1].is_floating_point():
            raise DataError("ScoreMatching differentiates with respect to the data, which are not of a floating type")

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        *covariates, x = columns(data)
        score = score_of(self.log_density)
        if self.weight is None:
            value, derivative = own_derivatives(lambda y: score(parameter, *covariates, y), x)
            each = value.square() / 2 + derivative
        else:
            weight = self.weight
            _, derivative = own_derivatives(lambda y: weight(y) * score(parameter, *covariates, y), x)
            each = weight(x) * score(parameter, *covariates, x).square() / 2 + derivative
        return each.flatten(1).sum(-1) if each.dim() > 1 else each
