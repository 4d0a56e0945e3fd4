"""Starting points of chains: prior draws, Pathfinder, and moves along a tempered ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.evaluation import tempered
from bayeskit._core.inputs import warn_user
from bayeskit._logdensity.density import Started
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.target import Target
from bayeskit.errors import DataError, InitializationError, InitializationWarning, ShapeError
from bayeskit.inference._known_modes import half_nat_widths
from bayeskit.inference._optimize import InverseHessian, LBFGSState, lbfgs_path, quartile_distance
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._metric import Metric

# Starting points of chains.

CANDIDATES = 10  # of each chain in a round
_BOX = 2.0  # half the width of the cube of the candidates that are no prior draws
_ROUNDS = 10  # at most, until as many candidates have a finite density as there are chains
_LOOKS = 16  # candidates at least whose gradients give the first scales
_NARROWEST, _WIDEST = 1e-6, 10.0  # first scale of a coordinate in units of the spread of the candidates


class _Candidates(NamedTuple):
    """Points at which chains may start; those of each chain are a row."""

    position: Tensor  # (n, m, d)
    merit: Tensor  # (n, m), minus infinity where the density is not finite


def starting_points(
    target: Target,
    num_chains: int,
    beta: Tensor,
    generator: torch.Generator,
    initial: Tensor | None = None,
    *,
    of_prior: bool = False,
) -> Tensor:
    """Return a starting point for each chain, ``(num_chains, d)``, at inverse temperatures ``(num_chains,)``.

    Each chain takes the best of its candidates. With ``of_prior`` these are prior draws alone, where there are any.
    ``initial``, ``(d,)`` or ``(num_chains, d)``, unconstrained, replaces the search. InitializationError, or DataError
    if all log likelihoods are NaN, if no candidate has a finite density.
    """
    if initial is not None:
        return _given(target, num_chains, beta, torch.as_tensor(initial))
    return _best(_candidates(target, num_chains, beta, generator, of_prior))


def scaled_starting_points(
    target: Target, num_chains: int, beta: Tensor, generator: torch.Generator, *, centre: bool = True
) -> tuple[Tensor, Tensor, int]:
    """Return starting points ``(num_chains, d)``, a scale of each coordinate ``(d,)``, and the gradients spent.

    ``centre`` tells whether the origin, or the point that the density knows, is a candidate, too.
    """
    found = _candidates(target, num_chains, beta, generator, of_prior=False, centre=centre)
    looks, spent = min(-(-_LOOKS // num_chains), found.merit.shape[1]), 0
    order = found.merit.argsort(dim=1, descending=True, stable=True)
    rows, merit = torch.arange(num_chains, device=order.device), found.merit.clone()
    evaluate, points, slopes = target.evaluator(num_chains, looks), [], []
    lacking = torch.ones_like(rows, dtype=torch.bool)
    for look, place in enumerate(order.T):
        if look >= looks and not bool((lacking & merit[rows, place].isfinite()).any()):
            break
        at = found.position[rows, place]
        value = evaluate(at, beta)
        usable = merit[rows, place].isfinite() & _can_move(at, value.log_density, value.gradient)
        merit[rows, place] = torch.where(usable, merit[rows, place], -torch.inf)
        lacking, spent = lacking & ~usable, spent + num_chains
        points.append(at[usable])
        slopes.append(value.gradient[usable])
    if bool(merit.isfinite().any()):
        found = found._replace(merit=merit)
    spread = quartile_distance(found.position[found.merit.isfinite()])
    return _best(found), _secant_scale(torch.cat(points), torch.cat(slopes), spread), spent


def _can_move(points: Tensor, log_density: Tensor, gradient: Tensor) -> Tensor:
    """Tell at which points ``(n, d)`` the last digit of a coordinate, or of the log density, is worth less than a nat.

    From other points a chain cannot make, or never accepts, a step.
    """
    size = (points.abs() * gradient.abs()).amax(-1).maximum(log_density.abs())
    return log_density.isfinite() & gradient.isfinite().all(-1) & (torch.finfo(points.dtype).eps * size < 1)


def _secant_scale(points: Tensor, slopes: Tensor, spread: Tensor) -> Tensor:
    """Return a scale of each coordinate, ``(d,)``, from points and the gradients there, ``(k, d)`` each."""
    # If the log density is quadratic and a coordinate independent of the others, its variance is sd(u) / sd(gradient),
    # wherever the points lie. ``spread (d,)`` bounds the scale.
    if len(points) < 2:
        return spread
    scale = (points.std(0) / slopes.std(0)).sqrt()
    usable = scale.isfinite() & (scale > 0)
    return torch.where(usable, scale, spread).clamp(min=_NARROWEST * spread, max=_WIDEST * spread)


def local_scale(target: Target, points: Tensor, beta: Tensor, columns: Tensor) -> tuple[Tensor, int]:
    """Return how far each point can move along some coordinates, ``(n, k)``, and evaluations."""
    directions = torch.zeros(len(columns), points.shape[-1], dtype=points.dtype, device=points.device)
    directions[torch.arange(len(columns), device=points.device), columns] = 1.0
    found, spent = half_nat_widths(
        lambda u: _density(target, u, beta if u.dim() == 2 else beta.unsqueeze(-1)), points, directions
    )
    return found.amin(0), spent


def _candidates(
    target: Target, num_chains: int, beta: Tensor, generator: torch.Generator, of_prior: bool, centre: bool = True
) -> _Candidates:
    count, power = CANDIDATES * num_chains, beta.repeat_interleave(CANDIDATES)
    known = target.density.start if isinstance(target.density, Started) else None
    rounds, terms, have = list[_Candidates](), list[tuple[Tensor, Tensor]](), 0
    while have < num_chains and len(rounds) < _ROUNDS:
        points, drawn = _drawn(target, count, generator, known, of_prior)
        if centre and not rounds and not bool(drawn[0]):
            points[0] = 0.0 if known is None else known
        log_prior, log_likelihood = target.evaluate(points, compiled=False)
        merit = _merit(log_prior, log_likelihood, power, drawn if target.can_sample_prior else None)
        terms.append((log_prior, log_likelihood))
        rounds.append(_Candidates(points.reshape(num_chains, CANDIDATES, -1), merit.reshape(num_chains, CANDIDATES)))
        have += int(merit.isfinite().sum())
    if not have and known is not None:
        position = known.to(target.device).expand(num_chains, 1, target.dim)
        return _Candidates(position, torch.zeros_like(position[..., 0]))
    if not have:
        raise _no_density(*(torch.cat(column) for column in zip(*terms, strict=True)))
    position, merit = (torch.cat(column, 1) for column in zip(*rounds, strict=True))
    return _Candidates(position, merit)


def candidate_points(target: Target, count: int, generator: torch.Generator) -> Tensor:
    """Return points from the prior and from the cube about the origin, ``(count, d)``."""
    known = target.density.start if isinstance(target.density, Started) else None
    return _drawn(target, count, generator, known, False)[0]


def _drawn(
    target: Target, count: int, generator: torch.Generator, known: Tensor | None, of_prior: bool
) -> tuple[Tensor, Tensor]:
    """Return points ``(count, d)`` and which of them are prior draws, ``(count,)`` bool."""
    # Every second point lies in a cube about the origin, or about a ``known`` point at which the density is not
    # negligible: all draws of a vague prior may lie where no step in double precision leads back.
    points = prior_positions(target, count, generator)
    drawn = torch.full((count,), points is not None, device=target.device)
    if points is None or known is not None or not of_prior:
        like = {"dtype": target.dtype, "device": generator.device, "generator": generator}
        near = _BOX * (2 * torch.rand(count, target.dim, **like) - 1)  # type: ignore[call-overload]
        near = near.to(target.device) + (0.0 if known is None else known)
        drawn[::2] = False
        points = near if points is None else torch.where(drawn.unsqueeze(-1), points.to(near), near)
    return points.to(target.device), drawn


def _merit(log_prior: Tensor, log_likelihood: Tensor, beta: Tensor, drawn: Tensor | None) -> Tensor:
    """Return by what candidates are compared, ``(k,)``; ``drawn (k,)`` are prior draws, None without a prior."""
    density = tempered(log_prior, log_likelihood, beta)
    merit = density
    if drawn is not None:
        # By likelihood: the density of the prior is infinitely high in the neck of a funnel. Points that are no prior
        # draws lose what their prior density lacks beside that of draws.
        least = torch.finfo(density.dtype).min  # above that of a draw without density
        own = log_prior[drawn & log_prior.isfinite()]
        lacking = (log_prior - own.median()).clamp(max=0.0) if len(own) else torch.zeros_like(log_prior)
        merit = beta * log_likelihood + torch.where(drawn, 0.0, lacking)
        merit = merit.nan_to_num(nan=least, posinf=least, neginf=least)
    return torch.where(density.isfinite(), merit, -torch.inf)


def _best(found: _Candidates) -> Tensor:
    """Return the best candidate of each chain, ``(n, d)``; a chain without any takes one that no other chain takes."""
    position, merit = found
    best, rows = merit.argmax(1), torch.arange(len(merit), device=merit.device)
    chosen, finite = position[rows, best], merit[rows, best].isfinite()
    lost = (~finite).nonzero().flatten()
    if len(lost):
        left = merit.clone()
        left[rows, best] = -torch.inf
        spare = left.flatten().argsort(descending=True, stable=True)[: int(left.isfinite().sum())]
        # Where there are fewer than chains, several start at one point.
        pool = torch.cat([position.flatten(0, 1)[spare], chosen[finite]])
        chosen[lost] = pool[torch.arange(len(lost), device=pool.device) % len(pool)]
    return chosen


def _no_density(log_prior: Tensor, log_likelihood: Tensor) -> DataError | InitializationError:
    if bool(log_likelihood.isnan().all()):
        return DataError(
            "the log likelihood is NaN at every starting candidate; look for NaN or infinite values in the data"
        )
    return InitializationError(
        f"the density is zero at all {len(log_prior)} starting candidates "
        f"(log prior {_range(log_prior)}, log likelihood {_range(log_likelihood)}); "
        "pass initial=target.unconstrain({...}) with plausible values, or check that data and likelihood fit"
    )


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

_MAX_GRADIENTS = 150  # gradients of a chain
_PLACES = 48  # of each search, at which a normal approximation is evaluated
_DRAWS = 5  # from each of them
_MAX_MEMORY = 40  # steps from which the curvature is estimated
_MAX_DENSE = 128  # dimensions up to which the covariance is given in full
_MAX_CHAINS = 64  # whose covariances are averaged
_VARIANCE_DRAWS = 100
_AT_REST = 10  # last gradients, over which a converged search gains less than a nat
_NEGLIGIBLE = 20.0  # nats, plus one per dimension, by which a negligible mode is below the best of its temperature


class Start(NamedTuple):
    """Starting points of chains, and a rough covariance of the posterior from the searches."""

    position: Tensor  # (n, d)
    covariance: Tensor | None  # (d, d), or variances (d,) in many dimensions; None if no search succeeded
    num_gradients: int
    ends: Tensor  # (k, d), of the searches


def pathfinder(target: Target, points: Tensor, beta: Tensor, scale: Tensor, generator: torch.Generator) -> Start:
    """Take each chain to a draw from the best normal approximation on its way uphill (Zhang et al. 2022)."""
    # points: (n, d); beta: (n,); scale: (d,), a rough unit of each coordinate. Curvature on the L-BFGS path gives a
    # normal approximation at each point, ranked by its evidence lower bound. The mode itself is a bad start: in many
    # dimensions it is far from all draws, and in a funnel the density is unbounded. Chains stay in the modes that they
    # find, unless the mass of a mode is negligible relative to another at the same temperature. If no chain improves on
    # its point, all chains keep theirs.
    n, d = points.shape
    evaluate = target.evaluator(n, _MAX_GRADIENTS)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        found = evaluate(u, beta)
        return found.log_density, found.gradient

    memory = min(_MAX_MEMORY, max(12, 2 * d))
    path = list(lbfgs_path(value_and_gradient, points, _MAX_GRADIENTS, scale, memory))
    spent = path[-1].num_gradients
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
    ends = path[-1].position[path[-1].value.isfinite()]
    return Start(position, covariance, spent + num_drawn + n * (_DRAWS + 1), ends)


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


def _places(path: list[LBFGSState], bound: Tensor) -> Tensor:
    """Return the place on each path where its lower bound ``(L, n)`` is highest, ``(n,)``."""
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
    target: Target, path: list[LBFGSState], beta: Tensor, scale: Tensor, generator: torch.Generator
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
    path: list[LBFGSState], chosen: Tensor, whose: Tensor, home: Tensor, scale: Tensor, generator: torch.Generator
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
class TemperedStarts:
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
        position = starting_points(target, num_chains, levels[:1].expand(num_chains), generator, of_prior=True)
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
