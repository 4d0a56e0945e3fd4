"""Weighted draws from the posteriors of many data sets or weightings, their proposals fitted where need be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from bayeskit._pareto_smoothing import pareto_smoothed
from bayeskit._quasi_random import student_points
from bayeskit._statistics import weight_effective_sample_size
from bayeskit._torch import new_generator, one_thread, validation_kept
from bayeskit.inference.generalized.coverage.quadratic_fits import QuadraticFits
from bayeskit.inference.generalized.losses.loss import Data, columns
from bayeskit.inference.generalized.posterior import GibbsPosterior

DEGREES_OF_FREEDOM = 5.0
ROUNDS = 4
MIN_SHARE = 0.3  # of effective draws, below which a proposal is fitted anew
MAX_SHAPE = 0.7
VALUES_AT_ONCE = 2**20
ROWS_AT_ONCE = 500


@dataclass(frozen=True, eq=False)
class ReplicateLosses:
    """The losses of many data sets or weightings as one function.

    Attributes
    ----------
    posterior : GibbsPosterior
    weights, data : Tensor or tuple of Tensor, or None
        ``(R, n)`` and ``(R, n, ...)``.
    """

    posterior: GibbsPosterior
    weights: Tensor | None
    data: Data | None

    @property
    def num_replicates(self) -> int:
        """Number of rows."""
        if self.weights is not None:
            return len(self.weights)
        return len(columns(self.data)[0])  # type: ignore[arg-type]

    def taken(self, rows: Tensor) -> ReplicateLosses:
        """Return those of some rows."""
        return ReplicateLosses(self.posterior, _rows(self.weights, rows), _rows(self.data, rows))

    def __call__(self, points: Tensor) -> Tensor:
        """Return losses ``(R, S)`` at unconstrained points ``(R, S, d)``.

        A bounded number of data times points is evaluated at a time.
        """
        in_dims = (0, None if self.weights is None else 0, None if self.data is None else 0)
        batched = vmap(vmap(self._one, in_dims=(0, None, None)), in_dims=in_dims)
        num_points = points.shape[1]
        at_once = max(1, VALUES_AT_ONCE // self.posterior.num_data)
        few = max(1, at_once // num_points)
        result = points.new_empty(points.shape[:2])
        with one_thread(), validation_kept(), torch.no_grad():
            torch.distributions.Distribution.set_default_validate_args(False)
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
    """Where posteriors were evaluated, a row a replicate.

    Attributes
    ----------
    draws : Tensor
        Unconstrained, ``(R, S, d)``.
    loss, log_prior : Tensor
        There, ``(R, S)``.
    log_proposal : Tensor
        Log density that they were drawn from, up to a constant, ``(R, S)``.
    """

    draws: Tensor
    loss: Tensor
    log_prior: Tensor
    log_proposal: Tensor

    def log_density(self, weight: Tensor) -> Tensor:
        """Return the posteriors' log densities at learning rates ``(R,)``, not normalised, ``(R, S)``."""
        return -weight[:, None] * self.loss + self.log_prior

    def log_ratio(self, weight: Tensor) -> Tensor:
        """Return log importance weights at learning rates ``(R,)``, not normalised, ``(R, S)``."""
        ratio = self.log_density(weight) - self.log_proposal
        return ratio.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def adapted_draws(
    losses: ReplicateLosses, fits: QuadraticFits, weight: Tensor, num_draws: int, seed: int
) -> tuple[QuadraticFits, Points]:
    """Draw about normal approximations, fitted anew to the weighted draws while that makes weights more even.

    Parameters
    ----------
    losses : ReplicateLosses
    fits : QuadraticFits
    weight : Tensor
        Learning rates, ``(R,)``.
    num_draws : int
    seed : int

    Returns
    -------
    fits : QuadraticFits
        Those that the draws were made about.
    points : Points
    """
    generator = new_generator(seed, stream="replicate posteriors")
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        points = _drawn(losses, fits, weight, num_draws, generator)
        score = _score(points, weight)
        for _ in range(ROUNDS):
            rows = (score < MIN_SHARE).nonzero().squeeze(-1)
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
            fits = QuadraticFits(*(a.index_copy(0, kept, b[better]) for a, b in zip(fits, trial_fits, strict=True)))
            points = Points(*(a.index_copy(0, kept, b[better]) for a, b in zip(points, trial, strict=True)))
            score = score.index_copy(0, kept, trial_score[better])
    return fits, points


def in_chunks(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Return a function of one vector ``(d,)`` at all of ``points (R, S, d)``, ``(R, S, ...)``."""
    batched = vmap(function)
    flat = torch.cat([batched(chunk) for chunk in points.flatten(0, 1).split(VALUES_AT_ONCE // 8)])
    return flat.unflatten(0, points.shape[:2])


def pareto_shape(log_ratio: Tensor) -> Tensor:
    """Return Pareto ``k`` of importance weights, ``(R, S) -> (R,)``, a bounded number of rows at a time."""
    return torch.cat([pareto_smoothed(rows)[1] for rows in log_ratio.split(ROWS_AT_ONCE)]).to(log_ratio)


def _drawn(
    losses: ReplicateLosses, fits: QuadraticFits, weight: Tensor, num_draws: int, generator: torch.Generator
) -> Points:
    """Draw from Student-t distributions about the fits, the same uniform numbers for every replicate."""
    mean, precision = fits.normal(weight)
    standard, log_proposal = (x.to(mean) for x in _student(num_draws, mean.shape[-1], generator))
    lower = torch.linalg.cholesky(precision)
    offsets = torch.linalg.solve_triangular(lower.mT, standard.mT.expand(len(mean), -1, -1), upper=True)
    draws = mean[:, None] + offsets.mT
    log_proposal = log_proposal + lower.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
    return Points(draws, losses(draws), in_chunks(losses.posterior.prior.log_density, draws), log_proposal)


def _student(num_draws: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return quasi-random draws ``(S, d)`` of a standard multivariate t, and their log densities up to a constant."""
    df = DEGREES_OF_FREEDOM
    standard = student_points(num_draws, dim, df, generator)
    return standard, -0.5 * (df + dim) * torch.log1p(standard.square().sum(-1) / df)


def _score(points: Points, weight: Tensor) -> Tensor:
    """Return the share of effective draws, below zero where even that cannot be relied on, ``(R,)``."""
    log_ratio = points.log_ratio(weight)
    share = (weight_effective_sample_size(log_ratio) / log_ratio.shape[-1]).nan_to_num(0.0)
    return torch.where(pareto_shape(log_ratio) <= MAX_SHAPE, share, share - 1)


def _moments(points: Points, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted means and covariances; weights too uneven to carry them are flattened by a power."""
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


def _some(points: Points, rows: Tensor) -> Points:
    return Points(*(x[rows] for x in points))


def _rows(x: Any, rows: Any) -> Any:
    if x is None:
        return None
    return tuple(part[rows] for part in x) if isinstance(x, tuple) else x[rows]
