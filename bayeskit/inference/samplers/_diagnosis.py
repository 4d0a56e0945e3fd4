"""Diagnostics of posterior draws: each warning names the problem, the coordinate, the cause and the remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._core.convergence import principal_directions, stands_still
from bayeskit._core.functions_of_users import density_may_fail
from bayeskit._core.statistics import effective_sample_size, r_hat
from bayeskit._draws import Draws
from bayeskit.inference.samplers._scale_profiles import scales_of
from bayeskit.inference.samplers._unseen_tails import scales_are_known

_MAX_R_HAT, _NOISE_OF_R_HAT = 1.05, 10.0  # the latter by the number of draws of a chain: 1.05 from 200 draws on
_ENOUGH_TO_JUDGE, _ENOUGH_TO_DISAGREE, _ENOUGH_TO_MOVE, _ENOUGH_TO_COMPARE = 200, 50, 20, 4  # draws per chain
_ENOUGH_TO_COUNT = 2000  # draws in all; effective should be a tenth of them, or 400
_EFFECTIVE, _EFFECTIVE_SHARE = 400, 0.1
_OUTER, _EFFECTIVE_OUTSIDE = 0.05, 100  # share of draws in a tail, and its least effective sample size
_LEAST_ENERGY_CHANGE = 0.2  # mean squared change between draws, relative to the variance
_RARE = 1e-3  # share of transitions
_PROBED = 256  # points at which the density may be NaN
_GATHERED = 4.0  # standard errors between the means of divergent and all draws from which a coordinate is named
_AT_THE_LIMIT = 0.9  # share of the limit of leapfrog steps
_FUNNEL = 0.3  # least correlation of a coordinate with the mean log step length of the others
_SEPARATE = 4.0  # least distance between the means of chains in different modes, in standard deviations
_LOST = 20.0  # log density, plus the dimension, by which a chain outside the bulk is below the highest chain
_AT_AN_END, _NEAR = 16.0, 1e-5  # unconstrained value at which a site is at an end of its support, and tolerance
_FEWEST = 3  # least number of coordinates of a funnel
_MOST_NAMED = 3  # coordinates that stand still
_LONG_TAIL, _TAIL = 3.0, 1e-3  # least ratio of the distances from the median to the quantiles of both tails


def problems(draws: Draws, max_steps: int) -> list[str]:
    """Return a sentence for each problem of posterior draws: the observation, its place, likely cause and remedy."""
    # ``max_steps``: the limit of leapfrog steps in warm-up.
    found = _divergences(draws)
    x = draws.unconstrained
    alive = draws.log_density.isfinite().all(1)  # lost chains have their own warning
    x = x[alive]
    if draws.num_draws >= _ENOUGH_TO_MOVE and (stuck := _stillness(draws, alive)) is not None:
        return [*found, stuck]
    if draws.num_draws < _ENOUGH_TO_COMPARE and draws.settings.get("ending") in (None, "finished"):
        number = f"{draws.num_draws} draws" if draws.num_draws > 1 else "one draw"
        return [
            *found,
            f"{number} of each chain cannot tell whether chains agree; take num_samples=200 or more",
        ]
    if not len(x) or draws.num_draws < _ENOUGH_TO_DISAGREE:
        return found
    directions, loadings = principal_directions(x)
    quantities = torch.cat([x.movedim(-1, 0), directions])
    disagreement = r_hat(quantities)
    worst = int(disagreement.nan_to_num(nan=torch.inf).argmax())
    place, name = _coordinate_of(draws, worst, loadings)
    most = max(_MAX_R_HAT, 1 + _NOISE_OF_R_HAT / draws.num_draws)
    if not float(disagreement[worst]) <= most:
        who, cause = "the two halves of the chain", None
        if len(x) > 1:
            who, cause = "the chains", _of_disagreement(draws, alive, place)
        seen = f"{who} disagree (R-hat {float(disagreement[worst]):.2f} > {most:.3g} for {name})"
        cause = cause or _of_slowness(draws, x, place, max_steps)
        return [*found, f"{seen} and do not sample one posterior; {cause}"]
    if draws.num_draws < _ENOUGH_TO_JUDGE:
        return found
    effective = effective_sample_size(quantities)
    worst, total = int(effective.argmin()), x.shape[0] * x.shape[1]
    place, name = _coordinate_of(draws, worst, loadings)
    if total >= _ENOUGH_TO_COUNT and float(effective[worst]) < min(_EFFECTIVE, _EFFECTIVE_SHARE * total):
        seen = f"the effective sample size of {name} is {float(effective[worst]):.0f} of {total} draws"
        return [*found, f"{seen}; {_of_slowness(draws, x, place, max_steps)}"]
    return found


def problems_in_tails(draws: Draws, max_steps: int) -> list[str]:
    """Return a sentence about tails of draws that have no other problem, if chains seldom come there."""
    x = draws.unconstrained[draws.log_density.isfinite().all(1)]
    if x.shape[0] * x.shape[1] < _ENOUGH_TO_COUNT or draws.num_draws < _ENOUGH_TO_JUDGE:
        return []
    ordered = x.flatten(0, 1).sort(0).values
    outer = round(_OUTER * (len(ordered) - 1))
    beyond = torch.stack([x <= ordered[outer], x >= ordered[-1 - outer]]).double().permute(0, 3, 1, 2)
    effective = effective_sample_size(beyond).flatten()  # (2 d,)
    worst = int(effective.argmin())
    side, place = divmod(worst, x.shape[-1])
    if float(effective[worst]) < _EFFECTIVE_OUTSIDE:
        seen = (
            f"the {'highest' if side else 'lowest'} 5 % of {_name(draws, place)} have an effective sample size of "
            f"{float(effective[worst]):.0f}, so a tail is hardly known"
        )
    elif (share := _energy_change(draws)) < _LEAST_ENERGY_CHANGE:
        seen = f"new momenta change little of the energy (E-BFMI {share:.2f} < {_LEAST_ENERGY_CHANGE})"
    else:
        return []
    return [f"{seen}; {_of_slowness(draws, x, place, max_steps)}"]


def _energy_change(draws: Draws) -> float:
    """Return the mean squared change of the energy between draws, relative to its variance; infinite if unknown."""
    # The fraction of missing information of Betancourt (2016), of all chains together.
    energy = draws.sample_stats.get("energy")
    if energy is None:
        return math.inf
    energy = energy[draws.log_density.isfinite().all(1)].double()
    return float(energy.diff(dim=1).square().mean() / energy.var(1).mean())


def _stillness(draws: Draws, alive: Tensor) -> str | None:
    """Return a warning of coordinates that never moved in a chain, None if all did."""
    still = stands_still(draws.unconstrained) & alive.unsqueeze(-1)
    if not bool(still.any()):
        return None
    places = still.any(0).nonzero().flatten().tolist()
    named = ", ".join(_name(draws, place) for place in places[:_MOST_NAMED])
    named += f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
    chains = still.any(1).nonzero().flatten().tolist()
    return (
        f"{named} never moved in chains {chains}, so these draws are not of the posterior: the scales of the "
        "coordinates differ by more than double precision can hold, or no proposal was accepted; narrow the prior of "
        "a scale that is vague, bring scales near one, or pass initial= with plausible values"
    )


def _coordinate_of(draws: Draws, place: int, loadings: Tensor) -> tuple[int, str]:
    """Return the coordinate of a quantity, or the one with the largest share in a direction, and a name."""
    d = draws.unconstrained.shape[-1]
    if place < d:
        return place, _name(draws, place)
    first, second = loadings[place - d].abs().topk(2).indices.tolist()
    return first, f"a combination of {_name(draws, first)} and {_name(draws, second)}"


def _divergences(draws: Draws) -> list[str]:
    diverging = draws.sample_stats["diverging"].bool()
    count = int(diverging.sum())
    if not count or _are_harmless(draws, count):
        return []
    seen = (
        f"{count} of {draws.num_chains * draws.num_draws} transitions diverged, so parts of the posterior may be "
        "missed; "
    )
    if (undefined := _undefined(draws, diverging)) is not None:
        return [seen + undefined]
    x = draws.unconstrained
    everywhere = x.flatten(0, 1)
    off = (x[diverging].mean(0) - everywhere.mean(0)) / everywhere.std(0) * math.sqrt(count)
    place = int(off.abs().nan_to_num(nan=0.0).argmax())
    if float(off[place].abs()) <= _GATHERED:
        return [seen + "raise target_acceptance or reparameterise the model"]
    if off[place] < 0:
        return [
            f"{seen}they gather where {_name(draws, place)} is small, as in the neck of a funnel; raise "
            "target_acceptance, or write the variables that it scales as location + scale * standard normal"
        ]
    return [
        f"{seen}they gather where {_name(draws, place)} is large; raise target_acceptance, give it a prior with less "
        "mass there, or, if it is a precision, write the variables that it scales as location + standard normal / "
        "sqrt(precision)"
    ]


def _are_harmless(draws: Draws, count: int) -> bool:
    """Tell whether divergences are rare, and the scales of the model have no mass where no chain has been."""
    # A step into a wall such as exp(u) diverges now and then, wherever it starts. What divergences warn of, a neck that
    # chains cannot enter, lies at an end of a scale, beyond which the density has been followed.
    if not draws.target.has_density or count > _RARE * draws.num_chains * draws.num_draws:
        return False
    neck = _neck(draws.unconstrained)
    return (neck is None or neck[0] in scales_of(draws.target)) and scales_are_known(draws)


def _undefined(draws: Draws, diverging: Tensor) -> str | None:
    """Return the place where the density is NaN, twice as far from the mean as some draws, and the remedy, or None."""
    if not draws.target.has_density:
        return None
    x, first = draws.unconstrained.flatten(0, 1), diverging.flatten()
    centre, width = x.mean(0), x.std(0)
    points = centre + 2 * (torch.cat([x[first], x[~first]])[:_PROBED] - centre)
    log_prior = log_likelihood = torch.zeros(len(points))
    with density_may_fail():
        log_prior, log_likelihood = draws.target.evaluate(points, compiled=False)
    undefined = (log_prior + log_likelihood).isnan()
    if not bool(undefined.any()):
        return None
    away = ((points - centre) / width).abs()
    place = int((away[undefined].mean(0) - away.mean(0)).nan_to_num(nan=-torch.inf).argmax())
    part = "log prior" if bool(log_prior.isnan().any()) else "log likelihood"
    return (
        f"the {part} is NaN where {_name(draws, place)} is far from its mean: bound that site by its distribution, or "
        "return -inf there by torch.where, with an argument that is defined in both branches"
    )


def _of_disagreement(draws: Draws, alive: Tensor, worst: int) -> str | None:
    """Return the cause of separate chains: starting points, a period, or modes; None if it is none of these."""
    x, density = draws.unconstrained[alive], draws.log_density[alive]
    level = density.median(1).values
    lost = level < level.max() - _LOST - x.shape[-1]
    if bool(lost.any()):
        chains = alive.nonzero().flatten()[lost].tolist()
        away = (x[lost].mean((0, 1)) - x[~lost].mean((0, 1))).abs() / x[~lost].std((0, 1))
        place = _name(draws, int(away.nan_to_num(nan=0.0).argmax()))
        return (
            f"chains {chains} have not reached the posterior from their starting points: their log density is up to "
            f"{float(level.max() - level.min()):.3g} lower, and they are farthest away in {place}; narrow its prior, "
            "bring its scale near one, or pass initial="
        )
    if _repeats(draws, x[:, -1], worst):
        return (
            f"{_name(draws, worst)} is an angle, and chains are separated by the boundary between its periods; measure "
            "it from another direction, or write it as the direction of a vector, as dist.ProjectedNormal does"
        )
    means, width = x[..., worst].mean(1).sort().values, x[..., worst].std(1).median()
    if float(means.diff().max()) > _SEPARATE * float(width):
        places = ", ".join(f"{float(m):.3g}" for m in means)
        return (
            f"they stay in different modes, at {places}; use samplers.sample_ladder with exchange=True, or "
            "samplers.sample_smc, or impose an order on exchangeable components"
        )
    return None


def _repeats(draws: Draws, points: Tensor, place: int) -> bool:
    """Tell whether a coordinate is an angle: between -pi and pi, or with the same density one period away."""
    target = draws.target
    if not target.has_density:
        return False
    ends = points[:1].repeat(2, 1)
    ends[:, place] = torch.tensor([-_AT_AN_END, _AT_AN_END]).to(ends)
    for site in target.sites:
        if site.start <= place < site.stop and site.shape.numel() == site.stop - site.start:
            low, high = target.constrain(ends)[site.name].reshape(2, -1)[:, place - site.start].tolist()
            if abs(low + math.pi) < _NEAR and abs(high - math.pi) < _NEAR:
                return True
    turned = points.clone()
    turned[:, place] += 2 * math.pi
    both = target.evaluate(torch.cat([points, turned]), compiled=False)
    here, there = (both[0] + both[1]).chunk(2)
    rounding = 1e3 * torch.finfo(here.dtype).eps * here.abs().clamp(min=1.0)
    return bool(((here - there).abs() <= rounding).all())


def _of_slowness(draws: Draws, x: Tensor, worst: int, max_steps: int) -> str:
    """Return the likely cause of slow mixing, a funnel, a scale or a long tail, and the remedy."""
    funnel = _neck(x)
    if funnel is not None:
        place, grows = funnel
        if grows:
            return (
                f"the spread of the other coordinates grows with {_name(draws, place)}, as in a funnel; write the "
                "variables that it scales as location + scale * standard normal, raise target_acceptance, or run longer"
            )
        return (
            f"the spread of the other coordinates shrinks as {_name(draws, place)} grows, as in a funnel; if they are "
            "written as location + scale * standard normal, sample them directly (centred), because the data determine "
            "them; if it is a precision, write them as location + standard normal / sqrt(precision); otherwise raise "
            "target_acceptance, or run longer"
        )
    steps = draws.sample_stats.get("n_steps")
    if steps is not None and float(steps.double().mean()) > _AT_THE_LIMIT * max_steps:
        return (
            f"trajectories reach the limit of {max_steps} steps, because the scale of {_name(draws, worst)} differs "
            "from the others; centre and scale the data that it multiplies, raise num_warmup, or reparameterise the "
            "model"
        )
    tail = torch.tensor([_TAIL, 0.5, 1 - _TAIL], dtype=torch.float64, device=x.device)
    low, middle, high = x[..., worst].double().flatten().quantile(tail).tolist()
    short, long = sorted((middle - low, high - middle))
    if long > _LONG_TAIL * short:
        side = "small" if middle - low == long else "large"
        return (
            f"{_name(draws, worst)} has a long tail at {side} values on the unconstrained scale, in which chains stay "
            "for long; give it a prior with less mass there, or run longer"
        )
    return (
        "run longer, raise num_warmup, or, if the posterior has several modes, use "
        "samplers.sample_ladder with exchange=True, or samplers.sample_smc"
    )


def _neck(x: Tensor) -> tuple[int, bool] | None:
    """Return the coordinate correlated with the others' step lengths and the sign; ``x`` is ``(chains, draws, d)``."""
    d = x.shape[-1]
    if d < _FEWEST:
        return None
    move, middle = (x[:, 1:] - x[:, :-1]).flatten(0, 1), (0.5 * (x[:, 1:] + x[:, :-1])).flatten(0, 1)
    moved = (move != 0).all(-1)  # rejected proposals carry no information
    logs = (move[moved].abs() / x.flatten(0, 1).std(0)).log()
    others = (logs.sum(-1, keepdim=True) - logs) / (d - 1)
    pairs = torch.stack([middle[moved].T, others.T])  # (2, d, moves)
    centred = pairs - pairs.mean(-1, keepdim=True)
    tied = (centred[0] * centred[1]).mean(-1) / centred.square().mean(-1).sqrt().prod(0)
    tied = tied.nan_to_num(nan=0.0)
    place = int(tied.abs().argmax())
    return (place, bool(tied[place] > 0)) if float(tied[place].abs()) > _FUNNEL else None


def _name(draws: Draws, place: int) -> str:
    names = draws.target.names
    return repr(names[place]) if place < len(names) else f"coordinate {place}"
