"""Molecular clocks: distributions of the substitution rate over the edges of a time tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from pyro.distributions import Exponential, Gamma, Normal, TorchDistribution
from torch import Tensor

from bayeskit.models.phylogenetics._substitution import Given, Parameter, Parameterized

#: Where the tree is known, its prior is that of `rate_given_tree_length` instead.
_CLOCK_RATE = Parameter(lambda like: Exponential(like.new_ones(())))
#: Prior of BEAST 2: exponential with mean 1/3.
_RATE_DEVIATION = Parameter(lambda like: Exponential(like.new_tensor(3.0)))


class Clock(Parameterized):
    """Base class of clocks: `clock_rate` is the mean rate, in substitutions per site and unit of time.

    Examples
    --------
    >>> isinstance(StrictClock(), Clock)
    True
    """

    clock_rate: Given

    @abstractmethod
    def sites(self, num_edges: int, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of what varies over the edges, by name, each over vectors `(num_edges,)`."""

    @abstractmethod
    def rates(self, values: Mapping[str, Tensor], num_edges: int) -> Tensor:
        """Return the rate of each edge, shape `(*batch, num_edges)`, at values of all parameters and `sites`."""

    @staticmethod
    def rate_given_tree_length(tree_length: Tensor) -> Gamma:
        """Return the conditional reference prior of the clock rate, given the sum of the durations of all edges.

        It is a Gamma distribution with shape 1/2 and this rate: proper, and the same in all units of time.

        References
        ----------
        M. A. R. Ferreira and M. A. Suchard (2008), Bayesian analysis of elapsed times in continuous-time Markov chains,
        Canadian Journal of Statistics 36, 355-368.

        Examples
        --------
        >>> Clock.rate_given_tree_length(torch.tensor(10.0)).mean
        tensor(0.0500)
        """
        return Gamma(torch.full_like(tree_length, 0.5), tree_length)


@dataclass(frozen=True, eq=False)
class StrictClock(Clock):
    """The same rate on all edges.

    Parameters
    ----------
    clock_rate : float, Tensor or TorchDistribution, optional
        Substitutions per site and unit of time, above 0; or its prior. By default 1 where all tips have the same date
        and the root has no prior of its own, so that heights are in substitutions per site; otherwise the conditional
        reference prior, `Clock.rate_given_tree_length`.

    Raises
    ------
    SettingsError
        If the rate is not above 0.

    References
    ----------
    E. Zuckerkandl and L. Pauling (1965), Evolutionary divergence and convergence in proteins, in: Evolving Genes and
    Proteins, Academic Press, 97-166.

    Examples
    --------
    >>> StrictClock(0.01).rates({"clock_rate": torch.tensor(0.01)}, num_edges=2)
    tensor([0.0100, 0.0100])
    """

    clock_rate: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"clock_rate": _CLOCK_RATE})

    def sites(self, num_edges: int, like: Tensor) -> dict[str, TorchDistribution]:
        """Return an empty dictionary: nothing varies over the edges."""
        return {}

    def rates(self, values: Mapping[str, Tensor], num_edges: int) -> Tensor:
        """Return the rate of each edge, shape `(*batch, num_edges)`."""
        rate = values["clock_rate"]
        return rate[..., None].expand(*rate.shape, num_edges)


@dataclass(frozen=True, eq=False)
class UncorrelatedLogNormalClock(Clock):
    """Independent log-normal rates of the edges with mean `clock_rate`.

    The rate of an edge is `clock_rate * exp(rate_deviation * z - rate_deviation**2 / 2)`, where its `z`, an element of
    the site `"rate_scores"`, is standard normal: coordinates whose prior does not depend on the deviation.

    Parameters
    ----------
    clock_rate : float, Tensor or TorchDistribution, optional
        Mean of the rates, as in `StrictClock`.
    rate_deviation : float, Tensor or TorchDistribution, optional
        Standard deviation of the logarithms of the rates, above 0; or its prior, by default exponential with mean 1/3,
        as in BEAST 2 (Bouckaert et al., 2019).

    Raises
    ------
    SettingsError
        If a parameter is not above 0.

    References
    ----------
    A. J. Drummond, S. Y. W. Ho, M. J. Phillips and A. Rambaut (2006), Relaxed phylogenetics and dating with confidence,
    PLoS Biology 4, e88.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> clock, z = UncorrelatedLogNormalClock(), torch.tensor([-1.0, 0.0, 1.0])
    >>> values = {"clock_rate": torch.tensor(2.0), "rate_deviation": torch.tensor(0.5), "rate_scores": z}
    >>> clock.rates(values, num_edges=3)
    tensor([1.0705, 1.7650, 2.9100])
    """

    clock_rate: Given = None
    rate_deviation: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"clock_rate": _CLOCK_RATE, "rate_deviation": _RATE_DEVIATION}
    )

    def sites(self, num_edges: int, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the prior of `"rate_scores"`."""
        return {"rate_scores": Normal(like.new_zeros(num_edges), like.new_ones(num_edges)).to_event(1)}

    def rates(self, values: Mapping[str, Tensor], num_edges: int) -> Tensor:
        """Return the rate of each edge, shape `(*batch, num_edges)`."""
        deviation = values["rate_deviation"][..., None]
        log_rates = deviation * values["rate_scores"] - 0.5 * deviation.square()
        return values["clock_rate"][..., None] * log_rates.exp()
