"""Coverage of credible regions, from the posteriors of many data sets in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.func import grad, jacrev, vmap

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.extend import (
    CHAIN_COLOURS,
    GREY,
    new_generator,
    one_thread,
    pareto_smoothed,
    real_number,
    student_log_prob,
    student_points,
    weight_effective_sample_size,
    whole_number,
)
from bayeskit.inference.generalized._minimizer import hessian_of_loss, minimize
from bayeskit.inference.generalized._posterior import GibbsPosterior, check_pooled_by_sum
from bayeskit.inference.generalized.losses._loss import Data, PointwiseLoss, as_data, columns, taken, unvalidated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Functionals of the parameter, as functions of the unconstrained vector.


@dataclass(frozen=True, eq=False)
class Functional:
    """Named torch function ``(d,) -> (k,)`` of one unconstrained vector, without branching on values."""

    names: tuple[str, ...]
    function: Callable[[Tensor], Tensor]

    def __call__(self, u: Tensor) -> Tensor:
        """Return the numbers, ``(k,)``, at one vector ``(d,)``."""
        return self.function(u)

    def jacobian(self, u: Tensor) -> Tensor:
        """Return their derivatives, ``(k, d)``, at one vector ``(d,)``."""
        result: Tensor = jacrev(self.function)(u)
        return result


def as_functional(posterior: GibbsPosterior, functional: Callable[[Any], Tensor] | None) -> Functional:
    """Return ``functional``, parameter -> ``()`` or ``(k,)``, by default all entries of sites, as a ``Functional``."""
    prior = posterior.prior
    if functional is None:
        return Functional(_entries(posterior), lambda u: _flat(prior.values(u)))
    name = getattr(functional, "__name__", type(functional).__name__)
    name = "functional" if name == "<lambda>" else name
    probe = torch.zeros(posterior.dim, dtype=posterior.dtype, device=posterior.device)
    with unvalidated(), torch.no_grad():
        value = functional(prior.parameter(probe))
    if not isinstance(value, Tensor) or value.dim() > 1:
        what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ModelError(f"the functional {name!r} must return a tensor () or (k,), not {what}")
    names = (name,) if value.dim() == 0 else tuple(f"{name}[{i}]" for i in range(len(value)))
    return Functional(names, lambda u: functional(prior.parameter(u)).reshape(-1))


def _flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in values.values()])


def _entries(posterior: GibbsPosterior) -> tuple[str, ...]:
    names = []
    for site in posterior.prior.sites:
        indices = np.ndindex(*site.shape) if site.shape else [()]
        names += [f"{site.name}[{','.join(map(str, index))}]" if index else site.name for index in indices]
    return tuple(names)


# Normal approximations of the posteriors of many data sets or weightings, at any learning rate.


class QuadraticFits(NamedTuple):
    """Second-order expansions of each replicate's loss and of the log prior, in unconstrained coordinates."""

    position: Tensor  # (R, d): points of expansion, the modes at the weight ``reference``
    hessian: Tensor  # (R, d, d), of the loss, smoothed where it has kinks
    score: Tensor  # (R, d): gradient of the log prior
    precision: Tensor  # (R, d, d): minus the Hessian of the log prior
    reference: Tensor  # (R,): infinite where the position is the minimiser of the loss alone
    converged: Tensor  # (R,), boolean: whether a minimum was found

    def normal(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(R, d)`` and precisions ``(R, d, d)`` at learning rates ``weight (R,)`` by a Newton step."""
        precision = _positive(weight[:, None, None] * self.hessian + self.precision)
        # Newton step from the mode at the reference weight; exact for a quadratic loss and log prior.
        step = torch.linalg.solve(precision, self.score * (1 - weight / self.reference)[:, None])
        return self.position + step, precision

    @classmethod
    def around(cls, mean: Tensor, covariance: Tensor, weight: Tensor, converged: Tensor) -> QuadraticFits:
        """Return fits whose normals at ``weight (R,)`` have these moments; the moments include the prior."""
        nothing = torch.zeros_like(covariance)
        hessian = torch.linalg.inv(covariance) / weight[:, None, None]
        return cls(mean, hessian, torch.zeros_like(mean), nothing, weight, converged)


def _quadratic_fits(
    posterior: GibbsPosterior, weights: Tensor | None, data: Data | None, weight: float, seed: int = 0
) -> QuadraticFits:
    """Expand the posteriors of weightings ``(R, n)`` or data sets ``(R, n, ...)`` about their modes at ``weight``."""
    proper = posterior.prior.is_proper
    found = minimize(posterior, weights=weights, data=data, prior_weight=1 / weight if proper else 0.0, seed=seed)
    position = found.position
    with one_thread(), unvalidated(), torch.no_grad():
        mean_hessian = vmap(
            lambda u, w, x: hessian_of_loss(posterior, u, x, w),
            in_dims=(0, None if weights is None else 0, None if data is None else 0),
        )(position, weights, data)
        score = vmap(grad(posterior.prior.log_density))(position)
        precision = -vmap(jacrev(grad(posterior.prior.log_density)))(position)
    num_data = len(columns(posterior.data)[0]) if data is None else columns(data)[0].shape[1]
    reference = torch.full_like(found.value, weight if proper else torch.inf)
    return QuadraticFits(position, num_data * mean_hessian, score, precision, reference, found.converged)


def _positive(matrix: Tensor) -> Tensor:
    """Return the nearest matrices with the same axes that are positive definite."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    size = values.abs()
    size = torch.maximum(size, 1e-8 * size.amax(-1, keepdim=True)).clamp_min(torch.finfo(matrix.dtype).tiny ** 0.5)
    return (vectors * size[:, None]) @ vectors.mT


def _squared_distance(offsets: Tensor, precision: Tensor) -> Tensor:
    """Return Mahalanobis distances, squared: ``(R, S, d), (R, d, d) -> (R, S)``."""
    return (torch.linalg.cholesky(precision).mT @ offsets.mT).square().sum(-2)


# Weighted draws from the posteriors of many data sets or weightings, with adapted proposals.

_DEGREES_OF_FREEDOM = 5.0
_ROUNDS = 4
_MIN_SHARE = 0.3  # relative effective sample size below which a proposal is refitted
MAX_SHAPE = 0.7
VALUES_AT_ONCE = 2**20
_ROWS_AT_ONCE = 500


@dataclass(frozen=True, eq=False)
class ReplicateLosses:
    """Losses of many data sets or weightings as one function."""

    posterior: GibbsPosterior
    weights: Tensor | None  # (R, n)
    data: Data | None  # (R, n, ...)

    @property
    def num_replicates(self) -> int:
        """Number of rows."""
        if self.weights is not None:
            return len(self.weights)
        return len(columns(self.data)[0])  # type: ignore[arg-type]

    def taken(self, rows: Tensor) -> ReplicateLosses:
        """Return the losses of some rows."""
        return ReplicateLosses(self.posterior, _rows(self.weights, rows), _rows(self.data, rows))

    def __call__(self, points: Tensor) -> Tensor:
        """Return losses ``(R, S)`` at unconstrained points ``(R, S, d)``, evaluated in blocks of bounded size."""
        in_dims = (0, None if self.weights is None else 0, None if self.data is None else 0)
        batched = vmap(vmap(self._one, in_dims=(0, None, None)), in_dims=in_dims)
        num_points = points.shape[1]
        at_once = max(1, VALUES_AT_ONCE // self.posterior.num_data)
        few = max(1, at_once // num_points)
        result = points.new_empty(points.shape[:2])
        with one_thread(), unvalidated(), torch.no_grad():
            for i in range(0, len(points), few):
                part = slice(i, i + few)
                weights, data = _rows(self.weights, part), _rows(self.data, part)
                for j in range(0, num_points, at_once):
                    chosen = slice(j, j + at_once)
                    result[part, chosen] = batched(points[part, chosen], weights, data)
        return result

    def _one(self, u: Tensor, weights: Tensor | None, data: Any) -> Tensor:
        data = self.posterior.data if data is None else data
        return self.posterior.loss.total(self.posterior.prior.parameter(u), data, weights)


class Points(NamedTuple):
    """Draws of the proposals with losses and densities, one row for each replicate."""

    draws: Tensor  # (R, S, d), unconstrained
    loss: Tensor  # (R, S)
    log_prior: Tensor  # (R, S)
    log_proposal: Tensor  # (R, S), up to a constant

    def log_density(self, weight: Tensor) -> Tensor:
        """Return the unnormalised log posterior densities at learning rates ``(R,)``, ``(R, S)``."""
        return -weight[:, None] * self.loss + self.log_prior

    def log_ratio(self, weight: Tensor) -> Tensor:
        """Return the unnormalised log importance weights at learning rates ``(R,)``, ``(R, S)``."""
        ratio = self.log_density(weight) - self.log_proposal
        return ratio.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _adapted_draws(
    losses: ReplicateLosses, fits: QuadraticFits, weight: Tensor, num_draws: int, seed: int
) -> tuple[QuadraticFits, Points]:
    """Draw from proposals, refitted while that improves the effective sample size at ``weight (R,)``."""
    generator = new_generator(seed, stream="replicate posteriors")
    with one_thread(), unvalidated(), torch.no_grad():
        points = _drawn(losses, fits, weight, num_draws, generator)
        score = _score(points, weight)
        for _ in range(_ROUNDS):
            rows = (score < _MIN_SHARE).nonzero().squeeze(-1)
            if len(rows) == 0:
                break
            chosen = weight[rows]
            trial_fits = QuadraticFits.around(*_moments(_some(points, rows), chosen), chosen, fits.converged[rows])
            trial = _drawn(losses.taken(rows), trial_fits, chosen, num_draws, generator)
            trial_score = _score(trial, chosen)
            better = trial_score > score[rows]
            kept = rows[better]
            if len(kept) == 0:
                break
            fits, points = _put(fits, kept, _some(trial_fits, better)), _put(points, kept, _some(trial, better))
            score = score.index_copy(0, kept, trial_score[better])
    return fits, points


def _in_chunks(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Return a function of one vector ``(d,)`` at all of ``points (R, S, d)``, ``(R, S, ...)``."""
    batched = vmap(function)
    flat = torch.cat([batched(chunk) for chunk in points.flatten(0, 1).split(VALUES_AT_ONCE // 8)])
    return flat.unflatten(0, points.shape[:2])


def row_pareto_shapes(log_ratio: Tensor) -> Tensor:
    """Return Pareto ``k`` of importance weights, ``(R, S) -> (R,)``, a bounded number of rows at a time."""
    return torch.cat([pareto_smoothed(rows)[1] for rows in log_ratio.split(_ROWS_AT_ONCE)]).to(log_ratio)


def _drawn(
    losses: ReplicateLosses, fits: QuadraticFits, weight: Tensor, num_draws: int, generator: torch.Generator
) -> Points:
    """Draw from Student-t distributions about the fits, with common random numbers for all replicates."""
    mean, precision = fits.normal(weight)
    standard, log_proposal = (x.to(mean) for x in _student(num_draws, mean.shape[-1], generator))
    lower = torch.linalg.cholesky(precision)
    offsets = torch.linalg.solve_triangular(lower.mT, standard.mT.expand(len(mean), -1, -1), upper=True)
    draws = mean[:, None] + offsets.mT
    log_proposal = log_proposal + lower.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    return Points(draws, losses(draws), _in_chunks(losses.posterior.prior.log_density, draws), log_proposal)


def _student(num_draws: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return quasi-random draws ``(S, d)`` of a standard multivariate t, and their log densities."""
    standard = student_points(num_draws, dim, _DEGREES_OF_FREEDOM, generator)
    return standard, student_log_prob(standard, _DEGREES_OF_FREEDOM)


def _score(points: Points, weight: Tensor) -> Tensor:
    """Return the relative effective sample size, minus one where Pareto ``k`` is too large, ``(R,)``."""
    log_ratio = points.log_ratio(weight)
    share = (weight_effective_sample_size(log_ratio) / log_ratio.shape[-1]).nan_to_num(0.0)
    return torch.where(row_pareto_shapes(log_ratio) <= MAX_SHAPE, share, share - 1)


def _moments(points: Points, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted means and covariances, with weights tempered to a sufficient effective sample size."""
    draws, log_ratio = points.draws, points.log_ratio(weight)
    log_ratio = (log_ratio - log_ratio.amax(-1, keepdim=True)).nan_to_num(-torch.inf)
    needed = min(max(50.0, 10.0 * draws.shape[-1]), 0.5 * draws.shape[1])
    low, high = torch.zeros(len(draws)).to(draws), torch.ones(len(draws)).to(draws)
    for step in range(20):
        power = high if step == 0 else 0.5 * (low + high)
        enough = weight_effective_sample_size(power[:, None] * log_ratio) >= needed
        low, high = torch.where(enough, power, low), torch.where(enough, high, power)
    weights = torch.softmax((low[:, None] * log_ratio).nan_to_num(-torch.inf), -1)
    mean = torch.einsum("rs,rsd->rd", weights, draws)
    away = draws - mean[:, None]
    covariance = torch.einsum("rs,rsd,rse->rde", weights, away, away)
    ridge = 1e-9 * covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300)
    return mean, covariance + ridge[:, None, None] * torch.eye(draws.shape[-1]).to(draws)


def _some(table: Any, rows: Tensor) -> Any:
    """Return rows of all columns of a named tuple."""
    return type(table)(*(x[rows] for x in table))


def _put(table: Any, rows: Tensor, new: Any) -> Any:
    """Return a named tuple with rows of all columns replaced."""
    return type(table)(*(a.index_copy(0, rows, b) for a, b in zip(table, new, strict=True)))


def _rows(x: Any, rows: Any) -> Any:
    return None if x is None else taken(x, rows)


# Posteriors of many data sets or weightings, in one batch.


@dataclass(frozen=True, eq=False)
class ReplicatePosteriors:
    """Posteriors of many data sets or weightings, at any learning rate, by importance sampling.

    Replicates use common random numbers, and all learning rates share the draws, so estimates are smooth in the
    learning rate. The normal approximation of each posterior is the control variate.

    Returned by :func:`replicate_posteriors`.

    Attributes
    ----------
    weight : Tensor
        Learning rates of the proposals, ``(R,)``; importance weights become uneven far from them.
    fits : QuadraticFits
        Normal approximations.
    points : Points
        Draws with their losses and densities.
    """

    losses: ReplicateLosses
    weight: Tensor
    fits: QuadraticFits
    points: Points

    @property
    def draws(self) -> Tensor:
        """Unconstrained draws of the proposals, not weighted, ``(R, S, d)``."""
        return self.points.draws

    @property
    def num_replicates(self) -> int:
        """Number of data sets or weightings."""
        return len(self.draws)

    @cached_property
    def pareto_shape(self) -> Tensor:
        """Pareto ``k`` of the importance weights, ``(R,)``; unreliable above 0.7."""
        return self.pareto_shape_at(self.weight)

    @property
    def trusted(self) -> Tensor:
        """Whether each replicate's mode was found and Pareto ``k`` is at most 0.7, ``(R,)``."""
        return (self.pareto_shape <= MAX_SHAPE) & self.fits.converged

    def pareto_shape_at(self, weight: float | Tensor) -> Tensor:
        """Return Pareto ``k`` of the importance weights at other learning rates, ``(R,)``."""
        return row_pareto_shapes(self.points.log_ratio(self._weight(weight)))

    def taken(self, rows: Tensor) -> ReplicatePosteriors:
        """Return the replicates with indices ``rows``."""
        fits, points = _some(self.fits, rows), _some(self.points, rows)
        return ReplicatePosteriors(self.losses.taken(rows), self.weight[rows], fits, points)

    def replaced(self, rows: Tensor, new: ReplicatePosteriors) -> ReplicatePosteriors:
        """Return the posteriors with the fits and draws of replicates ``rows`` replaced by those of ``new``."""
        weight = self.weight.index_copy(0, rows, new.weight)
        return ReplicatePosteriors(
            self.losses, weight, _put(self.fits, rows, new.fits), _put(self.points, rows, new.points)
        )

    def redrawn(self, weight: float | Tensor, *, seed: int = 0) -> ReplicatePosteriors:
        """Return the posteriors with new draws for another learning rate."""
        new = _as_weight(weight, self.weight)
        fits, points = _adapted_draws(self.losses, self.fits, new, self.draws.shape[1], seed)
        return ReplicatePosteriors(self.losses, new, fits, points)

    def evaluated_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each replicate, ``(R,)``, and the log prior, ``()``, at one vector ``(d,)``."""
        loss = self.losses(u.expand(self.num_replicates, 1, -1))[:, 0]
        with unvalidated(), torch.no_grad():
            return loss, self.losses.posterior.prior.log_density(u)

    def hpd_level(
        self, u: Tensor, weight: float | Tensor | None = None, *, evaluated: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the level at which a point ``u (d,)`` enters each highest-posterior-density region, ``(R,)``.

        It is the posterior probability of a higher density, in unconstrained coordinates. If coverage is nominal at all
        levels, it is uniform over replicates. ``weight`` is a number or ``(R,)``, by default ``self.weight``;
        ``evaluated`` is ``self.evaluated_at(u)`` if known.
        """
        weight = self._weight(weight)
        level, approximate = self._normalised(weight)
        loss, log_prior = self.evaluated_at(u) if evaluated is None else evaluated
        at = -weight * loss + log_prior
        higher = self.points.log_density(weight) > at[:, None]
        mean, precision = self.fits.normal(weight)
        squared = _squared_distance(u - mean[:, None], precision)  # (R, 1)
        nearer = _squared_distance(self.draws - mean[:, None], precision) < squared
        exact = torch.special.gammainc(torch.full_like(at, 0.5 * u.shape[-1]), 0.5 * squared[:, 0])
        return _corrected(level, higher, approximate, nearer, exact)

    def evaluated(self, functional: Functional) -> Tensor:
        """Return the values of a functional at the draws, ``(R, S, k)``."""
        with unvalidated():
            return _in_chunks(functional, self.draws)

    def probability_below(
        self,
        functional: Functional,
        value: Tensor,
        weight: float | Tensor | None = None,
        *,
        evaluated: Tensor | None = None,
    ) -> Tensor:
        """Return the posterior probability that a functional is at most ``value (k,)``, ``(R, k)``.

        ``evaluated`` is ``self.evaluated(functional)`` if known; ``weight`` as in :meth:`hpd_level`.
        """
        each = self.evaluated(functional) if evaluated is None else evaluated
        weight = self._weight(weight)
        level, approximate = self._normalised(weight)
        mean, precision = self.fits.normal(weight)
        with unvalidated():
            centre, slope = vmap(functional)(mean), vmap(functional.jacobian)(mean)
        linear = centre[:, None] + torch.einsum("rkd,rsd->rsk", slope, self.draws - mean[:, None])
        spread = (slope * torch.linalg.solve(precision, slope.mT).mT).sum(-1).sqrt()
        # A functional with zero slope has a constant linear approximation.
        exact = torch.where(spread > 0, torch.special.ndtr((value - centre) / spread), (centre <= value).to(centre))
        return torch.stack(
            [
                _corrected(level, each[..., j] <= value[j], approximate, linear[..., j] <= value[j], exact[:, j])
                for j in range(len(value))
            ],
            -1,
        )

    def central_level(
        self,
        functional: Functional,
        value: Tensor,
        weight: float | Tensor | None = None,
        *,
        evaluated: Tensor | None = None,
    ) -> Tensor:
        """Return the level at which a value enters the equal-tailed interval of each component, ``(R, k)``."""
        return (2 * self.probability_below(functional, value, weight, evaluated=evaluated) - 1).abs()

    def mean(self, weight: float | Tensor | None = None) -> Tensor:
        """Return the posterior means in unconstrained coordinates, ``(R, d)``."""
        weight = self._weight(weight)
        exact, approximate = self._normalised(weight)
        centre = self.fits.normal(weight)[0]
        return centre + torch.einsum("rs,rsd->rd", exact - approximate, self.draws - centre[:, None])

    def covariance(self, weight: float | Tensor | None = None) -> Tensor:
        """Return the posterior covariances in unconstrained coordinates, ``(R, d, d)``."""
        weight = self._weight(weight)
        exact, approximate = self._normalised(weight)
        centre, precision = self.fits.normal(weight)
        away = self.draws - centre[:, None]
        second = torch.einsum("rs,rsd,rse->rde", exact - approximate, away, away) + torch.linalg.inv(precision)
        first = torch.einsum("rs,rsd->rd", exact - approximate, away)
        return second - first[:, :, None] * first[:, None]

    def _weight(self, weight: float | Tensor | None) -> Tensor:
        return self.weight if weight is None else _as_weight(weight, self.weight)

    def _normalised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised importance weights of the posteriors and of their normal approximations, ``(R, S)``."""
        mean, precision = self.fits.normal(weight)
        approximate = -0.5 * _squared_distance(self.draws - mean[:, None], precision) - self.points.log_proposal
        return torch.softmax(self.points.log_ratio(weight), -1), torch.softmax(approximate, -1)

    def __repr__(self) -> str:
        replicates, draws, dim = self.draws.shape
        return (
            f"ReplicatePosteriors({type(self.losses.posterior.loss).__name__}, dim={dim}, {replicates} x {draws} draws)"
        )


def replicate_posteriors(
    posterior: GibbsPosterior,
    *,
    weights: Tensor | None = None,
    data: Data | None = None,
    weight: float | Tensor | None = None,
    num_draws: int = 1024,
    seed: int = 0,
) -> ReplicatePosteriors:
    """Approximate the posteriors of many data sets, or of many weightings of one data set, in one batch.

    Importance sampling from a multivariate Student-t at the mode and curvature of each posterior. If the importance
    weights are uneven, the proposal is refitted to the weighted draws, up to four times.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with losses pooled by the sum.
    weights : Tensor, optional
        Weights of the observations, ``(R, n)``, such as bootstrap counts.
    data : Tensor or tuple of Tensor, optional
        Data sets ``(R, n, ...)`` in place of the posterior's data.
    weight : float or Tensor, optional
        Learning rate, scalar or ``(R,)``; by default ``posterior.weight``.
    num_draws : int, default 1024
        Quasi-random draws for each replicate, at least 32; preferably a power of two.

    Raises
    ------
    SettingsError
        If neither weights nor data are given, losses are not pooled by the sum, or a learning rate is not positive.
    ShapeError
        If shapes do not fit.

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo integration. Econometrica 57,
    1317-1339. Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling.
    Journal of Machine Learning Research 25(72).

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x)
    >>> twice = replicate_posteriors(posterior, data=torch.stack([x, x + 1]), weight=2.0)
    >>> twice.mean().squeeze(-1)  # 2 * 9 / (1 + 2 * 3), and 2 * 12 / (1 + 2 * 3)
    tensor([2.5714, 3.4286], dtype=torch.float64)
    """
    if weights is None and (data is None or isinstance(data, tuple) and not data):
        raise SettingsError("give weights= or data=, a row or data set for each replicate")
    check_pooled_by_sum(posterior, "replicates are")
    num_draws = whole_number("num_draws", num_draws, least=32)
    losses = ReplicateLosses(posterior, weights, data)
    like = torch.zeros(losses.num_replicates, dtype=posterior.dtype, device=posterior.device)
    each = _as_weight(posterior.weight if weight is None else weight, like)
    fits = _quadratic_fits(posterior, weights, data, float(each.log().mean().exp()), seed)
    return ReplicatePosteriors(losses, each, *_adapted_draws(losses, fits, each, num_draws, seed))


def _corrected(exact: Tensor, event: Tensor, approximate: Tensor, linear: Tensor, known: Tensor) -> Tensor:
    """Estimate a probability with a control variate of known expectation."""
    return (torch.where(event, exact, 0.0).sum(-1) - torch.where(linear, approximate, 0.0).sum(-1) + known).clamp(0, 1)


def _as_weight(weight: float | Tensor, like: Tensor) -> Tensor:
    """Return the learning rate of each replicate; SettingsError unless positive."""
    if not isinstance(weight, Tensor) or weight.dim() == 0:
        return torch.full_like(like, real_number("weight", weight, "(0, inf)"))
    if weight.shape != like.shape:
        raise ShapeError(f"weight must be a number or ({len(like)},), not {tuple(weight.shape)}")
    if not bool(((weight > 0) & weight.isfinite()).all()):
        raise SettingsError("every weight must be a positive number")
    return weight.to(like)


def unreliable_replicates(trusted: Tensor) -> tuple[str, ...]:
    """Return a warning if more than one in a hundred replicates is not ``trusted (R,)``."""
    share = float((~trusted).double().mean())
    if share <= _MAX_UNTRUSTED:
        return ()
    return (
        f"importance sampling is unreliable for {100 * share:.1f} % of the replicates' posteriors; use more draws, "
        "or reparametrise the model",
    )


# Coverage of the minimiser of the expected loss, by repeated sampling.

_LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
_HUGE = 500_000
_CONFIDENCE = 0.95
_MAX_UNTRUSTED = 0.01
_JOINT = "joint"

Simulate = Callable[[torch.Generator], Any]
"""``generator -> data``, one simulated data set with the shapes of the posterior's data."""


@dataclass(frozen=True)
class BatchSelector:
    """Selector of learning rates for many data sets in one call.

    Parameters
    ----------
    function : callable
        ``(posterior, data sets (R, n, ...)) -> (R,)``.

    Examples
    --------
    >>> import torch
    >>> one_over_variance = BatchSelector(lambda posterior, x: 1 / x.var(-1))
    >>> one_over_variance.function(None, torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([1.])
    """

    function: Callable[[GibbsPosterior, Data], Tensor]


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """Coverage of the truth by credible regions.

    Attributes
    ----------
    names : tuple of str
        Names of the regions: ``"joint"`` is the highest-posterior-density region of the whole parameter, in
        unconstrained coordinates; the others are equal-tailed intervals.
    entry_levels : Tensor
        Level at which the truth enters each region, ``(R, len(names))``; uniform if coverage is nominal.
    levels : tuple of float
        Nominal levels.
    truth : Tensor
        Minimiser of the expected loss, unconstrained, ``(d,)``.
    weight : Tensor
        Learning rate of each replicate, ``(R,)``.
    trusted : Tensor
        Boolean, ``(R,)``: whether importance sampling of the replicate's posterior is reliable.
    mismatch : Tensor
        Generalised eigenvalues, increasing, ``(d,)``: covariance of the posterior mean over replicates relative to the
        mean posterior covariance. All are one if the posterior has the spread of repeated sampling; if they differ, no
        single weight makes all of them one.

    Examples
    --------
    >>> import torch
    >>> level = torch.linspace(0.0, 1.0, 201)[1::2].unsqueeze(-1)  # of a perfect posterior
    >>> one = torch.ones(100)
    >>> report = CoverageReport(("joint",), level, (0.5, 0.9), one[:1], one, one.bool(), one[:1])
    >>> report.coverage
    tensor([[0.5000, 0.9000]])
    """

    names: tuple[str, ...]
    entry_levels: Tensor
    levels: tuple[float, ...]
    truth: Tensor
    weight: Tensor
    trusted: Tensor
    mismatch: Tensor

    @property
    def num_replicates(self) -> int:
        """Number of data sets."""
        return len(self.entry_levels)

    @property
    def coverage(self) -> Tensor:
        """Estimated coverage, ``(len(names), len(levels))``."""
        levels = self.entry_levels.new_tensor(self.levels)
        return (self.entry_levels[..., None] <= levels).to(self.entry_levels).mean(0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Failed diagnostics, each with a remedy."""
        return unreliable_replicates(self.trusted)

    def to_pandas(self) -> pd.DataFrame:
        """Return coverage, standard error and 95 % Clopper-Pearson interval, one row for each region and level."""
        rows = []
        for name, covered in zip(self.names, self.coverage, strict=True):
            for level, share in zip(self.levels, covered.tolist(), strict=True):
                lower, upper = binomial_band(round(share * self.num_replicates), self.num_replicates)
                error = math.sqrt(share * (1 - share) / self.num_replicates)
                rows.append((name, level, share, error, lower, upper))
        return pd.DataFrame(rows, columns=["region", "level", "coverage", "standard_error", "lower", "upper"])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the coverage of each region against the nominal level, with 95 % intervals, by default in new axes."""
        from matplotlib.figure import Figure

        if ax is None:
            ax = Figure(figsize=(5.0, 4.6), layout="constrained").subplots()
        table = self.to_pandas()
        ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.0, zorder=0)
        shift = 0.006  # separates the intervals of several regions at one level
        for i, (name, rows) in enumerate(table.groupby("region", sort=False)):
            x = rows["level"] + shift * (i - (len(self.names) - 1) / 2)
            below, above = rows["coverage"] - rows["lower"], rows["upper"] - rows["coverage"]
            colour = CHAIN_COLOURS[i % len(CHAIN_COLOURS)]
            ax.errorbar(
                x, rows["coverage"], [below, above], color=colour, marker="o", markersize=4, capsize=2, label=str(name)
            )
        label = f"coverage over {self.num_replicates} data sets"
        ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="nominal level", ylabel=label)
        ax.legend(frameon=False)
        ax.grid(alpha=0.25)
        return ax

    def __repr__(self) -> str:
        weight = self.weight
        spread = f"{float(weight[0]):.4g}"
        if float(weight.amin()) < float(weight.amax()):
            spread = f"{float(weight.median()):.4g} ({float(weight.amin()):.4g} to {float(weight.amax()):.4g})"
        lines = [f"coverage over {self.num_replicates} data sets, weight {spread}"]
        width = max(len("nominal"), *map(len, self.names))
        lines.append("  " + "nominal".ljust(width) + "".join(f"{100 * level:9.1f}" for level in self.levels))
        lines += [
            "  " + name.ljust(width) + "".join(f"{100 * share:9.1f}" for share in covered.tolist())
            for name, covered in zip(self.names, self.coverage, strict=True)
        ]
        lines.append(f"  sampling over posterior variance: {', '.join(f'{x:.3g}' for x in self.mismatch.tolist())}")
        return "\n".join([*lines, *(f"  warning: {text}" for text in self.warnings)])


def binomial_band(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a probability."""
    interval = binomtest(successes, trials).proportion_ci(_CONFIDENCE)
    return float(interval.low), float(interval.high)


def coverage_report(
    posterior: GibbsPosterior,
    simulate: Simulate,
    truth: Any = None,
    weight: float | Tensor | BatchSelector | Callable[[GibbsPosterior], Any] | None = None,
    *,
    levels: Sequence[float] = _LEVELS,
    num_replicates: int = 1000,
    functional: Callable[[Any], Tensor] | None = None,
    num_draws: int = 1024,
    seed: int = 0,
) -> CoverageReport:
    """Estimate the coverage of credible regions over simulated data sets.

    The truth is the minimiser of the expected loss under the distribution of the data.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with the prior and loss to study, with losses pooled by the sum; only the shapes of its data matter.
    simulate : callable
        ``generator -> data``, one data set from the true distribution.
    truth : Tensor or dict of Tensor, optional
        Minimiser of the expected loss: the value of the prior's only site, or a dict of the values of its sites. By
        default the minimiser for half a million simulated observations, if the loss is pointwise.
    weight : float, Tensor, BatchSelector or callable, optional
        Learning rate, scalar or ``(R,)``; or a selector applied to each data set: a :class:`BatchSelector`, or a
        function of the posterior such as those of :mod:`~bayeskit.inference.generalized.calibrate`. By default
        ``posterior.weight``.
    levels : sequence of float, default (0.5, 0.8, 0.9, 0.95, 0.99)
    num_replicates : int, default 1000
        Number of simulated data sets.
    functional : callable, optional
        Function of the parameter of the loss, returning ``()`` or ``(k,)``; by default every entry of every site.
    num_draws : int, default 1024
        Draws for each data set.

    Raises
    ------
    SettingsError
        If a level is not in (0, 1), a weight is not positive, losses are not pooled by the sum, or ``truth`` is missing
        for a loss that is not pointwise.
    ShapeError
        If the shapes of simulated data differ from those of the posterior's data, or ``truth`` has the wrong shape.
    DataError
        If simulated data are not finite, or the minimiser of the expected loss is not found.

    References
    ----------
    Syring, N., Martin, R. (2019). Calibrating general posterior credible regions. Biometrika 106, 479-486.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> def simulate(generator):
    ...     return 2.0 * torch.randn(50, generator=generator, dtype=torch.float64)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), torch.zeros(50, dtype=torch.float64))
    >>> coverage_report(posterior, simulate, truth=0.0, levels=(0.95,), num_replicates=200)  # 67.3 % in the limit
    coverage over 200 data sets, weight 1
      nominal     95.0
      joint       ...
      theta       ...
      sampling over posterior variance: ...
    """
    num_replicates = whole_number("num_replicates", num_replicates, least=2)
    levels = _levels(levels)
    numbers = as_functional(posterior, functional)
    generator = new_generator(seed, stream="coverage report")
    target = _truth(posterior, simulate, truth, generator)
    data = simulated_sets(posterior, simulate, num_replicates, generator)
    weights = _weights(posterior, data, weight, num_replicates)
    replicates = replicate_posteriors(posterior, data=data, weight=weights, num_draws=num_draws, seed=seed)
    return CoverageReport(
        (_JOINT, *numbers.names),
        torch.cat([replicates.hpd_level(target)[:, None], replicates.central_level(numbers, numbers(target))], -1),
        levels,
        target,
        replicates.weight,
        replicates.trusted,
        _mismatch(replicates),
    )


def _levels(levels: Sequence[float]) -> tuple[float, ...]:
    try:
        given = tuple(levels)
    except TypeError as error:
        raise SettingsError(f"levels must be several numbers in (0, 1), such as (0.5, 0.95), not {levels!r}") from error
    return tuple(real_number("level", level, "(0, 1)") for level in given)


def _truth(posterior: GibbsPosterior, simulate: Simulate, truth: Any, generator: torch.Generator) -> Tensor:
    if truth is not None:
        if not isinstance(truth, dict) and len(posterior.sites) > 1:
            raise SettingsError(f"truth must be a dict of the sites {[site.name for site in posterior.sites]}")
        values = truth if isinstance(truth, dict) else {posterior.sites[0].name: truth}
        try:
            values = {k: torch.as_tensor(v, dtype=posterior.dtype) for k, v in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"truth must hold numbers for each site ({error})") from error
        for site in posterior.sites:
            if site.name in values and tuple(values[site.name].shape) != tuple(site.shape):
                given = tuple(values[site.name].shape)
                raise ShapeError(f"truth of site {site.name!r} must be {tuple(site.shape)}, not {given}")
        return posterior.unconstrain(values)
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} is not a sum over observations, so its minimiser is not searched for by "
            "simulation; give truth="
        )
    sets = [_simulated(posterior, simulate, generator) for _ in range(math.ceil(_HUGE / posterior.num_data))]
    huge = tuple(torch.cat(parts) for parts in zip(*map(columns, sets), strict=True))
    batch = tuple(x[None] for x in huge)
    found = minimize(posterior, data=batch if isinstance(posterior.data, tuple) else batch[0])
    if not bool(found.converged.all()):
        raise DataError("no minimiser of the expected loss was found from simulated data; give truth=")
    return found.position[0]


def simulated_sets(posterior: GibbsPosterior, simulate: Simulate, num_sets: int, generator: torch.Generator) -> Data:
    """Return simulated data sets, stacked, ``(num_sets, n, ...)``; ShapeError unless shaped as the posterior's data."""
    sets = [_simulated(posterior, simulate, generator) for _ in range(num_sets)]
    stacked = tuple(torch.stack(parts) for parts in zip(*map(columns, sets), strict=True))
    return stacked if isinstance(posterior.data, tuple) else stacked[0]


def _simulated(posterior: GibbsPosterior, simulate: Simulate, generator: torch.Generator) -> Data:
    data = as_data(simulate(generator))
    shapes = [tuple(x.shape) for x in columns(data)], [tuple(x.shape) for x in columns(posterior.data)]
    if isinstance(data, tuple) != isinstance(posterior.data, tuple) or shapes[0] != shapes[1]:
        raise ShapeError(f"simulate returned data of shapes {shapes[0]}, the posterior has {shapes[1]}")
    posterior.loss.check(data)
    return data


def _weights(posterior: GibbsPosterior, data: Data, weight: Any, num_replicates: int) -> float | Tensor:
    """Return the learning rate, scalar or ``(R,)``."""
    if weight is None:
        return posterior.weight
    if isinstance(weight, BatchSelector):
        return weight.function(posterior, data)
    if not callable(weight) or isinstance(weight, Tensor):
        return weight  # type: ignore[no-any-return]
    selected = []
    for i in range(num_replicates):
        found = weight(posterior.with_data(taken(data, i)))
        if not isinstance(found, (float, int, Tensor)):
            if not hasattr(found, "weight"):
                raise SettingsError(
                    f"weight returned {type(found).__name__} for a replicate; return a number, or what a rule returns"
                )
            found = found.weight
        selected.append(float(found))
    return torch.tensor(selected, dtype=posterior.dtype, device=posterior.device)


def _mismatch(replicates: ReplicatePosteriors) -> Tensor:
    """Return generalised eigenvalues of the posterior means' covariance relative to the mean posterior covariance."""
    mean, within = replicates.mean(), replicates.covariance().mean(0)
    between = torch.cov(mean.mT).reshape(within.shape)
    lower = torch.linalg.cholesky(within)
    half = torch.linalg.solve_triangular(lower, between, upper=False)
    whitened = torch.linalg.solve_triangular(lower, half.mT, upper=False)
    return torch.linalg.eigvalsh(0.5 * (whitened + whitened.mT))
