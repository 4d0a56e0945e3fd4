"""Starting points of chains: prior draws, Pathfinder, and moves along a tempered ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.core.inputs import warn_user
from bayeskit.errors import DataError, InitializationError, InitializationWarning, ShapeError
from bayeskit.inference.samplers.hmc import HMC
from bayeskit.inference.samplers.metric import Metric
from bayeskit.logdensity.climbing import ClimbObjective, InverseHessian, Place, ascent
from bayeskit.logdensity.compiling import tempered
from bayeskit.logdensity.density import Started
from bayeskit.logdensity.pyro_density import PyroDensity
from bayeskit.logdensity.target import Target

__all__ = [
    "CANDIDATES",
    "Climb",
    "Start",
    "pathfinder",
    "prior_positions",
    "starting_points",
]

# Starting points of chains.

CANDIDATES = 10


def starting_points(
    target: Target, num_chains: int, beta: Tensor, generator: torch.Generator, initial: Tensor | None = None
) -> Tensor:
    """Return a starting point for each chain, ``(num_chains, d)``, at inverse temperatures ``(num_chains,)``."""
    # Each chain takes the best of CANDIDATES prior draws by likelihood, which is plausible and differs between chains.
    # Where a point is known at which the density is not negligible, every second candidate is a uniform draw on
    # [-2, 2]^d about it. Without a prior to draw from, all are, about zero if no point is known, and the chain takes
    # the draw of highest density, or the known point where no draw has any. ``initial``, (d,) or (num_chains, d),
    # unconstrained, replaces both. InitializationError, or DataError if all log likelihoods
    # are NaN, if no chain has a finite density.
    if initial is not None:
        return _given(target, num_chains, beta, torch.as_tensor(initial))
    count = CANDIDATES * num_chains
    points = prior_positions(target, count, generator)
    known = target.density.start if isinstance(target.density, Started) else None
    if points is None or known is not None:
        shape = (count, target.dim)
        near = 4 * torch.rand(shape, dtype=target.dtype, device=generator.device, generator=generator) - 2
        near = near.to(target.device) + (0.0 if known is None else known)
        if points is None:
            points = near
        else:
            points[::2] = near[::2]
    points = points.to(target.device)
    log_prior, log_likelihood = target.evaluate(points, compiled=False)
    density = tempered(log_prior, log_likelihood, beta.repeat_interleave(CANDIDATES))
    density = density.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).reshape(num_chains, CANDIDATES)
    # By likelihood: the density of the prior is infinitely high in the neck of a funnel.
    merit = beta.repeat_interleave(CANDIDATES) * log_likelihood if target.can_sample_prior else density.flatten()
    least = torch.finfo(merit.dtype).min  # above that of a draw without density
    merit = merit.nan_to_num(nan=least, posinf=least, neginf=least).reshape(density.shape)
    best = torch.where(density.isfinite(), merit, -torch.inf).argmax(1)
    chosen = points.reshape(num_chains, CANDIDATES, -1)[torch.arange(num_chains), best]
    finite = density.max(1).values.isfinite()
    if known is not None:
        return torch.where(finite.unsqueeze(-1), chosen, known)
    if not bool(finite.any()):
        if bool(log_likelihood.isnan().all()):
            raise DataError(
                "the log likelihood is NaN at every starting candidate; look for NaN or infinite values in the data"
            )
        raise InitializationError(
            f"the density is zero at all {count} starting candidates "
            f"(log prior {_range(log_prior)}, log likelihood {_range(log_likelihood)}); "
            "pass initial=target.unconstrain({...}) with plausible values, or check that data and likelihood fit"
        )
    # A chain without a finite candidate takes one of its neighbours' candidates.
    donors = finite.nonzero().flatten()
    lost = (~finite).nonzero().flatten()
    chosen[lost] = chosen[donors[torch.arange(len(lost), device=donors.device) % len(donors)]]
    return chosen


def prior_positions(target: Target, num_vectors: int, generator: torch.Generator) -> Tensor | None:
    """Return vectors ``(num_vectors, d)`` from the sites, of the prior if that is proper; None if no site draws."""
    # Flat sites, or sites with a masked prior, are drawn all the same.
    if target.can_sample_prior:
        return target.sample_prior(num_vectors, seed=generator)
    if isinstance(target.density, PyroDensity):
        return target.density.prior_vectors(num_vectors, generator, not target.loops)
    return None


def _given(target: Target, num_chains: int, beta: Tensor, initial: Tensor) -> Tensor:
    initial = initial.to(target.dtype).to(target.device)
    if initial.shape not in ((target.dim,), (num_chains, target.dim)):
        raise ShapeError(
            f"initial must have shape {(target.dim,)} or {(num_chains, target.dim)}, not {tuple(initial.shape)}"
        )
    points = initial.expand(num_chains, target.dim).clone()
    wild = (~points.isfinite()).any(-1)
    if bool(wild.any()):
        chains = wild.nonzero().flatten().tolist()
        raise InitializationError(
            f"the initial points of chains {chains} hold NaN or infinite numbers; give finite numbers"
        )
    log_prior, log_likelihood = target.evaluate(points, compiled=False)
    density = tempered(log_prior, log_likelihood, beta)
    bad = ~density.isfinite()
    if bool(bad.all()):
        prior_bad = bool((~log_prior.isfinite()).all())
        where = "outside the support of the prior" if prior_bad else "at zero likelihood"
        raise InitializationError(
            f"every initial point is {where} (log prior {_range(log_prior)}, log likelihood "
            f"{_range(log_likelihood)}; first point: {_describe(target, points[0])}); "
            "give points of positive density, or leave initial=None to start from prior draws"
        )
    if bool(bad.any()):
        chains = bad.nonzero().flatten().tolist()
        warn_user(
            f"chains {chains} start at a point without finite density and will stay there; give points of finite "
            "density",
            InitializationWarning,
        )
    return points


def _describe(target: Target, point: Tensor) -> str:
    values = target.constrain(point)
    return ", ".join(f"{k}={v.flatten()[:3].tolist()}" for k, v in values.items())


def _range(x: Tensor) -> str:
    return f"from {float(x.min()):.4g} to {float(x.max()):.4g}"


# Pathfinder starts: each chain moves from its point to the bulk of the posterior mass.

_MAX_CLIMB = 150  # gradients of a chain
_PLACES = 48  # of each climb, at which a normal approximation is evaluated
_DRAWS = 5  # from each of them
_MAX_MEMORY = 40  # steps from which the curvature is estimated
_MAX_DENSE = 128  # dimensions up to which the covariance is given in full
_MAX_CHAINS = 64  # whose covariances are averaged
_VARIANCE_DRAWS = 100
_AT_REST = 10  # last gradients, over which a converged climb gains less than a nat
_NEGLIGIBLE = 20.0  # nats, plus one per dimension, by which a negligible mode is below the best of its temperature


class Start(NamedTuple):
    """Starting points of chains, and a rough covariance of the posterior from the climbs."""

    position: Tensor  # (n, d)
    covariance: Tensor | None  # (d, d), or variances (d,) in many dimensions; None if no climb succeeded
    num_gradients: int


def pathfinder(target: Target, points: Tensor, beta: Tensor, scale: Tensor, generator: torch.Generator) -> Start:
    """Take each chain to a draw from the best normal approximation on its way uphill (Zhang et al. 2022)."""
    # points: (n, d); beta: (n,); scale: (d,), a rough unit of each coordinate. Curvature on the L-BFGS path gives a
    # normal approximation at each point, ranked by its evidence lower bound. The mode itself is a bad start: in many
    # dimensions it is far from all draws, and in a funnel the density is unbounded. Chains stay in the modes that they
    # find, unless the mass of a mode is negligible relative to another at the same temperature. If no chain improves on
    # its point, all chains keep theirs.
    n, d = points.shape
    evaluate = target.evaluator(n, _MAX_CLIMB)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        found = evaluate(u, beta)
        return found.log_density, found.gradient

    objective = ClimbObjective(lambda u: value_and_gradient(u)[0], value_and_gradient)
    memory = min(_MAX_MEMORY, max(12, 2 * d))
    path = list(ascent(objective, points, _MAX_CLIMB, scale, memory))
    spent = path[-1].num_evaluations
    draws, bound, num_drawn = _approximations(target, path, beta, scale, generator)
    best = bound.amax(0)
    whose = _hills(best, beta, _NEGLIGIBLE + d, generator)
    home, chosen = best[whose].isfinite(), _places(path, bound)[whose]
    ours = draws[chosen, :, whose]  # (n, DRAWS, d)
    for row in (home & (whose != torch.arange(n, device=whose.device))).nonzero().flatten().tolist():
        place, hill = path[int(chosen[row])], whose[row : row + 1]
        ours[row] = place.position[hill] + scale * place.curvature.of(hill).draws(_DRAWS, generator)[:, 0]
    # The draw of median finite density, so that chains start neither in a tail nor all at the mode.
    density = _density(target, ours, beta.unsqueeze(-1))
    inside, everyone = density.isfinite().sum(-1), torch.arange(n, device=chosen.device)
    home = home & (inside > 0)
    middle = density.argsort(-1, descending=True)[everyone, inside // 2]
    # The density must not be lower than at the starting point: the normal approximation ignores edges of the support.
    home = home & (density[everyone, middle] >= _density(target, points, beta) - _NEGLIGIBLE - d)
    ours = ours[everyone, middle]
    position = torch.where(home.unsqueeze(-1), ours, points)
    covariance = _covariance(path, chosen, whose, home, scale, generator)
    return Start(position, covariance, spent + num_drawn + n * (_DRAWS + 1))


def _hills(bound: Tensor, beta: Tensor, negligible: float, generator: torch.Generator) -> Tensor:
    """Return the chain ``(n,)`` in whose mode each starts, its own unless that is negligible by the bounds ``(n,)``."""
    same = beta.unsqueeze(-1) == beta
    bounds = torch.where(same, bound, -torch.inf)  # row by row, bounds at the same temperature
    high = same & (bounds >= bounds.amax(-1, keepdim=True) - negligible)
    whose = torch.arange(len(bound), device=bound.device)
    low = ~high.diagonal()
    if low.any():
        whose[low] = torch.multinomial(high[low].to(bound), 1, generator=generator).squeeze(-1)
    return whose


def _places(path: list[Place], bound: Tensor) -> Tensor:
    """Return the place on each climb where its lower bound ``(L, n)`` is highest, ``(n,)``."""
    # A search that does not converge, or not at the bulk of the mass, runs to an infinite density, as in the neck of a
    # funnel of many groups. There the bounds hardly change, and no chain would return: it starts at the first point
    # with a bound within one nat per dimension of the best.
    highest = bound.max(0)
    level = highest.values - path[0].position.shape[-1]
    first = (bound >= level).long().argmax(0)
    known, rows = bound.isfinite(), torch.arange(bound.shape[1], device=bound.device)
    ending = bound[(known.long().cumsum(0)).argmax(0), rows]  # of the last place that was evaluated
    gain = path[-1].value - path[max(len(path) - 1 - _AT_REST, 0)].value
    return torch.where((gain < 1.0) & (ending >= level), highest.indices, first)


def _approximations(
    target: Target, path: list[Place], beta: Tensor, scale: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """Return draws ``(L, DRAWS, n, d)`` of normal approximations, bounds ``(L, n)``, and the evaluations spent."""
    # Bounds are -inf for points that did not move, have no positive curvature, or are not examined.
    moved = torch.stack([place.moved & (place.curvature.diagonal > 0).all(-1) for place in path])  # (L, n)
    number = moved.long().cumsum(0)
    count = number[-1].clamp(min=1)
    # Evenly spread over the points of each path, including the last.
    looked = moved & ((number * _PLACES) // count > ((number - 1) * _PLACES) // count)
    like = path[0].position
    draws = like.new_zeros(len(path), _DRAWS, *like.shape)
    bound = like.new_full(looked.shape, -torch.inf)
    for step, (place, wanted) in enumerate(zip(path, looked, strict=True)):
        rows = wanted.nonzero().flatten()
        if not len(rows):
            continue
        curvature = place.curvature.of(rows)
        # Centred at the point itself: a Newton step from it, as in the paper, leads out of funnels.
        draws[step, :, rows] = place.position[rows] + scale * curvature.draws(_DRAWS, generator)
        bound[step, rows] = 0.5 * curvature.log_determinant()
    where = bound.isfinite()
    at = draws.movedim(1, 2)[where]  # (k, DRAWS, d)
    if len(at):
        power = beta.expand(where.shape)[where].unsqueeze(-1)
        density = _density(target, at, power)
        inside = density.isfinite()
        share = inside.to(density).mean(-1)
        # If the density is zero beyond an edge, the bound is that of the normal distribution truncated at it.
        mean = torch.where(inside, density, 0.0).mean(-1) / share
        bound[where] = (bound[where] + mean + share.log()).nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    return draws, bound, len(at) * _DRAWS


def _density(target: Target, u: Tensor, beta: Tensor) -> Tensor:
    """Return tempered log densities, ``(*batch, d) -> (*batch)``; minus infinity if not finite."""
    value = tempered(*target.evaluate(u, compiled=False), beta)
    return torch.where(value.isfinite(), value, -torch.inf)


def _covariance(
    path: list[Place], chosen: Tensor, whose: Tensor, home: Tensor, scale: Tensor, generator: torch.Generator
) -> Tensor | None:
    """Return the mean covariance of the approximations that the chains chose, ``(d, d)``, or variances, ``(d,)``."""
    d = len(scale)
    rows = home.nonzero().flatten()[:_MAX_CHAINS]
    if not len(rows):
        return None
    total = scale.new_zeros((d, d) if d <= _MAX_DENSE else (d,))
    for step in chosen[rows].unique().tolist():
        curvature: InverseHessian = path[step].curvature.of(whose[rows[chosen[rows] == step]])
        if d <= _MAX_DENSE:
            identity = torch.eye(d, dtype=scale.dtype, device=scale.device)
            total += curvature.times(identity.unsqueeze(1).expand(d, len(curvature.diagonal), d)).sum(1)
        else:
            total += curvature.draws(_VARIANCE_DRAWS, generator).square().mean(0).sum(0)
    mean = total / len(rows)
    return scale[:, None] * mean * scale if d <= _MAX_DENSE else scale.square() * mean


# Starting points of a tempered ladder: prior draws moved up the ladder.

_MOVES = 2  # at each temperature
_LEAPFROGS = 3.0  # in each move
_ACCEPTANCE = 0.7
_FASTER, _SLOWER = 1.25, 0.6  # factors of the step size


@dataclass(frozen=True)
class Climb:
    """Starting points of a tempered ladder: prior draws, moved a few times at each lower temperature."""

    # Chains started at prior draws far outside a sharp posterior need a whole warm-up to reach it. These chains reach
    # it and stay independent of each other, so R-hat still detects separate modes.

    levels: Tensor  # (T,), increasing: inverse temperatures above zero of the whole ladder
    variance: Tensor | None = None  # (d,), of the prior

    def points(self, target: Target, beta: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
        """Return a starting point for each chain, ``(n, d)``, and the gradients spent on them."""
        # beta: (n,), equally many chains at each of some neighbouring ``levels``.
        wanted = beta.unique()
        num_chains = len(beta) // len(wanted)
        levels = self.levels[self.levels <= wanted[-1]].to(beta)
        position = starting_points(target, num_chains, levels[:1].expand(num_chains), generator)
        deviation = torch.ones_like(position[0]) if self.variance is None else self.variance.to(position).sqrt()
        calls = int(len(levels) * (1 + _MOVES * _LEAPFROGS))
        kernel = HMC(0.3, Metric(deviation, is_dense=False), _LEAPFROGS, planned_calls=calls)
        step_size = torch.full_like(position[:, 0], 0.3)
        reached, num_gradients = [], 0
        for level in levels:
            kernel = kernel.with_settings(beta=level)
            state = kernel.evaluate(target, position)
            num_gradients += num_chains
            for _ in range(_MOVES):
                state, info = kernel.with_settings(step_size=step_size).step(target, state, generator=generator)
                num_gradients += int(info.num_steps.sum())
                # Each chain has its own step size, so a stuck chain does not slow down the others.
                step_size = step_size * torch.where(info.acceptance_rate > _ACCEPTANCE, _FASTER, _SLOWER)
            position = state.position
            if bool(level >= wanted[0]):
                reached.append(position)
        return torch.cat(reached), num_gradients
