"""Metrics: the covariance a kernel believes in, kept as a factor, so that momenta are standard normal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.errors import SettingsError, ShapeError


@dataclass(frozen=True, eq=False)
class Metric:
    """An inverse mass matrix ``F F^T`` by its factor ``F``.

    A kernel keeps whitened momenta ``p ~ N(0, I)``: the position moves by ``F p`` and
    the momentum by ``F^T gradient``, so the kinetic energy is ``|p|^2 / 2`` whatever the metric.

    Make one with :meth:`diagonal` or :meth:`dense`.

    Attributes
    ----------
    factor : Tensor
        Standard deviations ``(d,)`` or ``(g, d)`` if diagonal, lower Cholesky factors ``(d, d)``
        or ``(g, d, d)`` if dense; ``n`` chains fall into ``g`` groups of neighbours of equal size.
    is_dense : bool

    Examples
    --------
    >>> import torch
    >>> metric = Metric.diagonal(torch.tensor([4.0, 1.0]))
    >>> metric.to_position(torch.ones(3, 2))[0]
    tensor([2., 1.])
    """

    factor: Tensor
    is_dense: bool

    @classmethod
    def diagonal(cls, variance: Tensor) -> Metric:
        """Take variances, ``(d,)`` or ``(g, d)``.

        Raises
        ------
        SettingsError
            If one is not positive and finite.
        """
        if not bool(((variance > 0) & variance.isfinite()).all()):
            raise SettingsError("a diagonal metric needs positive finite variances")
        return cls(variance.sqrt(), False)

    @classmethod
    def dense(cls, covariance: Tensor) -> Metric:
        """Take covariance matrices, ``(d, d)`` or ``(g, d, d)``.

        Raises
        ------
        ShapeError
            If they are not square.
        SettingsError
            If one is not positive definite.
        """
        if covariance.dim() < 2 or covariance.shape[-1] != covariance.shape[-2]:
            raise ShapeError(f"a dense metric needs square matrices, not shape {tuple(covariance.shape)}")
        factor, info = torch.linalg.cholesky_ex(covariance)
        if bool((info != 0).any()):
            raise SettingsError("a dense metric needs positive definite matrices")
        return cls(factor.contiguous(), True)

    def to_position(self, p: Tensor) -> Tensor:
        """Return ``F p``, a displacement, ``(n, d) -> (n, d)``."""
        return self._apply(p, transposed=False)

    def to_momentum(self, gradient: Tensor) -> Tensor:
        """Return ``F^T gradient``, ``(n, d) -> (n, d)``."""
        return self._apply(gradient, transposed=True)

    def whiten(self, displacement: Tensor) -> Tensor:
        """Return ``F^-1 displacement``, ``(n, d) -> (n, d)``."""
        d = displacement.shape[-1]
        if not self.is_dense:
            return Metric(1 / self.factor, False)._apply(displacement, transposed=False)
        x = displacement.reshape(len(self.factor) if self.factor.dim() == 3 else 1, -1, d)
        factor = self.factor if self.factor.dim() == 3 else self.factor.unsqueeze(0)
        return torch.linalg.solve_triangular(factor, x.mT, upper=False).mT.reshape(displacement.shape)

    def _apply(self, x: Tensor, transposed: bool) -> Tensor:
        grouped = self.factor.dim() == (3 if self.is_dense else 2)
        if not self.is_dense:
            if not grouped or self.factor.shape[0] == x.shape[0]:
                return self.factor * x
            return (self.factor.unsqueeze(1) * x.reshape(len(self.factor), -1, x.shape[-1])).reshape(x.shape)
        # Rows are vectors, so F p is p F^T.
        matrix = self.factor if transposed else self.factor.mT
        if not grouped:
            return x @ matrix
        return (x.reshape(len(self.factor), -1, x.shape[-1]) @ matrix).reshape(x.shape)
