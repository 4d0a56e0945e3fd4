"""Diagnostics shared by estimators; each returns warnings for the user."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bayeskit.core.convergence import (
    MAX_PARETO_SHAPE,
    MAX_R_HAT,
    MIN_EFFECTIVE,
    MIN_EFFECTIVE_WITHIN,
    chain_problems,
    divergence_problems,
    stands_still,
)
from bayeskit.core.statistics import effective_sample_size, effective_within_chains, mean_error, num_largest, r_hat
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError, SettingsError, ShapeError
from bayeskit.inference.samplers import Ladder
from bayeskit.logdensity.target import Target, require_target

__all__ = [
    "MAX_PARETO_SHAPE",
    "MAX_R_HAT",
    "MIN_DRAWS",
    "MIN_EFFECTIVE",
    "MIN_MISSED_SHARE",
    "NO_PRIOR_DRAWS",
    "belongs",
    "finite_chains",
    "is_same",
    "ladder_error",
    "ladder_problems",
    "largest_shape",
    "missed_draws",
    "posterior_problems",
    "require_own",
    "rounding_problems",
    "weight_problems",
    "with_rounding",
    "without_nan",
]

# Values rounded to an end of their support, where the likelihood cannot distinguish them.

#: Coordinates below this magnitude, in units of the log of the rounding unit, do not round to an end.
_NEAR = 0.8


def rounding_problems(
    target: Target, points: Tensor, log_weights: Tensor | None, standard_error: float
) -> tuple[list[str], float]:
    """Return a warning if rounded values can move an estimate by a standard error, and the share of mass affected.

    The points ``(*batch, d)`` stand for the posterior with ``log_weights (*batch)``, equal if None.
    """
    points = points.reshape(-1, points.shape[-1])
    weights = torch.ones_like(points[:, 0]) if log_weights is None else log_weights.reshape(-1).softmax(0)
    weights = weights / weights.sum()
    # The model is evaluated only at the few points that are so far out.
    end = -math.log(torch.finfo(points.dtype).eps)
    far = _NEAR * end
    rows = ((points.abs() > far).any(-1) & points.isfinite().all(-1)).nonzero().flatten()
    if not len(rows):
        return [], 0.0
    change, rounded = target.rounding(points[rows])
    # A likelihood that changes by one unit of rounding is a power of the distance to the end, which halves every log 2
    # of the coordinate: the exact value is many halvings closer.
    halvings = ((points[rows].abs().amax(-1) - end) / math.log(2)).clamp(min=1.0)
    moved = -torch.expm1(-halvings * change.abs().nan_to_num(nan=0.0))
    share = float((weights[rows] * moved).sum())
    if not share > standard_error:
        return [], share
    affected = [name for name, where in rounded.items() if bool((where & (moved > 0)).any())]
    return [
        f"{100 * share:.2g} % of the posterior lies where values of {', '.join(map(repr, affected))} are rounded to "
        "an end of their support, and the likelihood depends on their distance from it: write the likelihood as a "
        "function of the unconstrained value, such as Bernoulli(logits=...), or take a prior with less mass at the end"
    ], share


# Coverage of the posterior by a proposal.

MIN_MISSED_SHARE = 0.01


def missed_draws(log_prob: Callable[[Tensor], Tensor], draws: Draws | None, largest: float) -> list[str]:
    """Return a warning if over 1 % of draws exceed the ``largest`` log weight; ``log_prob`` maps ``(n, d) -> (n,)``."""
    if draws is None:
        return []
    x = draws.unconstrained.flatten(0, 1)
    log_weights = (draws.log_prior + draws.log_likelihood).flatten() - log_prob(x)
    share = float((log_weights > largest).to(torch.float64).mean())
    if share <= MIN_MISSED_SHARE:
        return []
    return [f"{100 * share:.0f} % of the posterior draws lie outside the proposal: use bridge sampling"]


# Largest Pareto shape of weights with finite variance.

_INFINITE_VARIANCE = 0.5


def largest_shape(num_weights: int, slowness: float = 1.0) -> float:
    """Return the largest fitted Pareto ``k`` at which ``num_weights`` weights may have finite variance."""
    # The mean of raw weights has a standard error only for ``k`` below one half. The fit to the ``t`` largest weights
    # has an error of about ``(1 + k) / sqrt(t)``, and is too small if the largest weights were not drawn; the limit
    # allows for both. ``slowness`` is the number of draws per independent draw.
    effective = max((num_largest(num_weights) - 1) / max(slowness, 1.0), 1.0)
    return _INFINITE_VARIANCE - (1 + _INFINITE_VARIANCE) / math.sqrt(effective)


_MIN_ROUND_TRIPS = 10
#: Draws at a temperature from which quartiles are taken.
_QUARTILES_OF = 1000
_LOST_CHAINS = "lost_chains"


MIN_DRAWS = 8
NO_PRIOR_DRAWS = (
    "it needs draws from the prior, which this target cannot make: give every site a proper prior, or pass "
    "sample_prior to Target.from_functions"
)


def belongs(draws: Draws, target: Target, *, posterior: bool = True) -> None:
    """Raise DrawsError for draws that are too short, of another target or, if ``posterior``, tempered."""
    require_target(target)
    if not isinstance(draws, Draws):
        raise DrawsError(f"draws must be Draws, such as bk.sample(target) returns, not a {type(draws).__name__}")
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


def posterior_problems(draws: Draws) -> tuple[list[str], dict[str, float]]:
    """Check chains for stillness, disagreement, too few effective draws, and divergences."""
    lost = int(draws.settings.get(_LOST_CHAINS, 0))
    names = () if draws.target is None else draws.target.names
    return chain_problems(draws.unconstrained, draws.log_density, draws.sample_stats.get("diverging"), lost, names)


def weight_problems(shape: float, effective: float) -> list[str]:
    """Check importance weights by their Pareto shape and effective number."""
    problems = []
    if not shape <= MAX_PARETO_SHAPE:
        problems.append(
            f"the largest weights dominate (Pareto k {shape:.2f} > {MAX_PARETO_SHAPE}): "
            "use bridge sampling or stepping stone"
        )
    if not effective >= MIN_EFFECTIVE:
        problems.append(f"only {effective:.0f} effective weights: use more draws or a closer proposal")
    return problems


def ladder_problems(ladder: Ladder) -> tuple[list[str], dict[str, float]]:
    """Check that the chains at every temperature agree on position and likelihood."""
    log_likelihood, diverging = ladder.log_likelihood, ladder.draws.sample_stats.get("diverging")
    levels, chains, count = log_likelihood.shape
    position = ladder.draws.unconstrained.reshape(levels, chains, count, -1).movedim(-1, 1)
    location, spread = _centre(position)

    def at(level: int) -> Tensor:
        """Return positions and log likelihoods at a temperature, ``(d + 1, chains, draws)``."""
        # Bounded, so that a heavy-tailed prior does not count as disagreement.
        bounded = ((position[level] - location[level]) / spread[level]).tanh()
        return torch.cat([bounded, log_likelihood[level].unsqueeze(0)])

    # One temperature after the other: the draws of all together fill the memory, and each pass over it costs seconds.
    ranks = torch.stack([r_hat(at(level)) for level in range(1, levels)])
    worst = float(ranks.max())
    problems = []
    still = stands_still(ladder.draws.unconstrained).unflatten(0, (levels, chains))[1:]
    if bool(still.any()):
        level, _, place = still.nonzero()[0].tolist()
        problems.append(
            f"{_coordinate(ladder.draws, place)} stands still in chains at temperature {level + 1}, which is no "
            "convergence: narrow its prior, or bring its scale near one"
        )
    # As for the posterior: the difference of half chains depends on their effective sample size, which takes long and
    # is asked only where it matters.
    least = (2 * MAX_R_HAT - 1) ** 2
    apart = ~(ranks.square() <= least)
    if bool(apart.any()):
        suspects = [at(int(level) + 1)[apart[level]] for level in apart.any(1).nonzero().flatten()]
        chance = 1 / effective_within_chains(torch.cat(suspects)).clamp(min=MIN_EFFECTIVE_WITHIN)
        apart[apart.clone()] = ~(ranks[apart].square() <= least + chance)
    if bool(apart.any()):
        problems.append(
            f"chains at temperature {int(ranks.amax(1).argmax()) + 1} disagree (R-hat {worst:.3f}): give the ladder "
            "more warm-up and samples; if the posterior has several modes, chains cannot estimate their relative masses"
        )
    effective = effective_sample_size(log_likelihood[1:])
    if not bool((effective >= MIN_EFFECTIVE).all()):
        fewest = float(effective.min())
        problems.append(f"a temperature has only {fewest:.0f} effective draws: give the ladder more samples")
    share = 0.0
    if diverging is not None:
        shares = diverging.to(torch.float64).reshape(levels, -1).mean(1)
        share = float(shares.mean())
        problems += divergence_problems(share, float((shares[1:] * chains * count / effective.clamp(min=1.0)).max()))
    facts = {"r_hat": worst, "diverging": share}
    if ladder.exchange is not None:
        trips = float(ladder.exchange.round_trips.sum())
        facts["round_trips"] = trips
        if trips < _MIN_ROUND_TRIPS:
            problems.append(
                f"only {trips:.0f} round trips between prior and posterior: give the ladder more samples, more "
                "temperatures, or the temperatures of ladder.exchange.temperatures"
            )
    return problems, facts


def ladder_error(influence: Tensor, ladder: Ladder) -> float:
    """Return the standard error of a sum of one mean per temperature, from influences ``(T, chains, draws)``."""
    # Temperatures with exchanges are correlated, so terms are added before their error is estimated.
    if ladder.exchange is not None:
        return float(mean_error(influence.sum(0)))
    return float(mean_error(influence).square().sum().sqrt())


def _coordinate(draws: Draws, place: int) -> str:
    names = () if draws.target is None else draws.target.names
    return repr(names[place]) if place < len(names) else f"coordinate {place}"


def _centre(position: Tensor) -> tuple[Tensor, Tensor]:
    """Median and quartile spread of each coordinate at each temperature, ``(T, d, 1, 1)``."""
    flat = position.flatten(-2)
    flat = flat[..., :: max(1, flat.shape[-1] // _QUARTILES_OF)]
    low, middle, high = flat.quantile(flat.new_tensor([0.25, 0.5, 0.75]), -1)[..., None, None]
    return middle, (high - low).clamp(min=torch.finfo(flat.dtype).tiny)


def without_nan(log_likelihood: Tensor) -> tuple[Tensor, list[str]]:
    """Replace NaN log likelihoods by minus infinity; also return a warning."""
    bad = log_likelihood.isnan()
    if not bool(bad.any()):
        return log_likelihood, []
    share = 100 * float(bad.to(torch.float64).mean())
    problem = f"the likelihood is NaN at {share:.2g} % of the points and was counted as zero there: correct the model"
    return torch.where(bad, -torch.inf, log_likelihood), [problem]


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
        settings=draws.settings | {_LOST_CHAINS: int((finite.any(1) & ~alive).sum())},
    )


def with_rounding(standard_error: float, log_values: Tensor) -> float:
    """Add to a standard error the rounding error of log densities of this magnitude."""
    finite = log_values[log_values.isfinite()]
    size = float(finite.abs().median()) if finite.numel() else 0.0
    return math.hypot(standard_error, size * torch.finfo(log_values.dtype).eps)
