"""Bijections from unconstrained vectors to every continuous support of torch and Pyro."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints as pyro_constraints
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints
from torch.distributions.transforms import (
    ComposeTransform,
    CorrCholeskyTransform,
    ExpTransform,
    IndependentTransform,
    SigmoidTransform,
    StickBreakingTransform,
)
from torch.nn.functional import logsigmoid

_MATRIX_SUPPORTS = (
    type(constraints.lower_cholesky),
    type(constraints.positive_definite),
    type(constraints.positive_semidefinite),
    type(constraints.lower_triangular),
    type(pyro_constraints.unit_lower_cholesky),
)


class LowerTriangle(Transform):
    """The map of a vector to a lower triangle ``L``, or to ``L @ L.T`` if ``square``."""

    # Densities of matrices are with respect to Lebesgue measure on the free entries, so the Jacobian is that of the map
    # between free entries: n (n + 1) / 2 of them, n (n - 1) / 2 where the diagonal is one.
    bijective = True
    domain = constraints.real_vector
    codomain = constraints.independent(constraints.real, 2)

    def __init__(self, diagonal: str = "exp", square: bool = False) -> None:
        super().__init__()
        # The diagonal is positive ("exp" of a coordinate), unrestricted ("free") or fixed at "one".
        self.diagonal, self.square = diagonal, square

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LowerTriangle) and (self.diagonal, self.square) == (
            other.diagonal,
            other.square,
        )

    __hash__ = None  # type: ignore[assignment]

    def forward_shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the matrix shape that a vector of ``shape`` fills."""
        length = shape[-1]
        root = (math.isqrt(1 + 8 * length) - 1) // 2
        n = root + 1 if self.diagonal == "one" else root
        return torch.Size((*shape[:-1], n, n))

    def inverse_shape(self, shape: tuple[int, ...]) -> torch.Size:
        """Return the vector shape that fills a matrix of ``shape``."""
        n = shape[-1]
        return torch.Size((*shape[:-2], n * (n - 1) // 2 if self.diagonal == "one" else n * (n + 1) // 2))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor | None, int]:
        n = self.forward_shape(tuple(x.shape))[-1]
        if self.diagonal == "one":
            return x, None, n
        return x[..., n:], x[..., :n], n

    def _call(self, x: Tensor) -> Tensor:
        below, diagonal, n = self._split(x)
        # Index matrices instead of in-place writes: vmap and make_fx take them as they are.
        position = torch.zeros(n, n, dtype=torch.long, device=x.device)
        rows, columns = torch.tril_indices(n, n, -1, device=x.device)
        position[rows, columns] = torch.arange(1, len(rows) + 1, device=x.device)
        padded = torch.cat([torch.zeros_like(x[..., :1]), below], -1)
        lower = padded[..., position.reshape(-1)].reshape(*x.shape[:-1], n, n)
        identity = torch.eye(n, dtype=x.dtype, device=x.device)
        if diagonal is None:
            lower = lower + identity
        else:
            entries = diagonal.exp() if self.diagonal == "exp" else diagonal
            lower = lower + entries.unsqueeze(-1) * identity
        return lower @ lower.mT if self.square else lower

    def _inverse(self, y: Tensor) -> Tensor:
        lower = torch.linalg.cholesky(y) if self.square else y
        n = y.shape[-1]
        rows, columns = torch.tril_indices(n, n, -1, device=y.device)
        below = lower[..., rows, columns]
        if self.diagonal == "one":
            return below
        diagonal = torch.diagonal(lower, dim1=-2, dim2=-1)
        return torch.cat([diagonal.log() if self.diagonal == "exp" else diagonal, below], -1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log determinant, shape ``(*batch)``."""
        _, diagonal, n = self._split(x)
        if diagonal is None or self.diagonal == "free":
            return torch.zeros_like(x[..., :1]).sum(-1)
        if not self.square:
            return diagonal.sum(-1)
        # |d(L L^T) / dL| = 2^n prod_i L_ii^(n - i), and one more power of L_ii for the exponential.
        power = torch.arange(n + 1, 1, -1, dtype=x.dtype, device=x.device)
        return n * math.log(2.0) + (power * diagonal).sum(-1)


class LogSimplex(StickBreakingTransform):
    """Stick breaking in the coordinate of ``StickBreakingTransform``, by logarithms: no piece rounds to zero."""

    @staticmethod
    def log_value_and_jacobian(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the pieces ``(*batch, K)`` and of the Jacobian ``(*batch)``."""
        logit = x - _log_pieces_after(x)
        log_rest = logsigmoid(-logit)
        # A simplex of one piece has no coordinate.
        whole = torch.zeros_like(logit[..., :1]) if logit.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
        log_v = torch.cat([whole, log_rest.cumsum(-1)], -1) + torch.cat([logsigmoid(logit), whole], -1)
        return log_v, (log_v[..., :-1] + log_rest).sum(-1)

    @staticmethod
    def coordinate(log_v: Tensor) -> Tensor:
        """Return the coordinate of pieces that need not add up to one, ``(*batch, K) -> (*batch, K - 1)``."""
        later = log_v.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:]
        return log_v[..., :-1] - later + _log_pieces_after(later)

    def _call(self, x: Tensor) -> Tensor:
        return self.log_value_and_jacobian(x)[0].clamp(min=_log_tiny(x)).exp()

    def _inverse(self, y: Tensor) -> Tensor:
        return self.coordinate(y.clamp(min=torch.finfo(y.dtype).tiny).log())

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log determinant, shape ``(*batch)``."""
        return self.log_value_and_jacobian(x)[1]


class _CorrelationCholesky(CorrCholeskyTransform):
    """The map of ``atanh`` of partial correlations to Cholesky factors, as in ``CorrCholeskyTransform``."""

    def _call(self, x: Tensor) -> Tensor:
        n = self.forward_shape(tuple(x.shape))[-1]
        lower = LowerTriangle("one")
        identity = torch.eye(n, dtype=x.dtype, device=x.device)
        # log(1 - tanh(x)**2), where torch clamps tanh x: the diagonal is right down to the smallest numbers.
        free = lower(_log_sech_square(x)) - identity
        before = free.cumsum(-1) - free  # of the entries to the left
        return lower(x.tanh()) * (0.5 * before).clamp(min=_log_tiny(x)).exp()

    def _inverse(self, y: Tensor) -> Tensor:
        # A row has length one; sums from the right do not cancel.
        rest = y.square().flip(-1).cumsum(-1).flip(-1).clamp(min=torch.finfo(y.dtype).tiny)
        free = LowerTriangle("one").inv
        partial = free(y * rest.rsqrt())
        log_one_less_square = free(rest.roll(-1, -1).log() - rest.log())
        return partial.sign() * (partial.abs().log1p() - 0.5 * log_one_less_square)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor, intermediates: object = None) -> Tensor:
        """Return the log determinant, shape ``(*batch)``."""
        n = self.forward_shape(tuple(x.shape))[-1]
        # A constant, not computed in the graph: inductor cannot compile such ranges where vectors are switched off.
        weight = x.new_tensor([1 + 0.5 * (row - 1 - column) for row in range(n) for column in range(row)])
        return (weight * _log_sech_square(x)).sum(-1)


class BoundedExponential(ExpTransform):
    """The exponential function, clamped to positive finite numbers of the dtype."""

    def _call(self, x: Tensor) -> Tensor:
        # Slightly inside, because the logarithms themselves are rounded.
        return x.clamp(_log_tiny(x), _log_max(x)).exp()

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``x``, or ``-inf`` beyond the logarithm of the largest number."""
        return torch.where(x <= _log_max(x), x, -torch.inf)


class _Sigmoid(SigmoidTransform):
    """The logistic function; the softplus in torch's Jacobian is cut at 20, beyond which it is off by 2e-9."""

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log derivative, shape of ``x``."""
        return logsigmoid(x) + logsigmoid(-x)


def _log_tiny(x: Tensor) -> float:
    return math.log(torch.finfo(x.dtype).tiny) * (1 - 1e-6)


def _log_max(x: Tensor) -> float:
    return math.log(torch.finfo(x.dtype).max) * (1 - 1e-6)


def _log_pieces_after(x: Tensor) -> Tensor:
    """Return ``log(n), ..., log(2), log(1)`` for ``n`` columns."""
    n = x.shape[-1]
    return (n + 1 - x.new_ones(n).cumsum(-1)).log()


def _log_sech_square(x: Tensor) -> Tensor:
    """Return ``log(1 - tanh(x)**2)``."""
    return 2 * math.log(2.0) + logsigmoid(2 * x) + logsigmoid(-2 * x)


def _exact(transform: Transform) -> Transform:
    """Return a bijection with the coordinate of torch's and less rounding near the ends of the support."""
    if isinstance(transform, ComposeTransform):
        return ComposeTransform([_exact(part) for part in transform.parts])
    for theirs, ours in _EXACT.items():
        if type(transform) is theirs:
            return ours()
    return transform


_EXACT: dict[type, type] = {
    ExpTransform: BoundedExponential,
    SigmoidTransform: _Sigmoid,
    StickBreakingTransform: LogSimplex,
    CorrCholeskyTransform: _CorrelationCholesky,
}


def bijection(support: constraints.Constraint) -> Transform:
    """Return the bijection of unconstrained space to ``support``; raise ``NotImplementedError`` if none is known."""
    if isinstance(support, constraints.independent):
        return IndependentTransform(bijection(support.base_constraint), support.reinterpreted_batch_ndims)
    if isinstance(support, _MATRIX_SUPPORTS):
        if isinstance(support, type(pyro_constraints.unit_lower_cholesky)):
            return LowerTriangle("one")
        if isinstance(support, type(constraints.lower_triangular)):
            return LowerTriangle("free")
        return LowerTriangle("exp", square=not isinstance(support, type(constraints.lower_cholesky)))
    return _exact(biject_to(support))


def support_of(fn: Any) -> constraints.Constraint:
    """Return the support of ``fn``; raise ``NotImplementedError`` where its transforms misdeclare it."""
    # torch declares the real line for angles, over which a periodic density does not integrate to one, and for mixtures
    # a constraint of its own.
    base = fn
    while isinstance(base, (dist.Independent, dist.MaskedDistribution)):
        base = base.base_dist
    if isinstance(base, (dist.VonMises, dist.SineBivariateVonMises, dist.SineSkewed)):
        turn = constraints.interval(-math.pi, math.pi)
        return constraints.independent(turn, fn.event_dim) if fn.event_dim else turn
    if isinstance(base, torch.distributions.MixtureSameFamily):
        support = _of_components(base)
        more = fn.event_dim - len(base.event_shape)
        return constraints.independent(support, more) if more else support
    if is_misdeclared(base):
        raise NotImplementedError("the transforms reach only a part of the declared support, the real line")
    return fn.support


def _of_components(mixture: Any) -> constraints.Constraint:
    """Return the smallest support of the same class that contains all components of a mixture."""
    components = mixture.component_distribution
    support = support_of(components)
    inner, dim = _inner(support), -1 - len(components.event_shape)
    ends = [(name, getattr(inner, name)) for name in ("lower_bound", "upper_bound") if hasattr(inner, name)]
    if not any(isinstance(end, Tensor) and end.dim() for _, end in ends):
        return support
    common = type(inner)(
        *(
            end if not isinstance(end, Tensor) or not end.dim() else end.amin(dim) if name[0] == "l" else end.amax(dim)
            for name, end in ends
        )
    )
    more = support.event_dim - inner.event_dim
    return constraints.independent(common, more) if more else common


def is_misdeclared(fn: Any) -> bool:
    """Tell whether the declared support exceeds the image of the transforms, as for a shifted exponential."""
    while isinstance(fn, (dist.Independent, dist.MaskedDistribution, torch.distributions.MixtureSameFamily)):
        fn = fn.component_distribution if isinstance(fn, torch.distributions.MixtureSameFamily) else fn.base_dist
    if type(fn).support is not dist.TransformedDistribution.support:
        return False
    images = [fn.base_dist.support, *(t.codomain for t in fn.transforms)]
    return any(not is_whole(_inner(t.domain), _inner(image)) for t, image in zip(fn.transforms, images, strict=False))


def is_whole(domain: Any, image: Any) -> bool:
    """Tell whether ``image`` covers ``domain``, if that is the real line or has bounds."""
    if domain is constraints.real:
        return image is constraints.real
    names = ("lower_bound", "upper_bound")
    if not any(hasattr(domain, name) for name in names):
        return True
    ends = ((getattr(domain, name, math.inf), getattr(image, name, math.inf)) for name in names)
    return all(bool(torch.as_tensor(end == wanted).all()) for wanted, end in ends)


def _inner(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def inside(support: constraints.Constraint, value: Tensor) -> Tensor:
    """Move values ``(*shape)`` that are rounded to an end of their support one unit of rounding away from it."""
    inner, limits = _inner(support), torch.finfo(value.dtype)
    if isinstance(inner, type(constraints.simplex)):
        return torch.where(value <= 4 * limits.tiny, 2 * value.clamp(min=limits.tiny), value)
    ends = {name: getattr(inner, f"{name}_bound") for name in ("lower", "upper") if hasattr(inner, f"{name}_bound")}
    if not ends:
        return value
    bounds = {name: torch.as_tensor(end, dtype=value.dtype, device=value.device) for name, end in ends.items()}
    width = bounds["upper"] - bounds["lower"] if len(bounds) == 2 else torch.zeros_like(value)
    moved = torch.where(value.abs() >= limits.max / 4, 0.5 * value, value) if len(bounds) == 1 else value
    for name, end in bounds.items():
        distance = (value - end).abs()
        # Near zero floating-point numbers are dense; elsewhere they are a unit of rounding apart.
        unit = limits.eps * torch.maximum(end.abs(), width if name == "upper" else torch.zeros_like(end))
        # By as much as the distance from the end, or one unit where that is zero.
        step = torch.maximum(distance, unit.clamp(min=limits.tiny))
        near = distance <= 2 * unit.clamp(min=2 * limits.tiny)
        moved = torch.where(near, value + step if name == "lower" else value - step, moved)
    return moved
