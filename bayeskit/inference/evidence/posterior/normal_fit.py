"""A normal distribution close to the posterior, from draws and, in many dimensions, from its curvature."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bayeskit.errors import DrawsError
from bayeskit.inference.evidence.modes import curvature
from bayeskit.target import Target

#: More dimensions than this are many, if the draws' covariance costs more than so many nats by its noise.
FEW_DIMENSIONS, MAX_LOSS = 50, 0.25
#: Directions at either end that are looked at, and the logarithm of a ratio of variances from which on it counts.
NUM_DIRECTIONS, NOTABLE = 16, 0.25


def normal_fit(target: Target, x: Tensor) -> tuple[MultivariateNormal, int]:
    """Fit a normal distribution to chains, and return it with the evaluations spent.

    In few dimensions with the mean and the covariance of the draws. In many, ``n`` draws know a covariance so badly
    that the fit is some ``d (d + 3) / 4 n`` nats from the posterior, however many proposals are then drawn. There the
    curvature of the log density at the mean of the draws says what the covariance is, and the draws say in which few
    directions it is another: where the posterior is skewed, or has heavier tails.

    Parameters
    ----------
    target : Target
    x : Tensor
        Unconstrained draws from its posterior, ``(chains, draws, d)``.

    Raises
    ------
    DrawsError
        If the covariance is singular.
    """
    d, flat = x.shape[-1], x.flatten(0, 1)
    spent = 0
    if d > FEW_DIMENSIONS and d * (d + 3) > 4 * MAX_LOSS * len(flat):
        centre = flat.mean(0)
        precision, spent = curvature(target, centre)
        root, failed = torch.linalg.cholesky_ex(precision)
        if not bool(failed) and bool(root.isfinite().all()):
            return MultivariateNormal(centre, scale_tril=_corrected(x, centre, root), validate_args=False), spent
    covariance = torch.cov(flat.T).reshape(d, d)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate does not move, or two move as one; "
            "check the chains and the model"
        )
    return MultivariateNormal(flat.mean(0), scale_tril=factor, validate_args=False), spent


def _corrected(x: Tensor, centre: Tensor, root: Tensor) -> Tensor:
    """Return the Cholesky factor ``(d, d)`` of a covariance, ``root`` being that of the negative Hessian.

    Were the posterior normal, the draws would be white once multiplied by ``root``. The directions in which half of
    them vary the most and the least are mostly noise, so that the other half says by how much.
    """
    white = ((x - centre) @ root).flatten(0, 1)
    seen, other = white.tensor_split(2)
    vectors = torch.linalg.eigh(seen.T @ seen)[1]
    ends = torch.cat([vectors[:, :NUM_DIRECTIONS], vectors[:, -NUM_DIRECTIONS:]], 1)
    level = white.square().mean()
    variance = (other @ ends).square().mean(0) / level
    ends, variance = (part[..., variance.log().abs() > NOTABLE] for part in (ends, variance))
    inverse = torch.linalg.solve_triangular(root.mT, ends, upper=True)
    whole = torch.cholesky_inverse(root) + (inverse * (variance - 1)) @ inverse.mT
    return torch.linalg.cholesky(level * whole)
