"""Normal approximations of the posteriors of many data sets or weightings, at any learning rate."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from bayeskit._torch import one_thread, validation_kept
from bayeskit.inference.generalized.losses.loss import Data, columns
from bayeskit.inference.generalized.minimizer import minimize
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import curvature


class QuadraticFits(NamedTuple):
    """Second-order expansions of losses and of the log prior, one a replicate, in unconstrained coordinates.

    Attributes
    ----------
    position : Tensor
        Where they are expanded, ``(R, d)``: modes at the weight ``reference``.
    hessian : Tensor
        Of the loss, ``(R, d, d)``; that of a loss with kinks is one of a smoothed version.
    score : Tensor
        Gradient of the log prior, ``(R, d)``.
    precision : Tensor
        Minus the Hessian of the log prior, ``(R, d, d)``.
    reference : Tensor
        ``(R,)``; infinite where the position is the minimiser of the loss alone.
    converged : Tensor
        Boolean, ``(R,)``: whether a minimum was found.
    """

    position: Tensor
    hessian: Tensor
    score: Tensor
    precision: Tensor
    reference: Tensor
    converged: Tensor

    def normal(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(R, d)`` and precisions ``(R, d, d)`` at the learning rates ``weight (R,)``.

        One step of Newton's method leads from the mode at the reference weight to that at another: exact where loss
        and log prior are quadratic.
        """
        precision = _positive(weight[:, None, None] * self.hessian + self.precision)
        step = torch.linalg.solve(precision, self.score * (1 - weight / self.reference)[:, None])
        return self.position + step, precision

    @classmethod
    def around(cls, mean: Tensor, covariance: Tensor, weight: Tensor, converged: Tensor) -> QuadraticFits:
        """Return fits whose normals at ``weight (R,)`` have these moments, the prior's part in them included."""
        nothing = torch.zeros_like(covariance)
        hessian = torch.linalg.inv(covariance) / weight[:, None, None]
        return cls(mean, hessian, torch.zeros_like(mean), nothing, weight, converged)


def quadratic_fits(
    posterior: GibbsPosterior, weights: Tensor | None, data: Data | None, weight: float, seed: int = 0
) -> QuadraticFits:
    """Expand the posteriors of weightings ``(R, n)`` or data sets ``(R, n, ...)`` about their modes at ``weight``."""
    proper = posterior.prior.is_proper
    found = minimize(posterior, weights=weights, data=data, prior_weight=1 / weight if proper else 0.0, seed=seed)
    position = found.position
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        mean_hessian = vmap(
            lambda u, w, x: curvature(posterior, u, x, w),
            in_dims=(0, None if weights is None else 0, None if data is None else 0),
        )(position, weights, data)
        score = vmap(grad(posterior.prior.log_density))(position)
        precision = -vmap(jacrev(grad(posterior.prior.log_density)))(position)
    num_data = len(columns(posterior.data)[0]) if data is None else columns(data)[0].shape[1]
    reference = torch.full_like(found.value, weight if proper else torch.inf)
    return QuadraticFits(position, num_data * mean_hessian, score, precision, reference, found.converged)


def _positive(matrix: Tensor) -> Tensor:
    """Return the nearest matrices with the same axes that are positive definite."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    size = values.abs()
    size = torch.maximum(size, 1e-8 * size.amax(-1, keepdim=True)).clamp_min(torch.finfo(matrix.dtype).tiny ** 0.5)
    return (vectors * size[:, None]) @ vectors.mT


def squared_distance(offsets: Tensor, precision: Tensor) -> Tensor:
    """Return Mahalanobis distances, squared: ``(R, S, d), (R, d, d) -> (R, S)``."""
    return (torch.linalg.cholesky(precision).mT @ offsets.mT).square().sum(-2)
