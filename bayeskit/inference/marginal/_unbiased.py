"""Unbiased estimates of an integral that Laplace's method approximates, by quadrature or importance sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler import Cost, FailingApart
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import one_thread
from bayeskit._core.torch_internals import standard_gamma
from bayeskit.inference.marginal._field import FieldIntegral
from bayeskit.inference.marginal._inner_density import InnerDensity
from bayeskit.inference.marginal._laplace import LaplaceIntegral
from bayeskit.inference.marginal._line_rule import LineRule, line_rule
from bayeskit.inference.marginal._modes import require_modes

#: Relative error of summed slopes that is taken for a failure, unless the density has fallen by so many nats.
_SUM_ERROR, _DEEP = 1e-6, 50.0
#: Evaluations of the log density in the memory of one gradient of the approximation.
_VALUES_PER_GRADIENT = 8
#: Numbers of pieces of each panel that are tried: 1, 2, 4, ...
_REFINEMENTS = 4


ApproximateIntegral = LaplaceIntegral | FieldIntegral


class UnbiasedEstimates(NamedTuple):
    """Estimates at ``n`` vectors that are free of the approximation."""

    log_ratio: Tensor  # (n,), of an unbiased estimate of the likelihood and the approximation
    z: Tensor  # (n, m), draws of the inner coordinates, to be weighted by the ratio
    left_over: float  # largest share of an integral that may lie beyond the ends of the quadrature


def estimate_without_bias(
    integral: ApproximateIntegral,
    rows: Tensor,
    num_inner: int,
    generator: torch.Generator,
    cost: Cost,
    *,
    progress: bool,
    with_draws: bool,
) -> UnbiasedEstimates:
    """Estimate the likelihood at rows ``(n, p)``, with draws if wanted; by quadrature where coordinates are separate.

    Raises ``DrawsError`` where no mode is found at some rows.
    """
    density, parts = integral.density, []
    with (
        one_thread(),
        torch.no_grad(),
        FailingApart(),
        progress_bar("correcting Laplace's approximation", len(rows), progress) as bar,
    ):
        for r in rows.split(cost.chunk_size(len(rows))):
            modes = integral.modes(r)
            require_modes(modes, density)
            if (scale := integral.separate_scales(modes)) is not None:
                chance = torch.rand(modes.z.shape, generator=generator, dtype=torch.float64) if with_draws else None
                parts.append(_by_quadrature(density, r, modes.z, scale, chance, cost))
            else:
                size = max(1, _VALUES_PER_GRADIENT * cost.chunk_size(len(r) * num_inner) // num_inner)
                pairs = zip(r.split(size), modes.z.split(size), strict=True)
                parts.append(_joined([_by_importance(integral, *pair, num_inner, generator) for pair in pairs]))
            bar.update(sum(len(part.log_ratio) for part in parts))
    return _joined(parts)


def _joined(parts: Sequence[UnbiasedEstimates]) -> UnbiasedEstimates:
    """Return estimates at all rows of several parts."""
    return UnbiasedEstimates(
        log_ratio=torch.cat([part.log_ratio for part in parts]),
        z=torch.cat([part.z for part in parts]),
        left_over=max(part.left_over for part in parts),
    )


def _by_quadrature(
    density: InnerDensity, r: Tensor, mode: Tensor, scale: Tensor, chance: Tensor | None, cost: Cost
) -> UnbiasedEstimates:
    """Integrate along each coordinate, from its slope at points that all coordinates share; finer where needed.

    Draws are quantiles of ``chance`` ``(n, m)``. What may be left out is one where the quadrature failed.
    """
    log_ratio, left_over, z = mode.new_zeros(len(mode)), mode.new_ones(len(mode)), mode.clone()
    for number in range(_REFINEMENTS):
        bad = (left_over == 1).nonzero()[:, 0]
        if len(bad) == 0:
            break
        rule = LineRule(*(x.to(mode) for x in line_rule(2**number)))
        size = max(1, cost.chunk_size(len(bad) * len(rule.nodes)) // len(rule.nodes))
        for some in bad.split(size):
            height, log_ratio[some], left_over[some] = _along(rule, density, r[some], mode[some], scale[some])
            if chance is not None:
                z[some] = mode[some] + scale[some] * rule.quantiles(height, chance[some].to(mode))
    return UnbiasedEstimates(log_ratio=log_ratio, z=z, left_over=float(left_over.amax()))


def _along(
    rule: LineRule, density: InnerDensity, r: Tensor, mode: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log densities at the nodes ``(J, n, m)``, the log ratio ``(n,)`` and what is left out, ``(n,)``."""
    slope, value = torch.func.vmap(lambda x: density.slope(r, mode + scale * x))(rule.nodes)
    # The log density along a coordinate is what the slopes from the mode outwards add up to.
    height = torch.einsum("jk,knm->jnm", rule.integrals, slope * scale)
    logs = height + rule.log_weights[:, None, None]
    total = logs.logsumexp(0)
    left_over = (logs - total)[[0, -1]].logsumexp(0).exp().amax(-1)
    # The sum over coordinates is known, and where it counts the slopes must add up to it.
    known, found = value - value[len(value) // 2], height.sum(-1)
    gap = ((found - known).abs() > _SUM_ERROR * (1 + known.abs())) & ((found > -_DEEP) | (known > -_DEEP))
    failed = gap.any(0) | (height > 1).any(-1).any(0) & (found > -_DEEP).any(0) | ~left_over.isfinite()
    return height, (total - 0.5 * math.log(2 * math.pi)).sum(-1), torch.where(failed, 1.0, left_over)


def _by_importance(
    integral: ApproximateIntegral, r: Tensor, mode: Tensor, num_inner: int, generator: torch.Generator
) -> UnbiasedEstimates:
    """Draw from independent Student t distributions along the axes; one draw of each row is kept by its weight."""
    density, m = integral.density, integral.density.num_inner
    factor = integral.factor(r, mode)
    # So many degrees of freedom that the log ratio to normal draws varies little over all axes.
    freedom = torch.tensor(max(5.0, math.sqrt(5 * m)), dtype=torch.float64)
    shape = (num_inner, len(r), m)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    gamma = standard_gamma((freedom / 2).expand(shape).contiguous(), generator)
    x = normal / (2 * gamma / freedom).sqrt()
    log_q = torch.distributions.StudentT(freedom).log_prob(x).sum(-1).to(r)
    z = torch.func.vmap(lambda x: mode + integral.spread(factor, x))(x.to(r))
    logs = torch.func.vmap(lambda z: density.value(r, z))(z) - log_q
    top = density.value(r, mode) + 0.5 * m * math.log(2 * math.pi)
    uniform = torch.rand(logs.shape, generator=generator, dtype=torch.float64)
    chosen = (logs - (-uniform.log()).log().to(r)).argmax(0)  # Gumbel's trick
    log_ratio = logs.logsumexp(0) - math.log(num_inner) - top
    return UnbiasedEstimates(log_ratio=log_ratio, z=z[chosen, torch.arange(len(r), device=z.device)], left_over=0.0)
