"""Likelihoods of latent Gaussian models: distributions of observations given a linear predictor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.models.latent_gaussian._priors import PCScale, Prior, distribution_of

#: From the linear predictor ``(n,)`` to a distribution of batch shape ``(n,)``; it may sample sites of its own.
Likelihood = Callable[[Tensor], Any]


class _PoissonOfLogRate(dist.Poisson):  # type: ignore[misc]
    """A Poisson distribution whose log density keeps its digits, and those of its derivatives, at small rates."""

    def __init__(self, log_rate: Tensor, validate_args: bool | None = None) -> None:
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return _PoissonOfLogRate(self.log_rate.expand(batch_shape), validate_args=self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return value * self.log_rate - self.rate - torch.lgamma(value + 1)


@dataclass(frozen=True)
class NormalLikelihood:
    """Normal observations around the linear predictor, with site ``noise`` for their standard deviation.

    Parameters
    ----------
    noise : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of ``noise``.

    Examples
    --------
    >>> import torch
    >>> NormalLikelihood()(torch.zeros(3)).mean
    tensor([0., 0., 0.])
    """

    noise: Prior = PCScale(1.0, 0.01)

    def __call__(self, eta: Tensor) -> Any:
        """Return normal distributions with mean ``eta``, ``(n,)``."""
        return dist.Normal(eta, pyro.sample("noise", distribution_of(self.noise)))


@dataclass(frozen=True, eq=False)
class PoissonLikelihood:
    """Poisson counts whose log rate is the linear predictor plus an offset.

    Parameters
    ----------
    offset : float or Tensor, default 0.0
        Log exposure, scalar or ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> PoissonLikelihood(offset=torch.tensor([2.0, 3.0]).log())(torch.zeros(2)).mean
    tensor([2., 3.])
    """

    offset: float | Tensor = 0.0

    def __call__(self, eta: Tensor) -> Any:
        """Return Poisson distributions with rate ``exp(eta + offset)``, ``(n,)``."""
        return _PoissonOfLogRate(eta + self.offset)


@dataclass(frozen=True, eq=False)
class BinomialLikelihood:
    """Binomial counts whose log odds are the linear predictor; with one trial, Bernoulli outcomes.

    Parameters
    ----------
    trials : int or Tensor, default 1
        Numbers of trials, scalar or ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> BinomialLikelihood(trials=10)(torch.zeros(2)).mean
    tensor([5., 5.])
    """

    trials: int | Tensor = 1

    def __call__(self, eta: Tensor) -> Any:
        """Return binomial distributions with log odds ``eta``, ``(n,)``."""
        return dist.Binomial(self.trials, logits=eta)


@dataclass(frozen=True, eq=False)
class NegativeBinomialLikelihood:
    """Overdispersed counts of mean m and variance m + a m^2, with site ``overdispersion`` for a.

    Parameters
    ----------
    overdispersion : Distribution or callable, default PCScale(1.0, 0.01)
        Prior of a, positive.
    offset : float or Tensor, default 0.0
        Added to the linear predictor, which is log m, scalar or ``(n,)``.

    Examples
    --------
    >>> import torch
    >>> import pyro.distributions as dist
    >>> NegativeBinomialLikelihood(dist.Delta(torch.tensor(0.5)))(torch.tensor([2.0]).log()).variance
    tensor([4.])
    """

    overdispersion: Prior = PCScale(1.0, 0.01)
    offset: float | Tensor = 0.0

    def __call__(self, eta: Tensor) -> Any:
        """Return negative binomial distributions with mean ``exp(eta + offset)``, ``(n,)``."""
        a = pyro.sample("overdispersion", distribution_of(self.overdispersion))
        return dist.NegativeBinomial((1 / a).expand(eta.shape), logits=eta + self.offset + a.log())
