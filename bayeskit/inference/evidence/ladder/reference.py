"""Independent reference distributions fitted to posterior draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit.errors import DrawsError

DEGREES_OF_FREEDOM = 5.0
QUANTILES = (0.1, 0.9)
CANDIDATES = 33


class SplitStudentT:
    """Independent Student-t distributions with another scale on either side of their mode.

    The density is smooth enough to be sampled by gradients, its tails are heavier than those of
    any normal or gamma distribution seen in unconstrained space, and the two scales follow the
    skewness that the logarithm of a positive coordinate has.

    Attributes
    ----------
    location, left, right : Tensor
        Mode and both scales of each coordinate, shape ``(d,)``.
    df : float
        Degrees of freedom.
    """

    def __init__(self, location: Tensor, left: Tensor, right: Tensor, df: float = DEGREES_OF_FREEDOM) -> None:
        self.location, self.left, self.right, self.df = location, left, right, df
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        # Half of each t is joined at the mode, so that either side carries mass in proportion to its scale.
        self._constant = (constant + math.log(2) - (left + right).log()).sum()

    @property
    def parameters(self) -> list[Tensor]:
        """What the distribution is made of."""
        return [self.location, self.left, self.right]

    @classmethod
    def fit(cls, x: Tensor) -> SplitStudentT:
        """Fit to draws ``(n, d)``: scales by maximum likelihood of a split normal, in closed form for each mode.

        Raises
        ------
        DrawsError
            If a coordinate does not move, or fewer than four draws are there.

        References
        ----------
        John, S. (1982). The three-parameter two-piece normal family of distributions and its
        fitting. Communications in Statistics: Theory and Methods 11, 879-885.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.evidence.ladder.reference import SplitStudentT
        >>> x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> fitted = SplitStudentT.fit(x)
        >>> bool((fitted.left / fitted.right - 1).abs().max() < 0.3)
        True
        """
        n = len(x)
        x = x.to(torch.float64)
        still = ((x.amax(0) - x.amin(0)) <= 1e-12 * x.abs().amax(0)) if n >= 4 else torch.ones(x.shape[1]).bool()
        if n < 4 or bool(still.any()) or not bool(x.isfinite().all()):
            where = still.nonzero().flatten().tolist()
            raise DrawsError(
                f"no reference can be fitted to {n} draws whose coordinates {where} do not move or are not finite; "
                "check the chains and the model"
            )
        levels = torch.linspace(*QUANTILES, CANDIDATES, dtype=x.dtype, device=x.device)
        modes = x.quantile(levels, 0)  # (candidates, d)
        away = x - modes.unsqueeze(1)  # (candidates, n, d)
        below = away.clamp(max=0).square().sum(1)
        above = away.clamp(min=0).square().sum(1)
        roots = below.pow(1 / 3) + above.pow(1 / 3)
        best = roots.argmin(0, keepdim=True)
        location, root, low, high = (v.gather(0, best)[0] for v in (modes, roots, below, above))
        # A t of the same variance as the normal has the smaller scale.
        shrink = math.sqrt((DEGREES_OF_FREEDOM - 2) / DEGREES_OF_FREEDOM)
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
        chi_squared = 2 * torch._standard_gamma(concentration, generator=generator)
        size = (normal.abs() * (self.df / chi_squared).sqrt()).to(self.location)
        uniform = torch.rand(shape, generator=generator, dtype=dtype, device=device).to(self.location)
        down = uniform < self.left / (self.left + self.right)
        return self.location + torch.where(down, -size * self.left, size * self.right)
