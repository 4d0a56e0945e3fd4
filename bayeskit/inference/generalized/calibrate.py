"""Selectors of the learning rate: each aims at a target of its own, which its result names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, vmap

from bayeskit.core.inputs import real_number, whole_number
from bayeskit.core.randomness import global_stream, new_generator, one_thread, validation_kept
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.bootstrap import dirichlet
from bayeskit.inference.generalized.coverage import (
    MAX_SHAPE,
    Functional,
    ReplicatePosteriors,
    as_functional,
    replicate_posteriors,
)
from bayeskit.inference.generalized.losses.densities import Model, law_of
from bayeskit.inference.generalized.losses.log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss, columns, taken
from bayeskit.inference.generalized.minimizer import (
    InformationMatrices,
    hessian_of_loss,
    influence,
    information,
    minimize,
    residual_spread,
    smooth_total,
)
from bayeskit.inference.generalized.posterior import GibbsPosterior, check_pooled_by_sum
from bayeskit.logdensity.pyro_distributions import draw_values

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

# The result of a selector of the learning rate: the weight, its criterion, and diagnostics.


class Curve(NamedTuple):
    """What a selector measured at each of several weights.

    Attributes
    ----------
    weights, values : Tensor
        Shape ``(g,)``.
    standard_errors : Tensor or None
        Shape ``(g,)``.
    label : str
        What the values are.
    """

    weights: Tensor
    values: Tensor
    standard_errors: Tensor | None
    label: str


@dataclass(frozen=True)
class Selection:
    """A learning rate, and what it was chosen for.

    Selectors aim at different targets: their weights need not agree, and are no estimates of one number.

    Attributes
    ----------
    weight : float
        The learning rate.
    target : str
        A sentence that names what the weight aims at.
    method : str
        Name of the selector.
    source : GibbsPosterior
        The posterior it was chosen for, whose own weight played no part.
    standard_error : float
        Of the weight, from simulation alone, given the data; zero where nothing is simulated, nan where unknown.
    diagnostics : dict
        What the selector measured on the way.
    warnings : tuple of str
        Assumptions that do not hold, each with its remedy.
    curve : Curve or None
        What was compared, where the weight was chosen from a grid.

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
        """Whether no assumption was found to fail."""
        return not self.warnings

    @property
    def posterior(self) -> GibbsPosterior:
        """The posterior with this weight."""
        return self.source.with_weight(self.weight)

    def plot(self, ax: Any = None) -> Any:
        """Plot what was compared against the weight, on a logarithmic axis, and return the axes of matplotlib.

        Raises
        ------
        SettingsError
            If the weight was not chosen from a grid, so that there is nothing to plot.
        """
        if self.curve is None:
            raise SettingsError(f"{self.method} computes its weight at once and compares no others; there is no curve")
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


# Conditions that selectors check on a posterior, and the warnings where they fail.

_DATA_PER_UNKNOWN = 10
_MAX_CONDITION = 1e8
_MIN_CONVERGED = 0.5
_NEAR_KINK = 1e-4  # in units of the residuals' spread
_MAX_ON_KINKS = 0.1
_MIN_VARIATION = 1e-6  # of minimisers, in units of their asymptotic variance


def _pointwise_loss(posterior: GibbsPosterior) -> PointwiseLoss:
    """Return the loss of the posterior; SettingsError unless it is a PointwiseLoss pooled by the sum."""
    check_pooled_by_sum(posterior)
    if not isinstance(posterior.loss, PointwiseLoss):
        raise SettingsError(
            f"{type(posterior.loss).__name__} looks at all data at once, so that no datum has a loss of its own; take "
            "bootstrap_score_matching or weighted_likelihood_bootstrap_matching"
        )
    return posterior.loss


def _few_data(posterior: GibbsPosterior) -> tuple[str, ...]:
    """Return a warning where an asymptotic argument has too few data to stand on."""
    if posterior.num_data >= _DATA_PER_UNKNOWN * posterior.dim:
        return ()
    return (
        f"{posterior.num_data} data for {posterior.dim} unknowns are few for an argument that needs many; take the "
        "weight as a rough one, or compare coverage_report",
    )


def _ill_conditioned(information: InformationMatrices) -> tuple[str, ...]:
    """Return warnings where a direction is all but undetermined."""
    found = []
    for name, matrix in (
        ("mean Hessian of the loss", information.mean_hessian),
        ("covariance of its gradients", information.gradient_covariance),
    ):
        if not bool(torch.linalg.cond(matrix) <= _MAX_CONDITION):
            found.append(f"the {name} is nearly singular; rescale covariates, or drop those that others determine")
    return tuple(found)


def converged_rows(converged: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """Return indices of the converged rows and a warning that counts others; DataError if under half converged."""
    rows, lost = converged.nonzero()[:, 0], int((~converged).sum())
    if len(rows) < _MIN_CONVERGED * len(converged):
        raise DataError(
            f"the loss has no minimum in {lost} of {len(converged)} replicates; the data leave a direction "
            "undetermined: drop unknowns, or see propriety_check"
        )
    if not lost:
        return rows, ()
    return rows, (
        f"{lost} of {len(converged)} minimisations did not converge and were left out, which favours large weights; "
        "look at propriety_check",
    )


def on_kinks(posterior: GibbsPosterior, position: Tensor) -> tuple[str, ...]:
    """Return a warning where many data, such as tied ones, lie on a kink of their loss at ``position (d,)``."""
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
    # Half the width smooths a kink half as much, and a fourth as much far from it.
    # A minimiser is held in place by as many kinks as there are unknowns, even where no data are tied.
    tied = int(((wide > 0.1 * wide.max()) & (narrow > 0.4 * wide)).sum())
    if tied <= _MAX_ON_KINKS * posterior.num_data + posterior.dim:
        return ()
    return (
        f"{tied} of {posterior.num_data} data lie on a kink of the loss at its minimiser, where tied or rounded data "
        "leave no density to estimate its curvature from; take a smooth loss, such as Huber",
    )


def _check_minimizers_vary(posterior: GibbsPosterior, position: Tensor, covariance: Tensor) -> None:
    """Raise DataError where bootstrap minimisers, ``covariance (d, d)``, vary much less than the sandwich."""
    with one_thread(), validation_kept():
        torch.distributions.Distribution.set_default_validate_args(False)
        each, hessian = influence(posterior, position), hessian_of_loss(posterior, position)
    centred = each - each.mean(0)
    lower, failed = torch.linalg.cholesky_ex(centred.mT @ centred / len(each))
    if int(failed):  # gradients that do not vary in some direction have nothing to say of it
        return
    half = torch.linalg.solve_triangular(lower, hessian, upper=False)
    ratio = len(each) * half @ covariance @ half.mT
    if not bool(torch.linalg.eigvalsh(0.5 * (ratio + ratio.mT)).min() > _MIN_VARIATION):
        raise DataError(
            "the bootstrap's minimisers hardly vary in some direction, as where a kink of the loss lies on tied or "
            "rounded data, so that their spread says nothing of the learning rate; are the data fitted without error? "
            "Take a smooth loss, such as Huber"
        )


# Learning rates to compare, and posteriors of parts of the data at each of them.

_OCTAVES = 6
_MAX_UNTRUSTED = 0.01
_NUMBERS_AT_ONCE = 2**22


def _as_grid(posterior: GibbsPosterior, grid: Sequence[float] | Tensor | None) -> Tensor:
    """Return increasing learning rates ``(g,)``, by default octaves about the curvature over the gradient variance."""
    if grid is None:
        found = information(posterior)
        hessian = found.mean_hessian
        # Where ``I`` is a multiple of ``J``, this is the weight of information matching; the trace needs no inverse.
        centre = torch.trace(hessian) / torch.trace(found.gradient_covariance)
        return centre * 2.0 ** torch.arange(-_OCTAVES, _OCTAVES + 1, dtype=posterior.dtype, device=posterior.device)
    values = [real_number("grid", x, between=(0.0, float("inf"))) for x in grid]
    if len(set(values)) < 2:
        raise SettingsError("grid must have at least two different weights")
    return torch.tensor(sorted(set(values)), dtype=posterior.dtype, device=posterior.device)


class _PartPosteriors(NamedTuple):
    """Posteriors of parts of the data at each learning rate."""

    replicates: ReplicatePosteriors  # p * g rows: all learning rates of the first part, then of the next
    log_weights: Tensor  # (p * g, S): normalised importance weights of the draws
    warnings: tuple[str, ...]


def _part_posteriors(
    posterior: GibbsPosterior, parts: Tensor, grid: Tensor, num_draws: int, seed: int
) -> _PartPosteriors:
    """Compute the posteriors of parts, the rows ``(p, n)`` of zeros and ones, at all learning rates in one batch."""
    weight = grid.repeat(len(parts))
    weights = parts.to(grid).repeat_interleave(len(grid), 0)
    found = replicate_posteriors(posterior, weights=weights, weight=weight, num_draws=num_draws, seed=seed)
    lost = int((~found.trusted).sum())
    warnings: tuple[str, ...] = ()
    if lost > _MAX_UNTRUSTED * len(weight):
        warnings = (
            f"{lost} of {len(weight)} posteriors of parts of the data could not be computed reliably by importance "
            "sampling; take more draws, fewer weights, or larger parts",
        )
    return _PartPosteriors(found, found.points.log_ratio(weight).log_softmax(-1), warnings)


def _losses_at(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: Data) -> Tensor:
    """Return the losses ``(R, S, m)`` at draws ``(R, S, d)`` of the rows' own data ``(R, m, ...)``."""

    def one(u: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        return loss.pointwise(posterior.prior.parameter(u), own if isinstance(data, tuple) else own[0])

    size = columns(data)[0].shape[1] * draws.shape[1]
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        batched = vmap(vmap(one, in_dims=(0, None)), chunk_size=max(1, _NUMBERS_AT_ONCE // size))
        result: Tensor = batched(draws, columns(data))
    return result


def _at_edge(grid: Tensor, chosen: int, *, lowest_only: bool = False) -> tuple[str, ...]:
    """Return a warning where the best weight of a grid is its first or last."""
    if chosen == 0 or (chosen == len(grid) - 1 and not lowest_only):
        side = "smallest" if chosen == 0 else "largest"
        return (f"the {side} weight of the grid, {float(grid[chosen]):.4g}, is best; extend the grid that way",)
    return ()


# Weights of the data that stand for resampling them.

_MOST_RESAMPLES = 10**6


def resampled(num_data: int, num_replicates: int, generator: torch.Generator) -> Tensor:
    """Return how often each datum occurs in resamples with replacement, ``(R, n)``."""
    chosen = torch.randint(num_data, (num_replicates, num_data), generator=generator)
    counts = torch.zeros(num_replicates, num_data, dtype=torch.float64)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))


def all_resamples(num_data: int) -> Tensor:
    """Return how often each datum occurs in each of the ``n**n`` resamples of few data: the bootstrap, exactly.

    Parameters
    ----------
    num_data : int
        At most seven.

    Returns
    -------
    Tensor
        Shape ``(n**n, n)``, all equally probable.

    Raises
    ------
    SettingsError
        If there are more than a million resamples.

    Examples
    --------
    >>> all_resamples(2)
    tensor([[2., 0.],
            [1., 1.],
            [1., 1.],
            [0., 2.]], dtype=torch.float64)
    """
    if num_data < 1 or num_data**num_data > _MOST_RESAMPLES:
        raise SettingsError(f"{num_data} data have too many resamples to enumerate; draw some of them")
    grids = torch.meshgrid(*[torch.arange(num_data)] * num_data, indexing="ij")
    chosen = torch.stack([x.reshape(-1) for x in grids], 1)
    return torch.nn.functional.one_hot(chosen, num_data).sum(1).double()


# The largest learning rate at which the region of each bootstrap replicate covers the plug-in truth.

_DOUBLINGS = 10  # how far from the draws' weight a replicate's own is looked for: a factor of a thousand
_HALVINGS = 30


class OwnWeights(NamedTuple):
    """Own weights of replicates, and whether they can be relied on.

    Attributes
    ----------
    weight : Tensor
        ``(R,)``: zero where the region covers at no weight that was visited, infinite where it does at every.
    pareto_shape : Tensor
        Of the importance weights there, or at the last weight visited, ``(R,)``.
    trusted : Tensor
        Boolean, ``(R,)``: whether these weights can be relied on, and the mode was found.
    """

    weight: Tensor
    pareto_shape: Tensor
    trusted: Tensor


def replicate_weights(
    replicates: ReplicatePosteriors,
    truth: Tensor,
    level: float,
    functional: Functional | None = None,
    seed: int = 0,
) -> OwnWeights:
    """Return the largest learning rate at which each replicate's region covers the unconstrained ``truth (d,)``."""
    # Bracket from the weight of the draws outward, then bisect in the logarithm; a functional's equal-tailed interval
    # takes the place of the highest-posterior-density region.
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
    """Return replicates with draws that hold there, the last two weights visited, and whether coverage changed."""
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
            fresh = some.taken(lost).redrawn(weight[lost], seed)
            some, replicates = some.replaced(lost, fresh), replicates.replaced(rows[lost], fresh)
            usable[lost] = fresh.pareto_shape <= MAX_SHAPE
        # Where even new draws are of no use, coverage there is unknown, and counts neither way.
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
    """Evaluations for the levels at which the truth enters regions, made once for all learning rates."""

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


# The learning rate whose posterior is nearest to the bootstrap of the minimiser, in Fisher divergence.

_SCORES_AT_ONCE = 2**22


def bootstrap_score_matching(
    posterior: GibbsPosterior, *, num_replicates: int = 1000, resamples: Tensor | None = None, seed: int = 0
) -> Selection:
    r"""Minimise the Fisher divergence between the bootstrap law of the minimiser and the posterior.

    With minimisers :math:`\theta_b` of the loss of resampled data and :math:`D` the loss of the data themselves,
    the divergence is quadratic in the weight, and least at

    .. math:: w = \frac{\sum_b \mathrm{tr} \nabla^2 D(\theta_b) + \nabla D(\theta_b) \cdot \nabla \log \pi(\theta_b)}
                       {\sum_b \|\nabla D(\theta_b)\|^2}.

    The prior counts. Derivatives are taken in unconstrained coordinates; those of a loss with kinks are ones of the
    smoothed version that also estimates its curvature.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight does not matter.
    num_replicates : int, default 1000
        Resamples of the data, all minimised in one batch.
    resamples : Tensor, optional
        How often each datum occurs in each resample, ``(R, n)``, in place of random ones, such as
        :func:`~bayeskit.inference.generalized.calibrate.all_resamples`, with which nothing is simulated.
    seed : int, default 0
        Of the resamples.

    Returns
    -------
    Selection
        With diagnostics ``"minimizers" (R, d)``, ``"converged" (R,)`` and ``"num_replicates"``.

    Raises
    ------
    DataError
        If most minimisations fail, minimisers hardly vary, or no positive weight minimises the divergence.
    SettingsError
        If losses do not add up.
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
    trace, squared, along = _derivatives(posterior, centre, found.position[rows])
    above, below = trace + along, squared
    weight = float(above.sum() / below.sum())
    if not 0 < weight < float("inf"):
        raise DataError(
            f"the divergence from the bootstrap has no minimum at a positive weight (but at {weight:.3g}): the prior "
            "is sharper than the bootstrap, or the data are fitted without error; take a wider prior"
        )
    residual = (above - weight * below) / below.mean()
    return Selection(
        weight=weight,
        target="The bootstrap law of the loss minimiser: the posterior nearest to it in Fisher divergence.",
        method="bootstrap_score_matching",
        source=posterior,
        standard_error=0.0 if resamples is not None else float(residual.std()) / len(rows) ** 0.5,
        diagnostics={
            "minimizers": found.position,
            "converged": found.converged,
            "num_replicates": len(weights),
        },
        warnings=_few_data(posterior) + warnings + on_kinks(posterior, centre),
    )


def _covariance(position: Tensor) -> Tensor:
    away = position - position.mean(0)
    return away.mT @ away / len(position)


def _derivatives(posterior: GibbsPosterior, centre: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the Laplacian of the loss, its squared gradient and its gradient along the prior's, each ``(R,)``."""
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
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


# The learning rate that predicts held-out data best.


def held_out_predictive(
    posterior: GibbsPosterior,
    *,
    grid: Sequence[float] | Tensor | None = None,
    num_folds: int = 10,
    model: Model | None = None,
    num_draws: int = 512,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight whose posteriors of part of the data predict the rest best.

    With a predictive density ``f`` the score of a held-out datum is :math:`-\log \int f(x \mid \theta)\,\pi_w(\theta
    \mid x_{\mathrm{train}}) d\theta`; without one it is the posterior expectation of its loss. That always rewards a
    posterior for being narrow, so that its best weight is large unless the prior knows better: use it for the
    balance of prior and data, not for uncertainty. Neither score aims at coverage.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses of single data. Its weight does not matter.
    grid : sequence of float, optional
        Learning rates to compare. By default thirteen octaves about one that matches the scale of the loss, so that a
        rescaled loss gets an inversely rescaled grid.
    num_folds : int, default 10
        Parts of the data, each held out once.
    model : callable, optional
        The predictive density, ``parameter -> distribution`` of a datum, or ``(parameter, *covariates) ->
        distributions``. By default that of a ``NegativeLogLikelihood``.
    num_draws : int, default 512
        From the posterior of each fold and weight, all in one batch, by importance sampling.
    seed : int, default 0
        Of the folds and draws.

    Returns
    -------
    Selection
        With the summed scores as ``curve``, whose standard errors are those, over data, of the difference from the
        best; diagnostics ``"scores" (g, n)`` and ``"num_folds"``.

    Raises
    ------
    DataError
        If no weight has a finite score.
    SettingsError
        If there are more folds than data, or a single datum has no loss.

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
        raise SettingsError(f"{posterior.num_data} data cannot be cut into {num_folds} folds")
    weights = _as_grid(posterior, grid)
    generator = new_generator(seed, stream="folds")
    fold = torch.randperm(posterior.num_data, generator=generator).to(weights.device) % num_folds
    training = fold != torch.arange(num_folds, device=fold.device)[:, None]
    parts = _part_posteriors(posterior, training, weights, num_draws, seed)
    if model is None and isinstance(loss, NegativeLogLikelihood):
        model = loss.distribution
    density = None if model is None else NegativeLogLikelihood(model)
    scores = torch.stack(
        [_scores(posterior, density or loss, parts, training, g, density is not None) for g in range(len(weights))]
    )
    total = scores.sum(-1).nan_to_num(nan=torch.inf)
    best = int(total.argmin())
    if not bool(total[best].isfinite()):
        raise DataError("no weight of the grid gives held-out data a finite score; does the model have their support?")
    differences = scores - scores[best]
    caveat: tuple[str, ...] = ()
    if density is None:
        caveat = (
            "the expected held-out loss rewards narrow posteriors and says nothing of uncertainty; give model= for a "
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
        curve=Curve(weights, total, differences.std(-1) * posterior.num_data**0.5, f"{what} of held-out data"),
    )


def _scores(
    posterior: GibbsPosterior, loss: PointwiseLoss, parts: _PartPosteriors, training: Tensor, chosen: int, mixed: bool
) -> Tensor:
    """Return the score of each datum at one weight, ``(n,)``: of a mixture of densities, or an expected loss."""
    folds, num_data = training.shape
    size = len(parts.log_weights) // folds
    rows = torch.arange(folds, device=training.device) * size + chosen
    held_out = ~training
    # Folds differ in size by one at most: the shorter ones are filled up by a datum whose score is then left out.
    most = int(held_out.sum(-1).max())
    order = held_out.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
    each = _losses_at(posterior, loss, parts.replicates.draws[rows], taken(posterior.data, order))
    log_weights = parts.log_weights[rows][..., None]
    score = -(log_weights - each).logsumexp(1) if mixed else (log_weights.exp() * each).nansum(1)
    kept = held_out.gather(1, order)
    result = score.new_empty(num_data)
    result[order[kept]] = score[kept]
    return result


# The learning rate under which the information gain from the data equals its expectation under the model.

_PAIRS_AT_ONCE = 2**21


def holmes_walker(
    posterior: GibbsPosterior, *, model: Model | None = None, num_draws: int = 4096, seed: int = 0
) -> Selection:
    r"""Match the information gain of a datum with the one that the model expects.

    The gain is the Fisher divergence between prior and posterior of one datum, :math:`w^2 \int \|\nabla_\theta
    \ell(\theta, x)\|^2 \pi(\theta) d\theta`. Its mean over the data is set to the mean, over data of the model at the
    loss minimiser :math:`\hat\theta`, of the gain of an ordinary update with the model's likelihood ``f``:

    .. math:: w^2 = \frac{E_{x \sim f(\cdot \mid \hat\theta)} \int \|\nabla \log f(x \mid \theta)\|^2 \pi(\theta)
                    d\theta}{n^{-1} \sum_i \int \|\nabla \ell(\theta, x_i)\|^2 \pi(\theta) d\theta}.

    Coverage is not its target: with a wide prior the weight is near one whatever the noise. Gradients are those in
    unconstrained coordinates.

    Parameters
    ----------
    posterior : GibbsPosterior
        With a proper prior and losses of single data. Its weight does not matter.
    model : callable, optional
        What data were expected to follow: ``parameter -> distribution`` of a datum, or ``(parameter, *covariates) ->
        distributions``, as for :class:`~bayeskit.inference.generalized.losses.log_likelihood.NegativeLogLikelihood`,
        whose own is the default. It sets the scale of information, so that a rescaled loss gets an inversely
        rescaled weight.
    num_draws : int, default 4096
        Draws from the prior, each with a simulated data set.
    seed : int, default 0

    Returns
    -------
    Selection
        With diagnostics ``"expected_gain"`` (of the model's data and likelihood), ``"gain"`` (of the data, at weight
        one) and ``"minimizer"``.

    Raises
    ------
    DataError
        If gains are not finite and positive.
    SettingsError
        If the prior is improper, there is no model, or a single datum has no loss.

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
    if model is None and isinstance(loss, NegativeLogLikelihood):
        model = loss.distribution
    if model is None:
        raise SettingsError(
            f"{type(loss).__name__} does not say which data were expected; give model=, such as "
            "lambda mean: Normal(mean, 1.0)"
        )
    if not posterior.prior.is_proper:
        raise SettingsError("information is gained over a proper prior; this one is improper")
    num_draws = whole_number("num_draws", num_draws, least=2)
    found = minimize(posterior, seed=seed)
    generator = new_generator(seed, stream="holmes walker")
    with one_thread(), validation_kept(), torch.no_grad():
        torch.distributions.Distribution.set_default_validate_args(False)
        draws = posterior.prior.start(num_draws, generator).to(posterior.dtype)
        simulated = _simulated(posterior, model, found.position, num_draws, generator)
        expected = _gains(posterior, NegativeLogLikelihood(model), draws, simulated)
        gain = _gains(posterior, loss, draws, None)
    ratio = float(expected.mean() / gain.mean())
    if not 0 < ratio < float("inf"):
        raise DataError("the gain of information is not finite and positive; does the model have the data's support?")
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
        else ("the loss minimiser was not found, and the model's data are simulated elsewhere; try another seed",),
    )


def _simulated(
    posterior: GibbsPosterior, model: Model, position: Tensor, num_sets: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Return data sets ``(R, n, ...)`` of the model at one vector: the outcomes' columns alone are new."""
    law, outcomes = law_of(model, posterior.prior.parameter(position), posterior.data)
    shape = outcomes.shape[: outcomes.dim() - len(law.event_shape)]
    with global_stream(generator):
        new = draw_values(law.expand(shape), (num_sets,)).to(outcomes)
    return (*(x.expand(num_sets, *x.shape) for x in columns(posterior.data)[:-1]), new)


def _gains(posterior: GibbsPosterior, loss: PointwiseLoss, draws: Tensor, data: tuple[Tensor, ...] | None) -> Tensor:
    """Return the squared gradient of a datum's loss, averaged over data, at each draw, ``(S,)``."""

    def one(u: Tensor, sets: Any) -> Tensor:
        own: Data = posterior.data if sets is None else sets if isinstance(posterior.data, tuple) else sets[0]
        each = jacrev(lambda u: loss.pointwise(posterior.prior.parameter(u), own))(u)
        return each.square().sum(-1).mean()

    at_once = max(1, _PAIRS_AT_ONCE // posterior.num_data**2)
    result: Tensor = vmap(one, in_dims=(0, None if data is None else 0), chunk_size=at_once)(draws, data)
    return result


# The learning rate that matches the information of posterior and loss-likelihood bootstrap.


def information_matching(posterior: GibbsPosterior, at: Tensor | None = None) -> Selection:
    r"""Give the posterior the asymptotic Fisher information of the loss-likelihood bootstrap.

    The bootstrap of the minimiser has the asymptotic precision :math:`n J I^{-1} J`, the posterior of weight ``w``
    has :math:`n w J`, where ``I`` is the covariance of a datum's gradient and ``J`` its mean Hessian. Equal traces
    give

    .. math:: w = \mathrm{tr}(J I^{-1} J) / \mathrm{tr}(J).

    With one unknown, credible intervals then cover asymptotically as often as they say. With several this holds for
    none of them exactly, unless ``I`` is a multiple of ``J``: see
    :func:`~bayeskit.inference.generalized.checks.residual_mismatch`. A trace depends on the coordinates;
    these are the unconstrained ones.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior do not matter.
    at : Tensor, optional
        The minimiser of the loss, unconstrained, ``(d,)``; by default it is searched for. Losses that are bounded have
        plateaus from which no search comes back: give ``minimize(posterior, start=...).position`` there.

    Returns
    -------
    Selection
        With diagnostics ``"information"`` and ``"num_data"``. Nothing is simulated.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or the data are fitted without error.
    SettingsError
        If losses do not add up.

    Notes
    -----
    The curvature of a loss with kinks is a kernel estimate: for the median of 200 normal data the weight has a
    standard deviation of about 12 %, where 1,000 data leave 6 %.

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
    found = information(posterior, at)
    hessian, covariance = found.mean_hessian, found.gradient_covariance
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError(
            "the gradients of the data's losses do not vary in some direction, so that nothing tells how far to trust "
            "the data there; are they fitted without error?"
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


# The learning rate whose credible regions have nominal coverage over bootstrap replicates of the data.

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
    r"""Select the learning rate whose credible regions have their level as coverage, by the bootstrap.

    The data are resampled with replacement, the loss minimiser of the data themselves plays the truth, and the
    weight is the one at which regions of the given level cover it in that share of the replicates. Each replicate's
    own weight, above which its region no longer reaches the truth, is bracketed and then found by bisection in the
    logarithm; coverage at ``w`` is the share of replicates whose own weight is larger, so that the selected one is a
    quantile of them.

    The result does not depend on the posterior's present weight, and a loss ``c`` times as large gets a weight
    ``c`` times as small.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses that add up.
    level : float, default 0.95
        In (0, 1).
    num_replicates : int, default 1000
        Of the bootstrap: at least ``level / (1 - level)``, so that the quantile lies among their own weights.
    functional : callable, optional
        From what the loss takes as its parameter to one number, whose equal-tailed interval is to cover. By default
        the highest-posterior-density region of the whole parameter, in unconstrained coordinates.
    num_draws : int, default 1024
        From each replicate's posterior.
    seed : int, default 0

    Returns
    -------
    Selection
        Its standard error is that of the quantile, which comes from the number of replicates. With diagnostics
        ``"replicate_weights" (R,)``, ``"coverage"``, ``"level"``, ``"num_replicates"``, ``"pareto_shape"`` (the
        largest, at the replicates' own weights) and ``"share_trusted"``, of the replicates whose own weight is known,
        or at least known to be far above or below the selected one.

    Raises
    ------
    SettingsError
        If the level does not lie in (0, 1), replicates are too few for it, or ``functional`` returns more than one
        number.
    DataError
        If the data determine no minimiser, or the coverage is not reached at any weight.

    References
    ----------
    Syring, N., Martin, R. (2019). Calibrating general posterior credible regions. Biometrika 106, 479-486 (there by
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
    level = real_number("level", level, between=(0.0, 1.0))
    num_replicates = whole_number("num_replicates", num_replicates, least=20)
    _check_replicates(level, num_replicates)
    number = None if functional is None else as_functional(posterior, functional)
    if number is not None and len(number.names) != 1:
        raise SettingsError(
            f"the functional {number.names[0].partition('[')[0]!r} must return one number, whose interval is to "
            f"cover, not {len(number.names)}"
        )
    region = "highest-posterior-density regions" if number is None else f"equal-tailed intervals of {number.names[0]}"
    check_pooled_by_sum(posterior)
    found = information(posterior)
    counts = bootstrap_counts(posterior, num_replicates, seed)
    weight = _first_guess(found.mean_hessian, found.gradient_covariance)
    replicates = replicate_posteriors(posterior, weights=counts, weight=weight, num_draws=num_draws, seed=seed)
    for redraw in range(_REDRAWS):
        each = replicate_weights(replicates, found.position, level, number, seed)
        own = each.weight
        selected = float(own.quantile(_position(level, num_replicates)))
        if not 0 < selected < math.inf:
            raise DataError(
                f"no learning rate gives {100 * level:g} % {region} that coverage over bootstrap replicates: in too "
                "many of them the region covers at none, or at all; look whether prior and data disagree, or take "
                "another level" + "".join(f"; {text}" for text in on_kinks(posterior, found.position))
            )
        if redraw == _REDRAWS - 1 or abs(math.log(selected / weight)) < _NEAR:
            break
        # Draws made for a weight far away say little of this one.
        weight = selected
        replicates = replicates.redrawn(weight, seed)
    each = each._replace(trusted=each.trusted | _known_to_be_beyond(own, weight, selected, replicates))
    return Selection(
        selected,
        f"The coverage of {100 * level:g} % {region}, over bootstrap replicates of the data.",
        "posterior_coverage",
        posterior,
        standard_error=_standard_error(own, level),
        diagnostics={
            "level": level,
            "coverage": float((own >= selected).double().mean()),
            "num_replicates": num_replicates,
            "replicate_weights": own,
            "pareto_shape": float(each.pareto_shape.max()),
            "share_trusted": float(each.trusted.double().mean()),
        },
        warnings=_warnings(each, level) + on_kinks(posterior, found.position),
        curve=_curve(own, selected),
    )


def _known_to_be_beyond(own: Tensor, weight: float, selected: float, replicates: ReplicatePosteriors) -> Tensor:
    """Tell which replicates' own weights certainly lie on their side of the selected weight, ``(R,)``."""
    low, high = sorted((weight, selected))
    # Draws made at ``weight`` can tell whether regions cover near it, and thus on which side a distant own weight lies.
    far = (own.log() < math.log(low) - _NEAR) | (own.log() > math.log(high) + _NEAR)
    return far & replicates.trusted


def bootstrap_counts(posterior: GibbsPosterior, num_replicates: int, seed: int) -> Tensor:
    """Return how often each datum is drawn when as many as there are are drawn with replacement, ``(R, n)``."""
    counts = resampled(posterior.num_data, num_replicates, new_generator(seed, stream="posterior coverage"))
    return counts.to(dtype=posterior.dtype, device=posterior.device)


def _first_guess(mean_hessian: Tensor, gradient_covariance: Tensor) -> float:
    """Return the weight at which posterior and sampling variance agree on average, in the limit of many data."""
    mismatch = float(torch.linalg.solve(mean_hessian, gradient_covariance).trace())
    if not mismatch > 0:
        raise DataError("the data are fitted without error, so that nothing tells how far to trust them")
    return len(mean_hessian) / mismatch


def _position(level: float, num_replicates: int) -> float:
    """Return the quantile level of the selected weight among the replicates' own weights, from zero to one."""
    # The k-th smallest of R has in expectation the share k / (R + 1) below it, whatever their law.
    rank = (1 - level) * (num_replicates + 1)
    return min(max((rank - 1) / (num_replicates - 1), 0.0), 1.0)


def _check_replicates(level: float, num_replicates: int) -> None:
    """Refuse levels whose quantile lies beyond the smallest or largest of so many replicates."""
    odds = max(level / (1 - level), (1 - level) / level)
    if num_replicates < odds * (1 - 1e-9):
        raise SettingsError(
            f"num_replicates must be at least {math.ceil(odds * (1 - 1e-9))} at level {level:g}, not {num_replicates}: "
            "level / (1 - level), or the inverse if that is larger"
        )


def _standard_error(own: Tensor, level: float) -> float:
    """Return the standard error of a quantile, from its neighbours one binomial standard error away."""
    below, above = _neighbours(own, level)
    return 0.5 * (above - below)


def _neighbours(own: Tensor, level: float) -> tuple[float, float]:
    share = math.sqrt(level * (1 - level) / len(own))
    below, above = max(1 - level - share, 0.0), min(1 - level + share, 1.0)
    return float(own.quantile(below)), float(own.quantile(above))


def _curve(own: Tensor, selected: float) -> Curve:
    """Return coverage over bootstrap replicates against the weight, about the selected one."""
    weights = selected * torch.logspace(-2, 2, 33, base=2.0, dtype=own.dtype, device=own.device)
    share = (own[:, None] >= weights).to(own).mean(0)
    return Curve(weights, share, (share * (1 - share) / len(own)).sqrt(), "coverage of the bootstrap's truth")


def _warnings(each: OwnWeights, level: float) -> tuple[str, ...]:
    found = []
    share = float((~each.trusted).double().mean())
    if share > _MAX_UNTRUSTED:
        found.append(
            f"{100 * share:.1f} % of the replicates' posteriors could not be computed reliably by importance sampling; "
            "take more draws, or reparametrise the model"
        )
    below, above = _neighbours(each.weight, level)
    if above - below <= _TIED * above:
        found.append(
            "many replicates have the same own weight, so that coverage jumps at the selected one and its standard "
            "error means nothing: too few distinct data for a bootstrap; take information_matching, or more data"
        )
    return tuple(found)


# The learning rate with the smallest loss of each datum under the posterior of those before it.


def safe_bayes(
    posterior: GibbsPosterior,
    grid: Sequence[float] | Tensor,
    *,
    randomized: bool = True,
    first: int | None = None,
    num_draws: int = 256,
    seed: int = 0,
) -> Selection:
    r"""Choose the weight with the smallest cumulative loss, predicting each datum from those before it.

    R-log-SafeBayes sums the posterior expected loss :math:`E_{\theta \sim \pi_w(\cdot \mid x_1, \dots, x_{i-1})}
    \ell(\theta, x_i)`, I-log-SafeBayes the loss at the posterior mean. Both make the posterior concentrate near the
    best parameter where a misspecified model would not let it. **Neither calibrates coverage**: a model that
    understates the noise of a location keeps the full weight, and its intervals stay too short.

    Parameters
    ----------
    posterior : GibbsPosterior
        With losses of single data, which are taken in the order they have. Its weight does not matter.
    grid : sequence of float
        Learning rates to compare; where the loss is minus a log likelihood, one and smaller powers of two.
    randomized : bool, default True
        R-log-SafeBayes; else I-log-SafeBayes, with the mean in unconstrained coordinates.
    first : int, optional
        Number of data before the first that is predicted. By default none where the prior is proper, and else two
        for each unknown.
    num_draws : int, default 256
        From the posterior after each datum at each weight, all in one batch, by importance sampling.
    seed : int, default 0

    Returns
    -------
    Selection
        With the cumulative losses as ``curve``, whose standard errors are those, over data, of the difference from
        the best; diagnostics ``"losses" (g, n - first)`` and ``"first"``.

    Raises
    ------
    SettingsError
        If a single datum has no loss, or there is none left to predict.

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
        raise SettingsError(f"none of {posterior.num_data} data is left to predict after the first {first}")
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
        curve=Curve(weights, total, (scores - scores[best]).std(-1) * scores.shape[1] ** 0.5, f"cumulative {kind}"),
    )


# The learning rate that gives the posterior as much spread as the weighted-likelihood bootstrap.


def weighted_likelihood_bootstrap_matching(
    posterior: GibbsPosterior,
    *,
    criterion: Literal["trace", "determinant"] = "trace",
    num_replicates: int = 1000,
    seed: int = 0,
) -> Selection:
    r"""Give the posterior the total or the generalised variance of the weighted-likelihood bootstrap.

    The bootstrap minimises :math:`\sum_i g_i \ell(\theta, x_i)` under :math:`g \sim n\,\mathrm{Dirichlet}(1, \dots,
    1)`; with covariance ``V`` of its minimisers, and :math:`(n w J)^{-1}` for the posterior's,

    .. math:: w = \mathrm{tr}(J^{-1}) / (n\,\mathrm{tr} V) \quad \text{or} \quad
              w = (\det(J^{-1}) / \det V)^{1/d} / n.

    In the limit of many data ``V`` is the sandwich, and with one unknown this is the weight of
    :func:`information_matching`; here the spread of few data is that of actual minimisers.

    Parameters
    ----------
    posterior : GibbsPosterior
        Its weight and prior do not matter.
    criterion : {"trace", "determinant"}, default "trace"
        The determinant does not depend on linear changes of coordinates, the trace does.
    num_replicates : int, default 1000
        Weightings of the data, all minimised in one batch.
    seed : int, default 0
        Of the weightings.

    Returns
    -------
    Selection
        With diagnostics ``"covariance" (d, d)`` of the bootstrap, ``"minimizers" (R, d)``, ``"converged" (R,)`` and
        ``"information"``.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or minimisers hardly vary.
    SettingsError
        If losses do not add up, or the criterion is none.

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
    found = information(posterior)
    generator = new_generator(seed, stream="weighted likelihood bootstrap matching")
    ones = torch.ones(num_replicates, posterior.num_data, dtype=torch.float64)
    weights = posterior.num_data * dirichlet(ones, generator)
    minima = minimize(posterior, weights=weights.to(found.position), start=found.position)
    rows, warnings = converged_rows(minima.converged)
    away = minima.position[rows] - minima.position[rows].mean(0)
    covariance = away.mT @ away / (len(rows) - 1)
    if not bool((torch.linalg.eigvalsh(covariance) > 0).all()):
        raise DataError("the bootstrap's minimisers do not vary in some direction; are the data fitted without error?")
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
