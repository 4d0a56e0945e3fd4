"""Multivariate Student-t distributions as proposals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._quasi_random import student_points

#: Curvatures below this part of the largest are none; what is taken in their place.
FLAT, NARROWEST = 1e-20, 1e-8
#: Half degrees of freedom from which on Stirling's series is as exact as a double.
LARGE = 1e3


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

    def spread(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points that fill the distribution evenly, ``(num_draws, d)``: each follows it, together they do better.

        Several calls are independent of each other.
        """
        standard = student_points(num_draws, len(self.location), self.df, generator)
        return self.location + standard.to(self.location) @ self.factor.T

    def with_share_of(self, num_draws: int) -> StudentT:
        """Return itself: there is nothing to share."""
        return self

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(n, d) -> (n)``."""
        d = x.shape[-1]
        z = torch.linalg.solve_triangular(self.factor, (x - self.location).T, upper=False)
        constant = log_constant(self.df, d)
        log_determinant = self.factor.diagonal().log().sum()
        return constant - log_determinant - (self.df + d) / 2 * torch.log1p(z.square().sum(0) / self.df)


def log_constant(degrees_of_freedom: float, dim: int) -> float:
    r"""Log of :math:`\Gamma((\nu + d) / 2) / \Gamma(\nu / 2) / (\nu \pi)^{d / 2}`, right also where nu is huge.

    Examples
    --------
    The normal distribution is the limit:

    >>> abs(log_constant(1e25, 3) + 1.5 * math.log(2 * math.pi)) < 1e-12
    True
    """
    x, a = 0.5 * degrees_of_freedom, 0.5 * dim
    if x < LARGE:
        return math.lgamma(x + a) - math.lgamma(x) - a * math.log(2 * x * math.pi)
    # Logarithms of gamma functions would differ by less than their rounding. Stirling's series has no such difference;
    # its next term is below the rounding of this one.
    ratio = a / x
    series = (1 / (x + a) - 1 / x) / 12 - ((1 / (x + a)) ** 3 - (1 / x) ** 3) / 360
    return (x + a - 0.5) * math.log1p(ratio) - a + series - a * math.log(2 * math.pi)


class DefensiveStudentT:
    """A Student-t of which a share of the draws comes from another with heavier tails, so that none is missed."""

    def __init__(self, main: StudentT, heavy: StudentT, heavy_share: float) -> None:
        self.main, self.heavy, self.heavy_share = main, heavy, heavy_share

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points, ``(num_draws, d)``, those from the heavy tails last."""
        num_heavy = int((torch.rand(num_draws, generator=generator) < self.heavy_share).sum())
        main = self.main.sample(num_draws - num_heavy, generator)
        return torch.cat([main, self.heavy.sample(num_heavy, generator)])

    def spread(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points as :meth:`StudentT.spread` does, ``(num_draws, d)``, the nearest whole numbers from each."""
        num_heavy = round(self.heavy_share * num_draws)
        main = self.main.spread(num_draws - num_heavy, generator)
        return torch.cat([main, self.heavy.spread(num_heavy, generator)])

    def with_share_of(self, num_draws: int) -> DefensiveStudentT:
        """Return the mixture of which as many draws come from each as :meth:`spread` would take."""
        return DefensiveStudentT(self.main, self.heavy, round(self.heavy_share * num_draws) / num_draws)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(n, d) -> (n)``."""
        main = self.main.log_prob(x) + math.log1p(-self.heavy_share)
        return torch.logaddexp(main, self.heavy.log_prob(x) + math.log(self.heavy_share))


def scaled_curvature(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal of a negative Hessian, and its eigenvalues once that is scaled to ones; NaN where it is not positive."""
    diagonal = precision.diagonal()
    if not bool(precision.isfinite().all() & (diagonal > 0).all()):
        return diagonal, torch.full_like(diagonal, torch.nan)
    scale = diagonal.rsqrt()
    return diagonal, torch.linalg.eigvalsh(scale[:, None] * precision * scale)


def scale_factor(precision: Tensor) -> Tensor:
    """Cholesky factor of the inverse of ``precision``; directions without curvature get a finite width."""
    dtype, precision = precision.dtype, precision.double()  # single precision cannot factorise what is this narrow
    diagonal = precision.diagonal().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if not bool(precision.isfinite().all()):
        precision = torch.diag(diagonal)
    # Coordinates may have any units, so one is flat only if it is so next to nothing.
    highest = diagonal.max() if bool(diagonal.any()) else torch.ones_like(diagonal[0])
    diagonal = torch.where(diagonal > FLAT * highest, diagonal, NARROWEST * highest)
    scale = diagonal.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * precision * scale)
    floor = NARROWEST * values.abs().max().clamp(min=1.0)
    covariance = (vectors / values.clamp(min=floor)) @ vectors.T
    return (scale[:, None] * torch.linalg.cholesky(covariance)).to(dtype)
