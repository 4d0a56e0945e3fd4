"""The independent normal distribution that is closest to the posterior in unconstrained space."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import InitializationError
from bayeskit.inference.evidence.checks import require_own
from bayeskit.inference.evidence.modes import curvature, find_modes
from bayeskit.inference.evidence.variational.fixed_draws import balanced_normal_draws, power_of_two
from bayeskit.inference.evidence.variational.normal import normal_log_prob, sample_normal
from bayeskit.inference.samplers.initial import from_prior
from bayeskit.target import Target

MIN_DRAWS = 128
MAX_START_DRAWS = 1024
GROWTH = 4
MAX_ITERATIONS = 1000
MAX_GRADIENT = 0.01
"""In nats for a step of one standard deviation."""
MAX_STARTS = 3
PRIOR_DRAWS = 400
MAX_SHRINKS = 12
SMALLEST_SCALE = 1e-100


@dataclass(frozen=True, eq=False)
class MeanField:
    """Independent normal distributions of the unconstrained coordinates.

    Attributes
    ----------
    location, scale : Tensor
        Means and standard deviations, shape ``(d,)``.
    bound : float
        Evidence lower bound, in nats, on the draws it was fitted to.
    improvement : float
        What the last set of draws, four times larger than the one before, added to the
        bound. About a quarter of it is what more draws could still add.
    gradient : float
        Largest slope of the bound at the end, in nats per standard deviation.
    num_draws : int
        Fixed draws of the last round.
    num_evaluations : int
        Gradients of the log density, those of the search for modes included.
    others : tuple of (Tensor, Tensor)
        Location and scale of other optima that a search ended at, the highest first.
    problems : tuple of str
        What is wrong with the fit.
    height : float
        Log density of the target at the location, by which to know it again.
    """

    location: Tensor
    scale: Tensor
    bound: float
    improvement: float
    gradient: float
    num_draws: int
    num_evaluations: int
    others: tuple[tuple[Tensor, Tensor], ...] = ()
    problems: tuple[str, ...] = ()
    height: float = math.nan

    def require(self, target: Target) -> int:
        """Refuse a target to which this mean field does not belong.

        Returns
        -------
        int
            Evaluations spent.

        Raises
        ------
        ShapeError
            If their dimensions differ.
        SettingsError
            If the density of the target is another at the location.
        """
        return require_own("mean field", self.location, self.height, target, target.log_density)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw from it, shape ``(num_draws, d)``; ``generator`` is one of the CPU."""
        return sample_normal(self.location, self.scale, num_draws, generator)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``, in double precision."""
        return normal_log_prob(self.location, self.scale, x)


@dataclass(frozen=True)
class _Fit:
    """Where an optimisation ended: location, log scale, bound, largest slope."""

    location: np.ndarray
    log_scale: np.ndarray
    bound: float
    gradient: float


def fit_mean_field(target: Target, *, tolerance: float = 0.01, max_draws: int = 8192, seed: int = 0) -> MeanField:
    """Fit independent normal distributions to the posterior by the evidence lower bound.

    The expectation in the bound is an average over fixed draws, so that L-BFGS can
    maximise it to the end and convergence can be seen. Their number grows fourfold
    until the fit to fewer draws is as good on the new ones as the fit to these.
    Searches start at the modes, as wide as the curvature there says, and at the
    centre of the prior, as wide as the prior.

    Parameters
    ----------
    target : Target
    tolerance : float, default 0.01
        The number of draws stops growing when that raises the bound by no more, in nats.
    max_draws : int, default 8192
        Fixed draws at most.
    seed : int, default 0

    Returns
    -------
    MeanField
        Its ``problems`` say whether it did not converge.

    Raises
    ------
    InitializationError
        If the density is finite nowhere that a search could start.
    SettingsError
        If ``tolerance`` is not positive or ``max_draws`` below 2.

    References
    ----------
    Giordano, R., Ingram, M., Broderick, T. (2024). Black box variational inference
    with a deterministic objective: faster, more accurate, and even more black box.
    Journal of Machine Learning Research 25(18).

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence.variational import fit_mean_field
    >>> case = bk.exact.get("linreg10")
    >>> q = fit_mean_field(case.target())
    >>> q.problems, q.bound < case.log_evidence
    ((), True)
    """
    tolerance = real_number("tolerance", tolerance, (0.0, math.inf))
    max_draws = whole_number("max_draws", max_draws, least=2)
    generator = new_generator(seed, stream="mean field")
    count = power_of_two(min(max(MIN_DRAWS, 4 * target.dim), MAX_START_DRAWS))
    count = min(count, max_draws - max_draws % 2)
    objective = _Objective(target, balanced_normal_draws(count, target.dim, generator))
    starts, num_evaluations = _starts(target, generator, seed)
    fits = [fit for start in starts if (fit := objective.maximise(*start)) is not None]
    if not fits:
        raise InitializationError(
            "the evidence lower bound is finite at no starting point: the density is zero close to the mode; "
            "look at the model and the data"
        )
    fits.sort(key=lambda fit: fit.bound, reverse=True)
    best, others = fits[0], _distinct(fits)
    num_evaluations += objective.num_evaluations
    improvement = math.inf
    while GROWTH * count <= max_draws and improvement > tolerance:
        count *= GROWTH
        objective = _Objective(target, balanced_normal_draws(count, target.dim, generator))
        before = objective.bound(best)
        best = objective.maximise(best.location, np.exp(best.log_scale)) or replace(best, bound=before)
        num_evaluations += objective.num_evaluations
        improvement = best.bound - before
    location, scale = _tensors(target, best)
    return MeanField(
        location,
        scale,
        best.bound,
        improvement,
        best.gradient,
        count,
        num_evaluations + 1,
        tuple(_tensors(target, other) for other in others),
        tuple(_problems(best, improvement, tolerance, count)),
        float(target.log_density(location)),
    )


def _tensors(target: Target, fit: _Fit) -> tuple[Tensor, Tensor]:
    """Return location and scale as the target takes them."""
    location, scale = torch.as_tensor(fit.location), torch.as_tensor(np.exp(fit.log_scale))
    return location.to(target.device, target.dtype), scale.to(target.device, target.dtype)


def _problems(fit: _Fit, improvement: float, tolerance: float, count: int) -> list[str]:
    problems = []
    if not fit.gradient <= MAX_GRADIENT:
        problems.append(
            f"the mean field did not converge (slope {fit.gradient:.2g} nats a standard deviation): reparameterise, "
            "or use bridge sampling"
        )
    if not improvement <= tolerance:
        found = "what more would gain was not seen"
        if math.isfinite(improvement):
            found = f"the last gained {improvement:.3f} nats"
        problems.append(f"{count} fixed draws are too few for the mean field ({found}): raise max_draws")
    return problems


class _Objective:
    """The bound as an average over fixed draws, and its gradient."""

    def __init__(self, target: Target, z: Tensor) -> None:
        self._z = z.to(target.device)
        self._like = torch.ones(len(z), dtype=target.dtype, device=target.device)
        self._evaluate = target.evaluator(len(z), 300)
        self.num_evaluations = 0

    def value_and_grad(self, location: np.ndarray, log_scale: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the bound without its constant, and its gradient; not finite where the density is zero at a draw."""
        self.num_evaluations += len(self._z)
        with np.errstate(over="ignore"):
            scale = np.exp(log_scale)
        u = torch.as_tensor(location).to(self._z) + torch.as_tensor(scale).to(self._z) * self._z
        if not bool(u.isfinite().all()):
            return -math.inf, np.zeros_like(location), np.zeros_like(location)
        result = self._evaluate(u.to(self._like), self._like)
        gradient = result.gradient.double()
        slope = gradient.mean(0).cpu().numpy()
        bound = float(result.log_density.double().mean()) + float(log_scale.sum())
        return bound, slope, 1 + scale * (gradient * self._z).mean(0).cpu().numpy()

    def bound(self, fit: _Fit) -> float:
        """Return the bound of a fit to other draws."""
        with one_thread():
            return self.value_and_grad(fit.location, fit.log_scale)[0] + _entropy(len(fit.location))

    def maximise(self, location: np.ndarray, scale: np.ndarray) -> _Fit | None:
        """Climb from a location and scale; from a smaller scale if draws of that one have density zero."""
        with one_thread():
            for _ in range(MAX_SHRINKS):
                value, slope, scale_slope = self.value_and_grad(location, np.log(scale))
                if math.isfinite(value) and bool(np.isfinite(slope).all() and np.isfinite(scale_slope).all()):
                    return self._climb(location, scale)
                scale = scale / 4
        return None

    def _climb(self, location: np.ndarray, scale: np.ndarray) -> _Fit:
        d, start = len(location), np.log(scale)
        last = np.zeros(2 * d), math.inf, np.zeros(2 * d)

        def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal last
            value, slope, scale_slope = self.value_and_grad(location + scale * x[:d], start + x[d:])
            gradient = -np.concatenate([scale * slope, scale_slope])
            if not math.isfinite(value) or not bool(np.isfinite(gradient).all()):
                # A wall just high enough to send the line search back.
                return last[1] + 10 * (1 + abs(float(last[2] @ (x - last[0])))), np.zeros_like(x)
            last = x.copy(), -value, gradient
            return -value, gradient

        options = {"maxiter": MAX_ITERATIONS, "maxfun": 2 * MAX_ITERATIONS, "maxls": 50, "maxcor": 20}
        outcome = minimize(
            loss, np.zeros(2 * d), jac=True, method="L-BFGS-B", options=options | {"ftol": 1e-13, "gtol": 1e-6}
        )
        end, log_scale = location + scale * outcome.x[:d], start + outcome.x[d:]
        value, slope, scale_slope = self.value_and_grad(end, log_scale)
        largest = max(float(np.abs(np.exp(log_scale) * slope).max()), float(np.abs(scale_slope).max()))
        return _Fit(end, log_scale, value + _entropy(d), largest)


def _entropy(dim: int) -> float:
    """Return the entropy of a standard normal distribution."""
    return 0.5 * dim * (1 + math.log(2 * math.pi))


def _starts(target: Target, generator: torch.Generator, seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Return locations and scales: the modes by their curvature, then the prior; and the evaluations spent."""
    prior = from_prior(target, PRIOR_DRAWS, generator)
    if prior is not None:
        prior = prior.double()
        low, centre, high = (prior.quantile(q, 0).cpu().numpy() for q in (0.25, 0.5, 0.75))
        width = np.clip((high - low) / 1.349, SMALLEST_SCALE, 1 / SMALLEST_SCALE)
    else:
        centre, width = np.zeros(target.dim), np.ones(target.dim)
    starts: list[tuple[np.ndarray, np.ndarray]] = []
    modes, spent = find_modes(target, seed=seed)
    for mode in modes:
        end = mode.double().cpu().numpy()
        if len(starts) == MAX_STARTS or any((np.abs(end - other) < 0.1 * scale).all() for other, scale in starts):
            continue
        precision, count = curvature(target, mode)
        spent += count
        diagonal = precision.diagonal().double().cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(diagonal > 0, 1 / np.sqrt(diagonal), width)
        starts.append((end, np.clip(scale, SMALLEST_SCALE, width)))
    return [*starts, (centre, width)], spent


def _distinct(fits: list[_Fit]) -> list[_Fit]:
    """Leave out the best and whatever ended where a better one did."""
    kept = fits[:1]
    for fit in fits[1:]:
        if not any(_same(fit, other) for other in kept):
            kept.append(fit)
    return kept[1:]


def _same(a: _Fit, b: _Fit) -> bool:
    scale = np.exp(np.minimum(a.log_scale, b.log_scale))
    near = np.abs(a.location - b.location) < 0.5 * scale
    return bool(near.all() and (np.abs(a.log_scale - b.log_scale) < 0.5).all())
