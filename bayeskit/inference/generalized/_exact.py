"""Exact Gibbs posteriors, in closed form or by enumeration of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import CoherenceError, DataError, ImproperPosteriorError, ModelError, SettingsError, ShapeError
from bayeskit.extend import as_numbers, new_generator, real_number, short_repr
from bayeskit.inference.generalized._posterior import GibbsPosterior, Pooling, as_loss, as_pooling
from bayeskit.inference.generalized.losses._loss import Data, Loss, PointwiseLoss, as_data, columns, num_data, refuse

# Gibbs posteriors in closed form: normal for quadratic losses, beta for binary outcomes.

_NUM_CHECKS = 8
_STEPS = (0.1, -0.1, 1.0, -1.0, 10.0, -10.0, 100.0, -100.0)


class _Quadratic(NamedTuple):
    """Quadratic function of a vector, half its ``hessian (d, d)``, ``linear (d,)`` and ``constant ()``."""

    hessian: Tensor
    linear: Tensor
    constant: Tensor

    def at(self, theta: Tensor) -> Tensor:
        """Return the value at a vector, ``(d,) -> ()``."""
        return theta @ self.hessian @ theta / 2 + theta @ self.linear + self.constant


@dataclass(frozen=True)
class GaussianPosterior:
    """Normal posterior.

    Attributes
    ----------
    mean : Tensor
        Shape ``(d,)``.
    covariance : Tensor
        Shape ``(d, d)``.
    log_normalizer : Tensor
        Log integral of ``exp(-weight * loss)`` times the prior density, scalar.

    Examples
    --------
    >>> import torch
    >>> GaussianPosterior(torch.zeros(2), torch.eye(2), torch.tensor(0.0)).distribution
    MultivariateNormal(loc: torch.Size([2]), covariance_matrix: torch.Size([2, 2]))
    """

    mean: Tensor
    covariance: Tensor
    log_normalizer: Tensor

    __repr__ = short_repr

    @property
    def distribution(self) -> dist.MultivariateNormal:
        """Distribution of vectors ``(d,)``."""
        return dist.MultivariateNormal(self.mean, self.covariance)


@dataclass(frozen=True)
class BetaPosterior:
    """Beta posterior of a probability.

    Attributes
    ----------
    concentration1, concentration0 : Tensor
        Concentrations of successes and failures, scalars.
    log_normalizer : Tensor
        Log integral of the likelihood to the power ``weight`` times the prior density, scalar.

    Examples
    --------
    >>> import torch
    >>> BetaPosterior(torch.tensor(2.0), torch.tensor(6.0), torch.tensor(0.0)).distribution.mean
    tensor(0.2500)
    """

    concentration1: Tensor
    concentration0: Tensor
    log_normalizer: Tensor

    __repr__ = short_repr

    @property
    def distribution(self) -> dist.Beta:
        """Distribution of the probability."""
        return dist.Beta(self.concentration1, self.concentration0)


def gaussian_posterior(posterior: GibbsPosterior) -> GaussianPosterior:
    r"""Return the normal Gibbs posterior of a quadratic loss and a quadratic log prior.

    With :math:`w L(\theta) - \log \pi(\theta) = \tfrac12 \theta^\top A\,\theta + b^\top \theta + c` the posterior is
    :math:`N(-A^{-1} b, A^{-1})`, with log normalising constant
    :math:`\tfrac12 b^\top A^{-1} b - c + \tfrac d2 \log 2\pi - \tfrac12 \log |A|`.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with a quadratic loss and a normal or flat prior.

    Returns
    -------
    GaussianPosterior
        Distribution of the unconstrained vector; for a normal prior this is the parameter.

    Raises
    ------
    ModelError
        If the loss or the log prior is not quadratic.
    ImproperPosteriorError
        If ``A`` is not positive definite.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130. Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2022). Robust generalised Bayesian
    inference for intractable likelihoods. JRSS B 84, 997-1022.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> exact = gaussian_posterior(GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=0.5))
    >>> round(exact.mean.item(), 12), round(exact.covariance.item(), 12)
    (1.4, 0.4)
    """
    starts = posterior.prior.start(_NUM_CHECKS, 0)
    prior = _expanded(lambda u: -posterior.log_prior(u), starts[0], starts, "minus the log prior")
    loss = _expanded(
        lambda u: -posterior.log_likelihood(u), starts[0], starts, f"the loss {type(posterior.loss).__name__}"
    )
    precision, linear = prior.hessian + loss.hessian, prior.linear + loss.linear
    factor, failed = torch.linalg.cholesky_ex(precision)
    if bool(failed):
        raise ImproperPosteriorError(
            "the posterior is improper: prior and loss together do not grow in every direction; take a proper prior, "
            "or a V-statistic for a discrepancy"
        )
    mean = -torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    log_volume = posterior.dim / 2 * math.log(2 * math.pi) - factor.diagonal().log().sum()
    log_normalizer = log_volume - linear @ mean / 2 - prior.constant - loss.constant
    return GaussianPosterior(mean, torch.cholesky_inverse(factor), log_normalizer)


def beta_posterior(prior: Any, outcomes: Tensor, weight: float = 1.0, weights: Tensor | None = None) -> BetaPosterior:
    r"""Return the beta posterior of a success probability, with the Bernoulli likelihood to the power ``weight``.

    With ``s`` successes and ``f`` failures it is :math:`\mathrm{Beta}(a + w s,\, b + w f)`, with normalising constant
    :math:`B(a + w s, b + w f) / B(a, b)`.

    Parameters
    ----------
    prior : Beta
        Beta distribution with scalar concentrations.
    outcomes : Tensor
        Zeros and ones, ``(n,)``.
    weight : float, default 1.0
        Learning rate, positive.
    weights : Tensor, optional
        Nonnegative weights of the outcomes, ``(n,)``.

    Returns
    -------
    BetaPosterior
        With the dtype of the outcomes if floating, otherwise that of the prior.

    Raises
    ------
    SettingsError
        If ``prior`` is not a scalar Beta, or ``weight`` is not positive.
    DataError
        If an outcome is neither zero nor one, or one of ``weights`` is negative or not finite.
    ShapeError
        If ``weights`` is not ``(n,)``.

    References
    ----------
    Ibrahim, J. G., Chen, M.-H. (2000). Power prior distributions for regression models. Statistical Science 15, 46-60.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> posterior = beta_posterior(dist.Beta(1.0, 1.0), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    >>> round(posterior.log_normalizer.exp().item(), 4)
    0.05
    """
    if not isinstance(prior, torch.distributions.Beta) or prior.batch_shape:
        raise SettingsError(f"the prior must be Beta(a, b) with numbers a and b, not {prior!r:.80}")
    rate = real_number("weight", weight, "(0, inf)")
    wrong = (outcomes != 0) & (outcomes != 1)
    if outcomes.dim() != 1 or bool(wrong.any()):
        which = "" if outcomes.dim() != 1 else f", unlike datum {int(wrong.nonzero()[0])}"
        raise DataError(f"outcomes must be zeros and ones of shape (n,){which}; shape {tuple(outcomes.shape)} given")
    dtype = outcomes.dtype if outcomes.is_floating_point() else prior.concentration1.dtype
    outcomes = outcomes.to(dtype)
    counts = torch.ones_like(outcomes) if weights is None else _counts(weights, outcomes, dtype)
    old1, old0 = prior.concentration1.to(counts), prior.concentration0.to(counts)
    new1, new0 = old1 + rate * (counts * outcomes).sum(), old0 + rate * (counts * (1 - outcomes)).sum()
    return BetaPosterior(new1, new0, _log_beta(new1, new0) - _log_beta(old1, old0))


def _expanded(function: Callable[[Tensor], Tensor], at: Tensor, starts: Tensor, what: str) -> _Quadratic:
    """Expand a function of a vector about ``at``; ModelError unless it is quadratic around all of ``starts``."""
    value, gradient = function(at), torch.func.grad(function)(at)
    hessian = torch.func.jacrev(torch.func.grad(function))(at)
    hessian = (hessian + hessian.mT) / 2
    linear = gradient - hessian @ at
    found = _Quadratic(hessian, linear, value - gradient @ at + at @ hessian @ at / 2)
    tolerance = torch.finfo(at.dtype).eps ** 0.5
    generator = new_generator(0, at.device, stream="checks of a quadratic")
    for start in starts:
        direction = torch.randn(at.shape, generator=generator, dtype=at.dtype, device=at.device)
        direction = direction / direction.abs().max()  # equal reach for all draws
        for step in _STEPS:
            point = start + step * direction
            true, claimed = function(point), found.at(point)
            size = value.abs() + true.abs() + linear.abs() @ point.abs() + point.abs() @ hessian.abs() @ point.abs()
            if not bool((true - claimed).abs() <= tolerance * (1 + size)):
                raise ModelError(
                    f"{what} is not quadratic: {float(true):.6g} instead of {float(claimed):.6g} at "
                    f"{point.tolist()!r:.100}; sample instead, or use the natural parameter"
                )
    return found


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _counts(weights: Tensor, outcomes: Tensor, dtype: torch.dtype) -> Tensor:
    if weights.shape != outcomes.shape:
        raise ShapeError(f"weights must have shape {tuple(outcomes.shape)}, not {tuple(weights.shape)}")
    refuse("weights", weights, ~(weights.isfinite() & (weights >= 0)), "finite and not negative")
    return weights if weights.is_floating_point() else weights.to(dtype)


# Gibbs posterior on a finite grid, by enumeration.

_ENTRIES = 2**22  # largest number of losses in memory
_NEAR_ONE = 1e-2  # tolerance for sums of rounded probabilities


@dataclass(frozen=True, eq=False)
class GridPosterior:
    """Exact Gibbs posterior on a grid, returned by :func:`grid_posterior`.

    Attributes
    ----------
    values : Tensor
        Grid, ``(m, ...)``.
    log_probabilities : Tensor
        Normalised log probabilities, ``(m,)``.
    log_evidence : float
        Log prior mean of ``exp(-weight * loss)`` for all data.
    """

    values: Tensor
    log_probabilities: Tensor
    log_evidence: float
    loss: Loss
    weight: float
    pooling: Pooling

    @property
    def probabilities(self) -> Tensor:
        """Posterior probabilities, ``(m,)``."""
        return self.log_probabilities.exp()

    @property
    def mean(self) -> Tensor:
        """Posterior mean, with the shape of one grid value."""
        weights = self.probabilities.reshape(-1, *[1] * (self.values.dim() - 1))
        return (weights * self.values).sum(0)

    def quantile(self, level: float) -> Tensor:
        """Return the smallest grid value at which the distribution function reaches ``level``, in (0, 1).

        Raises
        ------
        SettingsError, ShapeError
            If ``level`` is not in (0, 1), or grid values are not scalars.
        """
        level = real_number("level", level, "(0, 1)")
        if self.values.dim() != 1:
            raise ShapeError(f"values of shape {tuple(self.values.shape[1:])} have no order, so no quantiles")
        values, order = self.values.sort()
        mass = self.probabilities[order].cumsum(0)
        # Tolerance for rounding: .1 + .2 must reach the level .3.
        reached = mass >= level - 4 * len(mass) * torch.finfo(mass.dtype).eps
        return values[int(reached.int().argmax())]

    def update(self, new_data: Any) -> GridPosterior:
        """Return the posterior of further data too; CoherenceError if sequential and joint updates differ."""
        if not (isinstance(self.loss, PointwiseLoss) and self.pooling.coherent):
            raise CoherenceError(
                f"{type(self.loss).__name__} pooled by {type(self.pooling).__name__} cannot be updated sequentially: "
                "sequential and joint updates give different posteriors; call grid_posterior with all data"
            )
        return _enumerated(self, as_data(new_data))

    def __repr__(self) -> str:
        return f"GridPosterior({type(self.loss).__name__}, {len(self.values)} values, weight={self.weight:g})"


def grid_posterior(
    loss: Any,
    grid: Any,
    data: Any,
    log_prior: Any = None,
    weight: float = 1.0,
    pooling: Pooling | Literal["sum", "mean", "max"] = "sum",
) -> GridPosterior:
    """Return the exact Gibbs posterior of a parameter with finitely many values.

    Parameters
    ----------
    loss, data, weight, pooling
        As for :class:`GibbsPosterior`; the loss is called with one grid value and may branch on it.
    grid : Tensor
        Parameter values, ``(m, ...)``.
    log_prior : Tensor, optional
        Unnormalised log prior probabilities, ``(m,)``; ``-inf`` excludes a value. Uniform by default.

    Raises
    ------
    SettingsError
        If ``weight`` is not positive, ``pooling`` does not fit the loss, or ``log_prior`` holds probabilities.
    ShapeError
        If the grid, ``log_prior`` or losses have the wrong shape.
    DataError
        If the grid is not finite, ``log_prior`` is nan or inf or excludes all values, a loss is nan, or the loss is
        infinite at all values that the prior allows.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> posterior = grid_posterior(losses.Absolute(), torch.arange(5.0), x)
    >>> [round(p, 6) for p in posterior.probabilities.tolist()]
    [0.009694, 0.194706, 0.529266, 0.194706, 0.071628]
    >>> round(posterior.mean.item(), 6), posterior.quantile(0.5).item()
    (2.123869, 2.0)
    """
    data = as_data(data)
    loss = as_loss(loss)
    pooling = as_pooling(pooling, loss)
    weight = real_number("weight", weight, "(0, inf)")
    values = _as_grid(grid, data)
    empty = GridPosterior(values, _as_masses(log_prior, values, data), 0.0, loss, weight, pooling)
    return _enumerated(empty, data)


def _as_grid(grid: Any, data: Data) -> Tensor:
    values = as_numbers("grid", grid)
    if values.dim() == 0 or len(values) == 0:
        raise ShapeError(f"grid must be values (m, ...), not of shape {tuple(values.shape)}")
    bad = ~values.isfinite().reshape(len(values), -1).all(-1)
    if bool(bad.any()):
        raise DataError(f"value {int(bad.nonzero()[0])} of the grid is not finite")
    # Integer grids keep their dtype: they may be counts or indices.
    return values.to(_dtype(values, data)) if values.is_floating_point() else values


def _dtype(values: Tensor, data: Data) -> torch.dtype:
    """Return the widest floating dtype of grid and data; torch's default if there is none."""
    found = [x.dtype for x in (values, *columns(data)) if x.is_floating_point()]
    return max(found, key=lambda dtype: torch.finfo(dtype).bits, default=torch.get_default_dtype())


def _as_masses(log_prior: Any, values: Tensor, data: Data) -> Tensor:
    dtype, device = _dtype(values, data), values.device
    if log_prior is None:
        log_masses = torch.zeros(len(values), dtype=dtype, device=device)
    else:
        log_masses = as_numbers("log_prior", log_prior).to(device, dtype)
    if log_masses.shape != values.shape[:1]:
        raise ShapeError(f"log_prior must have shape {(len(values),)}, not {tuple(log_masses.shape)}")
    bad = log_masses.isnan() | (log_masses == torch.inf)
    if bool(bad.any()):
        raise DataError(
            f"the prior of value {int(bad.nonzero()[0])} of the grid is nan or inf; give logarithms of masses"
        )
    if bool((log_masses == -torch.inf).all()):
        raise DataError("the prior excludes every value of the grid")
    if bool((log_masses >= 0).all()) and abs(float(log_masses.sum()) - 1) < _NEAR_ONE:
        raise SettingsError("log_prior looks like probabilities, which sum to one; give their logarithms")
    return log_masses.log_softmax(0)


def _enumerated(before: GridPosterior, data: Data) -> GridPosterior:
    """Return the posterior with prior ``before``."""
    before.loss.check(data)
    total = _pooled(before.loss, before.pooling, before.values, data).to(before.log_probabilities)
    allowed = before.log_probabilities > -torch.inf
    wrong = total.isnan() & allowed
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(f"the loss is nan at value {first} of the grid, {before.values[first].tolist()!r:.80}")
    # Excluded values stay excluded, even if their loss is nan or -inf.
    unnormalized = torch.where(allowed, before.log_probabilities - before.weight * total, -torch.inf)
    step = unnormalized.logsumexp(0)
    if not bool(step.isfinite()):
        raise DataError("the loss is infinite at every value of the grid that the prior allows; widen the grid")
    return replace(before, log_probabilities=unnormalized - step, log_evidence=before.log_evidence + float(step))


def _pooled(loss: Loss, pooling: Pooling, values: Tensor, data: Data) -> Tensor:
    """Return the pooled loss at each value, ``(m,)``."""

    def of_one(value: Tensor) -> Tensor:
        if not isinstance(loss, PointwiseLoss):
            return loss.total(value, data)
        each = loss.pointwise(value, data)
        if tuple(each.shape) != (num_data(data),):
            raise ShapeError(
                f"the loss {type(loss).__name__} returns {tuple(each.shape)} instead of {(num_data(data),)} for a "
                f"single value of the grid, of shape {tuple(value.shape)}"
            )
        return pooling(each)

    chunk = max(1, _ENTRIES // num_data(data))
    try:
        result: Tensor = torch.func.vmap(of_one, chunk_size=chunk)(values)
    except RuntimeError:
        # A loss that branches on values cannot be batched; a faulty loss raises its own error here.
        result = torch.stack([of_one(value) for value in values])
    return result
