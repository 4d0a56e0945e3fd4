"""The density power divergence: outliers stop to matter where the model gives them little density."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from bayeskit._settings import real_number
from bayeskit.inference.generalized.losses.densities import Model, joint_law_of, log_density, log_power_integral
from bayeskit.inference.generalized.losses.loss import Data, PointwiseLoss


@dataclass(frozen=True)
class BetaDivergence(PointwiseLoss):
    r"""The loss of the beta- or density power divergence.

    .. math:: \ell(\theta, x) = -\frac{1}{\beta}\, p_\theta(x)^{\beta}
        + \frac{1}{1+\beta} \int p_\theta(y)^{1+\beta}\,dy.

    As :math:`\beta \to 0` its gradient becomes that of minus the log likelihood (the loss itself grows like
    :math:`-1/\beta`, which no posterior notices). It is bounded: for a datum without density the model
    pays no more than the integral. Only a proper prior gives a posterior; with an unknown scale that is not enough,
    see the notes.

    Parameters
    ----------
    beta : float
        Positive; .1 to .5 are usual.
    distribution : callable
        ``parameter -> distribution`` of a datum; ``(parameter, *covariates) -> distributions`` where the data are
        ``(*covariates, outcomes)``. Entries of an outcome are independent unless it says otherwise.
    power_integral : callable, optional
        ``(distribution, s) -> integral of p**s``, of the distribution's batch shape, for families that
        :func:`~bayeskit.inference.generalized.losses.log_power_integral` does not know.

    Raises
    ------
    SettingsError
        If ``beta`` is not positive.

    Notes
    -----
    Where the scale :math:`s` of a ``d``-dimensional normal law is unknown, the loss has poles: with the location at a
    value that occurs ``k`` times among ``n`` data it is, as :math:`s \to 0`,

    .. math:: (2\pi)^{-d\beta/2} s^{-d\beta} \Big(\frac{n}{(1+\beta)^{1+d/2}} - \frac{k}{\beta}\Big) + o(1).

    If :math:`n < k\,(1+\beta)^{1+d/2} / \beta`, it falls to minus infinity, :math:`e^{-w\ell}` has no integral, and
    there is no posterior, although the prior be proper: half-normal, exponential and gamma priors of the scale do not
    help. This takes few data, or many ties, such as rounding makes. A prior does help that vanishes like
    :math:`\exp(-s^{-b})` with :math:`b > d\beta`, such as an inverse gamma law of the scale (:math:`b = 1`) or of the
    variance (:math:`b = 2`), as does a lower bound on the scale.

    An outcome outside of the distribution's support has density zero, and adds the integral.

    References
    ----------
    Basu, A., Harris, I. R., Hjort, N. L., Jones, M. C. (1998). Robust and efficient estimation by minimising a density
    power divergence. Biometrika 85, 549-559.

    Ghosh, A., Basu, A. (2016). Robust Bayes estimation using the density power divergence. Annals of the Institute of
    Statistical Mathematics 68, 413-437.

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
        real_number("beta", self.beta, between=(0.0, float("inf")))

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        power = (self.beta * log_density(law, outcomes)).exp()
        if self.power_integral is None:
            integral = log_power_integral(law, 1 + self.beta).exp()
        else:
            integral = self.power_integral(law, 1 + self.beta)
        return integral / (1 + self.beta) - power / self.beta
