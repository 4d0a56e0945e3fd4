"""Proposals with heavy tails for importance sampling: Student-t distributions, and mixtures of proposals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bayeskit._core.randomness import student_points
from bayeskit._core.torch_internals import standard_gamma
from bayeskit.errors import DrawsError

#: Half degrees of freedom above which Stirling's series is exact in double precision.
_LARGE = 1e3
#: Degrees of freedom of a distribution with two scales, the quantiles between which its mode is, and its candidates.
_DEGREES_OF_FREEDOM, _QUANTILES, _CANDIDATES = 5.0, (0.1, 0.9), 33


def student_log_constant(degrees_of_freedom: float, dim: int) -> float:
    r"""Return :math:`\log(\Gamma((\nu + d) / 2) / \Gamma(\nu / 2) / (\nu \pi)^{d / 2})`, accurate also for huge nu."""
    x, a = 0.5 * degrees_of_freedom, 0.5 * dim
    if x < _LARGE:
        return math.lgamma(x + a) - math.lgamma(x) - a * math.log(2 * x * math.pi)
    # The difference of log gamma functions would be lost to rounding. Stirling's series avoids the difference; its next
    # term is below the rounding error of this one.
    ratio = a / x
    series = (1 / (x + a) - 1 / x) / 12 - ((1 / (x + a)) ** 3 - (1 / x) ** 3) / 360
    return (x + a - 0.5) * math.log1p(ratio) - a + series - a * math.log(2 * math.pi)


def student_log_prob(z: Tensor, degrees_of_freedom: float) -> Tensor:
    """Return the log density of the standard multivariate Student-t distribution, ``(*batch, d) -> (*batch)``."""
    d, df = z.shape[-1], degrees_of_freedom
    return student_log_constant(df, d) - (df + d) / 2 * torch.log1p(z.square().sum(-1) / df)


def student_noise(
    shape: Sequence[int], degrees_of_freedom: float, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw standard multivariate Student-t vectors ``(*batch, d)``, on the device of the generator."""
    *batch, _ = shape
    normal = torch.randn(*shape, generator=generator, dtype=dtype, device=generator.device)
    # A chi-squared variable with real degrees of freedom; torch's gamma sampler accepts the generator.
    concentration = torch.full((*batch, 1), degrees_of_freedom / 2, dtype=dtype, device=generator.device)
    return normal * (degrees_of_freedom / (2 * standard_gamma(concentration, generator=generator))).sqrt()


def normal_log_prob(z: Tensor, variance: float = 1.0) -> Tensor:
    """Return the log density of independent normal variables of one variance, ``(*batch, d) -> (*batch)``."""
    return -z.square().sum(-1) / (2 * variance) - 0.5 * z.shape[-1] * math.log(2 * math.pi * variance)


class _Part(Protocol):
    """A distribution of vectors that can be drawn and has a density."""

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points, ``(num_draws, d)``."""
        ...

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        ...


class StudentT:
    """Multivariate Student-t distributions with locations ``(*batch, d)`` and scale factors ``(*batch, d, d)``."""

    def __init__(self, location: Tensor, factor: Tensor, degrees_of_freedom: float) -> None:
        self.location, self.factor, self.df = location, factor, degrees_of_freedom

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points of each distribution, ``(*batch, num_draws, d)``."""
        *batch, d = self.location.shape
        standard = student_noise((*batch, num_draws, d), self.df, generator, self.location.dtype)
        return self.location.unsqueeze(-2) + standard.to(self.location.device) @ self.factor.mT

    def spread(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Return randomised quasi-Monte Carlo points ``(num_draws, d)`` of one distribution; calls are independent."""
        standard = student_points(num_draws, len(self.location), self.df, generator)
        return self.location + standard.to(self.location) @ self.factor.T

    def with_share_of(self, num_draws: int) -> StudentT:
        """Return itself, because it has one part."""
        return self

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log densities, ``(*batch, n, d) -> (*batch, n)``."""
        away = (x - self.location.unsqueeze(-2)).mT
        z = torch.linalg.solve_triangular(self.factor, away, upper=False)
        widths = self.factor.diagonal(dim1=-2, dim2=-1)
        return student_log_prob(z.mT, self.df) - widths.log().sum(-1, keepdim=True)


class IndependentStudentT:
    """Independent Student-t variables, scaled one by one or by a triangular factor: ``x = location + factor @ t``."""

    def __init__(self, location: Tensor, factor: Tensor, degrees_of_freedom: Tensor | float) -> None:
        self.location, self.factor = location, factor  # (d,); (d,) or lower triangular (d, d)
        self.df = torch.as_tensor(degrees_of_freedom, dtype=torch.float64, device=location.device).expand(
            location.shape
        )

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points, ``(num_draws, d)``."""
        half = (self.df / 2).cpu().expand(num_draws, -1).contiguous()
        normal = torch.randn(half.shape, generator=generator, dtype=torch.float64)
        t = (normal * (half / standard_gamma(half, generator=generator)).sqrt()).to(self.location)
        return self.location + (t * self.factor if self.factor.dim() == 1 else t @ self.factor.T)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density in double precision, ``(*batch, d) -> (*batch)``."""
        t, power = self.standardised(x), (self.df + 1) / 2
        constant = power.lgamma() - (self.df / 2).lgamma() - 0.5 * (self.df * math.pi).log()
        widths = self.factor if self.factor.dim() == 1 else self.factor.diagonal()
        return (constant - power * torch.log1p(t.square() / self.df)).sum(-1) - widths.double().log().sum()

    def standardised(self, x: Tensor) -> Tensor:
        """Return the Student-t variables behind ``x``, ``(*batch, d) -> (*batch, d)``."""
        away = x.double() - self.location.double()
        if self.factor.dim() == 1:
            return away / self.factor.double()
        flat = away.reshape(-1, len(self.location))
        return torch.linalg.solve_triangular(self.factor.double(), flat.T, upper=False).T.reshape(x.shape)


class SplitStudentT:
    """Independent Student-t distributions with different scales on either side of the mode, all ``(d,)``."""

    def __init__(self, location: Tensor, left: Tensor, right: Tensor, df: float = _DEGREES_OF_FREEDOM) -> None:
        # Smooth enough for gradients, with tails heavier than those of normal or gamma distributions in unconstrained
        # space; two scales fit the skewness of the logarithm of a positive coordinate.
        self.location, self.left, self.right, self.df = location, left, right, df
        # The halves are joined at the mode, so the mass of each side is proportional to its scale.
        self._constant = (student_log_constant(df, 1) + math.log(2) - (left + right).log()).sum()

    @property
    def parameters(self) -> list[Tensor]:
        """Location and scales."""
        return [self.location, self.left, self.right]

    @classmethod
    def fit(cls, x: Tensor) -> SplitStudentT:
        """Fit to draws ``(n, d)`` by split-normal maximum likelihood (John 1982); DrawsError if degenerate."""
        n = len(x)
        x = x.to(torch.float64)
        still = ((x.amax(0) - x.amin(0)) <= 1e-12 * x.abs().amax(0)) if n >= 4 else torch.ones(x.shape[1]).bool()
        if n < 4 or bool(still.any()) or not bool(x.isfinite().all()):
            where = still.nonzero().flatten().tolist()
            raise DrawsError(
                f"no reference can be fitted to {n} draws whose coordinates {where} are constant or not finite; "
                "check the chains and the model"
            )
        levels = torch.linspace(*_QUANTILES, _CANDIDATES, dtype=x.dtype, device=x.device)
        modes = x.quantile(levels, 0)  # (candidates, d)
        # For each mode the maximum likelihood scales have a closed form.
        away = x - modes.unsqueeze(1)  # (candidates, n, d)
        below = away.clamp(max=0).square().sum(1)
        above = away.clamp(min=0).square().sum(1)
        roots = below.pow(1 / 3) + above.pow(1 / 3)
        best = roots.argmin(0, keepdim=True)
        location, root, low, high = (v.gather(0, best)[0] for v in (modes, roots, below, above))
        # A t with the variance of the normal has the smaller scale.
        shrink = math.sqrt((_DEGREES_OF_FREEDOM - 2) / _DEGREES_OF_FREEDOM)
        left, right = ((root * side.pow(2 / 3) / n).sqrt() * shrink for side in (low, high))
        return cls(location, left, right)

    def to(self, like: Tensor) -> SplitStudentT:
        """Return the distribution in the precision and on the device of ``like``."""
        return SplitStudentT(self.location.to(like), self.left.to(like), self.right.to(like), self.df)

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        z, _ = self._standardised(u)
        return self._constant - (self.df + 1) / 2 * torch.log1p(z.square() / self.df).sum(-1)

    def gradient(self, u: Tensor) -> Tensor:
        """Return the gradient of the log density, ``(*batch, d) -> (*batch, d)``."""
        z, scale = self._standardised(u)
        return -(self.df + 1) * z / ((self.df + z.square()) * scale)

    def _standardised(self, u: Tensor) -> tuple[Tensor, Tensor]:
        away = u - self.location
        scale = torch.where(away < 0, self.left, self.right)
        return away / scale, scale

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw independent points, ``(n, d)``."""
        shape = (num_draws, len(self.location))
        dtype = torch.float64
        device = generator.device
        normal = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        concentration = torch.full(shape, self.df / 2, dtype=dtype, device=device)
        chi_squared = 2 * standard_gamma(concentration, generator=generator)
        size = (normal.abs() * (self.df / chi_squared).sqrt()).to(self.location)
        uniform = torch.rand(shape, generator=generator, dtype=dtype, device=device).to(self.location)
        down = uniform < self.left / (self.left + self.right)
        return self.location + torch.where(down, -size * self.left, size * self.right)


class Mixture:
    """Proposals, each with a share of the draws, of which the last may have heavier tails to defend against."""

    def __init__(self, parts: Sequence[_Part], shares: Sequence[float]) -> None:
        self.parts, self.shares = tuple(parts), tuple(share / math.fsum(shares) for share in shares)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw points independently, ``(num_draws, d)``, those of one part after those of another."""
        ends = torch.tensor(self.shares[::-1], dtype=torch.float64).cumsum(0)
        uniform = torch.rand(num_draws, generator=generator)
        below = (uniform.unsqueeze(-1) < ends[:-1]).sum(0).tolist()  # the last part first
        counts = [last - first for first, last in zip([0, *below], [*below, num_draws], strict=True)][::-1]
        pairs = zip(self.parts, counts, strict=True)
        return torch.cat([part.sample(count, generator) for part, count in pairs if count])

    def stratified(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw a rounded number of points from each part, ``(num_draws, d)``."""
        pairs = zip(self.parts, self.counts(num_draws), strict=True)
        return torch.cat([part.sample(count, generator) for part, count in pairs if count])

    def spread(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Return quasi-Monte Carlo points of each part, ``(num_draws, d)``, with rounded numbers of each."""
        pairs = zip(self.parts, self.counts(num_draws), strict=True)
        return torch.cat([part.spread(count, generator) for part, count in pairs if count])  # type: ignore[attr-defined]

    def counts(self, num_draws: int) -> list[int]:
        """Return rounded numbers of draws of the parts; the first part has what is left."""
        rest = [round(share * num_draws) for share in self.shares[1:]]
        return [num_draws - sum(rest), *rest]

    def with_share_of(self, num_draws: int) -> Mixture:
        """Return the mixture with the shares of the numbers of draws in :meth:`spread`."""
        return Mixture(self.parts, self.counts(num_draws))

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        pairs = [(part, math.log(share)) for part, share in zip(self.parts, self.shares, strict=True) if share]
        return torch.stack([part.log_prob(x) + share for part, share in pairs]).logsumexp(0)
