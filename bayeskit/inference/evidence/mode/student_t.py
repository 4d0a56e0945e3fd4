"""Multivariate Student-t distributions as proposals."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class StudentT:
    """Multivariate Student-t with location ``(d,)`` and scale factor ``(d, d)``."""

    def __init__(self, location: Tensor, factor: Tensor, degrees_of_freedom: float) -> None:
        self.location, self.factor, self.df = location, factor, degrees_of_freedom

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points, ``(num_draws, d)``."""
        d = len(self.location)
        normal = torch.randn(num_draws, d, generator=generator, dtype=self.location.dtype)
        # A chi-squared variable with real degrees of freedom; torch's gamma sampler takes the generator.
        concentration = torch.full((num_draws, 1), self.df / 2, dtype=self.location.dtype)
        chi_squared = 2 * torch._standard_gamma(concentration, generator=generator)
        scaled = (normal * (self.df / chi_squared).sqrt()).to(self.location.device)
        return self.location + scaled @ self.factor.T

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(n, d) -> (n)``."""
        d = x.shape[-1]
        z = torch.linalg.solve_triangular(self.factor, (x - self.location).T, upper=False)
        constant = math.lgamma((self.df + d) / 2) - math.lgamma(self.df / 2) - d / 2 * math.log(self.df * math.pi)
        log_determinant = self.factor.diagonal().log().sum()
        return constant - log_determinant - (self.df + d) / 2 * torch.log1p(z.square().sum(0) / self.df)


def scale_factor(precision: Tensor) -> Tensor:
    """Cholesky factor of the inverse of ``precision``; directions without curvature get a finite width."""
    values, vectors = torch.linalg.eigh(precision)
    floor = 1e-8 * values.abs().max()
    covariance = (vectors / values.clamp(min=floor)) @ vectors.T
    return torch.linalg.cholesky(covariance)
