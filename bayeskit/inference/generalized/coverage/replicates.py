"""The posteriors of many data sets, or of many weightings of one, as a single batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from bayeskit._settings import real_number, whole_number
from bayeskit._torch import validation_kept
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized.coverage.functionals import Functional
from bayeskit.inference.generalized.coverage.quadratic_fits import QuadraticFits, quadratic_fits, squared_distance
from bayeskit.inference.generalized.coverage.replicate_draws import (
    MAX_SHAPE,
    Points,
    ReplicateLosses,
    adapted_draws,
    in_chunks,
    pareto_shape,
)
from bayeskit.inference.generalized.losses.loss import Data
from bayeskit.inference.generalized.pooling import Sum
from bayeskit.inference.generalized.posterior import GibbsPosterior


@dataclass(frozen=True, eq=False)
class ReplicatePosteriors:
    """Posteriors of many data sets or weightings, at any learning rate, by importance sampling.

    All replicates share the uniform numbers behind their draws, and all learning rates the draws, so that whatever
    is computed from them varies smoothly with the learning rate. The normal approximation of each posterior serves
    as control variate: what is known of it exactly replaces its own estimate from the same draws.

    Made by :func:`replicate_posteriors`.

    Attributes
    ----------
    losses : ReplicateLosses
    weight : Tensor
        Learning rates that the draws are made for, ``(R,)``; far from them importance weights get uneven.
    fits : QuadraticFits
        Their normal approximations.
    points : Points
        The draws, and losses and densities there.
    """

    losses: ReplicateLosses
    weight: Tensor
    fits: QuadraticFits
    points: Points

    @property
    def draws(self) -> Tensor:
        """Draws of the proposals, unconstrained, ``(R, S, d)``: to be weighted."""
        return self.points.draws

    @property
    def num_replicates(self) -> int:
        """Number of data sets or weightings."""
        return len(self.draws)

    @cached_property
    def pareto_shape(self) -> Tensor:
        """Pareto ``k`` of the importance weights, ``(R,)``: above 0.7 a replicate cannot be relied on."""
        return self.pareto_shape_at(self.weight)

    @property
    def trusted(self) -> Tensor:
        """Whether a replicate's mode was found and its importance weights can be relied on, ``(R,)``."""
        return (self.pareto_shape <= MAX_SHAPE) & self.fits.converged

    def pareto_shape_at(self, weight: float | Tensor) -> Tensor:
        """Return Pareto ``k`` of the importance weights that lead to other learning rates, ``(R,)``."""
        return pareto_shape(self.points.log_ratio(self._weight(weight)))

    def taken(self, rows: Tensor) -> ReplicatePosteriors:
        """Return some of the replicates."""
        fits = QuadraticFits(*(x[rows] for x in self.fits))
        points = Points(*(x[rows] for x in self.points))
        return ReplicatePosteriors(self.losses.taken(rows), self.weight[rows], fits, points)

    def replaced(self, rows: Tensor, new: ReplicatePosteriors) -> ReplicatePosteriors:
        """Return the same posteriors with the fits and draws of some replicates taken from ``new``."""
        return ReplicatePosteriors(
            self.losses,
            self.weight.index_copy(0, rows, new.weight),
            QuadraticFits(*(a.index_copy(0, rows, b) for a, b in zip(self.fits, new.fits, strict=True))),
            Points(*(a.index_copy(0, rows, b) for a, b in zip(self.points, new.points, strict=True))),
        )

    def redrawn(self, weight: float | Tensor, seed: int = 0) -> ReplicatePosteriors:
        """Return the same posteriors with draws made for another learning rate."""
        new = _as_weight(weight, self.weight)
        fits, points = adapted_draws(self.losses, self.fits, new, self.draws.shape[1], seed)
        return ReplicatePosteriors(self.losses, new, fits, points)

    def evaluated_at(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each replicate, ``(R,)``, and the log prior, ``()``, at one vector ``(d,)``."""
        loss = self.losses(u.expand(self.num_replicates, 1, -1))[:, 0]
        with validation_kept(), torch.no_grad():
            torch.distributions.Distribution.set_default_validate_args(False)
            return loss, self.losses.posterior.prior.log_density(u)

    def hpd_level(
        self,
        u: Tensor,
        weight: float | Tensor | None = None,
        *,
        evaluated: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the level at which a point enters each highest-posterior-density region, ``(R,)``.

        It is the posterior mass of the points of higher density, in unconstrained coordinates: uniform over
        replicates where regions cover the point as often as they say.

        Parameters
        ----------
        u : Tensor
            Unconstrained, ``(d,)``.
        weight : float or Tensor, optional
            Learning rate, one for all or ``(R,)``; by default that of the draws.
        evaluated : (Tensor, Tensor), optional
            ``self.evaluated_at(u)``, where it is known.
        """
        weight = self._weight(weight)
        level, approximate = self._normalised(weight)
        loss, log_prior = self.evaluated_at(u) if evaluated is None else evaluated
        at = -weight * loss + log_prior
        higher = self.points.log_density(weight) > at[:, None]
        mean, precision = self.fits.normal(weight)
        squared = squared_distance(u - mean[:, None], precision)  # (R, 1)
        nearer = squared_distance(self.draws - mean[:, None], precision) < squared
        exact = torch.special.gammainc(torch.full_like(at, 0.5 * u.shape[-1]), 0.5 * squared[:, 0])
        return _corrected(level, higher, approximate, nearer, exact)

    def evaluated(self, functional: Functional) -> Tensor:
        """Return a functional of ``k`` numbers at the draws, ``(R, S, k)``."""
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            return in_chunks(functional, self.draws)

    def probability_below(
        self,
        functional: Functional,
        value: Tensor,
        weight: float | Tensor | None = None,
        *,
        evaluated: Tensor | None = None,
    ) -> Tensor:
        """Return the posterior probability that a functional is at most ``value``, ``(R, k)``.

        Parameters
        ----------
        functional : Functional
            Of ``k`` numbers.
        value : Tensor
            Shape ``(k,)``.
        weight : float or Tensor, optional
            As in :meth:`hpd_level`.
        evaluated : Tensor, optional
            ``self.evaluated(functional)``, where it is known.
        """
        each = self.evaluated(functional) if evaluated is None else evaluated
        weight = self._weight(weight)
        level, approximate = self._normalised(weight)
        mean, precision = self.fits.normal(weight)
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            centre, slope = vmap(functional)(mean), vmap(functional.jacobian)(mean)
        linear = centre[:, None] + torch.einsum("rkd,rsd->rsk", slope, self.draws - mean[:, None])
        spread = (slope * torch.linalg.solve(precision, slope.mT).mT).sum(-1).sqrt()
        # Where the functional does not move to first order, its linear version is a constant.
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
        """Return the level at which a value enters the equal-tailed interval of each number, ``(R, k)``.

        Parameters
        ----------
        functional, value, weight, evaluated
            As in :meth:`probability_below`.
        """
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
        approximate = -0.5 * squared_distance(self.draws - mean[:, None], precision) - self.points.log_proposal
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
    """Approximate the posteriors of many data sets, or of many weightings of one, all in one batch.

    Each posterior's mode and curvature give a multivariate Student-t; draws from it are weighted to the posterior.
    Where the weights turn out uneven, the t is fitted anew to the weighted draws, a few times if need be.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses that add up. Its weight counts only where no other is given.
    weights : Tensor, optional
        How often each datum counts, ``(R, n)``, such as the counts of a bootstrap.
    data : Tensor or tuple of Tensor, optional
        Data sets ``(R, n, ...)`` in place of the posterior's own.
    weight : float or Tensor, optional
        Learning rate, one for all or one each, ``(R,)``.
    num_draws : int, default 1024
        Of each replicate. Powers of two suit the quasi-random numbers behind them.
    seed : int, default 0

    Returns
    -------
    ReplicatePosteriors

    Raises
    ------
    SettingsError
        If neither weights nor data are given, losses do not add up, or a learning rate is not positive.
    ShapeError
        If shapes do not fit.

    References
    ----------
    Geweke, J. (1989). Bayesian inference in econometric models using Monte Carlo integration. Econometrica 57,
    1317-1339.

    Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto smoothed importance sampling. Journal of
    Machine Learning Research 25(72).

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
    if weights is None and data is None:
        raise SettingsError("give weights= or data=, a row or data set for each replicate")
    if not isinstance(posterior.pooling, Sum):
        raise SettingsError(
            f"replicates need losses that add up, not ones pooled by {type(posterior.pooling).__name__}"
        )
    num_draws = whole_number("num_draws", num_draws, least=32)
    losses = ReplicateLosses(posterior, weights, data)
    like = torch.zeros(losses.num_replicates, dtype=posterior.dtype, device=posterior.device)
    each = _as_weight(posterior.weight if weight is None else weight, like)
    fits = quadratic_fits(posterior, weights, data, float(each.log().mean().exp()), seed)
    return ReplicatePosteriors(losses, each, *adapted_draws(losses, fits, each, num_draws, seed))


def _corrected(exact: Tensor, event: Tensor, approximate: Tensor, linear: Tensor, known: Tensor) -> Tensor:
    """Estimate a probability, corrected by how far the same draws miss a known one."""
    return (torch.where(event, exact, 0.0).sum(-1) - torch.where(linear, approximate, 0.0).sum(-1) + known).clamp(0, 1)


def _as_weight(weight: float | Tensor, like: Tensor) -> Tensor:
    """Return positive learning rates, one a replicate."""
    if not isinstance(weight, Tensor) or weight.dim() == 0:
        return torch.full_like(like, real_number("weight", weight, between=(0.0, math.inf)))
    if weight.shape != like.shape:
        raise ShapeError(f"weight must be a number or ({len(like)},), not {tuple(weight.shape)}")
    if not bool(((weight > 0) & weight.isfinite()).all()):
        raise SettingsError("every weight must be a positive number")
    return weight.to(like)
