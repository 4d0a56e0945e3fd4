"""Estimators based on an independent normal distribution fitted by variational inference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit._core.randomness import new_generator, normal_points, one_thread
from bayeskit._core.statistics import (
    log_mean_exp,
    pareto_shape,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit._core.texts import short_repr
from bayeskit._draws import Draws
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import InitializationError
from bayeskit.inference._optimize import negative_hessian, scipy_lbfgs
from bayeskit.inference._proposals import IndependentStudentT, Mixture
from bayeskit.inference.evidence._decorator import estimator
from bayeskit.inference.evidence._judging._belonging import belongs, require_own
from bayeskit.inference.evidence._judging._densities import with_rounding, without_infinity, without_nan
from bayeskit.inference.evidence._judging._missed_mass import missed_mass, same_likelihood
from bayeskit.inference.evidence._judging._weights import missed_draws, weight_problems
from bayeskit.inference.evidence._methods import Part
from bayeskit.inference.evidence._modes import find_modes
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.samplers._starts import prior_positions

# Independent normal and Student-t distributions: draws and densities.

_DEGREES_OF_FREEDOM = 3.0


def _tails(location: Tensor, scale: Tensor) -> IndependentStudentT:
    return IndependentStudentT(location, scale, _DEGREES_OF_FREEDOM)


# Fixed standard normal draws whose averages replace expectations during optimisation.


def balanced_normal_draws(num_draws: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return an even number of normal draws ``(num_draws, dim)`` with exact moments, float64 on the CPU (Owen 1995)."""
    # A scrambled Sobol sequence, its mirror image, and a linear map that corrects the covariance (the variances for few
    # draws): averages of quadratic functions are exact, and so is the mean field of a normal posterior.
    half = num_draws // 2
    z = normal_points(half, dim, generator)
    moments = z.T @ z / half if half >= 2 * dim else torch.diag(z.square().mean(0))
    factor = torch.linalg.cholesky(moments)
    z = torch.linalg.solve_triangular(factor.T, z, upper=True, left=False)
    return torch.cat([z, -z])


def _power_of_two(number: float) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(0, math.ceil(math.log2(number)))


# The independent normal distribution closest to the posterior in unconstrained space.

_MIN_DRAWS = 128
_MAX_START_DRAWS = 1024
_GROWTH = 4
MAX_ITERATIONS = 1000
_MAX_GRADIENT = 0.01
"""In nats per standard deviation."""
_MAX_STARTS = 3
_PRIOR_DRAWS = 400
_MAX_SHRINKS = 12
_SMALLEST_SCALE = 1e-100


@dataclass(frozen=True, eq=False)
class MeanField:
    """Independent normal distributions of the unconstrained coordinates.

    Attributes
    ----------
    location, scale : Tensor
        Means and standard deviations, shape ``(d,)``.
    bound : float
        Evidence lower bound, in nats, on the draws of the fit.
    improvement : float
        Increase of the bound by the last, four times larger, set of draws. About a quarter of it is the increase that
        more draws could still add.
    gradient : float
        Largest slope of the bound at the end, in nats per standard deviation.
    num_draws : int
        Number of fixed draws in the last round.
    num_evaluations : int
        Gradients of the log density, including those of the mode searches.
    others : tuple of (Tensor, Tensor)
        Location and scale of the other optima, best first.
    problems : tuple of str
        Problems of the fit.
    height : float
        Log density of the target at the location, which identifies the target.
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

    __repr__ = short_repr

    def require(self, target: Target) -> int:
        """Raise if this mean field does not belong to the target.

        Returns
        -------
        int
            Number of evaluations.

        Raises
        ------
        ShapeError
            If the dimensions differ.
        SettingsError
            If the target has another density at the location.
        """
        return require_own("mean field", self.location, self.height, target, target.log_density)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw vectors, shape ``(num_draws, d)``; ``generator`` has to be on the CPU."""
        noise = torch.randn(num_draws, len(self.location), generator=generator, dtype=torch.float64)
        return self.location + self.scale * noise.to(self.location)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``, in double precision."""
        z = (x.double() - self.location.double()) / self.scale.double()
        return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi)) - self.scale.double().log().sum()


@dataclass(frozen=True)
class _Fit:
    """End of an optimisation: location, log scale, bound, largest slope."""

    location: np.ndarray
    log_scale: np.ndarray
    bound: float
    gradient: float


@takes_draws
def fit_mean_field(target: Target, *, tolerance: float = 0.01, max_draws: int = 8192, seed: int = 0) -> MeanField:
    """Fit independent normal distributions to the posterior by maximising the evidence lower bound.

    The expectation in the bound is an average over fixed draws, so L-BFGS converges and convergence can be checked. The
    number of draws grows fourfold until the fit to the smaller set is as good on the new draws as the new fit. Searches
    start at the modes, with scales from the curvature, and at the centre of the prior, with the scales of the prior.

    Parameters
    ----------
    target : Target
    tolerance : float, default 0.01
        The number of draws stops growing if that raises the bound by no more, in nats.
    max_draws : int, default 8192
        Largest number of fixed draws.
    seed : int, default 0

    Returns
    -------
    MeanField
        ``problems`` reports a lack of convergence.

    Raises
    ------
    InitializationError
        If no search can start at a finite density.
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
    >>> from bayeskit.inference.evidence._variational import fit_mean_field
    >>> case = bk.exact.get("linreg10")
    >>> q = fit_mean_field(case.target())
    >>> q.problems, q.bound < case.log_evidence
    ((), True)
    """
    tolerance = real_number("tolerance", tolerance, "(0, inf)")
    max_draws = whole_number("max_draws", max_draws, least=2)
    generator = new_generator(seed, stream="mean field")
    count = _power_of_two(min(max(_MIN_DRAWS, 4 * target.dim), _MAX_START_DRAWS))
    count = min(count, max_draws - max_draws % 2)
    objective = _Objective(target, balanced_normal_draws(count, target.dim, generator))
    starts, num_evaluations = _starts(target, generator, seed)
    fits = [fit for start in starts if (fit := objective.maximize(*start)) is not None]
    if not fits:
        raise InitializationError(
            "the evidence lower bound is not finite at any starting point: the density is zero close to the mode; "
            "check the model and the data"
        )
    fits.sort(key=lambda fit: fit.bound, reverse=True)
    best, others = fits[0], _distinct(fits)
    num_evaluations += objective.num_evaluations
    improvement = math.inf
    while _GROWTH * count <= max_draws and improvement > tolerance:
        count *= _GROWTH
        objective = _Objective(target, balanced_normal_draws(count, target.dim, generator))
        before = objective.bound(best)
        best = objective.maximize(best.location, np.exp(best.log_scale)) or replace(best, bound=before)
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
    """Return location and scale in dtype and on the device of the target."""
    location, scale = torch.as_tensor(fit.location), torch.as_tensor(np.exp(fit.log_scale))
    return location.to(target.device, target.dtype), scale.to(target.device, target.dtype)


def _problems(fit: _Fit, improvement: float, tolerance: float, count: int) -> list[str]:
    problems = []
    if not fit.gradient <= _MAX_GRADIENT:
        problems.append(
            f"the mean field did not converge (slope {fit.gradient:.2g} nats per standard deviation): reparameterise, "
            "or use bridge sampling"
        )
    if not improvement <= tolerance:
        found = "the gain of more draws is unknown"
        if math.isfinite(improvement):
            found = f"the last increase gained {improvement:.3f} nats"
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
        """Return the bound without its constant, and its gradient; not finite if the density is zero at a draw."""
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

    def maximize(self, location: np.ndarray, scale: np.ndarray) -> _Fit | None:
        """Maximize from a location and scale; from a smaller scale if a draw has density zero."""
        with one_thread():
            for _ in range(_MAX_SHRINKS):
                value, slope, scale_slope = self.value_and_grad(location, np.log(scale))
                if math.isfinite(value) and bool(np.isfinite(slope).all() and np.isfinite(scale_slope).all()):
                    return self._fit(location, scale)
                scale = scale / 4
        return None

    def _fit(self, location: np.ndarray, scale: np.ndarray) -> _Fit:
        d, start = len(location), np.log(scale)

        def standardised(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope, scale_slope = self.value_and_grad(location + scale * x[:d], start + x[d:])
            return value, np.concatenate([scale * slope, scale_slope])

        most, zero = MAX_ITERATIONS, np.zeros(2 * d)
        x = scipy_lbfgs(standardised, zero, maxiter=most, maxfun=2 * most, maxcor=20, ftol=1e-13, gtol=1e-6).position
        end, log_scale = location + scale * x[:d], start + x[d:]
        value, slope, scale_slope = self.value_and_grad(end, log_scale)
        largest = max(float(np.abs(np.exp(log_scale) * slope).max()), float(np.abs(scale_slope).max()))
        return _Fit(end, log_scale, value + _entropy(d), largest)


def _entropy(dim: int) -> float:
    """Return the entropy of a standard normal distribution."""
    return 0.5 * dim * (1 + math.log(2 * math.pi))


def _starts(target: Target, generator: torch.Generator, seed: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Return locations and scales: the modes by their curvature, then the prior; and the evaluations spent."""
    prior = prior_positions(target, _PRIOR_DRAWS, generator)
    if prior is not None:
        prior = prior.double()
        low, centre, high = (prior.quantile(q, 0).cpu().numpy() for q in (0.25, 0.5, 0.75))
        width = np.clip((high - low) / 1.349, _SMALLEST_SCALE, 1 / _SMALLEST_SCALE)
    else:
        centre, width = np.zeros(target.dim), np.ones(target.dim)
    starts: list[tuple[np.ndarray, np.ndarray]] = []
    modes, spent = find_modes(target, seed=seed)
    for mode in modes:
        end = mode.double().cpu().numpy()
        if len(starts) == _MAX_STARTS or any((np.abs(end - other) < 0.1 * scale).all() for other, scale in starts):
            continue
        precision, count = negative_hessian(target.value_and_grad, mode)
        spent += count
        diagonal = precision.diagonal().double().cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(diagonal > 0, 1 / np.sqrt(diagonal), width)
        starts.append((end, np.clip(scale, _SMALLEST_SCALE, width)))
    return [*starts, (centre, width)], spent


def _distinct(fits: list[_Fit]) -> list[_Fit]:
    """Return the distinct optima other than the best."""
    kept = fits[:1]
    for fit in fits[1:]:
        if not any(_same(fit, other) for other in kept):
            kept.append(fit)
    return kept[1:]


def _same(a: _Fit, b: _Fit) -> bool:
    scale = np.exp(np.minimum(a.log_scale, b.log_scale))
    near = np.abs(a.location - b.location) < 0.5 * scale
    return bool(near.all() and (np.abs(a.log_scale - b.log_scale) < 0.5).all())


# Importance weights of draws that are independent of the mean field fit.


class _Weights(NamedTuple):
    """Importance weights of draws of a mean field, with the log density there."""

    log_weights: Tensor  # (1, num_draws), float64
    log_density: Tensor  # (num_draws,)
    problems: list[str]


def _fresh_weights(target: Target, mean_field: MeanField, num_draws: int, generator: torch.Generator) -> _Weights:
    """Draw from a mean field and weigh the draws."""
    x = mean_field.sample(num_draws, generator)
    with one_thread():
        log_density, problems = without_nan(target.log_density(x))
        return _Weights((log_density.double() - mean_field.log_prob(x)).unsqueeze(0), log_density, problems)


# The evidence lower bound of a mean field.


@estimator(Part.MEAN_FIELD, kind="bound")
def evidence_lower_bound(
    target: Target, *, mean_field: MeanField | None = None, num_draws: int = 10_000, seed: int = 0
) -> Evidence:
    """Return the evidence lower bound of independent normal distributions.

    The gap to the log evidence is the divergence of the fit from the posterior, which is unknown. The bound therefore
    has no standard error as an estimate and is never trusted. The diagnostic ``bound_error`` is the Monte Carlo error
    of the bound itself.

    Parameters
    ----------
    target : Target
    mean_field : MeanField, optional
        Mean field of the target; fitted if not given.
    num_draws : int, default 10,000
        Number of new draws, independent of the fit.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    SettingsError
        If ``num_draws`` is below two, or the mean field is of another target.

    References
    ----------
    Jordan, M. I., Ghahramani, Z., Jaakkola, T. S., Saul, L. K. (1999). An introduction
    to variational methods for graphical models. Machine Learning 37, 183-233.
    Kucukelbir, A., Tran, D., Ranganath, R., Gelman, A., Blei, D. M. (2017). Automatic
    differentiation variational inference. Journal of Machine Learning Research 18(14).

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._variational import evidence_lower_bound
    >>> case = bk.exact.get("linreg10")
    >>> z = evidence_lower_bound(case.target())
    >>> z.log_evidence < case.log_evidence, z.diagnostics["bound_error"] < 0.02, z.trusted
    (True, True, False)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    q = mean_field or fit_mean_field(target, seed=seed)
    checked = q.require(target)
    weights = _fresh_weights(target, q, num_draws, new_generator(seed, stream="evidence lower bound"))
    bound = float(weights.log_weights.mean())
    problems = [
        "a lower bound, below the log evidence by an unknown divergence: use variational_importance_sampling",
        *q.problems,
        *weights.problems,
    ]
    if bound == -math.inf:
        share = 100 * float((weights.log_weights == -math.inf).double().mean())
        problems.append(f"the density is zero at {share:.2g} % of the draws: use bridge sampling")
    error = float(weights.log_weights.std()) / math.sqrt(num_draws)
    return Evidence(
        "evidence_lower_bound",
        bound,
        math.nan,
        num_draws + q.num_evaluations + checked,
        tuple(problems),
        {
            "bound_error": with_rounding(error, weights.log_density),
            "fitted_bound": q.bound,
            "improvement": q.improvement,
            "gradient": q.gradient,
        },
    )


# Importance sampling from a mean field.

CHECK_DRAWS = 4000
_MAX_UNSEEN = 0.5
_MAX_LOCAL_SHAPE = {"normal": 0.5, "mixture": 0.6}
"""Pareto k above which normal weights have infinite variance, and, by replicates, the mixture's error is too small."""


@estimator(Part.MEAN_FIELD)
def variational_importance_sampling(
    target: Target,
    *,
    mean_field: MeanField | None = None,
    draws: Draws | None = None,
    num_draws: int = 10_000,
    tail_share: float = 0.5,
    seed: int = 0,
) -> Evidence:
    """Estimate the log evidence by importance sampling from independent distributions fitted by variational inference.

    The fit is narrower than the posterior if coordinates are correlated, and has lighter tails than most posteriors.
    Half of the draws therefore come from Student-t distributions of the same locations and scales. All draws are
    weighted by the mixture density, which costs at most half of the effective sample size. Wider draws, the other
    optima of the bound and the curvature of the density serve to check for missed mass.

    Parameters
    ----------
    target : Target
    mean_field : MeanField, optional
        Mean field of the target; fitted if not given.
    draws : Draws, optional
        Posterior draws, for a check that the proposal covers them.
    num_draws : int, default 10,000
    tail_share : float, default 0.5
        Share of draws from the Student-t distributions, in [0, 1); zero uses the normal distributions alone.
    seed : int, default 0

    Returns
    -------
    Evidence

    Raises
    ------
    DrawsError
        If the draws come from another target.
    SettingsError
        If ``num_draws`` is below two, ``tail_share`` is not in [0, 1), or the mean field is of another target.

    References
    ----------
    Hesterberg, T. (1995). Weighted average importance sampling and defensive mixture
    distributions. Technometrics 37, 185-194.
    Domke, J., Sheldon, D. (2018). Importance weighting and variational inference.
    Advances in Neural Information Processing Systems 31.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.evidence._variational import variational_importance_sampling
    >>> case = bk.exact.get("three_taxon_tree")
    >>> z = variational_importance_sampling(case.target())
    >>> abs(z.log_evidence - case.log_evidence) < 4 * z.standard_error, z.trusted
    (True, True)
    """
    num_draws = whole_number("num_draws", num_draws, least=2)
    tail_share = real_number("tail_share", tail_share, "[0, 1)")
    # At least one draw comes from the normal distributions, so the mixture is complete.
    num_tail_draws = min(round(tail_share * num_draws), num_draws - 1)
    if draws is not None:
        belongs(draws, target)
    q = mean_field or fit_mean_field(target, seed=seed)
    spent = q.require(target) + q.num_evaluations + (0 if draws is None else draws.num_gradients)
    generator = new_generator(seed, stream="variational importance sampling")
    counts = torch.tensor([num_draws - num_tail_draws, num_tail_draws])
    proposal = Mixture([q, _tails(q.location, q.scale)], counts.tolist())
    x = proposal.stratified(num_draws, generator)
    with one_thread():
        log_prior, log_likelihood = target.evaluate(x)
    log_density, problems = without_nan(log_prior + log_likelihood)
    log_density, infinite = without_infinity(log_density)
    log_weights = log_density.double() - proposal.log_prob(x)
    log_z, largest = float(log_mean_exp(log_weights.unsqueeze(0))), float(log_weights.max())
    part = torch.arange(2).repeat_interleave(counts).to(log_weights.device)
    error = with_rounding(float(stratified_log_mean_exp_error(log_weights, part)), log_density)
    shape, effective = pareto_shape(log_weights), float(weight_effective_sample_size(log_weights))
    local, differences = _local_shape(target, q)
    unseen = _unseen_variance(target, q, proposal, log_z, largest, generator) / (num_draws * error**2)
    problems = [*q.problems, *problems, *(infinite or weight_problems(shape, effective))]
    if local > _MAX_LOCAL_SHAPE["mixture" if tail_share else "normal"]:
        problems.append(
            f"the posterior is much wider than the mean field in some direction (Pareto k {local:.2f} from its "
            "curvature): use bridge sampling"
        )
    if unseen > _MAX_UNSEEN:
        problems.append(
            f"the proposal hardly covers a part of the posterior (which adds {100 * unseen:.3g} % to the variance of "
            "the weights): use bridge sampling or nested sampling"
        )
    others = torch.stack([location for location, _ in q.others]) if q.others else None
    missed, looks = missed_mass(
        target, x, log_weights, log_z, error, log_prob=proposal.log_prob, others=others, seed=seed
    )
    problems += missed_draws(proposal.log_prob, draws, largest) + missed + same_likelihood(target, log_likelihood)
    return Evidence(
        "variational_importance_sampling",
        log_z,
        error,
        num_draws + spent + differences + looks + CHECK_DRAWS * (1 + len(q.others)),
        tuple(problems),
        {"pareto_shape": shape, "effective_draws": effective, "local_pareto_shape": local, "unseen_variance": unseen},
    )


def _local_shape(target: Target, q: MeanField) -> tuple[float, int]:
    """Return the Pareto shape of normal weights for a quadratic log density, and evaluations."""
    precision, spent = negative_hessian(target.value_and_grad, q.location)
    if not bool(precision.isfinite().all()):
        return math.inf, spent
    # Along an eigenvector of the curvature, in units of the mean field, the weight is ``exp((1 - eigenvalue) z^2 / 2)``
    # with ``z`` normal.
    return 1 - float(torch.linalg.eigvalsh(q.scale.unsqueeze(-1) * precision * q.scale).min()), spent


def _unseen_variance(
    target: Target, q: MeanField, proposal: Mixture, log_z: float, largest: float, generator: torch.Generator
) -> float:
    """Return the relative variance of the weights from regions of log weights above ``largest``."""
    # From Student-t distributions at every optimum of the bound; at the best one twice as wide as the fit.
    unseen = 0.0
    for location, scale in ((q.location, 2 * q.scale), *q.others):
        tails = _tails(location, scale)
        x = tails.sample(CHECK_DRAWS, generator)
        with one_thread():
            log_density = target.log_density(x).double().nan_to_num(nan=-torch.inf, posinf=-torch.inf)
            log_weights = log_density - proposal.log_prob(x)
            squared = log_weights + log_density - tails.log_prob(x) - 2 * log_z
        terms = torch.where(log_weights > largest, squared, -torch.inf)
        unseen = max(unseen, float(log_mean_exp(terms.unsqueeze(0)).clamp(max=700.0).exp()))
    return unseen
