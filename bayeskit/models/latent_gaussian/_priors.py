"""Priors that penalise complexity: exponential in the distance from a simpler model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.transforms import PowerTransform

from bayeskit.errors import SettingsError
from bayeskit.extend import real_number, whole_number

#: A distribution, or what makes one when the model runs, in the dtype and on the device of the data.
Prior = torch.distributions.Distribution | Callable[[], Any]

#: Terms below which t - log(1 + t) is a series.
_SMALL = 1e-3
_BISECTIONS = 60


def distribution_of(prior: Prior) -> Any:
    """Return the distribution that a prior is or makes."""
    return prior if isinstance(prior, torch.distributions.Distribution) else prior()


@dataclass(frozen=True)
class PCScale:
    r"""Exponential prior of a standard deviation :math:`\sigma` with :math:`P(\sigma > u) = p`.

    It penalises the distance from the model without the random effect, :math:`\sigma = 0`.

    Parameters
    ----------
    upper : float
        :math:`u`, positive.
    probability : float
        :math:`p`, between 0 and 1.

    Raises
    ------
    SettingsError
        If a number is outside its domain.

    References
    ----------
    Simpson, D., Rue, H., Riebler, A., Martins, T. G., Sørbye, S. H. (2017). Penalising model component complexity: a
    principled, practical approach to constructing priors. Statistical Science 32, 1-28.

    Examples
    --------
    >>> import torch
    >>> PCScale(upper=1.0, probability=0.01)().cdf(torch.tensor(1.0))
    tensor(0.9900)
    """

    upper: float
    probability: float

    def __post_init__(self) -> None:
        real_number("upper", self.upper, "(0, inf)")
        real_number("probability", self.probability, "(0, 1)")

    def __call__(self) -> Any:
        """Return the exponential distribution."""
        return dist.Exponential(-math.log(self.probability) / self.upper)


@dataclass(frozen=True)
class PCLength:
    r"""Prior of the length scale :math:`\ell` of a field in d dimensions, with :math:`P(\ell < u) = p`.

    :math:`\ell^{-d/2}` is exponential: the prior penalises the distance from a constant field,
    :math:`\ell = \infty`. It was derived for the range of Matérn fields with a penalised scale.

    Parameters
    ----------
    lower : float
        :math:`u`, positive.
    probability : float
        :math:`p`, between 0 and 1.
    dimension : int, default 1
        Number of coordinates of a place.

    Raises
    ------
    SettingsError
        If a number is outside its domain.

    References
    ----------
    Fuglstad, G.-A., Simpson, D., Lindgren, F., Rue, H. (2019). Constructing priors that penalize the complexity of
    Gaussian random fields. Journal of the American Statistical Association 114, 445-452.

    Examples
    --------
    >>> import torch
    >>> PCLength(lower=0.5, probability=0.05)().cdf(torch.tensor(0.5))
    tensor(0.0500)
    """

    lower: float
    probability: float
    dimension: int = 1

    def __post_init__(self) -> None:
        real_number("lower", self.lower, "(0, inf)")
        real_number("probability", self.probability, "(0, 1)")
        whole_number("dimension", self.dimension, 1)

    def __call__(self) -> Any:
        """Return the distribution of the length scale."""
        rate = -math.log(self.probability) * self.lower ** (self.dimension / 2)
        return dist.TransformedDistribution(
            dist.Exponential(rate), [PowerTransform(torch.as_tensor(-2 / self.dimension))]
        )


class PCProportion(dist.TorchDistribution):  # type: ignore[misc]
    r"""Prior of the proportion :math:`\varphi` of spatial variance in BYM2, with :math:`P(\varphi < u) = p`.

    The field has covariance :math:`(1 - \varphi) I + \varphi G`. With eigenvalues :math:`\gamma_i` of :math:`G`, its
    distance from independent areas is

    .. math:: d(\varphi)^2 = \sum_i \varphi (\gamma_i - 1) - \log(1 + \varphi (\gamma_i - 1)),

    twice the Kullback-Leibler divergence, and :math:`d(\varphi)` is exponential.

    Parameters
    ----------
    eigenvalues : Tensor
        :math:`\gamma`, not negative, one or more of them zero, ``(n,)``; those of an
        :class:`~bayeskit.models.latent_gaussian.AreaGraph`.
    upper : float, default 0.5
        :math:`u`, between 0 and 1.
    probability : float, default 2/3
        :math:`p`, between 0 and 1.
    validate_args : bool, optional
        Whether to check values, as in all torch distributions.

    Raises
    ------
    SettingsError
        If a number is outside its domain, or no eigenvalue is zero: the distance is then bounded.

    References
    ----------
    Riebler, A., Sørbye, S. H., Simpson, D., Rue, H. (2016). An intuitive Bayesian spatial model for disease mapping
    that accounts for scaling. Statistical Methods in Medical Research 25, 1145-1165.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.latent_gaussian import AreaGraph
    >>> prior = PCProportion(AreaGraph(3, [(0, 1), (1, 2)]).eigenvalues)
    >>> prior.cdf(torch.tensor(0.5, dtype=torch.float64))
    tensor(0.6667, dtype=torch.float64)
    """

    arg_constraints = {}  # noqa: RUF012  as in all distributions of torch
    support = constraints.unit_interval

    def __init__(
        self,
        eigenvalues: Tensor,
        upper: float = 0.5,
        probability: float = 2 / 3,
        validate_args: bool | None = None,
    ) -> None:
        real_number("upper", upper, "(0, 1)")
        real_number("probability", probability, "(0, 1)")
        eigenvalues = eigenvalues.to(torch.result_type(eigenvalues, 1.0))
        near = math.sqrt(torch.finfo(eigenvalues.dtype).eps)
        if not (float(eigenvalues.min()) > -near and bool((eigenvalues.abs() < near).any())):
            raise SettingsError(
                "eigenvalues must not be negative, and one must be zero: take those of an AreaGraph with at least one "
                "edge"
            )
        self._excess = torch.where(eigenvalues.abs() < near, -1.0, eigenvalues - 1)
        edge = eigenvalues.new_tensor(upper)
        self.rate = -math.log1p(-probability) / self.distance(edge)
        super().__init__(torch.Size(), torch.Size(), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the distribution with a batch shape."""
        new = type(self).__new__(type(self))
        new._excess, new.rate = self._excess, self.rate
        super(PCProportion, new).__init__(torch.Size(batch_shape), torch.Size(), validate_args=self._validate_args)
        return new

    def distance(self, value: Tensor) -> Tensor:
        """Return the distance from independent areas, ``(*batch)``."""
        return value * self._ratio(value).sqrt()

    def _ratio(self, value: Tensor) -> Tensor:
        """Return the squared distance over the square of the proportion, which is smooth at zero."""
        excess = self._excess.to(value)
        t = value.unsqueeze(-1) * excess
        small = t.abs() < _SMALL
        far = torch.where(small, 0.5, t)
        whole = (far - far.log1p()) / far.square()
        near = torch.where(small, t, 0.0)
        series = 0.5 - near * (1 / 3 - near * (0.25 - near * (0.2 - near / 6)))
        return (excess.square() * torch.where(small, series, whole)).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        squared, excess, rate = self._ratio(value), self._excess.to(value), self.rate.to(value)
        slope = 0.5 * (excess.square() / (1 + value.unsqueeze(-1) * excess)).sum(-1)
        return rate.log() - rate * value * squared.sqrt() + slope.log() - 0.5 * squared.log()

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of smaller proportions, ``(*batch)``."""
        return -torch.expm1(-self.rate.to(value) * self.distance(value))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw by the global stream, ``(*sample_shape, *batch)``."""
        uniform = torch.rand(self._extended_shape(sample_shape), dtype=self.rate.dtype, device=self.rate.device)
        low, high = torch.zeros_like(uniform), torch.ones_like(uniform)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            above = self.cdf(middle) > uniform
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        return 0.5 * (low + high)
