"""Whether what an estimator is given, draws or a fit, is of its target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, require_target
from bayeskit.errors import DrawsError, SettingsError, ShapeError

MIN_DRAWS = 8
NO_PRIOR_DRAWS = (
    "it needs draws from the prior, which this target cannot make: give every site a proper prior, pass "
    "sample_prior to Target.from_functions, or write a Stan program for Pyro, NumPyro or PyMC"
)
#: Name of the setting that counts chains without a finite density at all draws.
LOST_CHAINS = "lost_chains"


def belongs(draws: Draws, target: Target, *, posterior: bool = True) -> None:
    """Raise DrawsError for draws that are too short, of another target or, if ``posterior``, tempered."""
    require_target(target)
    if not isinstance(draws, Draws):
        if draws is None:
            raise DrawsError("posterior draws are missing: pass bk.sample(target), alone or after the target")
        raise DrawsError(
            f"draws must be Draws, such as bk.sample(target) returns or ladder.posterior, not a {type(draws).__name__}"
        )
    if draws.num_draws < MIN_DRAWS:
        raise DrawsError(
            f"chains of {draws.num_draws} draws are too short to estimate their error; draw at least {MIN_DRAWS}"
        )
    if posterior and not bool((draws.beta == 1).all()):
        raise DrawsError("the draws are tempered (beta below 1); this estimator needs draws from the posterior")
    if draws.unconstrained.shape[-1] != target.dim:
        raise DrawsError(
            f"the draws have dimension {draws.unconstrained.shape[-1]}, the target {target.dim}; "
            "pass the target that they were drawn from"
        )
    if draws.target is target:
        return
    probe = draws.unconstrained[:, -1]
    log_prior, log_likelihood = target.evaluate(probe)
    tolerance = 1e-3 if target.dtype == torch.float32 else 1e-6
    scale = 1 + draws.log_likelihood[:, -1].abs() + draws.log_prior[:, -1].abs()
    difference = (log_prior - draws.log_prior[:, -1]).abs() + (log_likelihood - draws.log_likelihood[:, -1]).abs()
    same = (difference <= tolerance * scale) | ~(scale.isfinite() | difference.isfinite())
    if not bool(same.all()):
        raise DrawsError(
            "the draws come from another target: their recorded densities differ from the densities of this target"
        )


def finite_chains(draws: Draws) -> Draws:
    """Drop chains without a finite density at all draws, noting their number; DrawsError if none is left."""
    finite = draws.log_density.isfinite()
    alive = finite.all(1)
    if bool(alive.all()):
        return draws
    if not bool(alive.any()):
        raise DrawsError("no chain has a finite density at all of its draws; check the model and the starting points")
    # Chains without any finite density never left their start and have their own warning, so they are not counted.
    stats = {name: value[alive] for name, value in draws.sample_stats.items()}
    return replace(
        draws,
        unconstrained=draws.unconstrained[alive],
        log_prior=draws.log_prior[alive],
        log_likelihood=draws.log_likelihood[alive],
        beta=draws.beta[alive],
        sample_stats=stats,
        settings=draws.settings | {LOST_CHAINS: int((finite.any(1) & ~alive).sum())},
    )


def usable_draws(draws: Draws, target: Target) -> Draws:
    """Return the chains of finite density of posterior draws; DrawsError if there are none, or of another target."""
    belongs(draws, target)
    return finite_chains(draws)


def is_same(value: float, recorded: float, dtype: torch.dtype) -> bool:
    """Whether two log densities of one point are equal but for rounding."""
    tolerance = 1e-3 if dtype == torch.float32 else 1e-6
    return value == recorded or abs(value - recorded) <= tolerance * (1 + abs(recorded))


def require_own(
    what: str, position: Tensor, recorded: float, target: Target, log_density: Callable[[Tensor], Tensor]
) -> int:
    """Raise ShapeError or SettingsError if a density at ``position (d,)`` is not as recorded; return evaluations."""
    if position.shape != (target.dim,):
        raise ShapeError(
            f"the {what} has dimension {position.numel()}, the target {target.dim}; pass the {what} of this target"
        )
    value = float(log_density(position.to(target.device, target.dtype).unsqueeze(0)))
    # NaN: no density was recorded.
    if not math.isnan(recorded) and not is_same(value, recorded, target.dtype):
        raise SettingsError(
            f"the {what} is of another target: its recorded log density is {recorded:g}, but this target has {value:g} "
            f"there; pass the {what} of this target"
        )
    return 1
