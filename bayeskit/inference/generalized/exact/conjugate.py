"""Loss-based posteriors in closed form: normal where the loss is quadratic, beta for coins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit._torch import new_generator
from bayeskit.errors import DataError, ImproperPosteriorError, ModelError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses.loss import Data, Loss
from bayeskit.inference.generalized.posterior import GibbsPosterior

NUM_CHECKS = 8
STEPS = (0.1, -0.1, 1.0, -1.0, 10.0, -10.0, 100.0, -100.0)


@dataclass(frozen=True)
class Quadratic:
    r"""The function :math:`\tfrac12 \theta^\top A\,\theta + b^\top \theta + c`.

    Attributes
    ----------
    hessian : Tensor
        ``A``, shape ``(d, d)``.
    linear : Tensor
        ``b``, shape ``(d,)``.
    constant : Tensor
        ``c``, a scalar.

    Examples
    --------
    >>> import torch
    >>> Quadratic(torch.eye(1), torch.tensor([-2.0]), torch.tensor(0.0)).minimizer
    tensor([2.])
    """

    hessian: Tensor
    linear: Tensor
    constant: Tensor

    @property
    def minimizer(self) -> Tensor:
        """Where it is least, ``(d,)``.

        Raises
        ------
        ModelError
            If it has no unique minimum.
        """
        factor, failed = torch.linalg.cholesky_ex(self.hessian)
        if bool(failed):
            raise ModelError("the quadratic function has no unique minimum: its Hessian is not positive definite")
        return -torch.cholesky_solve(self.linear.unsqueeze(-1), factor).squeeze(-1)

    def __call__(self, theta: Tensor) -> Tensor:
        """Return the value, ``(*batch, d) -> (*batch)``."""
        return (theta @ self.hessian * theta).sum(-1) / 2 + theta @ self.linear + self.constant


@dataclass(frozen=True)
class GaussianPosterior:
    """A posterior that is a normal law.

    Attributes
    ----------
    mean : Tensor
        Shape ``(d,)``.
    covariance : Tensor
        Shape ``(d, d)``.
    log_normalizer : Tensor
        The log of the integral of ``exp(-weight * loss)`` times the prior density, a scalar.

    Examples
    --------
    >>> import torch
    >>> GaussianPosterior(torch.zeros(2), torch.eye(2), torch.tensor(0.0)).distribution
    MultivariateNormal(loc: torch.Size([2]), covariance_matrix: torch.Size([2, 2]))
    """

    mean: Tensor
    covariance: Tensor
    log_normalizer: Tensor

    @property
    def distribution(self) -> dist.MultivariateNormal:
        """The law, over vectors ``(d,)``."""
        return dist.MultivariateNormal(self.mean, self.covariance)


@dataclass(frozen=True)
class BetaPosterior:
    """A posterior of a probability that is a beta law.

    Attributes
    ----------
    concentration1, concentration0 : Tensor
        Of successes and of failures, scalars.
    log_normalizer : Tensor
        The log of the integral of the likelihood to the power ``weight`` times the prior density, a scalar.

    Examples
    --------
    >>> import torch
    >>> BetaPosterior(torch.tensor(2.0), torch.tensor(6.0), torch.tensor(0.0)).distribution.mean
    tensor(0.2500)
    """

    concentration1: Tensor
    concentration0: Tensor
    log_normalizer: Tensor

    @property
    def distribution(self) -> dist.Beta:
        """The law, over numbers in (0, 1)."""
        return dist.Beta(self.concentration1, self.concentration0)


def quadratic_coefficients(loss: Loss, data: Data, at: Tensor, weights: Tensor | None = None) -> Quadratic:
    """Return the coefficients of a loss that is quadratic in its parameter.

    They come from value, gradient and Hessian at one point, and are checked against the loss elsewhere.

    Parameters
    ----------
    loss : Loss
        Such as half the squared error of a linear prediction, or score matching and the kernel Stein discrepancy of
        an exponential family in its natural parameter.
    data : Tensor or tuple of Tensor
        Shapes ``(n, ...)``.
    at : Tensor
        A parameter of any shape, whose ``d`` entries the coefficients are for.
    weights : Tensor, optional
        Of the data, shape ``(n,)``.

    Returns
    -------
    Quadratic
        Of the total loss.

    Raises
    ------
    ModelError
        If the loss is not quadratic.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import losses
    >>> x = torch.tensor([1.0, 2.0, 4.0])
    >>> quadratic_coefficients(losses.HalfSquared(), x, torch.tensor(0.0))
    Quadratic(hessian=tensor([[3.]]), linear=tensor([-7.]), constant=tensor(10.5000))
    """
    if not at.is_floating_point():
        raise ShapeError(f"at must be a parameter of a floating type, not of {at.dtype}")

    def total(theta: Tensor) -> Tensor:
        return loss.total(theta.reshape(at.shape), data, weights)

    start = at.detach().reshape(-1)
    return _expanded(total, start, start.unsqueeze(0), f"the loss {type(loss).__name__}")


def gaussian_posterior(posterior: GibbsPosterior) -> GaussianPosterior:
    r"""Return a loss-based posterior in closed form, where loss and minus log prior are quadratic.

    With :math:`w L(\theta) - \log \pi(\theta) = \tfrac12 \theta^\top A\,\theta + b^\top \theta + c` it is
    :math:`N(-A^{-1} b, A^{-1})`, and its log normaliser
    :math:`\tfrac12 b^\top A^{-1} b - c + \tfrac d2 \log 2\pi - \tfrac12 \log |A|`.

    Parameters
    ----------
    posterior : GibbsPosterior
        With a normal prior, or a flat one where the loss alone fixes the parameter.

    Returns
    -------
    GaussianPosterior
        Over the unconstrained vector, which for a normal prior is the parameter.

    Raises
    ------
    ModelError
        If loss or log prior is not quadratic.
    ImproperPosteriorError
        If the posterior does not integrate to one.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130.

    Matsubara, T., Knoblauch, J., Briol, F.-X., Oates, C. J. (2022). Robust generalised Bayesian inference for
    intractable likelihoods. JRSS B 84, 997-1022.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> exact = gaussian_posterior(GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, weight=0.5))
    >>> round(exact.mean.item(), 12), round(exact.covariance.item(), 12)
    (1.4, 0.4)
    """
    starts = posterior.prior.start(NUM_CHECKS, 0)
    prior = _expanded(lambda u: -posterior.log_prior(u), starts[0], starts, "minus the log prior")
    loss = _expanded(
        lambda u: -posterior.log_likelihood(u), starts[0], starts, f"the loss {type(posterior.loss).__name__}"
    )
    precision, linear = prior.hessian + loss.hessian, prior.linear + loss.linear
    factor, failed = torch.linalg.cholesky_ex(precision)
    if bool(failed):
        raise ImproperPosteriorError(
            "the posterior does not integrate to one, for prior and loss together do not grow in every direction; "
            "take a proper prior, or a V-statistic for a discrepancy"
        )
    mean = -torch.cholesky_solve(linear.unsqueeze(-1), factor).squeeze(-1)
    log_volume = posterior.dim / 2 * math.log(2 * math.pi) - factor.diagonal().log().sum()
    log_normalizer = log_volume - linear @ mean / 2 - prior.constant - loss.constant
    return GaussianPosterior(mean, torch.cholesky_inverse(factor), log_normalizer)


def beta_posterior(prior: Any, outcomes: Tensor, weight: float = 1.0, weights: Tensor | None = None) -> BetaPosterior:
    r"""Return the posterior of a coin's probability under its likelihood to the power ``weight``.

    With ``s`` successes and ``f`` failures it is :math:`\mathrm{Beta}(a + w s,\, b + w f)`, and its normaliser
    :math:`B(a + w s, b + w f) / B(a, b)`.

    Parameters
    ----------
    prior : Beta
        Of scalar concentrations.
    outcomes : Tensor
        Zeros and ones, shape ``(n,)``.
    weight : float, default 1.0
        Positive.
    weights : Tensor, optional
        Of the data, shape ``(n,)``, not negative.

    Returns
    -------
    BetaPosterior
        Of the precision of the outcomes, or of the prior where these are whole numbers.

    Raises
    ------
    SettingsError
        If the prior is no beta law of one probability, or ``weight`` not positive.
    DataError
        If an outcome is neither zero nor one, or a weight negative or not finite.
    ShapeError
        If there is not one weight for each outcome.

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
    rate = real_number("weight", weight, between=(0.0, math.inf))
    wrong = (outcomes != 0) & (outcomes != 1)
    if outcomes.dim() != 1 or bool(wrong.any()):
        which = "" if outcomes.dim() != 1 else f", unlike datum {int(wrong.nonzero()[0])}"
        raise DataError(f"outcomes must be zeros and ones, of shape (n,){which}; theirs is {tuple(outcomes.shape)}")
    dtype = outcomes.dtype if outcomes.is_floating_point() else prior.concentration1.dtype
    outcomes = outcomes.to(dtype)
    counts = torch.ones_like(outcomes) if weights is None else _counts(weights, outcomes, dtype)
    old1, old0 = prior.concentration1.to(counts), prior.concentration0.to(counts)
    new1, new0 = old1 + rate * (counts * outcomes).sum(), old0 + rate * (counts * (1 - outcomes)).sum()
    return BetaPosterior(new1, new0, _log_beta(new1, new0) - _log_beta(old1, old0))


def _expanded(function: Callable[[Tensor], Tensor], at: Tensor, starts: Tensor, what: str) -> Quadratic:
    """Expand a function of a vector about ``at``, and see that it is quadratic around all of ``starts``."""
    value, gradient = function(at), torch.func.grad(function)(at)
    hessian = torch.func.jacrev(torch.func.grad(function))(at)
    hessian = (hessian + hessian.mT) / 2
    linear = gradient - hessian @ at
    found = Quadratic(hessian, linear, value - gradient @ at + at @ hessian @ at / 2)
    tolerance = torch.finfo(at.dtype).eps ** 0.5
    generator = new_generator(0, at.device, stream="checks of a quadratic")
    for start in starts:
        direction = torch.randn(at.shape, generator=generator, dtype=at.dtype, device=at.device)
        direction = direction / direction.abs().max()  # so that no draw looks less far than another
        for step in STEPS:
            point = start + step * direction
            true, claimed = function(point), found(point)
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
    wrong = ~(weights.isfinite() & (weights >= 0))
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise DataError(
            f"weights must be finite and not negative, but that of datum {first} is {float(weights[first])}"
        )
    return weights if weights.is_floating_point() else weights.to(dtype)
