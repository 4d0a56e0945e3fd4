"""The search for modes that no chain of a run visits, at a cost in proportion to the run's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._draws import Draws
from bayeskit._logdensity.own_density import ValueAndGradient
from bayeskit._logdensity.target import Target
from bayeskit.inference._known_modes import KnownModes, WeightedMode, reflections
from bayeskit.inference._optimize import lbfgs
from bayeskit.inference.samplers._starts import candidate_points

_SHARE_OF_COST = 0.05  # of the run's gradients
_GRADIENTS, _FEWEST = 40, 4  # gradients of a search, and least number of searches
_MOST_SEARCHES = 64
_FOR_SUMMANDS, _SUMMAND_STEPS = 8, 30  # climbs that a run can afford, from which terms of mixtures are climbed as well
_VALLEY, _POINTS = 0.5, (0.15, 0.35, 0.5, 0.65, 0.85)  # depth in nats, and places between two points
_LEAST_SHARE = 0.01  # of the posterior in a mode that is reported
_NEAR = 2000  # draws among which the nearest to an end is sought


def hidden_modes(draws: Draws, seed: int) -> list[str]:
    """Return a warning of modes with at least 1 % of the posterior in which no chain has been.

    Modes that are found are kept with the target, and chains of a further run start there.
    """
    target = draws.target
    if not target.has_density:
        return []
    with density_may_fail(), one_thread(), torch.no_grad():
        return _search(target, draws, KnownModes.of(target), seed)
    return []


def _search(target: Target, draws: Draws, known: KnownModes, seed: int) -> list[str]:
    n, x = draws.num_chains, draws.unconstrained.flatten(0, 1)
    known.unvisited = [mode for mode in known.unvisited if not bool(mode.holds(x).any())]
    generator = new_generator(seed, target.device, stream="modes that no chain visits")
    count = min(int(_SHARE_OF_COST * draws.num_gradients / _GRADIENTS), _MOST_SEARCHES) // n * n
    ends = [known.ends(target), *(mode.position[None] for mode in known.weighted)]
    mirrored, _ = reflections(target, draws.unconstrained[:, -1])
    fresh = mirrored[:0]
    if count >= _FEWEST and count > len(mirrored):
        fresh = candidate_points(target, count - len(mirrored), generator)
    for starts, found_by in ((mirrored, "reflections of draws"), (fresh, "search after a run")):
        finite = starts[starts.isfinite().all(-1)]
        if len(finite):
            reached, heights, _ = lbfgs(_in_blocks(target, n), finite, _GRADIENTS)
            known.note(reached[heights.isfinite()], found_by, independent=starts is fresh)
            ends.append(reached[heights.isfinite()])
    apart = _apart(target, draws, torch.cat(ends))
    if count >= _FOR_SUMMANDS:
        known.search_summands(target, draws.unconstrained[:, -1], _SUMMAND_STEPS)
        # A narrow mode on the slope of a wide one has no valley before it.
        apart = torch.cat([apart, _apart(target, draws, known.ends(target), by_valleys=False)])
    if not len(apart):
        return []
    visited = _seen_mass(target, draws, known, seed)
    known.weigh(target, seed=seed)
    found = [mode for mode in known.weighted if bool(mode.holds(apart).any()) and not bool(mode.holds(x).any())]
    if visited is None or not found:
        return []
    hidden = torch.tensor([mode.log_mass for mode in found], dtype=torch.float64).logsumexp(0)
    share = float(torch.sigmoid(hidden - visited))
    if share < _LEAST_SHARE:
        return []
    for mode in found:
        is_known = any(bool(other.holds(mode.position)) for other in known.unvisited)
        if mode.log_mass > visited + math.log(_LEAST_SHARE) and not is_known:
            known.unvisited.append(mode)
    where = ", ".join(f"{name} = {value:.4g}" for name, value in _place(target, found[0]))
    modes = "a mode" if len(found) == 1 else f"{len(found)} modes"
    return [
        f"no chain has been in {modes} with about {100 * share:.2g} % of the posterior, the highest at {where} "
        "(unconstrained): sample the same target again, whose chains then start there too, and use "
        "samplers.sample_ladder with exchange=True or samplers.sample_smc for the shares of modes"
    ]


def _in_blocks(target: Target, num_chains: int) -> ValueAndGradient:
    """Return the posterior by the evaluator that the run has made for its chains."""
    evaluate = target.ready_evaluator(num_chains)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        short = -len(u) % num_chains
        padded = torch.cat([u, u[-1:].expand(short, -1)])
        found = [evaluate(block, torch.ones_like(block[:, 0])) for block in padded.split(num_chains)]
        value, gradient = (torch.cat([getattr(one, name) for one in found]) for name in ("log_density", "gradient"))
        return value[: len(u)], gradient[: len(u)]

    return value_and_gradient


def _apart(target: Target, draws: Draws, ends: Tensor, *, by_valleys: bool = True) -> Tensor:
    """Return the ends, ``(k, d)``, that a valley separates from the nearest draw.

    Not ``by_valleys``, it is enough that the log density falls below the straight line between the two, which a
    concave one never does.
    """
    x = draws.unconstrained.flatten(0, 1)
    x = x[torch.linspace(0, len(x) - 1, min(_NEAR, len(x)), device=x.device).round().long()]
    ends = ends[ends.isfinite().all(-1)]
    if not len(ends):
        return ends
    scale = x.std(0).clamp(min=torch.finfo(x.dtype).tiny)
    nearest = x[torch.cdist(ends / scale, x / scale).argmin(1)]
    places = torch.tensor(_POINTS, dtype=x.dtype, device=x.device)[:, None, None]
    between = target.log_density(torch.lerp(nearest, ends, places)).nan_to_num(nan=-torch.inf)  # (points, k)
    near, far = target.log_density(nearest), target.log_density(ends)
    line = torch.minimum(near, far) if by_valleys else torch.lerp(near, far, places[..., 0])
    return ends[(between - line).amin(0) < -_VALLEY]


def _seen_mass(target: Target, draws: Draws, known: KnownModes, seed: int) -> float | None:
    """Return the log of the evidence in the modes that chains visit, by the mode with most draws; None without one."""
    x = draws.unconstrained.flatten(0, 1)
    best = x[draws.log_density.flatten().nan_to_num(nan=-torch.inf).argmax()]
    known.search(target, best[None], "chains")
    known.weigh(target, seed=seed)
    shares = [(float(mode.holds(x).double().mean()), mode.log_mass) for mode in known.weighted]
    share, log_mass = max(shares, default=(0.0, 0.0))
    return log_mass - math.log(share) if share > 0 else None


def _place(target: Target, mode: WeightedMode) -> list[tuple[str, float]]:
    return list(zip(target.names, mode.position.tolist(), strict=False))[:3]
