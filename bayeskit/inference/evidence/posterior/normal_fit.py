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
    curvature of the log density at the mean of the draws says what the covariance is, and the draws say in which
    directions it is another: where the posterior is skewed, has heavier tails, or curves upwards at its mean.

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
        if bool(precision.isfinite().all() & (flat.var(0) > 0).all()):
            factor, failed = torch.linalg.cholesky_ex(_corrected(flat - centre, precision))
            if not bool(failed) and bool(factor.isfinite().all()):
                return MultivariateNormal(centre, scale_tril=factor, validate_args=False), spent
    covariance = torch.cov(flat.T).reshape(d, d)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if bool(failed) or not bool(factor.isfinite().all()):
        raise DrawsError(
            "the covariance of the draws is singular: a coordinate does not move, or two move as one; "
            "check the chains and the model"
        )
    return MultivariateNormal(flat.mean(0), scale_tril=factor, validate_args=False), spent


def _corrected(x: Tensor, precision: Tensor) -> Tensor:
    """Return a covariance ``(d, d)`` from the negative Hessian at the mean of draws, and the draws about it ``(n, d)``.

    Along each eigenvector of the Hessian the draws know the variance well, so that theirs counts where the two differ.
    Multiplied by the root of what comes out of that, the draws of a normal posterior are white. The directions in which
    half of them still vary the most and the least are mostly noise, so that the other half says by how much.
    """
    scale = x.square().mean(0).sqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    along = (x / scale) @ vectors
    spread = along.square().mean(0)
    differs = ~((values * spread).log().abs() <= NOTABLE)
    variance = torch.where(differs, spread, 1 / values)
    white, basis = along / variance.sqrt(), scale[:, None] * vectors * variance.sqrt()
    seen, other = white.tensor_split(2)
    vectors = torch.linalg.eigh(seen.T @ seen)[1]
    ends = torch.cat([vectors[:, :NUM_DIRECTIONS], vectors[:, -NUM_DIRECTIONS:]], 1)
    more = (other @ ends).square().mean(0)
    ends, more = (part[..., more.log().abs() > NOTABLE] for part in (ends, more))
    ends = basis @ ends
    return basis @ basis.mT + (ends * (more - 1)) @ ends.mT
