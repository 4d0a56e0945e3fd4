"""Distributions of torch and Pyro in forms that ``torch.func.vmap`` can batch, and draws that follow the density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.infer.reparam.stable
import torch
from pyro.distributions import (
    Categorical,
    DirichletMultinomial,
    ImproperUniform,
    MultivariateNormal,
    NanMaskedMultivariateNormal,
    NanMaskedNormal,
    Normal,
    OrderedLogistic,
    Poisson,
)
from pyro.distributions.distribution import COERCIONS
from pyro.distributions.stable import RADIUS
from pyro.ops.tensor_utils import safe_cholesky
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, LKJCholesky
from torch.overrides import TorchFunctionMode

from bayeskit._core.torch_internals import standard_gamma, tree_leaves, tree_map_only
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.transforms import bijection

# Replacements for distributions that ``torch.func.vmap`` cannot batch.
#
# Some densities of torch and Pyro assign in place where a batched model needs a new tensor, or branch on values. The
# replacements give the same values, to rounding.


class MaskedFill(TorchFunctionMode):
    """Replace ``x[mask] = number``, which has no batching rule, by ``x.masked_fill_(mask, number)``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Multinomial.log_prob does so, to drop impossible categories without counts.
        if func is Tensor.__setitem__:
            tensor, index, value = args
            # A mask with fewer dimensions refers to the first dimensions here, but to the last in masked_fill_.
            whole = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == tensor.shape
            if whole and isinstance(value, (bool, int, float)):
                tensor.masked_fill_(index, value)
                return None
        return func(*args, **(kwargs or {}))


class DoublePrecision(TorchFunctionMode):
    """Compute with tensors of less precision, such as those in globals and modules, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs
        if (
            not in_place
            and name not in ("__get__", "__set__", "__setitem__")
            and any(isinstance(x, Tensor) and x.dtype in _LESS_PRECISE for x in tree_leaves((args, kwargs)))
        ):
            self.seen = True
            args, kwargs = tree_map_only(
                Tensor, lambda x: x.to(torch.float64) if x.dtype in _LESS_PRECISE else x, (args, dict(kwargs))
            )
        return func(*args, **kwargs)


_LESS_PRECISE = (torch.float32, torch.float16, torch.bfloat16)


@contextmanager
def batchable_distributions() -> Iterator[None]:
    """Replace distributions, and functions that Pyro's distributions call, by batchable ones while a model runs."""
    # Pyro's hook for distributions that a model makes; functions that Pyro calls itself have none.
    COERCIONS.append(_coerce)
    for (module, name), (_, ours) in _EXCHANGED.items():
        setattr(module, name, ours)
    try:
        yield
    finally:
        COERCIONS.remove(_coerce)
        for (module, name), (theirs, _) in _EXCHANGED.items():
            setattr(module, name, theirs)


def _safe_logarithm(x: Tensor) -> Tensor:
    """Return ``log(x)`` with a slope of at most ``1 / eps``, as Pyro's ``safe_log``, which has no batching rule."""
    least = torch.finfo(x.dtype).eps
    below = x < least
    line = x.detach().log() + (x - x.detach()) / least
    return torch.where(below, line, torch.where(below, least, x).log())


class _SafeLogarithm:
    """Replacement of Pyro's autograd function."""

    apply = staticmethod(_safe_logarithm)


def _safe_cholesky(x: Tensor) -> Tensor:
    """Return a Cholesky factor, as Pyro's ``safe_cholesky``, which adds to the diagonal in place."""
    jitter = pyro.ops.tensor_utils.CHOLESKY_RELATIVE_JITTER * torch.finfo(x.dtype).eps
    if x.size(-1) == 1 or not jitter:
        return safe_cholesky(x)
    return torch.linalg.cholesky(x + (jitter * x.detach().abs().amax(-1)).diag_embed())


def _unsafe_standard_stable(alpha: Tensor, beta: Any, v: Tensor, w: Tensor, coords: str) -> Tensor:
    """Transform noise to a stable variable (Chambers, Mallows and Stuck 1976), as Pyro does, but not in place."""
    half_pi, eps = math.pi / 2, torch.finfo(v.dtype).eps
    v = v.clamp(min=2 * eps - half_pi, max=half_pi - 2 * eps)
    b = beta * (half_pi * alpha).tan()
    turned = b.atan() - half_pi * alpha + alpha * (v + half_pi)
    root = ((1 + b * b).rsqrt() * v.cos()).pow(alpha.reciprocal())
    z = turned.sin() / root * ((turned - v).cos().clamp(min=eps) / w).pow(alpha.reciprocal() - 1)
    z = torch.where(z.isnan(), 0.0, z)
    return z - b if coords == "S0" else z


def _around_the_hole(alpha: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Return values and weights of an interpolation, ``(*, 2)``: the ends of a hole at one, or ``alpha`` twice."""
    near = ((alpha - 1).abs() <= radius).unsqueeze(-1)
    here = alpha.unsqueeze(-1).expand(*alpha.shape, 2)
    ends = torch.where(near, torch.tensor([1 - radius, 1 + radius], dtype=alpha.dtype, device=alpha.device), here)
    weights = torch.where(near, 1 - (ends - here).abs() / (2 * radius), 0.5)
    # Gradients flow to alpha either way, as in Pyro's functions, which branch.
    return here + (ends - here).detach(), weights.detach()


def _standard_stable(alpha: Tensor, beta: Tensor, v: Tensor, w: Tensor, coords: str) -> Tensor:
    """Transform noise to a stable variable, as Pyro's function of that name, which branches on values."""
    if coords == "S":
        z = _standard_stable(alpha, beta, v, w, "S0")
        return torch.where(alpha == 1, z, z + beta * (math.pi / 2 * alpha).tan())
    used, weights = _around_the_hole(alpha, RADIUS)
    pair = _unsafe_standard_stable(used, beta.unsqueeze(-1), v.unsqueeze(-1), w.unsqueeze(-1), "S0")
    return (pair * weights).sum(-1)


def _safe_shift(alpha: Tensor, skew: Tensor, t_scale: Tensor, skew_abs: Tensor) -> Tensor:
    """Return the shift of a stable variable's reparameterisation, as Pyro's function, which branches on values."""
    used, weights = _around_the_hole(alpha, 0.005)
    scale = skew_abs.unsqueeze(-1).pow(used.reciprocal())
    pair = (skew.sign().unsqueeze(-1) * scale - skew.unsqueeze(-1)) * (math.pi / 2 * used).tan()
    return (pair * weights).sum(-1)


def _log_matrix_product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``log(exp(x) @ exp(y))``, as Pyro's ``_logmatmulexp``, which clamps its maxima in place."""
    least = torch.finfo(x.dtype).min
    largest_x = x.detach().amax(-1, keepdim=True).clamp(min=least)
    largest_y = y.detach().amax(-2, keepdim=True).clamp(min=least)
    product = _safe_logarithm(torch.matmul((x - largest_x).exp(), (y - largest_y).exp()))
    return product + largest_x + largest_y


_EXCHANGED: dict[tuple[Any, str], tuple[Any, Any]] = {
    (module, name): (getattr(module, name), ours)
    for module, name, ours in (
        (pyro.ops.special, "_SafeLog", _SafeLogarithm),
        (pyro.ops.gaussian, "safe_cholesky", _safe_cholesky),
        (pyro.distributions.hmm, "safe_cholesky", _safe_cholesky),
        (pyro.distributions.hmm, "_logmatmulexp", _log_matrix_product),
        (pyro.distributions.stable, "_standard_stable", _standard_stable),
        (pyro.infer.reparam.stable, "_safe_shift", _safe_shift),
        (pyro.infer.reparam.stable, "_standard_stable", _standard_stable),
        (pyro.infer.reparam.stable, "_unsafe_standard_stable", _unsafe_standard_stable),
    )
}


def _coerce(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the replacement of ``cls(*args, **kwargs)``, or None if none is needed."""
    if cls is OrderedLogistic:
        return _ordered_logistic(*args, **kwargs)
    if cls in (Poisson, DirichletMultinomial) and kwargs.get("is_sparse"):
        # Sparse evaluation picks the counts above zero by their values; the dense density is the same.
        return cls(*args, **{**kwargs, "is_sparse": False})
    return _WITH_GAPS[cls](*args, **kwargs) if cls in _WITH_GAPS else None


class _NormalWithGaps(NanMaskedNormal):
    """Normal data of which some are NaN, without assignments to elements."""

    def log_prob(self, value: Tensor) -> Tensor:
        missing = value.isnan()
        return Normal.log_prob(self, value.masked_fill(missing, 0.0)).masked_fill(missing, 0.0)


class _MultivariateNormalWithGaps(NanMaskedMultivariateNormal):
    """Multivariate normal data of which some elements are NaN, without a loop over the patterns of these."""

    def log_prob(self, value: Tensor) -> Tensor:
        # Missing elements become independent standard normal variables, at zero, whose density is taken away again.
        missing = value.isnan()
        known = ~(missing.unsqueeze(-1) | missing.unsqueeze(-2))
        covariance = torch.where(known, self.covariance_matrix, torch.eye(value.shape[-1]).to(value))
        of_all = MultivariateNormal(torch.where(missing, 0.0, self.loc), covariance, validate_args=False)
        return of_all.log_prob(value.masked_fill(missing, 0.0)) + 0.5 * math.log(2 * math.pi) * missing.sum(-1)


MISSING_ALLOWED = (NanMaskedNormal, NanMaskedMultivariateNormal)
_WITH_GAPS = {NanMaskedNormal: _NormalWithGaps, NanMaskedMultivariateNormal: _MultivariateNormalWithGaps}


def _ordered_logistic(predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> OrderedLogistic:
    """Make an ``OrderedLogistic`` whose probabilities are joined instead of written into zeros."""
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    made = OrderedLogistic.__new__(OrderedLogistic)
    made.predictor, made.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    shares = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    Categorical.__init__(made, shares, validate_args=validate_args)
    return made


@contextmanager
def naming(name: str, fn: Any) -> Iterator[None]:
    """Add the site and its distribution as a note to an error of the body."""
    try:
        yield
    except UNTRACEABLE as error:
        while "base_dist" in fn.__dict__:
            fn = fn.base_dist
        error.add_note(f"at site {name!r}, of distribution {type(fn).__name__}")
        raise


# Draws that follow the density, including distributions whose draws in torch do not.

_FLAT_DRAWS = 2.0


def draw_values(fn: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """Draw from a distribution by the global stream, ``(*shape, *batch, *event)``, without gradient."""
    # A flat distribution has no draws: values uniform in the unconstrained coordinate replace them.
    if isinstance(fn, ImproperUniform):
        transform = bijection(fn.support)
        whole = torch.Size(shape) + transform.inverse_shape(fn.batch_shape + fn.event_shape)
        return transform(2 * _FLAT_DRAWS * torch.rand(whole) - _FLAT_DRAWS)
    # torch 2.13 and before draw row i of an LKJ factor, counted from zero, with an off-diagonal part of squared length
    # Beta(i - 1 / 2, ...) in place of Beta(i / 2, ...).
    with _BatchedCounts():
        value: Tensor = mended(fn).sample(torch.Size(shape))
    return value


def draw_reparameterized(fn: Any) -> Tensor:
    """Draw as :func:`draw_values`, with gradients by the parameters; NotImplementedError if these are not known."""
    if not fn.has_rsample:
        raise NotImplementedError
    with _FreshNoise():
        value: Tensor = fn.rsample()
    return value


class _FreshNoise(TorchFunctionMode):
    """Make new tensors of noise where torch's distributions fill empty ones, which vmap does not batch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if len(args) == 1 and not kwargs:
            like = args[0]
            if func is Tensor.normal_:
                return torch.randn(like.shape, dtype=like.dtype, device=like.device)
            if func is Tensor.exponential_:
                return -(-torch.rand(like.shape, dtype=like.dtype, device=like.device)).log1p()
            if func is Tensor.cauchy_:
                return (math.pi * (torch.rand(like.shape, dtype=like.dtype, device=like.device) - 0.5)).tan()
        return func(*args, **(kwargs or {}))


class _BatchedCounts(TorchFunctionMode):
    """Draw binomial counts of one number of trials and a batch of probabilities."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # The batching rule resizes a result of the shape of the trials, and warns of it.
        if func is torch.binomial:
            trials, probabilities = args
            args = (trials + torch.zeros_like(probabilities), probabilities)
        return func(*args, **(kwargs or {}))


def mended(fn: Any) -> Any:
    """Return a distribution whose draws follow its density: ``fn`` itself, unless correlation matrices are in it."""
    if isinstance(fn, LKJCholesky):
        # A subclass with draws of its own is left alone.
        if type(fn).sample is not LKJCholesky.sample:
            return fn
        onion = _Onion.__new__(_Onion)
        vars(onion).update(vars(fn))
        return onion
    inside = {name: part for name, part in getattr(fn, "__dict__", {}).items() if isinstance(part, Distribution)}
    changed = {name: new for name, part in inside.items() if (new := mended(part)) is not part}
    if not changed:
        return fn
    # Distributions may be shared, and are left as they are.
    outside = copy.copy(fn)
    vars(outside).update(changed)
    return outside


class MendedDraws(Messenger):
    """Make models and guides that Pyro runs in this context draw correlation matrices from their density."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not msg["done"] and not msg["is_observed"]:
            mine = mended(msg["fn"])
            if mine is not msg["fn"]:
                msg["value"] = mine.sample(*msg["args"], **msg["kwargs"])


class _Onion(LKJCholesky):
    """Cholesky factors of correlation matrices drawn row by row (Lewandowski, Kurowicka and Joe 2009)."""

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        with torch.no_grad():
            # Row i: i standard normal variables and, on the diagonal, the root of a chi-squared variable of
            # 2 eta + d - 1 - i degrees of freedom, over their length; so the direction off the diagonal is uniform and
            # the squared length there Beta(i / 2, eta + (d - 1 - i) / 2).
            whole = self._extended_shape(torch.Size(sample_shape))
            eta = self.concentration
            later = torch.arange(self.dim - 1, -1, -1, dtype=eta.dtype, device=eta.device)
            # Gamma's own draws are clamped in place, which vmap cannot batch.
            half = standard_gamma((eta.unsqueeze(-1) + later / 2).expand(whole[:-1]))
            diagonal = (2 * half.clamp(min=torch.finfo(eta.dtype).tiny)).sqrt()
            rows = torch.randn(whole, dtype=eta.dtype, device=eta.device).tril(-1) + torch.diag_embed(diagonal)
            return rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
