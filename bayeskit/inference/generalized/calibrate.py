"""Selectors of the learning rate; they calibrate different targets, named in the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import draw_values, global_stream, new_generator, one_thread, real_number, whole_number
from bayeskit.inference.generalized._bootstrap import dirichlet
from bayeskit.inference.generalized._coverage import (
    MAX_SHAPE,
    Functional,
    ReplicatePosteriors,
    as_functional,
    replicate_posteriors,
    unreliable_replicates,
)
from bayeskit.inference.generalized._minimizer import (
    InformationMatrices,
    hessian_of_loss,
    influence,
    information_matrices,
    minimize,
    residual_spread,
    smooth_total,
)
from bayeskit.inference.generalized._posterior import GibbsPosterior, check_pooled_by_sum
from bayeskit.inference.generalized.losses._densities import Model, law_of
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._loss import Data, PointwiseLoss, columns, taken, unvalidated

__all__ = [
    "Curve",
    "OwnWeights",
    "Selection",
    "all_resamples",
    "bootstrap_counts",
    "bootstrap_score_matching",
    "converged_rows",
    "held_out_predictive",
    "holmes_walker",
    "information_matching",
    "on_kinks",
    "posterior_coverage",
    "replicate_weights",
    "resampled",
    "safe_bayes",
    "weighted_likelihood_bootstrap_matching",
]

# The result of a selector of the learning rate: the weight, its criterion and diagnostics.


class Curve(NamedTuple):
    """Criterion of a selector at each ``weights (g,)`` of a grid: ``values`` and ``standard_errors``, and its name."""

    weights: Tensor
    values: Tensor
    standard_errors: Tensor | None
    label: str


@dataclass(frozen=True)
class Selection:
    """Selected learning rate with its criterion and diagnostics.

    Selectors calibrate different targets: their weights need not agree and do not estimate a common quantity.

    Attributes
    ----------
    weight : float
        Learning rate.
    target : str
        Description of the property that the weight calibrates.
    method : str
        Name of the selector.
    source : GibbsPosterior
        Posterior for which the weight was selected; its own weight has no effect.
    standard_error : float
        Simulation error of the weight given the data: zero if nothing is simulated, nan if unknown.
    diagnostics : dict
        Intermediate results, listed by each selector.
    warnings : tuple of str
        Violated assumptions, each with a remedy.
    curve : Curve or None
        Criterion against the weight, if several weights were compared.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> source = GibbsPosterior(dist.Normal(0.0, 9.0), losses.HalfSquared(), x)
    >>> chosen = Selection(0.25, "The variance of the minimiser.", "by_hand", source)
    >>> chosen
    Selection(weight=0.25, method='by_hand', target='The variance of the minimiser.')
    >>> chosen.posterior.weight
    0.25
    """

    weight: float
    target: str
    method: str
    source: GibbsPosterior = field(repr=False)
    standard_error: float = 0.0
    diagnostics: dict[str, Any] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()
    curve: Curve | None = field(default=None, repr=False)

    @property
    def trusted(self) -> bool:
        """Whether there are no warnings."""
        return not self.warnings

    @property
    def posterior(self) -> GibbsPosterior:
        """Posterior with the selected weight."""
        return self.source.with_weight(self.weight)

    def plot(self, ax: Any = None) -> Any:
        """Plot the criterion against the weight and return the axes; SettingsError if the selector has no curve."""
        if self.curve is None:
            raise SettingsError(f"there is no curve to plot: {self.method} does not compare several weights")
        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots()[1]
        weights, values, errors, label = self.curve
        ax.errorbar(weights.numpy(), values.numpy(), None if errors is None else errors.numpy(), marker="o")
        ax.axvline(self.weight, color="black", linestyle=":", label=f"chosen: {self.weight:.3g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel=label)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        error = f", standard_error={self.standard_error:.2g}" if self.standard_error > 0 else ""
        warned = f", warnings={list(self.warnings)}" if self.warnings else ""
        return f"Selection(weight={self.weight:.6g}{error}, method={self.method!r}, target={self.target!r}{warned})"


# Assumptions that selectors check, with their warnings.

_DATA_PER_UNKNOWN = 10
_MAX_CONDITION = 1e8
_MIN_CONVERGED = 0.5
_NEAR_KINK = 1e-4  # in units of the residual scale
_MAX_ON_KINKS = 0.1
_MIN_VARIATION = 1e-6  # of minimisers, in units of their asymptotic variance


def _pointwise_loss(posterior: GibbsPosterior) -> PointwiseLoss:
    """Return the loss of the posterior; SettingsError unless it is a PointwiseLoss pooled by the sum."""
    check_pooled_by_sum(posterior)
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} is not a sum over observations, so it has no pointwise losses; use "
            "bootstrap_score_matching or weighted_likelihood_bootstrap_matching"
        )
    return posterior.loss


def _model_of(loss: PointwiseLoss, model: Model | None) -> Model | None:
    """Return the given model, by default that of a negative log likelihood."""
    return loss.distribution if model is None and isinstance(loss, NegativeLogLikelihood) else model


def _few_data(posterior: GibbsPosterior) -> tuple[str, ...]:
    """Return a warning if there are few observations per unknown."""
    if posterior.num_data >= _DATA_PER_UNKNOWN * posterior.dim:
        return ()
    return (
        f"{posterior.num_data} observations are few for {posterior.dim} unknowns: the weight is justified only "
        "asymptotically; check it with coverage_report",
    )


def _ill_conditioned(information: InformationMatrices) -> tuple[str, ...]:
    """Return a warning for each nearly singular information matrix."""
    named = {
        "mean Hessian of the loss": information.mean_hessian,
        "covariance of its gradients": information.gradient_covariance,
    }
    return tuple(
        f"the {name} is nearly singular; rescale covariates, or drop collinear ones"
        for name, matrix in named.items()
        if not bool(torch.linalg.cond(matrix) <= _MAX_CONDITION)
    )


def converged_rows(converged: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return indices of converged rows and a warning if rows are missing; DataError if under half converged."""
    rows, lost = converged.nonzero()[:, 0], int((~converged).sum())
    if len(rows) < _MIN_CONVERGED * len(converged):
        raise DataError(
            f"the loss minimiser was not found in {lost} of {len(converged)} replicates: the data may not identify all "
            "unknowns; drop unknowns, or run propriety_check"
        )
    if not lost:
        return rows, ()
    return rows, (
        f"{lost} of {len(converged)} minimisations did not converge and were left out, which favours large weights; "
        "run propriety_check",
    )


def on_kinks(posterior: GibbsPosterior, position: Tensor) -> tuple[str, ...]:
    """Return a warning if many observations, such as tied ones, lie on a kink of the loss at ``position (d,)``."""
    loss = posterior.loss
    if not isinstance(loss, PointwiseLoss) or loss.smoothed(1.0) is loss:
        return ()
    width = _NEAR_KINK * float(residual_spread(posterior, position))
    parameter = posterior.prior.parameter(position)
    plain = loss.pointwise(parameter, posterior.data)
    wide, narrow = (
        (loss.smoothed(w).pointwise(parameter, posterior.data) - plain).abs()  # type: ignore[attr-defined]
        for w in (width, width / 2)
    )
    # Halving the width halves the smoothing error at a kink, and divides it by four away from kinks.
    # Without ties, a minimiser lies on up to d kinks.
    tied = int(((wide > 0.1 * wide.max()) & (narrow > 0.4 * wide)).sum())
    if tied <= _MAX_ON_KINKS * posterior.num_data + posterior.dim:
        return ()
    return (
        f"{tied} of {posterior.num_data} data lie on a kink of the loss at its minimiser: with tied or rounded data "
        "the curvature of the expected loss cannot be estimated; use a smooth loss, such as Huber",
    )


def _check_minimizers_vary(posterior: GibbsPosterior, position: Tensor, covariance: Tensor) -> None:
    """Raise DataError if the covariance ``(d, d)`` of bootstrap minimisers is far below the sandwich."""
    with one_thread(), unvalidated():
        each, hessian = influence(posterior, position), hessian_of_loss(posterior, position)
    centred = each - each.mean(0)
    lower, failed = torch.linalg.cholesky_ex(centred.mT @ centred / len(each))
    if int(failed):  # singular sandwich: no comparison possible
        return
    half = torch.linalg.solve_triangular(lower, hessian, upper=False)
    ratio = len(each) * half @ covariance @ half.mT
    if not bool(torch.linalg.eigvalsh(0.5 * (ratio + ratio.mT)).min() > _MIN_VARIATION):
        raise DataError(
            "the bootstrap minimisers hardly vary in some direction, so their spread does not determine a learning "
            "rate; if tied or rounded data lie on a kink of the loss, use a smooth loss, such as Huber; otherwise "
            "check whether the data are fitted without error"
        )


# Grids of learning rates, and the posteriors of training sets at each of them.

_OCTAVES = 6
_MAX_UNTRUSTED = 0.01
_NUMBERS_AT_ONCE = 2**22


def _as_grid(posterior: GibbsPosterior, grid: Sequence[float] | Tensor | None) -> Tensor:
    """Return increasing learning rates ``(g,)``, by default octaves around mean curvature over gradient variance."""
    if grid is None:
        found = information_matrices(posterior)
        hessian = found.mean_hessian
        # If ``I`` is a multiple of ``J``, this is the weight of information matching; it needs no inverse.
        centre = torch.trace(hessian) / torch.trace(found.gradient_covariance)
        return centre * 2.0 ** torch.arange(-_OCTAVES, _OCTAVES + 1, dtype=posterior.dtype, device=posterior.device)
    values = [real_number("grid", x, "(0, inf)") for x in grid]
    if len(set(values)) < 2:
        raise SettingsError("grid must have at least two different weights")
    return torch.tensor(sorted(set(values)), dtype=posterior.dtype, device=posterior.device)


class _PartPosteriors(NamedTuple):
    """Posteriors of training sets at each learning rate."""

    replicates: ReplicatePosteriors  # p * g rows: all learning rates of the first training set, then of the second, ...
    log_weights: Tensor  # (p * g, S): normalised importance weights of the draws
    warnings: tuple[str, ...]


def _part_posteriors(
    posterior: GibbsPosterior, parts: Tensor, grid: Tensor, num_draws: int, seed: int
) -> _PartPosteriors:
    """Compute the posteriors of training sets, 0-1 rows ``(p, n)``, at all learning rates in one batch."""
    weight = grid.repeat(len(parts))
    weights = parts.to(grid).repeat_interleave(len(grid), 0)
    found = replicate_posteriors(posterior, weights=weights, weight=weight, num_draws=num_draws, seed=seed)
    lost = int((~found.trusted).sum())
    warnings: tuple[str, ...] = ()
    if lost > _MAX_UNTRUSTED * len(weight):
        warnings = (
            f"importance sampling is unreliable for {lost} of {len(weight)} posteriors of training sets; use more "
            "draws, a narrower grid, or larger training sets",
        )
    return _PartPosteriors(found, found.points.log_ratio(weight).log_softmax(-1), warnings)


def _losses_at(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: Data) -> Tensor:
    """Return the losses ``(R, S, m)`` of each row's data ``(R, m, ...)`` at draws ``(R, S, d)``."""

    def one(u: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        return loss.pointwise(posterior.prior.parameter(u), own if isinstance(data, tuple) else own[0])

    size = columns(data)[0].shape[1] * draws.shape[1]
    with one_thread(), unvalidated(), torch.no_grad():
        batched = vmap(vmap(one, in_dims=(0, None)), chunk_size=max(1, _NUMBERS_AT_ONCE // size))
        result: Tensor = batched(draws, columns(data))
    return result


def _at_edge(grid: Tensor, chosen: int, *, lowest_only: bool = False) -> tuple[str, ...]:
    """Return a warning if the best weight is the first or last of the grid."""
    if chosen == 0 or (chosen == len(grid) - 1 and not lowest_only):
        side = "smallest" if chosen == 0 else "largest"
        return (f"the {side} weight of the grid, {float(grid[chosen]):.4g}, is best; extend the grid on that side",)
    return ()


def _score_curve(weights: Tensor, scores: Tensor, total: Tensor, best: int, label: str) -> Curve:
    """Return the curve of summed ``scores (g, n)``, with errors of the difference from the best weight."""
    return Curve(weights, total, (scores - scores[best]).std(-1) * scores.shape[1] ** 0.5, label)


# Resamples of the data, as counts of each observation.

_MOST_RESAMPLES = 10**6


def resampled(num_data: int, num_replicates: int, generator: torch.Generator) -> Tensor:
    """Return counts ``(R, n)`` of the observations in random resamples with replacement."""
    chosen = torch.randint(num_data, (num_replicates, num_data), generator=generator)
    counts = torch.zeros(num_replicates, num_data, dtype=torch.float64)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))


def all_resamples(num_data: int) -> Tensor:
    """Return the counts of each observation in all ``n**n`` resamples, which are equally probable, ``(n**n, n)``.

    Raises
    ------
    SettingsError
        If ``num_data`` is not between 1 and 7.

    Examples
    --------
    >>> all_resamples(2)
    tensor([[2., 0.],
            [1., 1.],
            [1., 1.],
            [0., 2.]], dtype=torch.float64)
    """
    if num_data < 1 or num_data**num_data > _MOST_RESAMPLES:
        raise SettingsError(f"the resamples of {num_data} observations cannot be enumerated; draw random ones")
    chosen = torch.cartesian_prod(*[torch.arange(num_data)] * num_data).reshape(-1, num_data)
    return torch.nn.functional.one_hot(chosen, num_data).sum(1).double()


# Own weight of a replicate: the largest learning rate at which its region covers the truth.

_DOUBLINGS = 10  # own weights are searched within a factor of 1,000 of the weight of the draws
_HALVINGS = 30


class OwnWeights(NamedTuple):
    """Own weight of each replicate, ``(R,)``: the largest learning rate at which its region covers the truth.

    It is zero if the region covers at none of the weights searched, and infinite if it covers at all. ``pareto_shape
    (R,)`` is the Pareto ``k`` of the importance weights there, or at the last weight searched; ``trusted (R,)`` tells
    whether it is at most 0.7 and the mode was found.
    """

    weight: Tensor
    pareto_shape: Tensor
    trusted: Tensor


def replicate_weights(
    replicates: ReplicatePosteriors,
    truth: Tensor,
    level: float,
    functional: Functional | None = None,
    *,
    seed: int = 0,
) -> OwnWeights:
    """Return the largest learning rate at which each replicate's region covers the unconstrained ``truth (d,)``."""
    # Bracket outward from the weight of the draws, then bisect on the log scale. The region is the
    # highest-posterior-density region, or the equal-tailed interval of the functional.
    replicates, near, far, covered, changed = _bracketed(replicates, truth, level, functional, seed)
    low, high = torch.minimum(near, far).log(), torch.maximum(near, far).log()
    evaluated = _Evaluated(replicates, truth, functional)
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        inside = evaluated.entry_level(middle.exp()) <= level
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    inner = torch.where(changed, (0.5 * (low + high)).exp(), far)
    shape = replicates.pareto_shape_at(inner)
    own = torch.where(changed, inner, torch.where(covered, torch.inf, 0.0))
    return OwnWeights(own, shape, (shape <= MAX_SHAPE) & replicates.fits.converged)


def _bracketed(
    replicates: ReplicatePosteriors, truth: Tensor, level: float, functional: Functional | None, seed: int
) -> tuple[ReplicatePosteriors, Tensor, Tensor, Tensor, Tensor]:
    """Return the replicates, redrawn where necessary, the last two weights, and where coverage holds and changed."""
    near, far = replicates.weight.clone(), replicates.weight.clone()
    covered = _Evaluated(replicates, truth, functional).entry_level(near) <= level
    factor = torch.where(covered, 2.0, 0.5).to(near)
    changed, rows = torch.zeros_like(covered), torch.arange(len(near), device=near.device)
    for _ in range(_DOUBLINGS):
        far[rows] = far[rows] * factor[rows]
        weight, some = far[rows], replicates.taken(rows)
        usable = some.pareto_shape_at(weight) <= MAX_SHAPE
        lost = (~usable).nonzero()[:, 0]
        if len(lost):
            fresh = some.taken(lost).redrawn(weight[lost], seed=seed)
            some, replicates = some.replaced(lost, fresh), replicates.replaced(rows[lost], fresh)
            usable[lost] = fresh.pareto_shape <= MAX_SHAPE
        # If new draws are unreliable too, coverage at this weight is unknown and ignored.
        inside = _Evaluated(some, truth, functional).entry_level(weight) <= level
        now = usable & (inside != covered[rows])
        changed[rows[now]] = True
        same = usable & ~now
        near[rows[same]] = weight[same]
        rows = rows[~now]
        if not len(rows):
            break
    return replicates, near, far, covered, changed


class _Evaluated:
    """Entry levels of the truth, with evaluations shared by all learning rates."""

    def __init__(self, replicates: ReplicatePosteriors, truth: Tensor, functional: Functional | None) -> None:
        self.replicates, self.truth, self.functional = replicates, truth, functional
        if functional is None:
            self.there = replicates.evaluated_at(truth)
        else:
            self.value, self.each = functional(truth), replicates.evaluated(functional)

    def entry_level(self, weight: Tensor) -> Tensor:
        """Return the level at which the truth enters each region at learning rates ``(R,)``."""
        if self.functional is None:
            return self.replicates.hpd_level(self.truth, weight, evaluated=self.there)
        return self.replicates.central_level(self.functional, self.value, weight, evaluated=self.each)[:, 0]


# Bootstrap score matching: least Fisher divergence from the bootstrap distribution of the minimiser.

_SCORES_AT_ONCE = 2**22


def bootstrap_score_matching(
    posterior: GibbsPosterior, *, num_replicates: int = 1000, resamples: Tensor | None = None, seed: int = 0
) -> Selection:
    r"""Minimise the Fisher divergence between the bootstrap distribution of the minimiser and the posterior.

    With :math:`\theta_b` the loss minimisers of resampled data, :math:`\pi` the prior density and :math:`D` the total
    loss of the observed data, the divergence is quadratic in the weight with minimum

    .. math:: w = \frac{\sum_b \mathrm{tr} \nabla^2 D(\theta_b) + \nabla D(\theta_b) \cdot \nabla \log \pi(\theta_b)}
                       {\sum_b \|\nabla D(\theta_b)\|^2}.

    Derivatives are taken in unconstrained coordinates; a loss with kinks is smoothed.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight has no effect; its prior has.
    num_replicates : int, default 1000
        Number of random resamples, minimised in one batch.
    resamples : Tensor, optional
        Counts of each observation in each resample, ``(R, n)``, in place of random resamples; for instance
        :func:`~bayeskit.inference.generalized.calibrate.all_resamples` for the exact bootstrap.

    Returns
    -------
    Selection
        Diagnostics: ``"minimizers" (R, d)``, ``"converged" (R,)`` and ``"num_replicates"``. The standard error is
        zero if ``resamples`` is given.

    Raises
    ------
    DataError
        If most minimisations fail, minimisers hardly vary, or the minimum is not at a positive weight.
    SettingsError
        If losses are not pooled by the sum.
    ShapeError
        If ``resamples`` is not ``(R, n)``.

    References
    ----------
    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2024). Generalized Bayesian inference for discrete
    intractable likelihood. JASA 119, 2345-2355.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> from bayeskit.inference.generalized.calibrate import all_resamples
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    >>> round(bootstrap_score_matching(posterior, resamples=all_resamples(4)).weight, 6)
    0.105263
    """
    check_pooled_by_sum(posterior)
    if resamples is None:
        num_replicates = whole_number("num_replicates", num_replicates, least=2)
        weights = resampled(posterior.num_data, num_replicates, new_generator(seed, stream="bootstrap score matching"))
    elif resamples.dim() == 2 and resamples.shape[1] == posterior.num_data:
        weights = resamples
    else:
        raise ShapeError(f"resamples must be (R, {posterior.num_data}), not {tuple(resamples.shape)}")
    centre = minimize(posterior, seed=seed).position
    found = minimize(posterior, weights=weights.to(centre), start=centre, seed=seed)
    rows, warnings = converged_rows(found.converged)
    _check_minimizers_vary(posterior, centre, _covariance(found.position[rows]))
    trace, below, along = _derivatives(posterior, centre, found.position[rows])
    above = trace + along
    weight = float(above.sum() / below.sum())
    if not 0 < weight < float("inf"):
        raise DataError(
            f"the Fisher divergence from the bootstrap has its minimum at weight {weight:.3g}, which is not positive "
            "and finite: the prior is narrower than the bootstrap distribution, or the data are fitted without error; "
            "use a wider prior"
        )
    residual = (above - weight * below) / below.mean()
    return Selection(
        weight=weight,
        target="The bootstrap law of the loss minimiser: the posterior nearest to it in Fisher divergence.",
        method="bootstrap_score_matching",
        source=posterior,
        standard_error=0.0 if resamples is not None else float(residual.std()) / len(rows) ** 0.5,
        diagnostics={"minimizers": found.position, "converged": found.converged, "num_replicates": len(weights)},
        warnings=_few_data(posterior) + warnings + on_kinks(posterior, centre),
    )


def _covariance(position: Tensor) -> Tensor:
    away = position - position.mean(0)
    return away.mT @ away / len(position)


def _derivatives(posterior: GibbsPosterior, centre: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Laplacian of the loss, its squared gradient norm and its gradient times the prior score, ``(R,)``."""
    with one_thread(), unvalidated(), torch.no_grad():
        total = smooth_total(posterior, centre)

        def first(u: Tensor) -> tuple[Tensor, Tensor]:
            gradient, _ = grad_and_value(total)(u)
            return gradient, gradient

        def one(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            curvature, gradient = jacrev(first, has_aux=True)(u)
            score = grad(posterior.prior.log_density)(u)
            return torch.trace(curvature), gradient.square().sum(), gradient @ score

        at_once = max(1, _SCORES_AT_ONCE // (posterior.num_data * posterior.dim))
        result: tuple[Tensor, Tensor, Tensor] = vmap(one, chunk_size=at_once)(position)
    return result


# Held-out predictive score.


def held_out_predictive(
    posterior: GibbsPosterior,
    *,
    grid: Sequence[float] | Tensor | None = None,
    num_folds: int = 10,
    model: Model | None = None,
    num_draws: int = 512,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight with the best held-out predictive score in K-fold cross-validation.

    With a predictive density ``f`` the score of a held-out observation is :math:`-\log \int f(x \mid
    \theta)\,\pi_w(\theta \mid x_{\mathrm{train}}) d\theta`; without one it is the posterior expectation of its loss.
    The expected loss favours narrow posteriors, so the selected weight is large unless the prior is informative: use
    it to balance prior and data, not to quantify uncertainty. **Neither score calibrates coverage.**

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with a pointwise loss; its weight has no effect.
    grid : sequence of float, optional
        Learning rates to compare. The default is thirteen powers of two times the ratio of mean curvature to gradient
        variance, so that a rescaled loss has an inversely rescaled grid.
    num_folds : int, default 10
        Number of folds, at least two.
    model : callable, optional
        Predictive density ``parameter -> distribution`` of one observation, or ``(parameter, *covariates) ->
        distributions``; by default the model of a ``NegativeLogLikelihood``.
    num_draws : int, default 512
        Importance-sampling draws for each fold and weight.

    Returns
    -------
    Selection
        ``curve`` has the summed scores; its standard errors refer to the difference from the best weight, over
        observations. Diagnostics: ``"scores" (g, n)`` and ``"num_folds"``. The standard error is nan.

    Raises
    ------
    DataError
        If no weight has a finite score.
    SettingsError
        If there are more folds than observations, or the loss is not pointwise or not pooled by the sum.

    References
    ----------
    Geisser, S., Eddy, W. F. (1979). A predictive approach to model selection. JASA 74, 153-160. Wu, P.-S., Martin, R.
    (2023). A comparison of learning rate selection methods in generalized Bayesian inference. Bayesian Analysis 18,
    105-132.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x)
    >>> unit = held_out_predictive(posterior, grid=[0.1, 1.0, 10.0], num_folds=6, model=lambda m: dist.Normal(m, 1.0))
    >>> unit.method, unit.curve.values.shape
    ('held_out_predictive', torch.Size([3]))
    """
    loss = _pointwise_loss(posterior)
    num_folds = whole_number("num_folds", num_folds, least=2)
    if num_folds > posterior.num_data:
        raise SettingsError(f"num_folds must be at most {posterior.num_data}, the number of data, not {num_folds}")
    weights = _as_grid(posterior, grid)
    generator = new_generator(seed, stream="folds")
    fold = torch.randperm(posterior.num_data, generator=generator).to(weights.device) % num_folds
    training = fold != torch.arange(num_folds, device=fold.device)[:, None]
    parts = _part_posteriors(posterior, training, weights, num_draws, seed)
    model = _model_of(loss, model)
    density = None if model is None else NegativeLogLikelihood(model)
    scores = torch.stack(
        [_scores(posterior, density or loss, parts, training, g, density is not None) for g in range(len(weights))]
    )
    total = scores.sum(-1).nan_to_num(nan=torch.inf)
    best = int(total.argmin())
    if not bool(total[best].isfinite()):
        raise DataError(
            "the held-out score is not finite at any weight of the grid; check that the model's support contains the "
            "data"
        )
    caveat: tuple[str, ...] = ()
    if density is None:
        caveat = (
            "the expected held-out loss favours narrow posteriors and does not measure uncertainty; pass model= for a "
            "predictive density",
        )
    what = "expected loss" if density is None else "minus log predictive density"
    return Selection(
        weight=float(weights[best]),
        target=f"The smallest {what} of held-out data; not coverage.",
        method="held_out_predictive",
        source=posterior,
        standard_error=float("nan"),
        diagnostics={"scores": scores, "num_folds": num_folds},
        warnings=_at_edge(weights, best) + parts.warnings + caveat,
        curve=_score_curve(weights, scores, total, best, f"{what} of held-out data"),
    )


def _scores(
    posterior: GibbsPosterior, loss: PointwiseLoss, parts: _PartPosteriors, training: Tensor, chosen: int, mixed: bool
) -> Tensor:
    """Return the held-out score of each observation at one weight, ``(n,)``: log mixture density or expected loss."""
    folds, num_data = training.shape
    size = len(parts.log_weights) // folds
    rows = torch.arange(folds, device=training.device) * size + chosen
    held_out = ~training
    # Fold sizes differ by at most one: smaller folds are padded with a training observation, whose score is dropped.
    most = int(held_out.sum(-1).max())
    order = held_out.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    each = _losses_at(posterior, loss, parts.replicates.draws[rows], taken(posterior.data, order))
    log_weights = parts.log_weights[rows][..., None]
    score = -(log_weights - each).logsumexp(1) if mixed else (log_weights.exp() * each).nansum(1)
    kept = held_out.gather(1, order)
    result = score.new_empty(num_data)
    result[order[kept]] = score[kept]
    return result


# Holmes and Walker: observed information gain equal to its expectation under the model.

_PAIRS_AT_ONCE = 2**21


def holmes_walker(
    posterior: GibbsPosterior, *, model: Model | None = None, num_draws: int = 4096, seed: int = 0
) -> Selection:
    r"""Match the information gain per observation with its expectation under a model.

    The gain is the Fisher divergence between the prior and the posterior of one observation, :math:`w^2 \int
    \|\nabla_\theta \ell(\theta, x)\|^2 \pi(\theta) d\theta`. Its mean over the data is set equal to the expected gain
    of a Bayesian update with the likelihood ``f``, for data from ``f`` at the loss minimiser :math:`\hat\theta`:

    .. math:: w^2 = \frac{E_{x \sim f(\cdot \mid \hat\theta)} \int \|\nabla \log f(x \mid \theta)\|^2 \pi(\theta)
                    d\theta}{n^{-1} \sum_i \int \|\nabla \ell(\theta, x_i)\|^2 \pi(\theta) d\theta}.

    **It does not calibrate coverage**: with a wide prior the weight is near one whatever the noise. Gradients are taken
    in unconstrained coordinates.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with a proper prior and a pointwise loss; its weight has no effect.
    model : callable, optional
        Model ``f``, as for :func:`held_out_predictive`.
    num_draws : int, default 4096
        Number of prior draws, each with a simulated data set.

    Returns
    -------
    Selection
        Diagnostics: ``"expected_gain"`` (under the model), ``"gain"`` (of the data at weight one) and ``"minimizer"``.

    Raises
    ------
    DataError
        If gains are not finite and positive.
    SettingsError
        If the prior is improper, there is no model, or the loss is not pointwise or not pooled by the sum.

    References
    ----------
    Holmes, C. C., Walker, S. G. (2017). Assigning a value to a power likelihood in a general Bayesian model. Biometrika
    104, 497-503.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(50) * 2  # of variance four
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x)
    >>> chosen = holmes_walker(posterior, model=lambda mean: dist.Normal(mean, 1.0))
    >>> abs(chosen.weight - (2 / 5) ** 0.5) < 5 * chosen.standard_error  # (1 + prior variance) / (4 + prior variance)
    True
    """
    loss = _pointwise_loss(posterior)
    model = _model_of(loss, model)
    if model is None:
        raise SettingsError(
            f"{type(loss).__name__} does not define a model of the data; pass model=, such as "
            "lambda mean: Normal(mean, 1.0)"
        )
    if not posterior.prior.is_proper:
        raise SettingsError("holmes_walker needs a proper prior; this one is improper")
    num_draws = whole_number("num_draws", num_draws, least=2)
    found = minimize(posterior, seed=seed)
    generator = new_generator(seed, stream="holmes walker")
    with one_thread(), unvalidated(), torch.no_grad():
        draws = posterior.prior.start(num_draws, generator).to(posterior.dtype)
        simulated = _simulated(posterior, model, found.position, num_draws, generator)
        expected = _gains(posterior, NegativeLogLikelihood(model), draws, simulated)
        gain = _gains(posterior, loss, draws, None)
    ratio = float(expected.mean() / gain.mean())
    if not 0 < ratio < float("inf"):
        raise DataError(
            "the information gain is not finite and positive; check that the model's support contains the data"
        )
    weight = ratio**0.5
    residual = (expected - ratio * gain) / gain.mean()
    return Selection(
        weight=weight,
        target="The gain of information (Fisher divergence from the prior) that the model expects of a datum.",
        method="holmes_walker",
        source=posterior,
        standard_error=float(residual.std()) / num_draws**0.5 / (2 * weight),
        diagnostics={
            "expected_gain": float(expected.mean()),
            "gain": float(gain.mean()),
            "minimizer": found.position,
        },
        warnings=()
        if bool(found.converged)
        else ("the search for the loss minimiser, where data are simulated, did not converge; try another seed",),
    )


def _simulated(
    posterior: GibbsPosterior, model: Model, position: Tensor, num_sets: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return simulated data sets ``(R, n, ...)`` at one vector ``(d,)``; covariates are not simulated."""
    law, outcomes = law_of(model, posterior.prior.parameter(position), posterior.data)
    shape = outcomes.shape[: outcomes.dim() - len(law.event_shape)]
    with global_stream(generator):
        new = draw_values(law.expand(shape), (num_sets,)).to(outcomes)
    return (*(x.expand(num_sets, *x.shape) for x in columns(posterior.data)[:-1]), new)


def _gains(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: tuple[Tensor, ...] | None) -> Tensor:
    """Return the squared gradient norm of the loss, averaged over observations, at each draw, ``(S,)``."""

    def one(u: Tensor, sets: Any) -> Tensor:
        own: Data = posterior.data if sets is None else sets if isinstance(posterior.data, tuple) else sets[0]
        each = jacrev(lambda u: loss.pointwise(posterior.prior.parameter(u), own))(u)
        return each.square().sum(-1).mean()

    at_once = max(1, _PAIRS_AT_ONCE // posterior.num_data**2)
    result: Tensor = vmap(one, in_dims=(0, None if data is None else 0), chunk_size=at_once)(draws, data)
    return result


# Information matching with the loss-likelihood bootstrap.


def information_matching(posterior: GibbsPosterior, at: Tensor | None = None) -> Selection:
    r"""Match the asymptotic Fisher information of the posterior and of the loss-likelihood bootstrap.

    The asymptotic precision of the bootstrap minimiser is :math:`n J I^{-1} J`, that of the posterior with weight
    ``w`` is :math:`n w J`, where ``I`` is the covariance of the gradient of one observation's loss and ``J`` the mean
    Hessian. Equal traces give

    .. math:: w = \mathrm{tr}(J I^{-1} J) / \mathrm{tr}(J).

    With one unknown, credible intervals have asymptotically nominal coverage. With several unknowns this is not exact
    unless ``I`` is a multiple of ``J``: see :func:`~bayeskit.inference.generalized.residual_mismatch`. The
    trace is taken in unconstrained coordinates and depends on them.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior have no effect.
    at : Tensor, optional
        Unconstrained minimiser of the loss, ``(d,)``; by default searched for. A search may end on a plateau of a
        bounded loss: pass ``minimize(posterior, start=...).position`` then.

    Returns
    -------
    Selection
        Diagnostics: ``"information"`` and ``"num_data"``. Nothing is simulated.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or the data are fitted without error.
    SettingsError
        If losses are not pooled by the sum.

    Notes
    -----
    The curvature of a loss with kinks is a kernel estimate: for the median of normal data the weight has a relative
    standard deviation of about 12 % with 200 observations and 6 % with 1,000.

    References
    ----------
    Lyddon, S. P., Holmes, C. C., Walker, S. G. (2019). General Bayesian updating and the loss-likelihood bootstrap.
    Biometrika 106, 465-478.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(10) * 2  # of variance four
    >>> chosen = information_matching(GibbsPosterior(dist.Normal(0.0, 5.0), losses.HalfSquared(), x))
    >>> round(chosen.weight, 6)
    0.25
    """
    check_pooled_by_sum(posterior)
    found = information_matrices(posterior, at)
    hessian, covariance = found.mean_hessian, found.gradient_covariance
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError(
            "the gradients of the losses do not vary in some direction, so no learning rate can be determined; check "
            "whether the data are fitted without error"
        )
    weight = torch.trace(hessian @ torch.linalg.solve(covariance, hessian)) / torch.trace(hessian)
    return Selection(
        weight=float(weight),
        target=(
            "The asymptotic Fisher information (in trace) of the loss-likelihood bootstrap: with one unknown, "
            "credible intervals that cover the loss minimiser as often as they say."
        ),
        method="information_matching",
        source=posterior,
        diagnostics={"information": found, "num_data": posterior.num_data},
        warnings=_few_data(posterior) + _ill_conditioned(found) + on_kinks(posterior, found.position),
    )


# Nominal coverage of credible regions over bootstrap replicates.

_NEAR = math.log(1.25)
_REDRAWS = 6
_TIED = 1e-6


def posterior_coverage(
    posterior: GibbsPosterior,
    level: float = 0.95,
    num_replicates: int = 1000,
    functional: Callable[[Any], Tensor] | None = None,
    *,
    num_draws: int = 1024,
    seed: int = 0,
) -> Selection:
    r"""Select the learning rate whose credible regions have nominal coverage over bootstrap replicates.

    The data are resampled with replacement, and the loss minimiser of the observed data is taken as the truth. The own
    weight of a replicate is the largest learning rate at which its credible region covers the truth, found by
    bisection. Coverage at ``w`` is the share of replicates with an own weight of at least ``w``, so the selected
    weight is a quantile of the own weights. A loss multiplied by ``c`` has its weight divided by ``c``.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with losses pooled by the sum; its weight has no effect.
    level : float, default 0.95
        Nominal coverage, in (0, 1).
    num_replicates : int, default 1000
        Number of bootstrap replicates: at least 20, ``level / (1 - level)`` and ``(1 - level) / level``.
    functional : callable, optional
        Function of the parameter of the loss that returns one number; its equal-tailed interval is calibrated. By
        default the highest-posterior-density region of the whole parameter, in unconstrained coordinates.
    num_draws : int, default 1024
        Draws for each replicate.

    Returns
    -------
    Selection
        The standard error accounts for the number of replicates. Diagnostics: ``"replicate_weights" (R,)`` (own
        weights), ``"coverage"``, ``"level"``, ``"num_replicates"``, ``"pareto_shape"`` (largest over replicates) and
        ``"share_trusted"``, the share of replicates whose own weight is reliable or reliably known to be far above or
        below the selected weight.

    Raises
    ------
    SettingsError
        If ``level`` is not in (0, 1), ``num_replicates`` is too small, losses are not pooled by the sum, or
        ``functional`` returns more than one number.
    DataError
        If the loss has no proper minimum, or no weight has nominal coverage.

    References
    ----------
    Syring, N., Martin, R. (2019). Calibrating general posterior credible regions. Biometrika 106, 479-486 (which uses
    stochastic approximation).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> x = 2.0 * torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> chosen = posterior_coverage(GibbsPosterior(Flat(), losses.HalfSquared(), x), num_replicates=200)
    >>> 0.15 < chosen.weight < 0.4  # one over the variance, in the limit
    True
    """
    level = real_number("level", level, "(0, 1)")
    num_replicates = whole_number("num_replicates", num_replicates, least=20)
    _check_replicates(level, num_replicates)
    number = None if functional is None else as_functional(posterior, functional)
    if number is not None and len(number.names) != 1:
        raise SettingsError(
            f"the functional {number.names[0].partition('[')[0]!r} must return one number, not {len(number.names)}"
        )
    region = "highest-posterior-density regions" if number is None else f"equal-tailed intervals of {number.names[0]}"
    check_pooled_by_sum(posterior)
    found = information_matrices(posterior)
    counts = bootstrap_counts(posterior, num_replicates, seed=seed)
    weight = _first_guess(found.mean_hessian, found.gradient_covariance)
    replicates = replicate_posteriors(posterior, weights=counts, weight=weight, num_draws=num_draws, seed=seed)
    for redraw in range(_REDRAWS):
        each = replicate_weights(replicates, found.position, level, number, seed=seed)
        own = each.weight
        selected = float(own.quantile(_position(level, num_replicates)))
        if not 0 < selected < math.inf:
            raise DataError(
                f"no learning rate gives {100 * level:g} % {region} nominal coverage over bootstrap replicates: in too "
                "many replicates the region covers at no weight, or at every weight; check for conflict between prior "
                "and data, or use another level" + "".join(f"; {text}" for text in on_kinks(posterior, found.position))
            )
        if redraw == _REDRAWS - 1 or abs(math.log(selected / weight)) < _NEAR:
            break
        # Importance weights are uneven far from the weight of the draws: redraw.
        weight = selected
        replicates = replicates.redrawn(weight, seed=seed)
    around = selected * torch.logspace(-2, 2, 33, base=2.0, dtype=own.dtype, device=own.device)
    share = (own[:, None] >= around).to(own).mean(0)
    below, above = _neighbours(own, level)
    each = each._replace(trusted=each.trusted | _known_to_be_beyond(own, weight, selected, replicates))
    return Selection(
        selected,
        f"The coverage of {100 * level:g} % {region}, over bootstrap replicates of the data.",
        "posterior_coverage",
        posterior,
        standard_error=0.5 * (above - below),
        diagnostics={
            "level": level,
            "coverage": float((own >= selected).double().mean()),
            "num_replicates": num_replicates,
            "replicate_weights": own,
            "pareto_shape": float(each.pareto_shape.max()),
            "share_trusted": float(each.trusted.double().mean()),
        },
        warnings=_warnings(each, level) + on_kinks(posterior, found.position),
        curve=Curve(around, share, (share * (1 - share) / len(own)).sqrt(), "coverage of the bootstrap's truth"),
    )


def _known_to_be_beyond(own: Tensor, weight: float, selected: float, replicates: ReplicatePosteriors) -> Tensor:
    """Return for which replicates the own weight is certainly above or below the selected weight, ``(R,)``."""
    low, high = sorted((weight, selected))
    # Draws made at ``weight`` determine coverage near it, hence on which side a distant own weight lies.
    far = (own.log() < math.log(low) - _NEAR) | (own.log() > math.log(high) + _NEAR)
    return far & replicates.trusted


def bootstrap_counts(posterior: GibbsPosterior, num_replicates: int, *, seed: int) -> Tensor:
    """Return bootstrap counts of the observations, ``(R, n)``."""
    counts = resampled(posterior.num_data, num_replicates, new_generator(seed, stream="posterior coverage"))
    return counts.to(dtype=posterior.dtype, device=posterior.device)


def _first_guess(mean_hessian: Tensor, gradient_covariance: Tensor) -> float:
    """Return the weight at which posterior and sampling variance agree on average, asymptotically."""
    mismatch = float(torch.linalg.solve(mean_hessian, gradient_covariance).trace())
    if not mismatch > 0:
        raise DataError("the data are fitted without error, so no learning rate can be determined")
    return len(mean_hessian) / mismatch


def _position(level: float, num_replicates: int) -> float:
    """Return the quantile level of the selected weight among the replicates' own weights, from zero to one."""
    # The expected probability below the k-th order statistic of R is k / (R + 1), for every distribution.
    rank = (1 - level) * (num_replicates + 1)
    return min(max((rank - 1) / (num_replicates - 1), 0.0), 1.0)


def _check_replicates(level: float, num_replicates: int) -> None:
    """Raise SettingsError if the quantile would lie outside the range of the replicates' own weights."""
    odds = max(level / (1 - level), (1 - level) / level)
    if num_replicates < odds * (1 - 1e-9):
        raise SettingsError(
            f"num_replicates must be at least {math.ceil(odds * (1 - 1e-9))} at level {level:g}, not {num_replicates}: "
            "level / (1 - level), or the inverse if that is larger"
        )


def _neighbours(own: Tensor, level: float) -> tuple[float, float]:
    """Return the quantiles one binomial standard error below and above the selected weight."""
    share = math.sqrt(level * (1 - level) / len(own))
    below, above = max(1 - level - share, 0.0), min(1 - level + share, 1.0)
    return float(own.quantile(below)), float(own.quantile(above))


def _warnings(each: OwnWeights, level: float) -> tuple[str, ...]:
    found = list(unreliable_replicates(each.trusted))
    below, above = _neighbours(each.weight, level)
    if above - below <= _TIED * above:
        found.append(
            "many replicates have the same own weight, so coverage is discontinuous at the selected weight and its "
            "standard error is invalid: the data have too few distinct values for the bootstrap; use "
            "information_matching, or more data"
        )
    return tuple(found)


# SafeBayes: cumulative predictive loss.


def safe_bayes(
    posterior: GibbsPosterior,
    grid: Sequence[float] | Tensor,
    *,
    randomized: bool = True,
    first: int | None = None,
    num_draws: int = 256,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight with the smallest cumulative loss of sequential predictions (SafeBayes).

    R-log-SafeBayes sums the posterior expected loss :math:`E_{\theta \sim \pi_w(\cdot \mid x_1, \dots, x_{i-1})}
    \ell(\theta, x_i)`, I-log-SafeBayes the loss at the posterior mean. The selected posterior concentrates near the
    best parameter even if the model is misspecified. **Neither calibrates coverage**: if the model of a location
    understates the noise, the selected weight stays at one and intervals are too short.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with a pointwise loss; data are predicted in the given order. Its weight has no effect.
    grid : sequence of float
        Learning rates to compare; for a negative log likelihood, one and smaller powers of two.
    randomized : bool, default True
        True for R-log-SafeBayes; False for I-log-SafeBayes, with the mean in unconstrained coordinates.
    first : int, optional
        Number of initial observations that are not predicted; by default 0 if the prior is proper, otherwise twice
        the number of unknowns.
    num_draws : int, default 256
        Importance-sampling draws for each observation and weight.

    Returns
    -------
    Selection
        ``curve`` has the cumulative losses; its standard errors refer to the difference from the best weight, over
        observations. Diagnostics: ``"losses" (g, n - first)`` and ``"first"``. The standard error is nan.

    Raises
    ------
    SettingsError
        If the loss is not pointwise or not pooled by the sum, or no observation is left to predict.

    References
    ----------
    Grunwald, P., van Ommen, T. (2017). Inconsistency of Bayesian inference for misspecified linear models, and a
    proposal for repairing it. Bayesian Analysis 12, 1069-1103.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> y = 3 * torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.HalfSquared(), y)
    >>> safe_bayes(posterior, [0.25, 0.5, 1.0]).weight  # although the calibrated weight is about 1 / 9
    1.0
    """
    loss = _pointwise_loss(posterior)
    if first is None:
        first = 0 if posterior.prior.is_proper else 2 * posterior.dim
    first = whole_number("first", first, least=0 if posterior.prior.is_proper else 1)
    if first >= posterior.num_data:
        raise SettingsError(f"first must be less than {posterior.num_data}, the number of data, not {first}")
    weights = _as_grid(posterior, grid)
    index = torch.arange(posterior.num_data, device=weights.device)
    parts = _part_posteriors(posterior, index < index[first:, None], weights, num_draws, seed)
    following = taken(posterior.data, index[first:].repeat_interleave(len(weights))[:, None])
    if randomized:
        each = _losses_at(posterior, loss, parts.replicates.draws, following)[..., 0]
        each = (parts.log_weights.exp() * each).nansum(-1)
    else:
        each = _losses_at(posterior, loss, parts.replicates.mean()[:, None], following)[:, 0, 0]
    scores = each.reshape(-1, len(weights)).mT
    total = scores.sum(-1)
    best = int(total.argmin())
    kind = "posterior expected loss" if randomized else "loss at the posterior mean"
    return Selection(
        weight=float(weights[best]),
        target=f"The smallest cumulative {kind} of each datum, given those before it; not coverage.",
        method="safe_bayes",
        source=posterior,
        standard_error=float("nan"),
        diagnostics={"losses": scores, "first": first},
        warnings=_at_edge(weights, best, lowest_only=True) + parts.warnings,
        curve=_score_curve(weights, scores, total, best, f"cumulative {kind}"),
    )


# Variance matching with the weighted-likelihood bootstrap.


def weighted_likelihood_bootstrap_matching(
    posterior: GibbsPosterior,
    *,
    criterion: Literal["trace", "determinant"] = "trace",
    num_replicates: int = 1000,
    seed: int = 0,
) -> Selection:
    r"""Match the total or generalised variance of the posterior and of the weighted-likelihood bootstrap.

    The bootstrap minimises :math:`\sum_i g_i \ell(\theta, x_i)` for :math:`g \sim n\,\mathrm{Dirichlet}(1, \dots,
    1)`. With the covariance ``V`` of its minimisers and the asymptotic posterior covariance :math:`(n w J)^{-1}`,

    .. math:: w = \mathrm{tr}(J^{-1}) / (n\,\mathrm{tr} V) \quad \text{or} \quad
              w = (\det(J^{-1}) / \det V)^{1/d} / n.

    Asymptotically ``V`` is the sandwich covariance, and with one unknown the weight equals that of
    :func:`information_matching`. Unlike the sandwich, ``V`` is not an asymptotic approximation.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior have no effect.
    criterion : {"trace", "determinant"}, default "trace"
        The determinant is invariant to linear changes of coordinates; the trace is not.
    num_replicates : int, default 1000
        Number of random weightings, minimised in one batch.

    Returns
    -------
    Selection
        Diagnostics: ``"covariance" (d, d)`` and ``"minimizers" (R, d)`` of the bootstrap, ``"converged" (R,)`` and
        ``"information"``.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or minimisers hardly vary.
    SettingsError
        If losses are not pooled by the sum, or ``criterion`` is unknown.

    References
    ----------
    Newton, M. A., Raftery, A. E. (1994). Approximate Bayesian inference with the weighted likelihood bootstrap. JRSS B
    56, 3-48. Lyddon, S. P., Holmes, C. C., Walker, S. G. (2019). General Bayesian updating and the loss-likelihood
    bootstrap. Biometrika 106, 465-478.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64).repeat(10)
    >>> posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    >>> chosen = weighted_likelihood_bootstrap_matching(posterior, seed=1)
    >>> abs(chosen.weight - 41 / 40 / 9.5) < 5 * chosen.standard_error  # (n + 1) / n / variance
    True
    """
    check_pooled_by_sum(posterior)
    if criterion not in ("trace", "determinant"):
        raise SettingsError(f"criterion must be 'trace' or 'determinant', not {criterion!r:.80}")
    num_replicates = whole_number("num_replicates", num_replicates, least=posterior.dim + 2)
    found = information_matrices(posterior)
    generator = new_generator(seed, stream="weighted likelihood bootstrap matching")
    ones = torch.ones(num_replicates, posterior.num_data, dtype=torch.float64)
    weights = posterior.num_data * dirichlet(ones, generator)
    minima = minimize(posterior, weights=weights.to(found.position), start=found.position)
    rows, warnings = converged_rows(minima.converged)
    away = minima.position[rows] - minima.position[rows].mean(0)
    covariance = away.mT @ away / (len(rows) - 1)
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError(
            "the bootstrap minimisers do not vary in some direction; check whether the data are fitted without error"
        )
    _check_minimizers_vary(posterior, found.position, covariance)
    ours = found.posterior_covariance
    if criterion == "trace":
        weight = torch.trace(ours) / torch.trace(covariance)
        share = away.square().sum(-1) / torch.trace(covariance)
    else:
        weight = ((torch.logdet(ours) - torch.logdet(covariance)) / posterior.dim).exp()
        share = (away * torch.linalg.solve(covariance, away.mT).mT).sum(-1) / posterior.dim
    spread = {"trace": "total variance (trace)", "determinant": "generalised variance (determinant)"}[criterion]
    return Selection(
        weight=float(weight),
        target=f"The {spread} of the weighted-likelihood bootstrap of the loss minimiser.",
        method="weighted_likelihood_bootstrap_matching",
        source=posterior,
        standard_error=float(weight * share.std()) / len(rows) ** 0.5,
        diagnostics={
            "covariance": covariance,
            "minimizers": minima.position,
            "converged": minima.converged,
            "information": found,
        },
        warnings=_few_data(posterior) + _ill_conditioned(found) + warnings + on_kinks(posterior, found.position),
    )
