"""Densities and draws of distributions in the unconstrained coordinate of their support.

A value near the end of its support rounds to that end: a probability of ``1 - exp(-40)`` is one in double precision, a
rate of ``exp(-800)`` is zero. The density of the coordinate ``x`` itself, Jacobian included, needs no such value:
that of ``Beta(a, b)`` on the logit is ``a log s(x) + b log s(-x) - log B(a, b)`` for every ``x``. Other
distributions are evaluated at the rounded value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as plain
from torch.distributions import transforms
from torch.distributions.constraints import independent
from torch.distributions.constraints import real as real_numbers
from torch.distributions.utils import _sum_rightmost
from torch.nn.functional import logsigmoid

from bayeskit._core.torch_internals import standard_gamma
from bayeskit._logdensity.transforms import LogSimplex, LowerTriangle, is_whole, support_of

_LOG_2 = math.log(2.0)
_SMALL = -30.0
"""Below this logarithm ``v``, ``1 - exp(-v)`` is ``v`` to rounding."""

_Density = Callable[[Any, Tensor], Tensor | None]
Draw = Callable[[Any, torch.Size], Tensor | None]


class _Form(NamedTuple):
    """A family in its unconstrained coordinate: ``(fn, x) -> log density`` and ``(fn, sample shape) -> x``."""

    kind: type
    log_density: _Density
    draw: Draw


def coordinate_log_density(fn: Any, x: Tensor) -> Tensor | None:
    """Return the log density ``(*batch)`` of an unconstrained coordinate ``(*batch, *event)``; None if not known."""
    if isinstance(fn, plain.Independent):
        inner = coordinate_log_density(fn.base_dist, x)
        return None if inner is None else _sum_rightmost(inner, fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution) or _is_unmasked(fn):
        return coordinate_log_density(fn.base_dist, x)
    form = _form(fn)
    return None if form is None else form.log_density(fn, x)


def draw_coordinates(fn: Any, shape: torch.Size) -> Tensor | None:
    """Draw coordinates with the global stream, ``(*shape, *batch, *event)``; None where ``fn`` is not known."""
    if isinstance(fn, plain.Independent) or _is_unmasked(fn):
        return draw_coordinates(fn.base_dist, shape)
    form = _form(fn)
    if form is None or not (_is_library(fn, "sample") and _is_library(fn, "rsample")):
        return None
    with torch.no_grad():
        return form.draw(fn, shape)


def _form(fn: Any) -> _Form | None:
    """Return the first form of the kind of ``fn``, unless a subclass from elsewhere has a density of its own."""
    form = next((form for form in _FORMS if isinstance(fn, form.kind)), None)
    return form if form is not None and _is_library(fn, "log_prob") else None


def _is_unmasked(fn: Any) -> bool:
    """Tell whether the mask of a distribution excludes nothing."""
    return isinstance(fn, dist.MaskedDistribution) and fn._mask is True


def _is_library(fn: Any, method: str) -> bool:
    """Tell whether a method of ``fn`` is defined in torch or Pyro, not in a subclass from elsewhere."""
    owner = next(kind for kind in type(fn).__mro__ if method in vars(kind))
    return owner.__module__.split(".")[0] in ("torch", "pyro")


# -- parts ----------------------------------------------------------------------------------


def _softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + exp(x))`` to rounding; torch's own is cut at 20."""
    return -logsigmoid(-x)


def _log_complement(log_v: Tensor) -> Tensor:
    """Return ``log(1 - exp(log_v))`` for ``log_v < 0``."""
    near = log_v > -_LOG_2
    one = torch.where(near, log_v, -1.0)
    two = torch.where(near, -1.0, log_v)
    return torch.where(near, (-torch.expm1(one)).log(), torch.log1p(-two.exp()))


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _log_gamma_draw(shape_parameter: Tensor, shape: torch.Size) -> Tensor:
    """Draw the log of standard gamma variables, ``(*shape, *parameter)``, however small (Marsaglia and Tsang 2000)."""
    # G(a) = G(a + 1) U^(1 / a), whose right side can be had in logarithms.
    a = shape_parameter.expand(shape + shape_parameter.shape)
    exponential = -torch.log1p(-torch.rand_like(a))
    return standard_gamma(a + 1).log() - exponential / a


def _log_exponential_draw(like: Tensor, shape: torch.Size) -> Tensor:
    """Draw the logarithm of standard exponential variables, ``(*shape, *like)``."""
    return (-torch.log1p(-torch.rand_like(like.expand(shape + like.shape)))).clamp(min=_tiny(like)).log()


def _tiny(x: Tensor) -> float:
    return float(torch.finfo(x.dtype).tiny)


# -- half-lines: x is the logarithm of the value, or of its distance from the lower end -----------


def _gamma(fn: Any, x: Tensor) -> Tensor:
    a, rate = fn.concentration, fn.rate
    return a * (rate.log() + x) - rate * x.exp() - torch.lgamma(a)


def _exponential(fn: Any, x: Tensor) -> Tensor:
    return fn.rate.log() + x - fn.rate * x.exp()


def _half_normal(fn: Any, x: Tensor) -> Tensor:
    z = x - fn.scale.log()
    return 0.5 * math.log(2 / math.pi) + z - 0.5 * (2 * z).exp()


def _half_cauchy(fn: Any, x: Tensor) -> Tensor:
    z = x - fn.scale.log()
    return math.log(2 / math.pi) + z - _softplus(2 * z)


def _half_cauchy_draw(fn: Any, shape: torch.Size) -> Tensor:
    """Draw the logarithm of a ratio of two normal variables."""
    like = {"dtype": fn.scale.dtype, "device": fn.scale.device}
    one, two = torch.randn(2, *shape, *fn.scale.shape, **like).abs().clamp(min=_tiny(fn.scale)).log()
    return fn.scale.log() + one - two


def _pareto(fn: Any, x: Tensor) -> Tensor:
    log_scale = fn.scale.log()
    return fn.alpha.log() + fn.alpha * log_scale + x - (fn.alpha + 1) * torch.logaddexp(log_scale, x)


def _pareto_draw(fn: Any, shape: torch.Size) -> Tensor:
    t = (_log_exponential_draw(fn.alpha, shape) - fn.alpha.log()).exp()  # log(value / scale)
    return fn.scale.log() + torch.where(t > 1, t, 0.0) + torch.where(t > 1, -torch.expm1(-t), torch.expm1(t)).log()


def _fisher_snedecor(fn: Any, x: Tensor) -> Tensor:
    half1, half2 = 0.5 * fn.df1, 0.5 * fn.df2
    z = fn.df1.log() - fn.df2.log() + x
    # a z - (a + b) log(1 + e^z), from the side on which nothing cancels
    return half1 * logsigmoid(z) + half2 * logsigmoid(-z) - _log_beta(half1, half2)


def _fisher_snedecor_draw(fn: Any, shape: torch.Size) -> Tensor:
    ratio = _log_gamma_draw(0.5 * fn.df1, shape) - _log_gamma_draw(0.5 * fn.df2, shape)
    return ratio + fn.df2.log() - fn.df1.log()


def _folded(fn: Any, x: Tensor) -> Tensor | None:
    base = fn.base_dist
    if isinstance(base, (plain.StudentT, plain.Cauchy)):
        sides = [_heavy_tailed(base, x, sign) for sign in (1.0, -1.0)]
    elif isinstance(base, (plain.Normal, plain.Laplace, dist.Logistic)):
        sides = [base.log_prob(sign * x.exp()) for sign in (1.0, -1.0)]
    else:
        return None
    return torch.logaddexp(*sides) + x


def _folded_draw(fn: Any, shape: torch.Size) -> Tensor | None:
    base = fn.base_dist
    if isinstance(base, (plain.Normal, plain.Laplace, dist.Logistic)):
        return base.sample(shape).abs().clamp(min=_tiny(base.loc)).log()  # type: ignore[no-any-return]
    if not isinstance(base, (plain.StudentT, plain.Cauchy)):
        return None
    half = 0.5 * (base.df if isinstance(base, plain.StudentT) else torch.ones_like(base.loc))
    normal = torch.randn(shape + base.loc.shape, dtype=base.loc.dtype, device=base.loc.device)
    log_ratio = 0.5 * (half.log() - _log_gamma_draw(half, shape))
    log_far = normal.abs().clamp(min=_tiny(normal)).log() + log_ratio + base.scale.log()
    far = log_far > 0.5 * math.log(torch.finfo(normal.dtype).max)  # where the location is lost in rounding
    near = base.loc + base.scale * normal * torch.where(far, 0.0, log_ratio).exp()
    return torch.where(far, log_far, near.abs().clamp(min=_tiny(normal)).log())


def _heavy_tailed(base: Any, x: Tensor, sign: float) -> Tensor:
    """Return the log density of a Student-t or Cauchy distribution at ``sign * exp(x)``, which may overflow."""
    df = base.df if isinstance(base, plain.StudentT) else torch.ones_like(base.loc)
    far = x > math.log(torch.finfo(x.dtype).max) / 2
    z = (sign * torch.where(far, 0.0, x).exp() - base.loc) / base.scale
    near_square = z.square().clamp(min=_tiny(x))
    log_square = torch.where(far, 2 * (x - base.scale.log()), near_square.log())
    normalizer = 0.5 * (df.log() + math.log(math.pi)) + base.scale.log()
    normalizer = normalizer + torch.lgamma(0.5 * df) - torch.lgamma(0.5 * (df + 1))
    return -0.5 * (df + 1) * _softplus(log_square - df.log()) - normalizer


# -- intervals: x is the logit of the position within the interval ---------------------------------


def _beta(fn: Any, x: Tensor) -> Tensor:
    a, b = fn.concentration1, fn.concentration0
    return a * logsigmoid(x) + b * logsigmoid(-x) - _log_beta(a, b)


def _beta_draw(fn: Any, shape: torch.Size) -> Tensor:
    return _log_gamma_draw(fn.concentration1, shape) - _log_gamma_draw(fn.concentration0, shape)


def _affine_beta(fn: Any, x: Tensor) -> Tensor:
    return _beta(fn.base_dist, x)


def _uniform(fn: Any, x: Tensor) -> Tensor:
    # Bounds that depend on other sites may cross, and then there is no density.
    return torch.where(fn.low < fn.high, logsigmoid(x) + logsigmoid(-x), torch.nan)


def _uniform_draw(fn: Any, shape: torch.Size) -> Tensor:
    low = fn.low.expand(fn.batch_shape)
    return _log_exponential_draw(low, shape) - _log_exponential_draw(low, shape)


def _kumaraswamy(fn: Any, x: Tensor) -> Tensor:
    a, b = fn.concentration1, fn.concentration0
    log_power = a * logsigmoid(x)
    # log(1 - v^a), which is log(a (1 - v)) next to the upper end
    far = x > -_SMALL
    rest = torch.where(far, a.log() + logsigmoid(-x), _log_complement(torch.where(far, -1.0, log_power)))
    return a.log() + b.log() + log_power + (b - 1) * rest + logsigmoid(-x)


def _kumaraswamy_draw(fn: Any, shape: torch.Size) -> Tensor:
    a, b = fn.concentration1, fn.concentration0
    # 1 - v^a = U^(1 / b), whose negative logarithm is exponential with rate b
    t = (_log_exponential_draw(a, shape) - b.log()).exp()
    log_v = _log_complement(-t) / a
    far = t > -_SMALL
    return log_v - torch.where(far, -t - a.log(), _log_complement(log_v.clamp(max=-_tiny(log_v))))


def _continuous_bernoulli(fn: Any, x: Tensor) -> Tensor:
    """Return the density by the logit of the parameter, which torch holds away from zero and one."""
    logit, size = _logit_and_size(fn)
    far = torch.where(logit > 0, (-x).sigmoid(), x.sigmoid())  # from the end at which the mass is
    log_normalizer = (size / (0.5 * size).tanh()).log() - (-size).exp().log1p()
    return log_normalizer - size * far + logsigmoid(x) + logsigmoid(-x)


def _continuous_bernoulli_draw(fn: Any, shape: torch.Size) -> Tensor:
    logit, size = _logit_and_size(fn)
    size = size.expand(fn.batch_shape)
    uniform = torch.rand(shape + size.shape, dtype=size.dtype, device=size.device)
    far = -torch.log1p(uniform * torch.expm1(-size)) / size
    far = far.clamp(_tiny(far), 1 - torch.finfo(far.dtype).eps / 2)
    x = far.log() - torch.log1p(-far)
    return torch.where(logit > 0, -x, x)


def _logit_and_size(fn: Any) -> tuple[Tensor, Tensor]:
    """Return the logit of a parameter, and its absolute value, held away from zero."""
    given = fn._param  # the other parameter may have been computed from it and clamped
    logit = given if vars(fn).get("logits") is given else given.log() - torch.log1p(-given)
    return logit, logit.abs().clamp(min=1e-30)


#: Polya-Gamma variable PG(1, 0): Pyro's truncation point, the mass beyond it, and the terms of its two series.
_TRUNCATION, _BEYOND, _SERIES_TERMS, _GAMMA_TERMS = 2.5, 5.584916780500388e-6, 6, 50


def _truncated_polya_gamma(fn: Any, x: Tensor) -> Tensor:
    """Return the density by the alternating series of a theta function, from the side on which it converges fast."""
    log_v = math.log(_TRUNCATION) + logsigmoid(x)
    small = log_v < -math.log(2 * math.pi)
    v, rate = log_v.exp(), (-log_v).exp()
    first = torch.where(
        small, -0.5 * math.log(2 * math.pi) - 1.5 * log_v - 0.125 * rate, math.log(2 * math.pi) - 0.5 * math.pi**2 * v
    )
    n = torch.arange(1.0, _SERIES_TERMS, dtype=x.dtype, device=x.device)
    decay = torch.where(small, 0.5 * rate, 2 * math.pi**2 * v).unsqueeze(-1)
    rest = (1 - 2 * (n % 2)) * (2 * n + 1) * (-n * (n + 1) * decay).exp()
    return first + torch.log1p(rest.sum(-1)) + log_v + logsigmoid(-x) - math.log1p(-_BEYOND)


def _truncated_polya_gamma_draw(fn: Any, shape: torch.Size) -> Tensor:
    """Draw PG(1, 0) as a sum of weighted exponential variables, with its tail replaced by its mean."""
    n = torch.arange(_GAMMA_TERMS, dtype=fn.prototype.dtype, device=fn.prototype.device)
    weight = 0.5 / (math.pi * (n + 0.5)).square()
    draws = -torch.log1p(-torch.rand(*shape, *fn.batch_shape, _GAMMA_TERMS, dtype=n.dtype, device=n.device))
    v = (weight * draws).sum(-1) + 0.25 - weight.sum()
    v = torch.where(v < _TRUNCATION, v, 0.5 * v)  # five in a million
    return v.log() - (_TRUNCATION - v).log()


def _von_mises(fn: Any, x: Tensor) -> Tensor:
    half = math.pi * (x.sigmoid() - 0.5) - 0.5 * fn.loc
    peak = -2 * fn.concentration * half.sin().square() - torch.special.i0e(fn.concentration).log()
    return peak + logsigmoid(x) + logsigmoid(-x)


# -- simplices, correlations and covariances ---------------------------------------------------------


def _dirichlet(fn: Any, x: Tensor) -> Tensor:
    a = fn.concentration
    log_v, log_jacobian = LogSimplex.log_value_and_jacobian(x)
    return ((a - 1) * log_v).sum(-1) + log_jacobian + torch.lgamma(a.sum(-1)) - torch.lgamma(a).sum(-1)


def _dirichlet_draw(fn: Any, shape: torch.Size) -> Tensor:
    return LogSimplex.coordinate(_log_gamma_draw(fn.concentration, shape))


def _relaxed_one_hot(fn: Any, x: Tensor) -> Tensor:
    log_v, log_jacobian = LogSimplex.log_value_and_jacobian(x)
    density: Tensor = fn.base_dist.log_prob(log_v)
    return density - log_v.sum(-1) + log_jacobian


def _lkj_weights(fn: Any) -> Tensor:
    """Return ``eta + (d - 1 - j) / 2`` for the entries ``j = 1, ...`` of each row, ``(*batch, d (d - 1) / 2)``."""
    # In the coordinates of _CorrelationCholesky the entries are independent, and (1 + tanh x) / 2 is a symmetric beta
    # variable with this parameter (Lewandowski, Kurowicka and Joe 2009, section 2.4).
    halves = [0.5 * (fn.dim - 2 - column) for row in range(fn.dim) for column in range(row)]
    return fn.concentration.unsqueeze(-1) + fn.concentration.new_tensor(halves)


def _lkj(fn: Any, x: Tensor) -> Tensor:
    w = _lkj_weights(fn)
    return (w * (logsigmoid(2 * x) + logsigmoid(-2 * x)) - _log_beta(w, w) + _LOG_2).sum(-1)


def _lkj_draw(fn: Any, shape: torch.Size) -> Tensor:
    w = _lkj_weights(fn)
    return 0.5 * (_log_gamma_draw(w, shape) - _log_gamma_draw(w, shape))


def _wishart(fn: Any, x: Tensor) -> Tensor:
    scale, df = fn._unbroadcasted_scale_tril, fn.df
    p = scale.shape[-1]
    lower = LowerTriangle("exp")(x)
    root = torch.linalg.solve_triangular(scale, lower, upper=False)
    log_det_scale = 2 * torch.diagonal(scale, dim1=-2, dim2=-1).log().sum(-1)
    power = (df.unsqueeze(-1) - p - 1) + x.new_tensor([float(p + 1 - i) for i in range(p)])
    return (
        (power * x[..., :p]).sum(-1)
        + p * _LOG_2
        - 0.5 * root.square().sum((-2, -1))
        - 0.5 * df * (p * _LOG_2 + log_det_scale)
        - torch.mvlgamma(0.5 * df, p)
    )


def _wishart_draw(fn: Any, shape: torch.Size) -> Tensor:
    """Draw the Cholesky factor row by row (Bartlett 1933), the diagonal in logarithms."""
    scale, n = fn._unbroadcasted_scale_tril, fn.event_shape[-1]
    whole = shape + fn.batch_shape
    half = 0.5 * (fn.df.unsqueeze(-1) - torch.arange(n, dtype=scale.dtype, device=scale.device))
    log_diagonal = 0.5 * (_LOG_2 + _log_gamma_draw(half.expand(*fn.batch_shape, n), shape))
    normal = torch.randn(*whole, n, n, dtype=scale.dtype, device=scale.device).tril(-1)
    below = LowerTriangle("one").inv(scale @ (normal + torch.diag_embed(log_diagonal.exp())))
    return torch.cat([torch.diagonal(scale, dim1=-2, dim2=-1).log() + log_diagonal, below], -1)


# -- made of others ---------------------------------------------------------------------------------


def _mixture(fn: Any, x: Tensor) -> Tensor | None:
    components = fn.component_distribution
    if _has_own_bounds(components):
        return None
    inner = coordinate_log_density(components, x.unsqueeze(-1 - len(components.event_shape)))
    return None if inner is None else (inner + fn.mixture_distribution.logits.log_softmax(-1)).logsumexp(-1)


def _mixture_draw(fn: Any, shape: torch.Size) -> Tensor | None:
    components = fn.component_distribution
    x = None if _has_own_bounds(components) else draw_coordinates(components, shape)
    if x is None:
        return None
    index = fn.mixture_distribution.sample(shape)
    event = x.dim() - len(shape) - len(components.batch_shape)
    index = index.reshape(*index.shape, 1, *(1,) * event)
    dim = -1 - event
    return torch.take_along_dim(x, index.expand(*x.shape[:dim], 1, *x.shape[x.dim() + dim + 1 :]), dim).squeeze(dim)


def _has_own_bounds(components: Any) -> bool:
    """Tell whether components of a mixture may have different supports; scalar bounds are the same for all."""
    support = _innermost(support_of(components))
    ends = [getattr(support, name, 0.0) for name in ("lower_bound", "upper_bound")]
    return any(isinstance(end, Tensor) and end.dim() > 0 for end in ends)


def _transformed(fn: Any, x: Tensor) -> Tensor | None:
    """Invert the last transform, to a distribution with a density of its own or a logarithmic coordinate."""
    last, before = _last(fn)
    if _is_bijection(last, fn):
        return before.log_prob(x)  # type: ignore[no-any-return]
    if isinstance(last, transforms.TanhTransform):
        return before.log_prob(0.5 * x) - _LOG_2 * math.prod(fn.event_shape)  # type: ignore[no-any-return]
    if isinstance(last, _SOFTPLUS):
        w, log_slope = _before_softplus(x)
        return before.log_prob(w) + _sum_rightmost(log_slope, fn.event_dim)  # type: ignore[no-any-return]
    if _is_back(last, before):
        return coordinate_log_density(before, x)
    line = _line(fn, last, before)
    if line is None:
        return None
    slope, shift = (torch.as_tensor(part, dtype=x.dtype, device=x.device) for part in line)
    inner = coordinate_log_density(before, (x - shift) / slope)
    log_slope = slope.abs().log().expand_as(x)
    return None if inner is None else inner - _sum_rightmost(log_slope, fn.event_dim)


def _transformed_draw(fn: Any, shape: torch.Size) -> Tensor | None:
    last, before = _last(fn)
    if _is_bijection(last, fn):
        return before.sample(shape)  # type: ignore[no-any-return]
    if isinstance(last, transforms.TanhTransform):
        return 2 * before.sample(shape)  # type: ignore[no-any-return]
    if isinstance(last, _SOFTPLUS):
        w = before.sample(shape)
        # Far below zero log(1 + exp(w)) is exp(w).
        return torch.where(w < _SMALL, w, _softplus(w.clamp(min=_SMALL)).log())
    if _is_back(last, before):
        return draw_coordinates(before, shape)
    line = _line(fn, last, before)
    x = None if line is None else draw_coordinates(before, shape)
    return None if line is None or x is None else line[0] * x + line[1]


_SOFTPLUS = (transforms.SoftplusTransform, dist.transforms.SoftplusTransform)


def _last(fn: Any) -> tuple[Any, Any]:
    """Return the last transform and the distribution of its input."""
    parts = [part for t in fn.transforms for part in (t.parts if isinstance(t, transforms.ComposeTransform) else [t])]
    if len(parts) < 2:
        return parts[0] if parts else None, fn.base_dist
    return parts[-1], dist.TransformedDistribution(fn.base_dist, parts[:-1], validate_args=False)


def _line(fn: Any, last: Any, before: Any) -> tuple[float | Tensor, float | Tensor] | None:
    """Return ``(slope, shift)`` of the coordinate after a transform in that before it; None if it is not affine."""
    # The coordinate of a real number is itself, that of a positive number its logarithm.
    if isinstance(last, transforms.PowerTransform):
        return (last.exponent, 0.0) if is_whole(_innermost(last.domain), _innermost(before.support)) else None
    if not isinstance(last, transforms.AffineTransform):
        return None
    if isinstance(fn, plain.Weibull):
        return 1.0, torch.as_tensor(last.scale).log()
    return (last.scale, last.loc) if _innermost(before.support) is real_numbers else None


_BIJECTIONS = (
    transforms.ExpTransform,
    transforms.SigmoidTransform,
    transforms.StickBreakingTransform,
    transforms.CorrCholeskyTransform,
    dist.transforms.OrderedTransform,
)


def _is_back(transform: Any, before: Any) -> bool:
    """Tell whether a transform maps a support to its unconstrained coordinate."""
    known = isinstance(transform, transforms._InverseTransform) and type(transform.inv) in _BIJECTIONS
    return known and is_whole(_innermost(transform.domain), _innermost(before.support))


def _is_bijection(transform: Any, fn: Any) -> bool:
    """Tell whether a transform is the bijection of the support of ``fn``."""
    return type(transform) in _BIJECTIONS and _innermost(fn.support) == _innermost(transform.codomain)


def _innermost(support: Any) -> Any:
    while isinstance(support, independent):
        support = support.base_constraint
    return support


def _before_softplus(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``w`` and the logarithm of its slope in ``x``, where ``exp(x) = log(1 + exp(w))``."""
    small, large = x < _SMALL, x > -_SMALL
    v = torch.where(small | large, 0.0, x).exp()
    log_share = torch.log(-torch.expm1(-v))  # of 1 - exp(-v)
    w = torch.where(small, x, torch.where(large, x.exp(), v + log_share))
    return w, torch.where(small, 0.0, torch.where(large, x, x - log_share))


def _relaxed_bernoulli(fn: Any, x: Tensor) -> Tensor:
    z = fn.base_dist.logits - x * fn.temperature
    return fn.temperature.log() + logsigmoid(z) + logsigmoid(-z)


#: The first row whose class has the distribution as an instance applies.
_FORMS: tuple[_Form, ...] = (
    _Form(plain.Gamma, _gamma, lambda fn, n: _log_gamma_draw(fn.concentration, n) - fn.rate.log()),
    _Form(plain.Exponential, _exponential, lambda fn, n: _log_exponential_draw(fn.rate, n) - fn.rate.log()),
    _Form(plain.HalfNormal, _half_normal, lambda fn, n: fn.base_dist.sample(n).abs().clamp(min=_tiny(fn.scale)).log()),
    _Form(plain.HalfCauchy, _half_cauchy, _half_cauchy_draw),
    _Form(plain.Pareto, _pareto, _pareto_draw),
    _Form(plain.FisherSnedecor, _fisher_snedecor, _fisher_snedecor_draw),
    _Form(dist.FoldedDistribution, _folded, _folded_draw),
    _Form(plain.Beta, _beta, _beta_draw),
    _Form(dist.AffineBeta, _affine_beta, lambda fn, n: draw_coordinates(fn.base_dist, n)),
    _Form(plain.Uniform, _uniform, _uniform_draw),
    _Form(plain.Kumaraswamy, _kumaraswamy, _kumaraswamy_draw),
    _Form(dist.TruncatedPolyaGamma, _truncated_polya_gamma, _truncated_polya_gamma_draw),
    _Form(plain.VonMises, _von_mises, lambda fn, n: None),
    _Form(plain.ContinuousBernoulli, _continuous_bernoulli, _continuous_bernoulli_draw),
    _Form(plain.RelaxedBernoulli, _relaxed_bernoulli, lambda fn, n: fn.base_dist.sample(n)),
    _Form(plain.Dirichlet, _dirichlet, _dirichlet_draw),
    _Form(
        plain.RelaxedOneHotCategorical,
        _relaxed_one_hot,
        lambda fn, n: LogSimplex.coordinate(fn.base_dist.sample(n)),
    ),
    _Form(plain.LKJCholesky, _lkj, _lkj_draw),
    _Form(dist.LKJ, lambda fn, x: _lkj(fn.base_dist, x), lambda fn, n: _lkj_draw(fn.base_dist, n)),
    _Form(plain.Wishart, _wishart, _wishart_draw),
    _Form(plain.MixtureSameFamily, _mixture, _mixture_draw),
    _Form(plain.TransformedDistribution, _transformed, _transformed_draw),
)
