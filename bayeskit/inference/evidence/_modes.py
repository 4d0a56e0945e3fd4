"""Modes, their curvature and their mass: one search used for all maximisations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit._compiler import Engine
from bayeskit._core.functions_of_users import is_for_want_of_memory
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.texts import short_repr
from bayeskit._draws import Draws
from bayeskit._logdensity.own_density import ValueAndGradient
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import BayeskitError, DrawsError, InitializationError
from bayeskit.inference._known_modes import KnownModes
from bayeskit.inference._optimize import quartile_distance, refine_mode, scipy_lbfgs
from bayeskit.inference.evidence._judging._belonging import is_same, require_own
from bayeskit.inference.samplers._starts import CANDIDATES, starting_points

#: A search has converged if no step along the gradient gains more than this.
_MAX_GAIN = 1e-3
#: Coordinates beyond this with a slope above ``_MAX_SLOPE`` are diverging to infinity.
_FAR, _MAX_SLOPE = 30.0, 1e-3
#: Number of searches from prior draws in addition to the search from the best posterior draw.
STARTS_BESIDE_DRAWS = 2


@dataclass(frozen=True)
class Mode:
    """The highest mode found by several searches of the posterior, in unconstrained space.

    Attributes
    ----------
    position : Tensor
        Shape ``(d,)``.
    value : float
        Log of prior times likelihood at the mode, over unconstrained space.
    precision : Tensor
        Negative Hessian, shape ``(d, d)``.
    others : Tensor
        End points of the other searches, highest first, shape ``(searches - 1, d)``.
    num_evaluations : int
        Evaluations for searches and Hessian, without those for posterior draws.
    problems : tuple of str
        Reasons why the point may not be a maximum.
    """

    position: Tensor
    value: float
    precision: Tensor
    others: Tensor
    num_evaluations: int
    problems: tuple[str, ...] = ()

    __repr__ = short_repr

    @property
    def ends(self) -> Tensor:
        """End points of all searches, highest first, shape ``(searches, d)``."""
        return torch.cat([self.position.unsqueeze(0), self.others])

    def require(self, target: Target) -> int:
        """Raise if this mode does not belong to the target.

        Returns
        -------
        int
            Number of evaluations.

        Raises
        ------
        ShapeError
            If the dimensions differ.
        SettingsError
            If the target has another density at the mode.
        """
        return require_own("mode", self.position, self.value, target, target.log_density)


def require_draws(draws: Draws | None, target: Target) -> None:
    """Raise DrawsError if dimension or recorded density of the draws differ from the target; short chains pass."""
    if draws is None or draws.target is target:
        return
    if draws.unconstrained.shape[-1] != target.dim:
        raise DrawsError(
            f"the draws have dimension {draws.unconstrained.shape[-1]}, the target {target.dim}; "
            "pass the target that they were drawn from"
        )
    # A few draws suffice, without those of infinite density, which belong to failed chains.
    recorded = (draws.log_prior + draws.log_likelihood)[:, -1]
    for x, value in zip(draws.unconstrained[:, -1], recorded.tolist(), strict=True):
        if math.isfinite(value) and not is_same(float(target.log_density(x)), value, target.dtype):
            raise DrawsError(
                "the draws come from another target: their recorded densities differ from the densities of this target"
            )


@takes_draws
def find_mode(target: Target, *, draws: Draws | None = None, seed: int = 0) -> Mode:
    """Find the highest mode of the posterior in unconstrained space and its curvature.

    Several estimators can share the result.

    Parameters
    ----------
    target : Target
    draws : Draws, optional
        Posterior draws; one search starts from the best draw.
    seed : int, default 0

    Returns
    -------
    Mode

    Raises
    ------
    InitializationError
        If no search ends at a finite density.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._modes import find_mode
    >>> from bayeskit.inference.evidence._laplace_approximation import laplace, laplace_importance_sampling
    >>> target = bk.exact.get("linreg10").target()
    >>> mode = find_mode(target)
    >>> normal = laplace(target, mode=mode).log_evidence
    >>> abs(laplace_importance_sampling(target, mode=mode).log_evidence - normal) < 0.05
    True
    """
    modes, search = find_modes(target, seed=seed, draws=draws)
    KnownModes.of(target).note(modes, "search for the highest mode")
    refined = refine_mode(target.value_and_grad, modes[0])
    end, precision = refined.position, refined.precision
    problems, probes = not_a_maximum(target, posterior(target), end, precision)
    spent = search + refined.num_gradients + probes
    return Mode(end, refined.value, precision, modes[1:], spent, tuple(problems))


def find_modes(
    target: Target,
    *,
    seed: int = 0,
    draws: Draws | None = None,
    objective: ObjectiveFunction | None = None,
    start: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Return ends of L-BFGS searches ``(searches, d)``, highest first, and evaluations; else InitializationError.

    They maximise ``objective``, by default the posterior, from ``start (s, d)``, else prior draws, and the best draws.
    """
    objective = objective or posterior(target)
    count = 0
    if start is None:
        start, count = starts_from_prior(target, seed, needed=draws is None)
    if draws is not None:
        start = torch.cat([best_of(draws).to(start), start[:STARTS_BESIDE_DRAWS]])

    # In units of the standard deviation of the starting points, so that the search does not depend on the units.
    unit = quartile_distance(start).double().cpu().numpy() if len(start) > 1 else np.ones(target.dim)

    def scaled(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal count
        count += objective.cost
        u = torch.as_tensor(unit * x, dtype=target.dtype, device=target.device).unsqueeze(0)
        value, gradient = objective.value_and_gradient(u)
        return float(value), unit * gradient[0].double().cpu().numpy()

    # Convergence is relative to the rounding error of the density, not to its magnitude.
    limit, small = 1000 + 20 * target.dim, 100 * torch.finfo(target.dtype).eps
    found: list[tuple[float, np.ndarray]] = []
    with one_thread():
        for point in start:
            at = point.double().cpu().numpy() / unit
            end = scipy_lbfgs(scaled, at, maxiter=2000, maxfun=limit, ftol=small, gtol=1e-12)
            found.append((end.value, unit * end.position))
    ends = [end for value, end in sorted(found, key=lambda pair: -pair[0]) if value > -math.inf]
    if not ends:
        raise InitializationError("the search for the mode met no finite density; pass posterior draws to start from")
    return torch.as_tensor(np.stack(ends), dtype=target.dtype, device=target.device), count


def best_of(draws: Draws) -> Tensor:
    """Return the draw of highest posterior density, shape ``(1, d)``."""
    best = (draws.log_prior + draws.log_likelihood).nan_to_num(nan=-torch.inf).flatten().argmax()
    return draws.unconstrained.flatten(0, 1)[best].unsqueeze(0)


def starts_from_prior(target: Target, seed: int, needed: bool) -> tuple[Tensor, int]:
    """Return starting points from the prior, none if that fails and they are not ``needed``, and evaluations."""
    one = torch.ones(4, dtype=target.dtype, device=target.device)
    try:
        return starting_points(target, 4, one, new_generator(seed, target.device, "mode")), 4 * CANDIDATES
    except (BayeskitError, RuntimeError) as error:
        if needed or is_for_want_of_memory(error):
            raise
        return torch.empty(0, target.dim, dtype=target.dtype, device=target.device), 4 * CANDIDATES


def not_a_maximum(
    target: Target, objective: ObjectiveFunction, end: Tensor, precision: Tensor
) -> tuple[list[str], int]:
    """Return a warning if a step from ``end (d,)`` leads higher or a coordinate tends to infinity, and evaluations."""
    value, gradient = (result[0] for result in objective.value_and_gradient(end.unsqueeze(0)))
    size = gradient.nan_to_num(nan=torch.inf).abs()
    directions = [gradient / gradient.norm().clamp(min=torch.finfo(end.dtype).tiny)]
    if bool(precision.isfinite().all()):
        values, vectors = torch.linalg.eigh(precision)
        # Uphill even without log-concavity, and bounded even in flat directions.
        values = values.abs().clamp(min=1e-4)
        directions.append(vectors @ (vectors.mT @ gradient / values))
    steps = torch.logspace(-8, 2, 21, dtype=end.dtype, device=end.device)[:, None, None]
    reached = objective.value((end + steps * torch.stack(directions)).flatten(0, 1))
    gain = float((reached - value).nan_to_num(nan=-torch.inf).max())
    away = (end.abs() > _FAR) & (size > _MAX_SLOPE)
    running = bool(away.any())
    spent = objective.cost + len(reached)
    limit = _MAX_GAIN + 100 * torch.finfo(end.dtype).eps * abs(float(value))
    if gain <= limit and not running and bool(size.isfinite().all()):
        return [], spent
    # Possible gain of each coordinate by itself; a diverging coordinate makes others steep, but narrow.
    curvature = precision.diagonal().abs().nan_to_num(nan=0.0).clamp(min=1e-4)
    place = int((away if running else size.square() / curvature).double().argmax())
    problem = (
        f"the search did not end at a maximum, most of all in {target.names[place]}, along which the density may be "
        "unbounded; check the prior of this coordinate, or pass posterior draws to start from"
    )
    return [problem], spent


@dataclass(frozen=True)
class ObjectiveFunction:
    """A function of unconstrained vectors to be maximized, with its gradient."""

    value: Callable[[Tensor], Tensor]  # (n, d) -> (n,)
    value_and_gradient: ValueAndGradient  # (n, d) -> (n,), (n, d)
    cost: int = 1  # evaluations of the target's density that a gradient needs


def posterior(target: Target) -> ObjectiveFunction:
    """Log of prior times likelihood as a density over unconstrained space."""
    return ObjectiveFunction(target.log_density, target.value_and_grad)


def posterior_of_values(target: Target) -> ObjectiveFunction:
    """Log of prior times likelihood as a density of the constrained values, without the Jacobian."""
    stretch = _log_jacobian_and_gradient(target)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        (value, gradient), (jacobian, slope) = target.value_and_grad(u), stretch(u)
        return value - jacobian, gradient - slope

    return ObjectiveFunction(lambda u: target.log_density(u) - target.log_jacobian(u), value_and_gradient)


def _log_jacobian_and_gradient(target: Target) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    if target.loops:
        return lambda u: _with_gradient(target.log_jacobian, u)

    def traced(u: Tensor) -> tuple[Tensor, Tensor]:
        # The second term connects the result to all coordinates, including those that are not scaled.
        return target.log_jacobian(u), (0.0 * u).sum(-1)

    engine = Engine(traced, target.dim, target.dtype, target.device)

    def stretch(u: Tensor) -> tuple[Tensor, Tensor]:
        found = engine.evaluator(len(u), 1, False)(u, torch.ones_like(u[:, 0]))
        return found.log_prior, found.gradient

    return stretch


def _with_gradient(function: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = u.detach().requires_grad_(True)
        value = function(leaf)
        if not value.requires_grad:
            return value, torch.zeros_like(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def likelihood(target: Target) -> ObjectiveFunction:
    """Log likelihood."""

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        # The gradient of the likelihood alone is that of the posterior minus that of the prior.
        n = len(u)
        powers = torch.cat([torch.ones_like(u[:, 0]), torch.zeros_like(u[:, 0])])
        found = target.evaluator(2 * n)(torch.cat([u, u]), powers)
        return found.log_likelihood[:n], found.gradient[:n] - found.gradient[n:]

    return ObjectiveFunction(target.log_likelihood, value_and_gradient, cost=2)
