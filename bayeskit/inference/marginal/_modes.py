"""Modes of the inner coordinates by damped Newton steps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler import FailingApart
from bayeskit.errors import DrawsError
from bayeskit.inference.curvature._structure import Factor
from bayeskit.inference.marginal._hessian import Hessian
from bayeskit.inference.marginal._inner_density import InnerDensity

_MAX_STEPS = 100
#: Squared length of a Newton step, in standard deviations and roots of the unit of rounding, after which values rest.
_NEAR = 0.01
#: Damping of a Newton step as a share of the largest diagonal entry of the Hessian: that of the first damped step, that
#: below which steps are undamped, and that beyond which the search gives up.
_FIRST_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-2, 2e-2, 1e10


class InnerModes(NamedTuple):
    """Modes of the inner coordinates at ``n`` vectors."""

    z: Tensor  # (n, m)
    factor: Factor  # of minus the Hessian, of the identity where no mode is found
    found: Tensor  # (n,), bool


def find_inner_modes(hessian: Hessian, r: Tensor, start: Tensor) -> InnerModes:
    """Maximize the log density by ``z`` at each of ``(n, p)``, by damped Newton steps from ``start`` ``(n, m)``."""
    with torch.no_grad(), FailingApart():
        return _climbed(hessian, r, start)


def _climbed(hessian: Hessian, r: Tensor, z: Tensor) -> InnerModes:
    structure, eps = hessian.structure, torch.finfo(r.dtype).eps
    constant = hessian.constant(r, z)
    minus, slope, value = hessian.curve(r, z, constant)
    alive = _is_finite(minus, slope, value)
    done, last, damping = torch.zeros_like(alive), torch.zeros_like(alive), torch.zeros_like(value)
    before = torch.full_like(value, torch.inf)
    for _ in range(_MAX_STEPS):
        scale, identity = structure.scale(minus), structure.identity(minus)
        factor, definite = structure.factorised(minus + _like(damping, minus) * identity)
        step = torch.where(definite[:, None], structure.solved(factor, slope), 0.0)
        gain = (slope * step).sum(-1)
        squared = torch.where(damping == 0, gain, torch.inf)  # length of the step in standard deviations
        done |= alive & definite & (last | (squared <= eps**1.8))
        # Where nothing rises and damping is still needed, there is a saddle or a minimum.
        level = definite & (damping > 0) & (gain <= eps**1.8)
        alive &= (damping <= _MOST_DAMPING * scale) & ~(last & ~definite) & ~level
        moving = alive & ~done
        if not bool(moving.any()):
            break
        # Newton's method squares the error: the step after a short one is the last, and so is one that rounding
        # keeps from being shorter than the one before.
        near = definite & (squared <= _NEAR * math.sqrt(eps))
        last = near & ((squared <= eps) | (squared > 0.1 * before))
        before = squared
        tried = torch.where(moving[:, None], z + step, z)
        new_minus, new_slope, new_value = hessian.curve(r, tried, constant)
        better = definite & _is_finite(new_minus, new_slope, new_value)
        better &= near | (new_value >= value - 16 * eps * (1 + value.abs()))
        better &= moving
        last &= better
        z = torch.where(better[:, None], tried, z)
        minus = torch.where(_like(better, minus), new_minus, minus)
        slope = torch.where(better[:, None], new_slope, slope)
        value = torch.where(better, new_value, value)
        less = torch.where(damping <= _LEAST_DAMPING * scale, 0.0, 0.1 * damping)
        more = torch.maximum(10 * damping, _FIRST_DAMPING * scale)
        damping = torch.where(moving, torch.where(better, less, more), damping)
    minus = torch.where(_like(done, minus), minus, structure.identity(minus))
    return InnerModes(z=z, factor=structure.factorised(minus)[0], found=done)


def require_modes(modes: InnerModes, density: InnerDensity) -> None:
    """Raise ``DrawsError`` where no mode is found at some vectors."""
    if lost := int((~modes.found).sum()):
        raise DrawsError(f"no mode of {sorted(density.over)} is found at {lost} of {len(modes.found)} draws")


def _is_finite(minus: Tensor, slope: Tensor, value: Tensor) -> Tensor:
    """Tell for which rows a curve is finite, ``(n,)``."""
    return minus.isfinite().flatten(1).all(-1) & slope.isfinite().all(-1) & value.isfinite()


def _like(rows: Tensor, blocks: Tensor) -> Tensor:
    """Return what belongs to rows ``(n,)`` with further dimensions of size one."""
    return rows.reshape(-1, *[1] * (blocks.dim() - 1))
