"""Robust divergence losses for models with normalised densities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Exponential,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    OneHotCategorical,
    Poisson,
)

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.extend import real_number, whole_number
from bayeskit.inference.generalized.losses._loss import Data, Loss, PointwiseLoss, unvalidated

# Log densities of the data, and integrals of powers of a density.

Model = Callable[..., Distribution]
"""``parameter -> distribution`` of one datum, or ``(parameter, *covariates) -> distributions`` of all data."""

_POISSON_TERMS = 256


def law_of(model: Model, parameter: Any, data: Data) -> tuple[Distribution, Tensor]:
    """Return the distribution of the outcomes, and the outcomes, the last column of the data."""
    covariates, outcomes = (data[:-1], data[-1]) if isinstance(data, tuple) else ((), data)
    with unvalidated():
        return model(parameter, *covariates), outcomes


def joint_law_of(model: Model, parameter: Any, data: Data) -> tuple[Distribution, Tensor]:
    """Return the joint distribution of the entries of an outcome, with independent batch entries, and the outcomes."""
    law, outcomes = law_of(model, parameter, data)
    if not isinstance(law, Distribution):
        raise ModelError(f"distribution must return a distribution, not {law!r:.80}")
    entries = outcomes.dim() - 1 - len(law.event_shape)
    if entries <= 0:
        return law, outcomes
    try:
        shape = torch.broadcast_shapes(law.batch_shape, outcomes.shape[1 : 1 + entries])
    except RuntimeError as error:
        raise ShapeError(
            f"a distribution of batch shape {tuple(law.batch_shape)} and event shape {tuple(law.event_shape)} "
            f"does not fit outcomes of shape {tuple(outcomes.shape)}"
        ) from error
    with unvalidated():
        return Independent(law.expand(shape), entries), outcomes


def outcome_log_density(law: Distribution, outcomes: Tensor) -> Tensor:
    """Return the log density of each outcome, ``(n,)``, minus infinity outside the support."""
    inside: Tensor = law.support.check(outcomes)  # type: ignore[union-attr]
    with unvalidated():
        value = law.log_prob(_replaced(outcomes, inside))
    if value.shape != outcomes.shape[:1]:
        raise ShapeError(
            f"{type(law).__name__} returns log densities of shape {tuple(value.shape)} for {len(outcomes)} outcomes "
            f"of shape {tuple(outcomes.shape[1:])}"
        )
    # Without validation some distributions have finite log densities outside the support.
    return torch.where(inside, value, value.new_full((), -math.inf))


def _replaced(outcomes: Tensor, inside: Tensor) -> Tensor:
    """Replace outcomes outside the support, where derivatives may be nan, by one inside."""
    if inside.shape != outcomes.shape[:1]:
        return outcomes
    one = outcomes.index_select(0, inside.int().argmax().reshape(1))
    return torch.where(inside.reshape(-1, *[1] * (outcomes.dim() - 1)), outcomes, one)


@singledispatch
def log_power_integral(law: Distribution, power: float) -> Tensor:
    r"""Return :math:`\log \int p(x)^{s}\,dx` of a distribution, or the log sum for discrete outcomes.

    Closed form for ``Normal``, ``MultivariateNormal``, ``Laplace`` and ``Exponential``; sum over all outcomes for
    ``Bernoulli``, ``Categorical`` and ``OneHotCategorical``; for ``Poisson``, sum over 256 counts around the mean, with
    spacing of at most a third of a standard deviation for large rates, exact to rounding. ``Independent`` is supported.
    Use ``log_power_integral.register`` for other families.

    Parameters
    ----------
    law : Distribution
        Distribution with batch shape ``(*batch)``.
    power : float
        ``s``, positive.

    Returns
    -------
    Tensor
        Shape ``(*batch)``.

    Raises
    ------
    ModelError
        If the family is not supported.

    Examples
    --------
    >>> import torch
    >>> round(log_power_integral(Normal(torch.tensor(0.0), torch.tensor(1.0)), 2.0).exp().item(), 6)  # 1 / 2 sqrt(pi)
    0.282095
    """
    raise ModelError(
        f"the integral of a power of the density of {type(law).__name__} is not known; pass power_integral="
        "(distribution, power) -> integral"
    )


@log_power_integral.register
def _(law: Normal, power: float) -> Tensor:
    return (1 - power) * (law.scale.log() + math.log(2 * math.pi) / 2) - math.log(power) / 2


@log_power_integral.register
def _(law: MultivariateNormal, power: float) -> Tensor:
    dim = law.event_shape[0]
    log_volume = law._unbroadcasted_scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    log_volume = (log_volume + dim * math.log(2 * math.pi) / 2).expand(law.batch_shape)
    return (1 - power) * log_volume - dim * math.log(power) / 2


@log_power_integral.register
def _(law: Laplace, power: float) -> Tensor:
    return (1 - power) * (2 * law.scale).log() - math.log(power)


@log_power_integral.register
def _(law: Exponential, power: float) -> Tensor:
    return (power - 1) * law.rate.log() - math.log(power)


@log_power_integral.register
def _(law: Bernoulli, power: float) -> Tensor:
    log_sigmoid = torch.nn.functional.logsigmoid
    return torch.logaddexp(power * log_sigmoid(law.logits), power * log_sigmoid(-law.logits))


@log_power_integral.register(Categorical)
@log_power_integral.register(OneHotCategorical)
def _(law: Categorical | OneHotCategorical, power: float) -> Tensor:
    return (power * law.logits).logsumexp(-1)


@log_power_integral.register
def _(law: Poisson, power: float) -> Tensor:
    rate = law.rate.detach()
    # By Poisson summation the relative error of a lattice with spacing s is 2 exp(-2 (pi sd / s)**2).
    spacing = ((rate / power).sqrt() / 3).floor().clamp_min(1.0)
    start = (rate - spacing * (_POISSON_TERMS // 2)).floor().clamp_min(0.0)
    steps = torch.arange(_POISSON_TERMS, dtype=rate.dtype, device=rate.device)
    counts = start.unsqueeze(-1) + spacing.unsqueeze(-1) * steps
    log_mass = torch.xlogy(counts, law.rate.unsqueeze(-1)) - law.rate.unsqueeze(-1) - torch.lgamma(counts + 1)
    return (power * log_mass).logsumexp(-1) + spacing.log()


@log_power_integral.register
def _(law: Independent, power: float) -> Tensor:
    value = log_power_integral(law.base_dist, power)
    return value.flatten(-law.reinterpreted_batch_ndims).sum(-1) if law.reinterpreted_batch_ndims else value


# Density power (beta-) divergence.


@dataclass(frozen=True)
class BetaDivergence(PointwiseLoss):
    r"""Loss of the beta-divergence (density power divergence).

    .. math:: \ell(\theta, x) = -\frac{1}{\beta}\, p_\theta(x)^{\beta}
        + \frac{1}{1+\beta} \int p_\theta(y)^{1+\beta}\,dy.

    As :math:`\beta \to 0` its gradient tends to that of the negative log likelihood. The loss is bounded, so the prior
    must be proper; with an unknown scale a proper prior may not suffice, see the notes. An outcome outside the support
    has density zero.

    Parameters
    ----------
    beta : float
        Positive; usually 0.1 to 0.5.
    distribution : callable
        ``parameter -> distribution`` of one datum, or ``(parameter, *covariates) -> distributions`` for data
        ``(*covariates, outcomes)``. Batch entries of an outcome are independent.
    power_integral : callable, optional
        ``(distribution, s) -> integral of p**s``, with the batch shape of the distribution, for families that
        :func:`~bayeskit.inference.generalized.losses.log_power_integral` does not support.

    Raises
    ------
    SettingsError
        If ``beta`` is not positive.

    Notes
    -----
    If the scale :math:`s` of a ``d``-dimensional normal distribution is unknown, the loss has poles: with the location
    at a value that occurs ``k`` times among ``n`` data the total loss is, as :math:`s \to 0`,

    .. math:: (2\pi)^{-d\beta/2} s^{-d\beta} \Big(\frac{n}{(1+\beta)^{1+d/2}} - \frac{k}{\beta}\Big) + o(1).

    If :math:`n < k\,(1+\beta)^{1+d/2} / \beta`, it tends to minus infinity and :math:`e^{-w\ell}` is not integrable:
    the posterior is improper for half-normal, exponential and gamma priors of the scale. This happens with few data or
    many ties, such as in rounded data. The posterior is proper with a lower bound on the scale, or with a prior that
    vanishes like :math:`\exp(-s^{-b})` with :math:`b > d\beta`, such as an inverse gamma prior of the scale
    (:math:`b = 1`) or of the variance (:math:`b = 2`).

    References
    ----------
    Basu, A., Harris, I. R., Hjort, N. L., Jones, M. C. (1998). Robust and efficient estimation by minimising a density
    power divergence. Biometrika 85, 549-559. Ghosh, A., Basu, A. (2016). Robust Bayes estimation using the density
    power divergence. Annals of the Institute of Statistical Mathematics 68, 413-437.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> loss = BetaDivergence(0.5, lambda mean: dist.Normal(mean, 1.0))
    >>> loss.pointwise(torch.tensor(0.0), torch.tensor([0.0, 2.0, 100.0]))
    tensor([-0.9194, -0.1209,  0.3438])
    """

    beta: float
    distribution: Model
    power_integral: Callable[[Distribution, float], Tensor] | None = None

    bounded = True

    def __post_init__(self) -> None:
        real_number("beta", self.beta, "(0, inf)")

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        power, s = (self.beta * outcome_log_density(law, outcomes)).exp(), 1 + self.beta
        given = self.power_integral
        return (log_power_integral(law, s).exp() if given is None else given(law, s)) / s - power / self.beta


# Gamma-divergence.


@dataclass(frozen=True)
class GammaDivergence(PointwiseLoss):
    r"""Loss of the gamma-divergence, in its pointwise form.

    .. math:: \ell(\theta, x) = -\frac{1}{\gamma}\, p_\theta(x)^{\gamma}
        \Big(\int p_\theta(y)^{1+\gamma}\,dy\Big)^{-\gamma/(1+\gamma)}.

    Its mean over data is a monotone function of the gamma-cross entropy of Fujisawa and Eguchi and has the same
    minimiser. The loss does not depend on the normalisation of the density, and estimates of scale are robust to heavy
    contamination. As :math:`\gamma \to 0` its gradient tends to that of the negative log likelihood. The loss is never
    positive, so the prior must be proper; with an unknown scale a proper prior may not suffice, see the notes. An
    outcome outside the support has loss zero.

    Parameters
    ----------
    gamma : float
        Positive; usually 0.1 to 0.5.
    distribution, power_integral
        As for :class:`BetaDivergence`.

    Raises
    ------
    SettingsError
        If ``gamma`` is not positive.

    Notes
    -----
    If the scale :math:`s` of a ``d``-dimensional distribution is unknown, the loss has a pole at every datum, for every
    ``n``: with the location there it decreases like :math:`-s^{-d\gamma/(1+\gamma)}` as :math:`s \to 0`, and
    :math:`e^{-w\ell}` is not integrable. The same priors as for :class:`BetaDivergence` make the posterior improper or
    proper, here with :math:`b > d\gamma/(1+\gamma)`.

    References
    ----------
    Fujisawa, H., Eguchi, S. (2008). Robust parameter estimation with a small bias against heavy contamination. Journal
    of Multivariate Analysis 99, 2053-2081. Nakagawa, T., Hashimoto, S. (2020). Robust Bayesian inference via
    gamma-divergence. Communications in Statistics - Theory and Methods 49, 343-360.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> loss = GammaDivergence(0.5, lambda mean: dist.Normal(mean, 1.0))
    >>> loss.pointwise(torch.tensor(0.0), torch.tensor([0.0, 2.0, 100.0]))
    tensor([-1.5752, -0.5795, -0.0000])
    """

    gamma: float
    distribution: Model
    power_integral: Callable[[Distribution, float], Tensor] | None = None

    bounded = True

    def __post_init__(self) -> None:
        real_number("gamma", self.gamma, "(0, inf)")

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        given, s = self.power_integral, 1 + self.gamma
        log_integral = log_power_integral(law, s) if given is None else given(law, s).log()
        # One exponential of the log ratio: for small scales both factors overflow or underflow.
        log_ratio = outcome_log_density(law, outcomes) - log_integral / s
        return -(self.gamma * log_ratio).exp() / self.gamma


# Alpha-divergence between a density estimate of the data and a model.


class DensityEstimate(ABC):
    """Base class of density estimates of the data."""

    @abstractmethod
    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points ``(m, ...)``, masses ``(m,)`` and log densities ``(m,)`` of the estimate.

        Data ``x (n, ...)`` have weights ``shares (n,)`` of sum one; means under the estimate are sums over the points.
        """


@dataclass(frozen=True)
class EmpiricalMass(DensityEstimate):
    """Empirical probability mass function, for discrete outcomes.

    Examples
    --------
    >>> import torch
    >>> points, masses, log_density = EmpiricalMass()(torch.tensor([0.0, 1.0, 1.0]), torch.full((3,), 1 / 3))
    >>> log_density.exp()
    tensor([0.3333, 0.6667, 0.6667])
    """

    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the data, their weights, and the log probability of each value."""
        rows = x.reshape(len(x), -1)
        same = (rows.unsqueeze(0) == rows.unsqueeze(1)).all(-1)
        share = same.to(shares.dtype) @ shares
        # Values with weight zero must not become nan.
        return x, shares, torch.where(share > 0, share, torch.ones_like(share)).log()


@dataclass(frozen=True)
class KernelDensity(DensityEstimate):
    """Kernel density estimate with a normal kernel, for real outcomes.

    Means under the estimate are computed by Gauss-Hermite quadrature around each datum.

    Parameters
    ----------
    bandwidth : float
        Standard deviation of the kernel, positive.
    num_nodes : int, default 16
        Quadrature nodes for each datum.

    Raises
    ------
    SettingsError
        If ``bandwidth`` is not positive, or ``num_nodes`` is below one.
    DataError, ShapeError
        When called, if data are not floating tensors ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> points, masses, _ = KernelDensity(0.5)(torch.tensor([0.0, 2.0]), torch.full((2,), 0.5))
    >>> round((masses * points**2).sum().item(), 4)  # (0 + 4) / 2 + 0.5**2
    2.25
    """

    bandwidth: float
    num_nodes: int = 16

    def __post_init__(self) -> None:
        real_number("bandwidth", self.bandwidth, "(0, inf)")
        whole_number("num_nodes", self.num_nodes, least=1)

    def __call__(self, x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the quadrature nodes, their masses and log densities, ``(n * num_nodes,)``."""
        if x.dim() != 1:
            raise ShapeError(f"KernelDensity takes outcomes that are numbers, (n,), not of shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise DataError("KernelDensity takes outcomes of a floating type; for whole numbers take EmpiricalMass()")
        nodes, masses = (torch.as_tensor(a).to(x) for a in np.polynomial.hermite_e.hermegauss(self.num_nodes))
        masses = masses / masses.sum()
        points = (x.unsqueeze(-1) + self.bandwidth * nodes).flatten()
        standardised = (points.unsqueeze(-1) - x) / self.bandwidth
        exponents = -standardised.square() / 2
        nearest = exponents.amax(-1, keepdim=True)
        # A matrix product, so that many weightings of the data share the kernel matrix.
        share = ((exponents - nearest).exp() @ shares).clamp_min(torch.finfo(x.dtype).tiny)
        log_density = nearest.squeeze(-1) + share.log() - math.log(self.bandwidth * math.sqrt(2 * math.pi))
        return points, (shares.unsqueeze(-1) * masses).flatten(), log_density


@dataclass(frozen=True)
class AlphaDivergence(Loss):
    r"""``n`` times the alpha-divergence from a density estimate of the data to the model.

    With the estimate :math:`\hat g`,

    .. math:: D_\alpha(\hat g \,\|\, p_\theta) = \frac{1}{\alpha(1-\alpha)}
        \Big(1 - \int \hat g(x)^{\alpha}\, p_\theta(x)^{1-\alpha}\,dx\Big), \qquad 0 < \alpha < 1.

    It is twice the squared Hellinger distance :math:`\int (\sqrt{\hat g} - \sqrt{p_\theta})^2` for :math:`\alpha = 1/2`
    and tends to the Kullback-Leibler divergence as :math:`\alpha \to 1`. The loss is robust and, with a good estimate,
    asymptotically as efficient as the likelihood. It is bounded by :math:`n/(\alpha(1-\alpha))`, so the prior must be
    proper. It is not pointwise, so minibatches and sequential updates are not supported.

    Parameters
    ----------
    alpha : float
        In (0, 1).
    distribution : callable
        ``parameter -> distribution`` of one datum.
    estimate : DensityEstimate
        :class:`EmpiricalMass` for discrete outcomes, :class:`KernelDensity` for real outcomes.

    Raises
    ------
    SettingsError
        If ``alpha`` is not in (0, 1), or ``estimate`` is not a :class:`DensityEstimate`.

    References
    ----------
    Hooker, G., Vidyashankar, A. N. (2014). Bayesian model robustness via disparities. TEST 23, 556-584. Jewson, J.,
    Smith, J. Q., Holmes, C. (2018). Principles of Bayesian inference using general divergence criteria. Entropy 20,
    442.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> hellinger = AlphaDivergence(0.5, dist.Poisson, EmpiricalMass())
    >>> counts = torch.tensor([0.0, 1.0, 1.0, 2.0, 30.0])
    >>> [round(hellinger.total(torch.tensor(rate), counts).item(), 3) for rate in (1.0, 6.8)]
    [3.067, 17.165]
    """

    alpha: float
    distribution: Model
    estimate: DensityEstimate

    bounded = True

    def __post_init__(self) -> None:
        real_number("alpha", self.alpha, "(0, 1)")
        if not isinstance(self.estimate, DensityEstimate):
            raise SettingsError(f"estimate must be EmpiricalMass() or KernelDensity(...), not {self.estimate!r:.80}")

    def check(self, data: Data) -> None:
        """Raise ShapeError for covariates, since all data must have one distribution."""
        if isinstance(data, tuple):
            raise ShapeError("AlphaDivergence takes outcomes alone, not covariates and outcomes")

    def total(self, parameter: Any, data: Data, weights: Tensor | None = None) -> Tensor:
        """Return the divergence times the sum of ``weights (n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        counts = outcomes.new_ones(len(outcomes), dtype=_floating(outcomes)) if weights is None else weights
        points, masses, log_estimate = self.estimate(outcomes, counts / counts.sum())
        log_ratio = outcome_log_density(law, points) - log_estimate
        # Points without mass may have an infinite ratio, if the estimate underflows.
        log_ratio = torch.where(masses > 0, log_ratio, torch.zeros_like(log_ratio))
        affinity = (masses * ((1 - self.alpha) * log_ratio).exp()).sum()
        return counts.sum() * (1 - affinity) / (self.alpha * (1 - self.alpha))


def _floating(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
