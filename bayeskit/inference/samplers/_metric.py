"""Metrics (inverse mass matrices) and their estimation from draws and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.texts import short_repr
from bayeskit.errors import SettingsError, ShapeError

# Metrics: a covariance stored as a factor, with standard normal whitened momenta.


@dataclass(frozen=True, eq=False)
class Metric:
    """An inverse mass matrix ``F F^T``, stored as its factor ``F``.

    Kernels use whitened momenta ``p ~ N(0, I)``: the position moves by ``F p`` and the momentum by ``F^T gradient``, so
    the kinetic energy is ``|p|^2 / 2`` for every metric.

    Constructors: :meth:`diagonal`, :meth:`dense`, :meth:`low_rank`.

    Attributes
    ----------
    factor : Tensor
        Standard deviations ``(d,)`` or ``(g, d)`` if diagonal or low-rank; lower Cholesky factors ``(d, d)`` or
        ``(g, d, d)`` if dense. The ``n`` chains form ``g`` groups of equal size, in order.
    is_dense : bool
    directions : Tensor, optional
        Orthonormal columns ``(d, k)`` or ``(g, d, k)``, in units of ``factor``, with scales other than the diagonal.
    stretch : Tensor, optional
        Standard deviations along ``directions``, relative to the diagonal, ``(k,)`` or ``(g, k)``.

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

    __repr__ = short_repr

    @classmethod
    def diagonal(cls, variance: Tensor) -> Metric:
        """Make a diagonal metric from variances, ``(d,)`` or ``(g, d)``.

        Raises
        ------
        SettingsError
            If a variance is not positive and finite.
        """
        if not bool(((variance > 0) & variance.isfinite()).all()):
            raise SettingsError("a diagonal metric needs positive finite variances")
        return cls(variance.sqrt(), False)

    @classmethod
    def dense(cls, covariance: Tensor) -> Metric:
        """Make a dense metric from covariance matrices, ``(d, d)`` or ``(g, d, d)``.

        Raises
        ------
        ShapeError
            If the matrices are not square.
        SettingsError
            If a matrix is not positive definite.
        """
        if covariance.dim() < 2 or covariance.shape[-1] != covariance.shape[-2]:
            raise ShapeError(f"a dense metric needs square matrices, not shape {tuple(covariance.shape)}")
        factor, info = torch.linalg.cholesky_ex(covariance)
        if bool((info != 0).any()):
            raise SettingsError("a dense metric needs positive definite matrices")
        return cls(factor.contiguous(), True)

    @classmethod
    def low_rank(cls, variance: Tensor, directions: Tensor, stretch: Tensor) -> Metric:
        """Make a low-rank metric from variances, ``(d,)`` or ``(g, d)``, and scales of ``k`` orthonormal directions.

        The factor is ``F = D (I + U diag(s - 1) U^T)`` with standard deviations ``D``, directions ``U`` in units of
        ``D``, ``(d, k)`` or ``(g, d, k)``, and scales ``s``, ``(k,)`` or ``(g, k)``.

        Raises
        ------
        ShapeError
            If the shapes do not match.
        SettingsError
            If a variance or a scale is not positive and finite, or the directions are not orthonormal.
        """
        if directions.shape[:-1] != variance.shape or stretch.shape != directions.shape[:-2] + directions.shape[-1:]:
            raise ShapeError(
                f"variances {tuple(variance.shape)}, directions {tuple(directions.shape)} and stretches "
                f"{tuple(stretch.shape)} do not fit; their shapes must be (d,), (d, k) and (k,)"
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


# Running mean and covariance of groups of chains, and the metric they give.

MAX_CROSS_DIMENSION = 400
_PRIOR_WEIGHT, _FISHER_WEIGHT = 5.0, 1.0
_DRAWS_PER_EFFECTIVE = 3.0
#: Variance relative to the metric, or its inverse, from which the metric is far off, and bounds of its correction.
_FAR, _FARTHEST_COORDINATE, _FARTHEST_DIRECTION = 1e3, 1e250, 1e9
#: Draws per dimension for which directions are corrected, and share of the mean variance added to all for rounding.
_DRAWS_FOR_DIRECTIONS, _LITTLE = 2.5, 1e-10


class Moments(NamedTuple):
    """Pooled moments of the chains of each of ``g`` groups."""

    # (g, 1), number of draws so far
    count: Tensor  # type: ignore[assignment]
    mean: Tensor  # (g, d)
    cross: Tensor  # sums of centred products, (g, d, d); of squares only, (g, d), above MAX_CROSS_DIMENSION

    @classmethod
    def start(cls, num_groups: int, like: Tensor) -> Moments:
        """Start empty, in dimension, dtype and device of ``like``, shape ``(*, d)``."""
        d = like.shape[-1]
        shape = (num_groups, d, d) if d <= MAX_CROSS_DIMENSION else (num_groups, d)
        return cls(like.new_zeros(num_groups, 1), like.new_zeros(num_groups, d), like.new_zeros(shape))

    def update(self, position: Tensor, alive: Tensor) -> Moments:
        """Add one draw of every living chain, ``(n, d)`` and ``(n,)``; the chains of a group are neighbours."""
        # A chain that started at zero density never moves and carries no information.
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
        """Return variances ``(g, d)``, shrunk towards ``before`` with the weight of five draws."""
        # Logarithms are averaged, because a prior may be wider than its posterior by orders of magnitude. A coordinate
        # that has not moved keeps ``before``.
        cross = self.cross.diagonal(dim1=-2, dim2=-1) if self.cross.dim() == 3 else self.cross
        variance = cross / (self.count - 1).clamp(min=1)
        shrunk = torch.lerp(before.log(), variance.log(), self.count / (self.count + _PRIOR_WEIGHT)).exp()
        return torch.where((variance > 0) & variance.isfinite(), shrunk, before)

    def root_with(self, slopes: Moments) -> Tensor:
        """Return the Cholesky factor of the covariance that draws and gradients agree on, ``(g, d, d)``."""
        # Of all metrics this has the least Fisher divergence from the posterior to a normal distribution (Seyboldt,
        # Carlson and Carpenter 2026, arXiv:2603.18845). For a normal posterior it is exact with a few more draws than
        # dimensions, from any distribution.
        mean = _agreement(self.cross, slopes.cross, self.count.unsqueeze(-1))
        identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        factor, failed = torch.linalg.cholesky_ex(mean)
        usable = ((failed == 0) & factor.isfinite().all(-1).all(-1))[:, None, None]
        return torch.where(usable, factor, identity).to(self.mean.dtype)

    def spread(self, root: Tensor) -> Tensor:
        """Return covariances ``(g, d, d)`` in units of ``root (g, d, d)``, less the largest by chance."""
        inner = torch.linalg.solve_triangular(root, self.cross, upper=False)
        covariance = torch.linalg.solve_triangular(root, inner.mT, upper=False)
        count = self.count.clamp(min=1).unsqueeze(-1)
        # The largest eigenvalue of as many independent draws with the identity as covariance (Marchenko and Pastur
        # 1967); as in `correlation`, a third of the draws counts as independent.
        chance = (1 + (_DRAWS_PER_EFFECTIVE * root.shape[-1] / count).sqrt()).square()
        covariance = 0.5 * (covariance + covariance.mT) / (count * chance)
        return torch.where(covariance.isfinite().all(-1, keepdim=True).all(-2, keepdim=True), covariance, 0.0)

    def correlation(self) -> Tensor:
        """Return correlation matrices ``(g, d, d)``, shrunk towards the identity (Schaefer and Strimmer 2005)."""
        # The weight of the identity is the expected squared error of the correlations over their squared size, with a
        # third of the draws counted as independent.
        variance = self.cross.diagonal(dim1=-2, dim2=-1)
        root = torch.where(variance > 0, variance.rsqrt(), torch.zeros_like(variance))
        identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
        correlation = (self.cross * root.unsqueeze(-1) * root.unsqueeze(-2)) * (1 - identity)
        square = correlation.square()
        effective = self.count.squeeze(-1).clamp(min=1) / _DRAWS_PER_EFFECTIVE
        error = ((1 - square).square() * (1 - identity)).sum((-1, -2)) / effective
        tiny = torch.finfo(root.dtype).tiny
        weight = (error / square.sum((-1, -2)).clamp(min=tiny)).clamp(max=1.0)[..., None, None]
        correlation = torch.where(correlation.isfinite(), (1 - weight) * correlation, torch.zeros_like(correlation))
        return correlation + identity


def _agreement(draws: Tensor, slopes: Tensor, count: Tensor) -> Tensor:
    """Return the geometric mean of draws' covariance and gradients' inverse covariance, ``(g, d, d)``, float64."""
    # draws, slopes: sums of centred products, (g, d, d); count: (g, 1, 1). Both are shrunk towards the identity with
    # the weight of one draw, which keeps the previous metric if there is little information.
    draws, slopes = draws.double(), slopes.double()
    # Squares of gradients may overflow, and factorisations fail on infinite entries.
    usable = (draws.isfinite() & slopes.isfinite()).all(-1).all(-1)[..., None, None]
    draws, slopes = (torch.where(usable, x, torch.zeros_like(x)) for x in (draws, slopes))
    # A metric that is wrong by orders of magnitude is not worth a draw: coordinates and then directions that are far
    # off are measured in a unit of their own, and the covariance is estimated in these.
    scale = _only_far(_deviation_ratio(draws, slopes), _FARTHEST_COORDINATE).sqrt()  # (g, d)
    outer = scale.unsqueeze(-1) * scale.unsqueeze(-2)
    draws, slopes = draws / outer, slopes * outer
    directions = _far_directions(draws, slopes, count)
    if directions is None:
        return outer * _shrunk_mean(draws, slopes, count)
    root, inverse = directions
    return outer * (root @ _shrunk_mean(inverse @ draws @ inverse, root @ slopes @ root, count) @ root)


def _shrunk_mean(draws: Tensor, slopes: Tensor, count: Tensor) -> Tensor:
    identity = torch.eye(draws.shape[-1], dtype=torch.float64, device=draws.device)
    covariance, gradients = (
        (cross + _FISHER_WEIGHT * identity) / (count.double() + _FISHER_WEIGHT) for cross in (draws, slopes)
    )
    return _geometric_mean(covariance, gradients)


def _geometric_mean(covariance: Tensor, gradients: Tensor) -> Tensor:
    """Return the geometric mean of matrices and of inverses of ``gradients``, positive definite, ``(g, d, d)`` each."""
    root, inverse = _power(gradients, 0.5), _power(gradients, -0.5)
    mean = inverse @ _power(root @ covariance @ root, 0.5) @ inverse
    return 0.5 * (mean + mean.mT)


def _deviation_ratio(draws: Tensor, slopes: Tensor) -> Tensor:
    """Return the variance of each coordinate that draws and gradients agree on by themselves, ``(g, d)``."""
    return draws.diagonal(dim1=-2, dim2=-1).sqrt() / slopes.diagonal(dim1=-2, dim2=-1).sqrt()


def _far_directions(draws: Tensor, slopes: Tensor, count: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the root, ``(g, d, d)``, of the covariance in directions of a far wrong scale, and its inverse.

    Other directions have the scale one; None if all have. The covariance that draws and gradients agree on needs no
    typical draws: it is a secant, right as soon as chains move at all.
    """
    d = draws.shape[-1]
    enough = count.squeeze(-1) > _DRAWS_FOR_DIRECTIONS * d  # (g, 1)
    identity, pair = torch.eye(d, dtype=draws.dtype, device=draws.device), []
    for cross in (draws, slopes):
        size = cross.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=torch.finfo(cross.dtype).tiny)
        pair.append(cross + _LITTLE * size[..., None, None] * identity)
    values, vectors = torch.linalg.eigh(_geometric_mean(*pair))
    stretch = torch.where(enough, _only_far(values, _FARTHEST_DIRECTION).sqrt(), 1.0).unsqueeze(-2)
    if not bool((stretch != 1).any()):
        return None
    return (vectors * stretch) @ vectors.mT, (vectors / stretch) @ vectors.mT


def _only_far(ratio: Tensor, farthest: float) -> Tensor:
    """Return variances relative to a metric, bounded, where they differ from it by orders of magnitude, else one."""
    far = ratio.isfinite() & (ratio > 0) & ((ratio > _FAR) | (ratio < 1 / _FAR))
    return torch.where(far, ratio.clamp(1 / farthest, farthest), 1.0)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Return a power of positive definite matrices, ``(g, d, d) -> (g, d, d)``."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    smallest = torch.finfo(values.dtype).eps * values[..., -1:]
    return (vectors * values.clamp(min=smallest).pow(exponent).unsqueeze(-2)) @ vectors.mT


# Low-rank metrics in many dimensions: directions of larger or smaller scale than the diagonal implies.

RANK = 32  # directions at most
_MAX_DRAWS = 256  # stored per group
_CUTOFF = 2.0  # variances relative to the diagonal within this factor of one are ignored


class Window(NamedTuple):
    """Draws and gradients of ``g`` groups of chains, evenly spread over a window of iterations."""

    draws: Tensor  # (g, slots, m, d), of m chains of a group at a time; NaN where missing
    gradients: Tensor  # (g, slots, m, d)
    # (), int64, on the host: number of draws offered so far
    count: Tensor  # type: ignore[assignment]
    stride: Tensor  # (), int64, on the host: one offer in this many is kept

    @classmethod
    def start(cls, num_groups: int, like: Tensor, kept: bool = True) -> Window:
        """Start empty, for chains of the shape ``(n, d)`` of ``like``; without slots unless ``kept``."""
        m, d = min(len(like) // num_groups, _MAX_DRAWS), like.shape[-1]
        slots = 2 * max(1, _MAX_DRAWS // (2 * m)) if kept else 0
        empty = like.new_full((num_groups, slots, m, d), torch.nan)
        return cls(empty, empty.clone(), torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.int64))

    def update(self, position: Tensor, gradient: Tensor, alive: Tensor) -> Window:
        """Offer one draw of every chain, ``(n, d)``, its gradient, and whether the chain is alive, ``(n,)``."""
        count, stride, slots = int(self.count), int(self.stride), self.draws.shape[1]
        draws, gradients = self.draws, self.gradients
        if slots and count % stride == 0:
            slot = count // stride
            if slot == slots:  # full: every other draw is dropped
                stride, slot = 2 * stride, slots // 2
                draws, gradients = (
                    torch.cat([x[:, ::2], torch.full_like(x[:, ::2], torch.nan)], 1) for x in (draws, gradients)
                )
            index = torch.tensor([slot], device=draws.device)
            news = (torch.where(alive.unsqueeze(-1), new, torch.nan) for new in (position, gradient))
            draws, gradients = (
                x.index_copy(1, index, new.reshape(len(x), 1, -1, x.shape[-1])[:, :, : x.shape[2]])
                for x, new in zip((draws, gradients), news, strict=True)
            )
        return Window(draws, gradients, self.count + 1, torch.full_like(self.stride, stride))

    def directions(self, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Return directions ``(g, d, k)`` and stretches ``(g, k)``, in units of ``deviation``, ``(g, d)``."""
        g, d = deviation.shape
        k = min(RANK, d)
        unit = deviation[:, None, None]
        x, y = (one.flatten(1, 2).double() for one in (self.draws / unit, self.gradients * unit))
        known = (x.isfinite() & y.isfinite()).all(-1, keepdim=True)
        count = known.sum(1, keepdim=True)
        x, y = (_centred(one, known, count) for one in (x, y))
        # The longest axes of the draws and those of the gradients, which are the shortest of the posterior.
        basis, _ = torch.linalg.qr(torch.cat([_longest(x, k), _longest(y, k)], -1))  # (g, d, 2 k)
        along, sloping = x @ basis, y @ basis
        covariance = _agreement(along.mT @ along, sloping.mT @ sloping, count)
        values, vectors = torch.linalg.eigh(covariance)
        size = values.log().abs()
        best = size.argsort(-1, descending=True)[..., :k]
        values, size = values.gather(-1, best), size.gather(-1, best)
        vectors = vectors.gather(-1, best.unsqueeze(-2).expand(g, vectors.shape[-1], k))
        usable = values.isfinite().all(-1, keepdim=True) & (values > 0).all(-1, keepdim=True)
        # Variances closer to one than the cutoff stay unchanged.
        stretch = torch.where(usable & (size > torch.tensor(_CUTOFF).log()), values.sqrt(), 1.0)
        directions = (basis @ vectors).nan_to_num()
        return directions.to(deviation).contiguous(), stretch.to(deviation)


def _centred(x: Tensor, known: Tensor, count: Tensor) -> Tensor:
    """Return rows minus their mean, ``(g, N, d)``, zero where unknown."""
    x = torch.where(known, x, 0.0)
    return torch.where(known, x - x.sum(1, keepdim=True) / count.clamp(min=1), 0.0)


def _longest(x: Tensor, k: int) -> Tensor:
    """Return the ``k`` longest axes of rows ``(g, N, d)``, ``(g, d, k)``."""
    _, vectors = torch.linalg.eigh(x @ x.mT)
    axes = x.mT @ vectors[..., -k:]
    return axes / axes.norm(dim=1, keepdim=True).clamp(min=torch.finfo(axes.dtype).tiny)
