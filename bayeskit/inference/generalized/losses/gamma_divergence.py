"""The gamma-divergence: a power of the density, divided by a norm of it."""

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
class GammaDivergence(PointwiseLoss):
    r"""The loss of the gamma-divergence, in the form that is a sum over data.

    .. math:: \ell(\theta, x) = -\frac{1}{\gamma}\, p_\theta(x)^{\gamma}
        \Big(\int p_\theta(y)^{1+\gamma}\,dy\Big)^{-\gamma/(1+\gamma)}.

    Its mean over data is a monotone function of the gamma-cross entropy of Fujisawa and Eguchi, so that both have the
    same minimiser. A factor of the density cancels: unnormalised densities give the same loss, and estimates of scale
    resist heavy contamination, too. As :math:`\gamma \to 0` its gradient becomes that of minus the log likelihood. It
    is never positive: only a proper prior gives a posterior; with an unknown scale that is not enough, see the notes.

    Parameters
    ----------
    gamma : float
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
        If ``gamma`` is not positive.

    Notes
    -----
    Where the scale :math:`s` of a ``d``-dimensional law is unknown, the loss has a pole at every datum, however many
    these are: with the location there it falls like :math:`-s^{-d\gamma/(1+\gamma)}` as :math:`s \to 0`, so that
    :math:`e^{-w\ell}` has no integral, and there is no posterior, although the prior be proper: half-normal,
    exponential and gamma priors of the scale do not help. A prior does that vanishes like :math:`\exp(-s^{-b})` with
    :math:`b > d\gamma/(1+\gamma)`, such as an inverse gamma law of the scale (:math:`b = 1`) or of the variance
    (:math:`b = 2`), as does a lower bound on the scale.

    An outcome outside of the distribution's support has density zero, and adds nothing.

    References
    ----------
    Fujisawa, H., Eguchi, S. (2008). Robust parameter estimation with a small bias against heavy contamination. Journal
    of Multivariate Analysis 99, 2053-2081.

    Nakagawa, T., Hashimoto, S. (2020). Robust Bayesian inference via gamma-divergence. Communications in Statistics -
    Theory and Methods 49, 343-360.

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
        real_number("gamma", self.gamma, between=(0.0, float("inf")))

    def pointwise(self, parameter: Any, data: Data) -> Tensor:
        """Return the loss of each datum, ``(n,)``."""
        law, outcomes = joint_law_of(self.distribution, parameter, data)
        if self.power_integral is None:
            log_integral = log_power_integral(law, 1 + self.gamma)
        else:
            log_integral = self.power_integral(law, 1 + self.gamma).log()
        # One exponential of the whole: where a scale shrinks both factors leave the range of numbers.
        log_ratio = log_density(law, outcomes) - log_integral / (1 + self.gamma)
        return -(self.gamma * log_ratio).exp() / self.gamma
