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

    Make one with :meth:`diagonal`, :meth:`dense` or :meth:`low_rank`.

    Attributes
    ----------
    factor : Tensor
        Standard deviations ``(d,)`` or ``(g, d)`` if diagonal or of low rank, lower Cholesky factors ``(d, d)``
        or ``(g, d, d)`` if dense; ``n`` chains fall into ``g`` groups of neighbours of equal size.
    is_dense : bool
    directions : Tensor, optional
        Orthonormal columns ``(d, k)`` or ``(g, d, k)``, in units of ``factor``, along which the metric is longer
        or shorter than its diagonal.
    stretch : Tensor, optional
        By what factor of a standard deviation, ``(k,)`` or ``(g, k)``.

    Examples
    --------
    >>> import torch
    >>> metric = Metric.diagonal(torch.tensor([4.0, 1.0]))
    >>> metric.to_position(torch.ones(3, 2))[0]
    tensor([2., 1.])
    """

    factor: Tensor
    is_dense: bool
    directions: Tensor | None = None
    stretch: Tensor | None = None

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

    @classmethod
    def low_rank(cls, variance: Tensor, directions: Tensor, stretch: Tensor) -> Metric:
        """Take variances, ``(d,)`` or ``(g, d)``, and what stretches ``k`` orthonormal directions.

        The factor is ``F = D (I + U diag(s - 1) U^T)`` of standard deviations ``D``, directions ``U`` in units of them,
        ``(d, k)`` or ``(g, d, k)``, and stretches ``s``, ``(k,)`` or ``(g, k)``.

        Raises
        ------
        ShapeError
            If the shapes do not fit.
        SettingsError
            If a variance or a stretch is not positive and finite, or the directions are not orthonormal.
        """
        if directions.shape[:-1] != variance.shape or stretch.shape != directions.shape[:-2] + directions.shape[-1:]:
            raise ShapeError(
                f"variances {tuple(variance.shape)}, directions {tuple(directions.shape)} and stretches "
                f"{tuple(stretch.shape)} do not fit; needed are (d,), (d, k) and (k,)"
            )
        if not bool(((stretch > 0) & stretch.isfinite()).all()):
            raise SettingsError("a metric of low rank needs positive finite stretches")
        identity = torch.eye(directions.shape[-1], dtype=directions.dtype, device=directions.device)
        if not bool(((directions.mT @ directions - identity).abs() <= directions.new_tensor(1e-4)).all()):
            raise SettingsError("a metric of low rank needs orthonormal directions")
        return cls(cls.diagonal(variance).factor, False, directions, stretch)

    def to_position(self, p: Tensor) -> Tensor:
        """Return ``F p``, a displacement, ``(n, d) -> (n, d)``."""
        if self.is_dense:
            return self._times(p, self.factor.mT)  # rows are vectors, so F p is p F^T
        return self._scale(self._stretch(p, 1.0), self.factor)

    def to_momentum(self, gradient: Tensor) -> Tensor:
        """Return ``F^T gradient``, ``(n, d) -> (n, d)``."""
        if self.is_dense:
            return self._times(gradient, self.factor)
        return self._stretch(self._scale(gradient, self.factor), 1.0)

    def whiten(self, displacement: Tensor) -> Tensor:
        """Return ``F^-1 displacement``, ``(n, d) -> (n, d)``."""
        if not self.is_dense:
            return self._stretch(self._scale(displacement, 1 / self.factor), -1.0)
        factor = self.factor if self.factor.dim() == 3 else self.factor.unsqueeze(0)
        x = displacement.reshape(len(factor), -1, displacement.shape[-1])
        return torch.linalg.solve_triangular(factor, x.mT, upper=False).mT.reshape(displacement.shape)

    def _stretch(self, x: Tensor, power: float) -> Tensor:
        """Return ``(I + U diag(s^power - 1) U^T) x``, ``(n, d) -> (n, d)``."""
        if self.directions is None or self.stretch is None:
            return x
        along = self._scale(self._times(x, self.directions), self.stretch.pow(power) - 1)
        return x + self._times(along, self.directions.mT)

    @staticmethod
    def _times(x: Tensor, matrix: Tensor) -> Tensor:
        """Return ``(n, a)`` times ``(a, b)``, or times the matrix ``(g, a, b)`` of each group."""
        if matrix.dim() == 2:
            return x @ matrix
        return (x.reshape(len(matrix), -1, x.shape[-1]) @ matrix).reshape(len(x), -1)

    @staticmethod
    def _scale(x: Tensor, factor: Tensor) -> Tensor:
        """Return ``(n, a)`` times ``(a,)``, or times the row of ``(g, a)`` of each group."""
        if factor.dim() == 1 or len(factor) == len(x):
            return factor * x
        return (factor.unsqueeze(1) * x.reshape(len(factor), -1, x.shape[-1])).reshape(x.shape)
