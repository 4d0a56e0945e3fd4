"""A symmetric matrix that differs from the identity within a span of few vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class System:
    """The matrix ``I + W^T W``, the posterior precision where the prior's is one.

    It differs from the identity within the span of the rows of ``W`` only.

    Attributes
    ----------
    factor : Tensor
        Its Cholesky factor in coordinates of that span, ``(m, m)``.
    basis : Tensor or None
        Of the span, orthonormal columns, ``(p, m)``; None for all of space.
    """

    factor: Tensor
    basis: Tensor | None

    @property
    def log_determinant(self) -> float:
        """Of the matrix."""
        return 2 * float(self.factor.diagonal().log().sum())

    def quadratic(self, a: Tensor) -> Tensor:
        """Return ``a (I + W^T W)^{-1} a^T``, ``(m, m)``."""
        inside, outside = self._parts(a.mT)
        half = torch.linalg.solve_triangular(self.factor, inside, upper=False)
        # A sum of squares: the difference in Woodbury's formula loses digits where data say much.
        return half.mT @ half + (0 if outside is None else outside.mT @ outside)

    def solve(self, v: Tensor) -> Tensor:
        """Return ``(I + W^T W)^{-1} v``, ``(p,)``."""
        inside, outside = self._parts(v.unsqueeze(1))
        inside = torch.cholesky_solve(inside, self.factor)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).squeeze(1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the normal law with this precision, ``(count, p)``."""
        size = len(self.factor if self.basis is None else self.basis)
        drawn = torch.randn(size, count, generator=generator, dtype=self.factor.dtype, device=generator.device)
        inside, outside = self._parts(drawn.to(self.factor.device))
        inside = torch.linalg.solve_triangular(self.factor.mT, inside, upper=True)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).mT

    def _parts(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return coordinates in the span, and what lies outside of it."""
        if self.basis is None:
            return columns, None
        inside = self.basis.mT @ columns
        outside = columns - self.basis @ inside
        # What rounding has left inside is taken away, too.
        return inside, outside - self.basis @ (self.basis.mT @ outside)
