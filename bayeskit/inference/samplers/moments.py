"""Running mean and covariance of groups of chains, and the metric they give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_CROSS_DIMENSION = 400
PRIOR_WEIGHT, FISHER_WEIGHT = 5.0, 1.0
DRAWS_PER_EFFECTIVE = 3.0


class Moments(NamedTuple):
    """Pooled moments of the chains of each of ``g`` groups.

    Attributes
    ----------
    count : Tensor
        Draws seen, shape ``(g, 1)``.
    mean : Tensor
        Shape ``(g, d)``.
    cross : Tensor
        Sums of centred products, ``(g, d, d)``; of squares only, ``(g, d)``, above 400 dimensions.
    """

    count: Tensor  # type: ignore[assignment]
    mean: Tensor
    cross: Tensor

    @classmethod
    def start(cls, num_groups: int, like: Tensor) -> Moments:
        """Start empty, in dimension, dtype and device of ``like``, shape ``(*, d)``."""
        d = like.shape[-1]
        shape = (num_groups, d, d) if d <= MAX_CROSS_DIMENSION else (num_groups, d)
        return cls(like.new_zeros(num_groups, 1), like.new_zeros(num_groups, d), like.new_zeros(shape))

    def update(self, position: Tensor, alive: Tensor) -> Moments:
        """Add one draw of every living chain, ``(n, d)`` and ``(n,)``; the chains of a group are neighbours.

        A chain is dead where it started without density: it never moves, and tells nothing.
        """
        x = position.reshape(len(self.mean), -1, position.shape[-1])
        known = alive.reshape(*x.shape[:2], 1)
        m = known.sum(1).to(x)
        mean = torch.where(known, x, 0.0).sum(1) / m.clamp(min=1)
        centred = torch.where(known, x - mean.unsqueeze(1), 0.0)
        count = self.count + m
        delta = torch.where(m > 0, mean - self.mean, 0.0)
        weight = self.count * m / count.clamp(min=1)
        if self.cross.dim() == 3:
            cross = centred.mT @ centred + weight.unsqueeze(-1) * delta.unsqueeze(-1) * delta.unsqueeze(-2)
        else:
            cross = centred.square().sum(1) + weight * delta.square()
        return Moments(count, self.mean + delta * (m / count.clamp(min=1)), self.cross + cross)

    def variance(self, before: Tensor) -> Tensor:
        """Return variances ``(g, d)``, shrunk towards ``before`` with the weight of five draws.

        The logarithms are averaged, as a prior may be wider than its posterior by orders of magnitude. Where a
        coordinate has not moved, ``before`` stays.
        """
        cross = self.cross.diagonal(dim1=-2, dim2=-1) if self.cross.dim() == 3 else self.cross
        variance = cross / (self.count - 1).clamp(min=1)
        shrunk = torch.lerp(before.log(), variance.log(), self.count / (self.count + PRIOR_WEIGHT)).exp()
        return torch.where((variance > 0) & variance.isfinite(), shrunk, before)

    def root_with(self, slopes: Moments) -> Tensor:
        """Return the Cholesky factor of the covariance that draws and gradients agree on, ``(g, d, d)``.

        Among all metrics the geometric mean of the covariance of the draws and the inverse covariance of the
        gradients has the least Fisher divergence from the posterior to a normal distribution (Seyboldt, Carlson and
        Carpenter 2026, arXiv:2603.18845). On a normal posterior it is exact from a few more draws than dimensions
        on, wherever they come from. Both are shrunk towards the identity with the weight of one draw: in units of
        the metric before, which thus stays where nothing is known.
        """
        mean = agreement(self.cross, slopes.cross, self.count.unsqueeze(-1))
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        factor, failed = torch.linalg.cholesky_ex(mean)
        usable = ((failed == 0) & factor.isfinite().all(-1).all(-1))[:, None, None]
        return torch.where(usable, factor, identity).to(self.mean.dtype)

    def correlation(self) -> Tensor:
        """Return correlation matrices ``(g, d, d)``, shrunk towards the identity as far as the draws are noise.

        The weight of the identity is the expected squared error of the correlations over their
        squared size (Schaefer and Strimmer 2005), a third of the draws counted as independent:
        where nothing is correlated the result is the identity.
        """
        variance = self.cross.diagonal(dim1=-2, dim2=-1)
        root = torch.where(variance > 0, variance.rsqrt(), torch.zeros_like(variance))
        identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        correlation = (self.cross * root.unsqueeze(-1) * root.unsqueeze(-2)) * (1 - identity)
        square = correlation.square()
        effective = self.count.squeeze(-1).clamp(min=1) / DRAWS_PER_EFFECTIVE
        error = ((1 - square).square() * (1 - identity)).sum((-1, -2)) / effective
        tiny = torch.finfo(root.dtype).tiny
        weight = (error / square.sum((-1, -2)).clamp(min=tiny)).clamp(max=1.0)[..., None, None]
        correlation = torch.where(correlation.isfinite(), (1 - weight) * correlation, torch.zeros_like(correlation))
        return correlation + identity


def agreement(draws: Tensor, slopes: Tensor, count: Tensor) -> Tensor:
    """Return the covariance that sums of centred products of draws and of gradients agree on, ``(g, d, d)``, float64.

    That is the geometric mean of the covariance of the draws and the inverse covariance of the gradients, both shrunk
    towards the identity with the weight of one draw; ``count (g, 1, 1)``.
    """
    identity = torch.eye(draws.shape[-1], dtype=torch.float64, device=draws.device)
    covariance, gradients = (
        (cross.double() + FISHER_WEIGHT * identity) / (count.double() + FISHER_WEIGHT) for cross in (draws, slopes)
    )
    # Squares of gradients may overflow, and no factorisation takes that.
    usable = (covariance.isfinite() & gradients.isfinite()).all(-1).all(-1)[..., None, None]
    covariance, gradients = (torch.where(usable, x, identity) for x in (covariance, gradients))
    root, inverse = _power(gradients, 0.5), _power(gradients, -0.5)
    mean = inverse @ _power(root @ covariance @ root, 0.5) @ inverse
    return 0.5 * (mean + mean.mT)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Return a power of positive definite matrices, ``(g, d, d) -> (g, d, d)``."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    smallest = torch.finfo(values.dtype).eps * values[..., -1:]
    return (vectors * values.clamp(min=smallest).pow(exponent).unsqueeze(-2)) @ vectors.mT
