"""Starts that come home: from where each chain begins along its own climb to where most of the posterior's mass is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._climbing import Curvature, Objective, Place, ascent
from bayeskit._evaluation import tempered
from bayeskit.target import Target

MAX_CLIMB = 150  # gradients of a chain
PLACES = 48  # of each climb, at which a normal approximation is looked at
DRAWS = 5  # from each of them
MAX_MEMORY = 40  # steps that tell of the curvature
MAX_DENSE = 128  # dimensions up to which the covariance is given in full
MAX_CHAINS = 64  # whose covariances are averaged
VARIANCE_DRAWS = 100
AT_REST = 10  # gradients in which a climb that has come to its top gains less than a nat
NEGLIGIBLE = 20.0  # nats, and one more a dimension, by which a hill is below the best one of its temperature


class Start(NamedTuple):
    """Where chains start, and what the climbs have shown of the posterior's shape."""

    position: Tensor  # (n, d)
    covariance: Tensor | None  # (d, d), or variances (d,) in many dimensions; None where no chain found a home
    num_gradients: int


def pathfinder(target: Target, points: Tensor, beta: Tensor, scale: Tensor, generator: torch.Generator) -> Start:
    """Take each chain to a draw from the best normal approximation on its way uphill.

    Every chain climbs by L-BFGS from its own point. Curvature seen on the way gives a normal approximation at each
    place; a few draws from it measure its evidence lower bound, and the chain starts at one of the draws from the best.
    That is neither the mode, which in many dimensions is far from all draws and in a funnel infinitely high,
    nor a place shared by all chains: chains that climb different hills stay on them, unless the lower bound of the one
    is so far below that of another, by 20 nats and one a dimension, that no draw would be on it: such a chain starts on
    one of the others. Where no chain has a place better than its point, all keep theirs.

    Parameters
    ----------
    target : Target
    points : Tensor
        Shape ``(n, d)``.
    beta : Tensor
        Inverse temperatures, ``(n,)``.
    scale : Tensor
        Rough unit of each coordinate, ``(d,)``.
    generator : torch.Generator

    References
    ----------
    Zhang, L., Carpenter, B., Gelman, A., Vehtari, A. (2022). Pathfinder: parallel quasi-Newton variational
    inference. Journal of Machine Learning Research 23, 1-49.
    """
    n, d = points.shape
    evaluate = target.evaluator(n, MAX_CLIMB)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        found = evaluate(u, beta)
        return found.log_density, found.gradient

    objective = Objective(lambda u: value_and_gradient(u)[0], value_and_gradient)
    memory = min(MAX_MEMORY, max(12, 2 * d))
    path = list(ascent(objective, points, MAX_CLIMB, scale, memory))
    spent = path[-1].num_evaluations
    draws, bound, num_drawn = _approximations(target, path, beta, scale, generator)
    best = bound.amax(0)
    whose = _hills(best, beta, NEGLIGIBLE + d, generator)
    home, chosen = best[whose].isfinite(), _places(path, bound)[whose]
    ours = draws[chosen, :, whose]  # (n, DRAWS, d)
    for row in (home & (whose != torch.arange(n, device=whose.device))).nonzero().flatten().tolist():
        place, hill = path[int(chosen[row])], whose[row : row + 1]
        ours[row] = place.position[hill] + scale * place.curvature.of(hill).draws(DRAWS, generator)[:, 0]
    # The median of those with a density, so that no chain starts in a tail, nor all of them at the top.
    density = _density(target, ours, beta.unsqueeze(-1))
    inside, everyone = density.isfinite().sum(-1), torch.arange(n, device=chosen.device)
    home = home & (inside > 0)
    middle = density.argsort(-1, descending=True)[everyone, inside // 2]
    # Nor farther out than where the climb began: draws may fall off a cliff that no normal distribution knows.
    home = home & (density[everyone, middle] >= _density(target, points, beta) - NEGLIGIBLE - d)
    ours = ours[everyone, middle]
    position = torch.where(home.unsqueeze(-1), ours, points)
    covariance = _covariance(path, chosen, whose, home, scale, generator)
    return Start(position, covariance, spent + num_drawn + n * (DRAWS + 1))


def _hills(bound: Tensor, beta: Tensor, negligible: float, generator: torch.Generator) -> Tensor:
    """Return the chain, ``(n,)``, on whose hill each starts, given lower bounds ``(n,)``: its own or a higher one's."""
    same = beta.unsqueeze(-1) == beta
    bounds = torch.where(same, bound, -torch.inf)  # row by row, those of the same temperature
    high = same & (bounds >= bounds.amax(-1, keepdim=True) - negligible)
    whose = torch.arange(len(bound), device=bound.device)
    low = ~high.diagonal()
    if low.any():
        whose[low] = torch.multinomial(high[low].to(bound), 1, generator=generator).squeeze(-1)
    return whose


def _places(path: list[Place], bound: Tensor) -> Tensor:
    """Return the place on each climb at which its chain starts, ``(n,)``: where the lower bound ``(L, n)`` is highest.

    A climb that does not come to rest, or not where most of the mass is, goes to where a density is infinite, as down
    the neck of a funnel of many groups. There the bounds say little, as they hardly change all the way, and no chain
    would come back. It is left at the first place whose bound is within one nat a dimension of the best one.
    """
    highest = bound.max(0)
    level = highest.values - path[0].position.shape[-1]
    first = (bound >= level).long().argmax(0)
    known, rows = bound.isfinite(), torch.arange(bound.shape[1], device=bound.device)
    ending = bound[(known.long().cumsum(0)).argmax(0), rows]  # of the last place that was looked at
    gain = path[-1].value - path[max(len(path) - 1 - AT_REST, 0)].value
    return torch.where((gain < 1.0) & (ending >= level), highest.indices, first)


def _approximations(
    target: Target, path: list[Place], beta: Tensor, scale: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Return draws ``(L, DRAWS, n, d)`` from normal approximations and their lower bounds ``(L, n)``, and the cost.

    Minus infinity stands where there is none: where a climb rests, or knows no curvature, or need not be looked at.
    """
    moved = torch.stack([place.moved & (place.curvature.diagonal > 0).all(-1) for place in path])  # (L, n)
    number = moved.long().cumsum(0)
    count = number[-1].clamp(min=1)
    # Evenly spread over the places of each climb, the last one among them.
    looked = moved & ((number * PLACES) // count > ((number - 1) * PLACES) // count)
    like = path[0].position
    draws = like.new_zeros(len(path), DRAWS, *like.shape)
    bound = like.new_full(looked.shape, -torch.inf)
    for step, (place, wanted) in enumerate(zip(path, looked, strict=True)):
        rows = wanted.nonzero().flatten()
        if not len(rows):
            continue
        curvature = place.curvature.of(rows)
        # About the place itself: Newton's step from it, as in the paper, leads out of funnels.
        draws[step, :, rows] = place.position[rows] + scale * curvature.draws(DRAWS, generator)
        bound[step, rows] = 0.5 * curvature.log_determinant()
    where = bound.isfinite()
    at = draws.movedim(1, 2)[where]  # (k, DRAWS, d)
    if len(at):
        power = beta.expand(where.shape)[where].unsqueeze(-1)
        density = _density(target, at, power)
        inside = density.isfinite()
        share = inside.to(density).mean(-1)
        # Where the density is zero beyond a wall, the bound is that of the normal distribution this side of it.
        mean = torch.where(inside, density, 0.0).mean(-1) / share
        bound[where] = (bound[where] + mean + share.log()).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    return draws, bound, len(at) * DRAWS


def _density(target: Target, u: Tensor, beta: Tensor) -> Tensor:
    """Return tempered log densities, ``(*batch, d) -> (*batch)``, minus infinity where there is none."""
    value = tempered(*target.evaluate(u, compiled=False), beta)
    return torch.where(value.isfinite(), value, -torch.inf)


def _covariance(
    path: list[Place], chosen: Tensor, whose: Tensor, home: Tensor, scale: Tensor, generator: torch.Generator
) -> Tensor | None:
    """Return the mean covariance of the approximations that the chains chose, ``(d, d)``, or variances, ``(d,)``."""
    d = len(scale)
    rows = home.nonzero().flatten()[:MAX_CHAINS]
    if not len(rows):
        return None
    total = scale.new_zeros((d, d) if d <= MAX_DENSE else (d,))
    for step in chosen[rows].unique().tolist():
        curvature: Curvature = path[step].curvature.of(whose[rows[chosen[rows] == step]])
        if d <= MAX_DENSE:
            identity = torch.eye(d, dtype=scale.dtype, device=scale.device)
            total += curvature.times(identity.unsqueeze(1).expand(d, len(curvature.diagonal), d)).sum(1)
        else:
            total += curvature.draws(VARIANCE_DRAWS, generator).square().mean(0).sum(0)
    mean = total / len(rows)
    return scale[:, None] * mean * scale if d <= MAX_DENSE else scale.square() * mean
