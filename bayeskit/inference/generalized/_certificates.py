"""PAC-Bayes certificates: upper limits of the loss on new data that hold with a stated probability over the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError, ShapeError
from bayeskit.extend import (
    Draws,
    Evidence,
    as_numbers,
    check_constants,
    global_stream,
    mean_error,
    new_generator,
    real_number,
    warn_user,
    whole_number,
)
from bayeskit.inference.generalized.losses._loss import Loss, PointwiseLoss, as_data, num_data, unvalidated

_HALVINGS = 60
#: What a divergence may lie below zero by rounding, in nats.
_ROUNDING = 1e-3
#: Share of the probability of failure that is spent on the Monte Carlo error of the posterior's mean loss.
_SHARE_OF_DRAWS = 0.2
#: Standard errors at which a number differs from zero.
_FAR = 5.0


def invert_binary_divergence(risk: float, budget: float) -> float:
    r"""Return the largest probability ``p >= risk`` whose Bernoulli distribution is within ``budget`` nats.

    The divergence is :math:`\mathrm{kl}(q \| p) = q \log\frac qp + (1 - q) \log\frac{1 - q}{1 - p}` with ``q = risk``.
    The result is rounded up, by bisection.

    Parameters
    ----------
    risk : float
        In [0, 1].
    budget : float
        In nats, not negative.

    Raises
    ------
    SettingsError
        If a number is outside its domain.

    References
    ----------
    Seeger, M. (2002). PAC-Bayesian generalisation error bounds for Gaussian process classification. Journal of Machine
    Learning Research 3, 233-269.

    Examples
    --------
    >>> from bayeskit.inference.generalized import invert_binary_divergence
    >>> round(invert_binary_divergence(0.0, 0.1), 6)  # 1 - exp(-0.1)
    0.095163
    """
    risk, budget = real_number("risk", risk, "[0, 1]"), real_number("budget", budget, "[0, inf]")
    low, high = risk, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _binary_divergence(risk, middle) <= budget:
            low = middle
        else:
            high = middle
    return high


def _binary_divergence(q: float, p: float) -> float:
    parts = ((a, b) for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)
    return sum(a * math.log(a / b) if b > 0 else math.inf for a, b in parts)


@dataclass(frozen=True)
class Certificate:
    """An upper limit of the loss on new data, averaged over a posterior; made by :func:`pac_bayes_certificate`.

    Attributes
    ----------
    bound : float
        Upper limit of the expected loss of a new datum, in units of the loss.
    risk : float
        Mean loss of the certified data, averaged over the posterior or over the draws.
    divergence : float
        Kullback-Leibler divergence of the posterior from the prior, in nats.
    num_data : int
        Number of data that the certificate rests on.
    level : float
        Probability over data sets, and draws of the parameter, with which the bound holds.
    num_draws : int or None
        Independent draws that estimate ``risk``; None if it is exact.
    between : tuple of float
        Range of the loss.
    warnings : tuple of str
        Why the bound may fail more often than stated.

    Examples
    --------
    >>> from bayeskit.inference.generalized import pac_bayes_certificate
    >>> pac_bayes_certificate(0.1, divergence=3.0, num_data=1000)
    Certificate(loss of new data at most 0.1481 with probability 0.95; 0.1000 on 1000 data, 3.00 nats from the prior)
    """

    bound: float
    risk: float
    divergence: float
    num_data: int
    level: float
    num_draws: int | None = None
    between: tuple[float, float] = (0.0, 1.0)
    warnings: tuple[str, ...] = ()

    @property
    def is_vacuous(self) -> bool:
        """Whether the bound says no more than the range of the loss."""
        low, high = self.between
        return self.bound >= high - 1e-12 * (high - low)

    @property
    def trusted(self) -> bool:
        """True if there is no warning."""
        return not self.warnings

    @property
    def promise(self) -> str:
        """What the certificate promises, and what it does not, in words."""
        drawn = "" if self.num_draws is None else f" and the {self.num_draws} draws of the parameter"
        return (
            f"With probability at least {self.level:g} over {self.num_data} independent data{drawn}, the expected loss "
            f"of a new datum from the same distribution, with the parameter drawn from the posterior, is at most "
            f"{self.bound:.4f}. This holds for all posteriors at once, but for one prior, chosen before these data "
            "were seen, and one set of data. It does not hold for dependent data or for data of another distribution. "
            "It says nothing about one single draw; of errors counted by a vote of all draws it says that they are at "
            "most twice as many."
        )

    def __repr__(self) -> str:
        flag = "" if self.trusted else ", NOT TRUSTED: " + "; ".join(self.warnings)
        return (
            f"Certificate(loss of new data at most {self.bound:.4f} with probability {self.level:g}; {self.risk:.4f} "
            f"on {self.num_data} data, {self.divergence:.2f} nats from the prior{flag})"
        )


def pac_bayes_certificate(
    losses: float | Tensor,
    divergence: float,
    num_data: int | None = None,
    *,
    between: tuple[float, float] = (0.0, 1.0),
    level: float = 0.95,
) -> Certificate:
    r"""Bound the loss of new data by the losses of the data and the divergence from the prior.

    For a loss in [0, 1], any prior that does not depend on the data, and with probability :math:`1 - \delta` for all
    posteriors :math:`\rho` at once,

    .. math::

       \mathrm{kl}\bigl(\hat L(\rho) \,\big\|\, L(\rho)\bigr)
       \le \frac{\mathrm{KL}(\rho \| \pi) + \log(2 \sqrt n / \delta)}{n},

    and :func:`invert_binary_divergence` gives the largest :math:`L(\rho)`. Where draws estimate the mean loss, a fifth
    of :math:`\delta` is spent on their error, by the same inversion.

    Parameters
    ----------
    losses : float or Tensor
        Mean loss of the data under the posterior, exactly; or losses of ``n`` data at ``S`` independent draws, ``(S,
        n)``.
    divergence : float
        Kullback-Leibler divergence of the posterior from the prior, in nats.
    num_data : int, optional
        Number of data ``n``, required if ``losses`` is a number.
    between : tuple of float, default (0, 1)
        Smallest and largest value that the loss can take for any parameter and datum.
    level : float, default 0.95
        Probability ``1 - delta`` of the bound, in (0, 1).

    Returns
    -------
    Certificate
        Its attribute ``promise`` says in words what is promised.

    Raises
    ------
    SettingsError
        If the range is not finite, or a setting is outside its domain.
    ShapeError
        If ``losses`` is neither a number nor ``(S, n)``.
    DataError
        If a loss lies outside of its range, or is not finite.

    References
    ----------
    Maurer, A. (2004). A note on the PAC Bayesian theorem. arXiv:cs/0411099. Langford, J., Caruana, R. (2001). (Not)
    bounding the true error. NeurIPS. Dziugaite, G. K., Roy, D. M. (2017). Computing nonvacuous generalization bounds
    for deep (stochastic) neural networks with many more parameters than training data. UAI.

    Examples
    --------
    A coin shows heads in 20 of 100 tosses. Its chance of heads has the posterior Beta(21, 81) under a uniform prior,
    and the next toss is predicted by a toss of a coin with that chance.

    >>> import torch
    >>> from bayeskit.inference.generalized import pac_bayes_certificate
    >>> posterior, uniform = torch.distributions.Beta(21.0, 81.0), torch.distributions.Beta(1.0, 1.0)
    >>> divergence = torch.distributions.kl_divergence(posterior, uniform).item()
    >>> chance = 21 / 102
    >>> round(pac_bayes_certificate(0.2 * (1 - chance) + 0.8 * chance, divergence, 100).bound, 5)
    0.5193
    """
    low, high = _range(between)
    level = real_number("level", level, "(0, 1)")
    divergence = real_number("divergence", divergence)
    if not 0 <= divergence < math.inf:
        raise SettingsError(f"divergence must be finite and not negative, not {divergence:g}")
    num_draws: int | None = None
    if isinstance(losses, Tensor) and losses.dim() > 0:
        if losses.dim() != 2 or 0 in losses.shape:
            raise ShapeError(f"losses must be a number or (draws, data), not of shape {tuple(losses.shape)}")
        _check_range(losses, low, high)
        num_draws, count = losses.shape
        if num_data is not None and num_data != count:
            raise SettingsError(f"num_data is {num_data}, but losses has {count} columns; leave num_data out")
        mean = float(losses.double().mean())
    else:
        mean = real_number("losses", losses)
        _check_range(torch.tensor([[mean]], dtype=torch.float64), low, high)
        if num_data is None:
            raise SettingsError("num_data is missing: give the number of data behind the mean loss")
        count = whole_number("num_data", num_data, 1)
    failure, relative = 1 - level, min(max((mean - low) / (high - low), 0.0), 1.0)
    if num_draws is not None:
        relative = invert_binary_divergence(relative, -math.log(_SHARE_OF_DRAWS * failure) / num_draws)
        failure *= 1 - _SHARE_OF_DRAWS
    budget = (divergence + math.log(2 * math.sqrt(count) / failure)) / count
    bound = low + (high - low) * invert_binary_divergence(relative, budget)
    return Certificate(bound, mean, divergence, count, level, num_draws, (low, high))


def certify(
    posterior: Distribution,
    prior: Distribution,
    loss: PointwiseLoss | Callable[[Any, Any], Tensor],
    data: Any,
    *,
    between: tuple[float, float] = (0.0, 1.0),
    num_draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Certificate:
    """Bound the loss of new data under a posterior that is a distribution, such as that of a variational network.

    It draws parameters, takes the divergence from the prior in closed form and calls :func:`pac_bayes_certificate`,
    where the bound and what it rests on stand. The prior may be learned, but from other data.

    Parameters
    ----------
    posterior, prior : Distribution
        Distributions of the parameter between which torch knows the Kullback-Leibler divergence.
    loss : PointwiseLoss or callable
        ``(parameter, data) -> (n,)``, with values in ``between``; no derivative is needed, so that errors may be
        counted.
    data : Tensor or tuple of Tensor
        Shapes ``(n, ...)``: independent data from which the prior was not made.
    between : tuple of float, default (0, 1)
        Range of the loss.
    num_draws : int, default 1000
        Independent draws of the parameter.
    level : float, default 0.95
    seed : int, default 0

    Raises
    ------
    SettingsError
        If the loss is not bounded, or a setting is outside its domain.
    ModelError
        If the divergence has no closed form.
    DataError, ShapeError
        If data or losses are not finite, outside of the range, or of the wrong shape.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import certify
    >>> x = torch.linspace(-2.0, 2.0, 500, dtype=torch.float64)
    >>> labels = x > 0.1
    >>> def errors(threshold, data):
    ...     x, labels = data
    ...     return ((x > threshold) != labels).double()
    >>> posterior = dist.Normal(torch.tensor(0.1, dtype=torch.float64), 0.02)
    >>> certify(posterior, dist.Normal(0.0, 1.0), errors, (x, labels)).bound < 0.06
    True
    """
    if isinstance(loss, Loss):
        if not isinstance(loss, PointwiseLoss):
            raise SettingsError(f"{type(loss).__name__} has no loss of a single datum, so it cannot be certified")
        if not loss.bounded:
            raise SettingsError(
                f"the loss {type(loss).__name__} is not bounded, so no certificate holds for it: one datum may cost "
                "more than any limit; take a bounded loss, such as errors counted by a function, or a loss cut off by "
                "clamp, with between=(smallest, largest); FunctionLoss(..., bounded=True) states that it is bounded"
            )
    low, high = _range(between)
    num_draws, given = whole_number("num_draws", num_draws, 1), as_data(data)
    _refuse_densities(posterior, prior)
    try:
        divergence = float(torch.as_tensor(kl_divergence(posterior, prior)).sum())
    except (NotImplementedError, TypeError, AttributeError) as error:
        raise ModelError(
            f"torch knows no divergence of {type(posterior).__name__} from {type(prior).__name__}; give two "
            "distributions of one family, or compute the divergence and call pac_bayes_certificate"
        ) from error
    divergence = divergence if divergence < -_ROUNDING else max(divergence, 0.0)
    generator = new_generator(seed, stream="certificate")
    call = loss.pointwise if isinstance(loss, PointwiseLoss) else loss
    rows = []
    with global_stream(generator), unvalidated(), torch.no_grad():
        for _ in range(num_draws):
            each = as_numbers("the loss", call(posterior.sample(), given))
            if tuple(each.shape) != (num_data(given),):
                raise ShapeError(f"the loss returns {tuple(each.shape)} for {num_data(given)} data instead of (n,)")
            _check_range(each.unsqueeze(0), low, high)
            rows.append(each.double())
    return pac_bayes_certificate(torch.stack(rows), divergence, between=(low, high), level=level)


def _refuse_densities(posterior: Distribution, prior: Distribution) -> None:
    """Refuse distributions for which Pyro registers something else than a divergence."""
    for name, distribution in (("posterior", posterior), ("prior", prior)):
        inside: Any = distribution
        while inside is not None:
            if isinstance(inside, dist.Delta):
                raise SettingsError(
                    f"the {name} is a point (Delta), which is infinitely far from any distribution with a density; "
                    "give it a spread, such as a normal distribution around the point"
                )
            if isinstance(inside, (dist.ImproperUniform, MaskedDistribution)):
                raise SettingsError(
                    f"the {name} has a part {type(inside).__name__}, which is no normalised distribution, so there is "
                    "no divergence; give a proper distribution without a mask"
                )
            inside = getattr(inside, "base_dist", None)


def divergence_from_prior(draws: Draws, evidence: Evidence) -> tuple[float, float]:
    r"""Return the divergence of a posterior from its prior, and its standard error, in nats.

    It is :math:`\mathrm{KL}(\pi(\cdot \mid x) \| \pi) = E[\log p(x \mid \theta)] - \log p(x)`, also for a
    :class:`GibbsPosterior`, whose log likelihood is minus the weighted loss. With an evidence the posterior of any
    sampler gets a certificate, which is as good as draws and evidence are: add a few standard errors. The prior has to
    be normalised. A certificate from losses at draws of a chain takes them for independent, which they are not.

    Parameters
    ----------
    draws : Draws
        At inverse temperature one.
    evidence : Evidence
        Of the same target.

    Raises
    ------
    SettingsError
        If a chain is tempered, or the target has no prior of its own or one whose integral is not one.
    DataError
        If the log likelihoods are not known, as after stochastic gradients, or the evidence is that of another target,
        so that the divergence is negative.

    Warns
    -----
    AccuracyWarning
        If the evidence is not trusted.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.inference.generalized import divergence_from_prior
    >>> case = bk.exact.get("linreg10")
    >>> target = case.target()
    >>> draws = bk.sample(target, num_samples=500, seed=0, progress=False)
    >>> divergence, error = divergence_from_prior(draws, bk.evidence.bridge_sampling(target, draws))
    >>> divergence > 0 and error < 0.5
    True
    """
    if not bool((draws.beta == 1).all()):
        raise SettingsError("a chain is tempered; give draws at inverse temperature one")
    if not bool(draws.log_likelihood.isfinite().all()):
        raise DataError("the log likelihoods of the draws are not known or not finite; draw with all data")
    if draws.target.has_density:
        if not draws.target.is_split:
            raise SettingsError(
                "the target is one density without a prior of its own; make it from prior and likelihood"
            )
        report = check_constants(draws.target)
        distance = abs(report.log_prior_integral)
        if report.improper or distance > _FAR * report.standard_error + _ROUNDING:
            raise SettingsError(
                f"the log integral of the prior is {report.log_prior_integral:.3g} instead of zero, and a divergence "
                "needs a normalised prior; add the constant to its log density"
            )
    error = math.hypot(float(mean_error(draws.log_likelihood)), evidence.standard_error)
    value = float(draws.log_likelihood.mean()) - evidence.log_evidence
    if not value > -_FAR * error - _ROUNDING:
        raise DataError(f"the divergence is {value:.4g}, below zero: evidence and draws belong to different targets")
    if not evidence.trusted:
        problems = "; ".join(evidence.warnings) or "it is not finite"
        warn_user(f"the evidence is not trusted, nor is the divergence: {problems}", AccuracyWarning)
    return value, error


def _range(between: tuple[float, float]) -> tuple[float, float]:
    low, high = (real_number("between", x) for x in between)
    if not -math.inf < low < high < math.inf:
        raise SettingsError(
            f"between must be the finite smallest and largest value of the loss, not {between}: a loss without bounds "
            "has no certificate"
        )
    return low, high


def _check_range(losses: Tensor, low: float, high: float) -> None:
    values = as_numbers("losses", losses).double()
    room = 1e-6 * (high - low)  # losses of single precision
    outside = ~((values >= low - room) & (values <= high + room))
    if bool(outside.any()):
        draw, datum = outside.nonzero()[0].tolist()
        raise DataError(
            f"a loss of {float(values[draw, datum]):g} (datum {datum}) lies outside of between=({low:g}, {high:g}), so "
            "the loss is not bounded as stated; give its true range, or cut it off by clamp"
        )
