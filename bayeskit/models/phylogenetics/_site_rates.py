"""Distributions of the rate of evolution over sites."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from pyro.distributions import Beta, Dirichlet, Exponential, TorchDistribution
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.extend import whole_number
from bayeskit.models.phylogenetics._substitution import Given, Parameter, Parameterized

# Categories of a Gamma distribution with mean one, differentiable with respect to its shape (Z. Yang 1994, J. Mol.
# Evol. 39, 306-314; E. A. Cornish and R. A. Fisher 1938, Rev. Inst. Int. Stat. 5, 307-320), in double precision. With
# `x` the argument of the Gamma distribution with rate one and `y = log x`,
#     P(shape, x) = g (1 + T), P(shape + 1, x) = g T, g = x^shape exp(-x) / Gamma(shape + 1),
#     T = sum over n >= 1 of x^n / ((shape + 1) ... (shape + n)),
# where all terms are positive, so that nothing cancels. Quantiles are found by Newton's method on `log P` as a function
# of `y`, which is increasing and concave; the last steps are differentiable with respect to the shape.

#: Number of terms of the series, sufficient up to the shape at which the expansion takes over.
_NUM_TERMS = 256
_LARGE_SHAPE = 400.0
#: Shape above which all rates are one to twelve digits.
_LARGEST_SHAPE = 1e24
_NUM_STEPS = 5


def category_means(shape: Tensor, num_categories: int) -> Tensor:
    """Return the means of `K` equally likely Gamma categories with mean one, `(*batch) -> (*batch, K)`, float64."""
    shape = shape.to(torch.float64)[..., None]
    bounds = torch.arange(1, num_categories, dtype=torch.float64, device=shape.device) / num_categories
    small, large = _split(shape)
    by_newton = _by_newton(small, bounds)
    by_series = torch.exp(_log_density(small, by_newton)) * _series(by_newton, _log_factors(small))
    by_difference = bounds - torch.exp(_log_density_near(large, _deviations(large, bounds)))
    shares = torch.where(shape > _LARGE_SHAPE, by_difference, by_series)
    none = torch.zeros_like(shape)
    return num_categories * torch.diff(torch.cat([none, shares, none + 1.0], -1))


#: Shapes for which the means by SciPy's quantiles have errors below 1e-12.
_SCIPY = (1e-4, 1e6)


def category_means_as_numbers(shape: Tensor, num_categories: int) -> Tensor:
    """Return the means as `category_means` does, without derivatives, in a hundredth of the time."""
    from scipy.special import gammainc, gammaincinv

    alpha = shape.detach().to(torch.float64)[..., None].numpy()
    if not ((alpha >= _SCIPY[0]) & (alpha <= _SCIPY[1])).all():
        return category_means(shape, num_categories)
    bounds = np.arange(1, num_categories) / num_categories
    shares = gammainc(alpha + 1, gammaincinv(alpha, bounds))
    none = np.zeros_like(alpha)
    return torch.from_numpy(num_categories * np.diff(np.concatenate([none, shares, none + 1], -1)))


def category_medians(shape: Tensor, num_categories: int) -> Tensor:
    """Return the medians of `K` equally likely Gamma categories, scaled to mean one, `(*batch) -> (*batch, K)`."""
    shape = shape.to(torch.float64)[..., None]
    middles = (torch.arange(num_categories, dtype=torch.float64, device=shape.device) + 0.5) / num_categories
    return num_categories * torch.softmax(log_quantiles(shape, middles), -1)


def log_quantiles(shape: Tensor, probabilities: Tensor) -> Tensor:
    """Return log quantiles of the Gamma distribution with rate one, differentiable by `shape`, in float64."""
    small, large = _split(shape)
    newton, expansion = _by_newton(small, probabilities), large.log() + torch.log1p(_deviations(large, probabilities))
    return torch.where(shape > _LARGE_SHAPE, expansion, newton)


def _split(shape: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shape for the series and for the expansion; each must be finite where the other is used."""
    return shape.clamp(max=_LARGE_SHAPE), shape.clamp(_LARGE_SHAPE, _LARGEST_SHAPE)


def _by_newton(shape: Tensor, probabilities: Tensor) -> Tensor:
    """Return logarithms of quantiles for shapes that the series serves."""
    fixed = shape.detach()
    # Initial value: Wilson and Hilferty's approximation, but at least a known lower bound.
    bound = (probabilities.log() + torch.lgamma(fixed + 1.0)) / fixed
    root = 1.0 - 1.0 / (9.0 * fixed) + torch.special.ndtri(probabilities) / (3.0 * fixed.sqrt())
    logs = torch.maximum(bound, fixed.log() + 3.0 * root.clamp(min=1e-3).log())
    factors = _log_factors(shape)
    for _ in range(_NUM_STEPS):
        logs = _newton_step(logs, fixed, factors.detach(), probabilities)
    # The first of these steps makes the first derivative with respect to the shape exact, the second the next two.
    for _ in range(2):
        logs = _newton_step(logs, shape, factors, probabilities)
    return logs


def _newton_step(logs: Tensor, shape: Tensor, factors: Tensor, probabilities: Tensor) -> Tensor:
    total = 1.0 + _series(logs, factors)
    return logs - (_log_density(shape, logs) + total.log() - probabilities.log()) * total / shape


def _log_density(shape: Tensor, logs: Tensor) -> Tensor:
    """Return `log g`."""
    return shape * logs - logs.exp() - torch.lgamma(shape + 1.0)


def _log_density_near(shape: Tensor, deviations: Tensor) -> Tensor:
    """Return `log g` at `shape * (1 + deviations)` for large shapes, by Stirling's series: no large numbers cancel."""
    stirling = 0.5 * (2.0 * math.pi * shape).log() + 1.0 / (12.0 * shape) - 1.0 / (360.0 * shape**3)
    return -shape * (deviations - torch.log1p(deviations)) - stirling


def _log_factors(shape: Tensor) -> Tensor:
    """Return the logarithm of `(shape + 1) ... (shape + n)` for each term of the series."""
    return (shape[..., None] + _numbers(shape)).log().cumsum(-1)


def _series(logs: Tensor, factors: Tensor) -> Tensor:
    """Return `T`."""
    return (_numbers(logs) * logs[..., None] - factors).exp().sum(-1)


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(1, _NUM_TERMS + 1, dtype=torch.float64, device=like.device)


def _deviations(shape: Tensor, probabilities: Tensor) -> Tensor:
    """Return quantiles relative to the shape, minus one, for large shapes, by Cornish and Fisher."""
    z, width = torch.special.ndtri(probabilities), shape.sqrt()
    terms = [
        (z**2 - 1.0) / 3.0,
        (z**3 - 7.0 * z) / 36.0,
        -(3.0 * z**4 + 7.0 * z**2 - 16.0) / 810.0,
        (9.0 * z**5 + 256.0 * z**3 - 433.0 * z) / 38880.0,
        (12.0 * z**6 - 243.0 * z**4 - 923.0 * z**2 + 1472.0) / 204120.0,
        -(3753.0 * z**7 + 4353.0 * z**5 - 289517.0 * z**3 - 289717.0 * z) / 146966400.0,
    ]
    deviations = z / width
    for power, term in enumerate(terms, start=2):
        deviations = deviations + term / width**power
    return deviations


#: Shape of the Gamma distribution; the usual prior is that of MrBayes 3.2 (`shapepr=exponential(1.0)`) and BEAST 2
#: (mean 1, BEAUti's template `SubstModels.xml`). torchtree has rate 2.
_SHAPE = Parameter(lambda like: Exponential(like.new_tensor(1.0)))
#: Proportion of sites that cannot change; the usual prior is flat, as in MrBayes 3.2 (`pinvarpr=uniform(0,1)`) and
#: BEAST 2 (uniform from 0 to 1, BEAUti's template `SubstModels.xml`).
_PROPORTION = Parameter(lambda like: Beta(like.new_tensor(1.0), like.new_tensor(1.0)), upper=1.0)


class Categories(NamedTuple):
    """Rate categories of sites; the mean rate over all sites is one.

    Attributes
    ----------
    rates : Tensor
        Rates of the variable categories, shape `(*batch, categories)`.
    weights : Tensor
        Probabilities of these categories, shape `(*batch, categories)`.
    invariant : Tensor or None
        Probability of an invariant site, shape `(*batch)`; None if there are none.
    """

    rates: Tensor
    weights: Tensor
    invariant: Tensor | None = None

    def expand(self, batch: torch.Size) -> Categories:
        """Return the same categories for a larger batch."""
        sizes = (*batch, self.rates.shape[-1])
        invariant = None if self.invariant is None else self.invariant.expand(batch)
        return Categories(self.rates.expand(sizes), self.weights.expand(sizes), invariant)


def one_rate(like: Tensor) -> Categories:
    """Return the one category of sites that all have rate one, with the dtype and device of `like`."""
    return Categories(like.new_ones(1), like.new_ones(1))


class SiteRates(Parameterized, ABC):
    """Base class of distributions of rates over sites, with mean one.

    Examples
    --------
    >>> isinstance(GammaRates(), SiteRates)
    True
    """

    @abstractmethod
    def categories(self, like: Tensor) -> Categories:
        """Return the categories, with the dtype and device of `like`."""

    def category_numbers(self, like: Tensor) -> Categories:
        """Return the categories on the CPU, without derivatives."""
        return self.categories(like)


@dataclass(frozen=True, eq=False)
class GammaRates(SiteRates):
    """Gamma-distributed rates with mean one, discretised into equally probable categories.

    Parameters
    ----------
    shape : float, Tensor or TorchDistribution, optional
        Shape parameter, shape `(*batch,)`, above 0; the variance of the rates is `1 / shape`. Or its prior: by default
        Exponential(1), as in MrBayes 3.2 (Ronquist et al., 2012) and BEAST 2 (Bouckaert et al., 2019).
    num_categories : int, default 4
    median : bool, default False
        Represent a category by its median, rescaled to an overall mean of one, instead of its mean.

    Raises
    ------
    SettingsError
        If the shape is not above 0, its prior is not over one positive number, or `num_categories` is not a positive
        integer.

    References
    ----------
    Z. Yang (1994), Maximum likelihood phylogenetic estimation from DNA sequences with variable rates over sites:
    approximate methods, Journal of Molecular Evolution 39, 306-314.

    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> GammaRates(shape=0.5).categories(torch.zeros((), dtype=torch.float64)).rates
    tensor([0.0334, 0.2519, 0.8203, 2.8944], dtype=torch.float64)
    """

    shape: Given = None
    num_categories: int = 4
    median: bool = False

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"shape": _SHAPE})

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        object.__setattr__(self, "num_categories", whole_number("num_categories", self.num_categories, least=1))

    def categories(self, like: Tensor) -> Categories:
        """Return the categories, with the dtype and device of `like`."""
        return self._represented(category_medians if self.median else category_means, like)

    def category_numbers(self, like: Tensor) -> Categories:
        """Return the categories on the CPU, without derivatives."""
        return self._represented(category_medians if self.median else category_means_as_numbers, like)

    def _represented(self, by: Callable[[Tensor, int], Tensor], like: Tensor) -> Categories:
        rates = by(self._values("shape", like), self.num_categories).to(like.dtype)
        return Categories(rates, torch.full_like(rates, 1.0 / self.num_categories))


@dataclass(frozen=True, eq=False)
class FreeRates(SiteRates):
    """Rates in categories whose rates and probabilities are both free, with mean one.

    The rates grow from one category to the next, by increments that are scaled to a mean rate of one, so that no two
    orders of the categories are the same model.

    Parameters
    ----------
    rate_increments : sequence of float, Tensor or TorchDistribution, optional
        The rate of the first category, and how much each is above the one before, up to a common factor, shape
        `(*batch, num_categories)`, above 0. Or their prior, by default Dirichlet(1, ..., 1).
    rate_weights : sequence of float, Tensor or TorchDistribution, optional
        Probabilities of the categories, shape `(*batch, num_categories)`, above 0, scaled to sum to one. Or their
        prior, by default Dirichlet(1, ..., 1).
    num_categories : int, default 4
        At least 2.

    Raises
    ------
    SettingsError
        If values or values in the support of a prior are not above 0, or there are fewer than two categories.
    ShapeError
        If there is not one number for each category.

    References
    ----------
    Z. Yang (1995), A space-time process model for the evolution of DNA sequences, Genetics 139, 993-1005.

    J. Soubrier et al. (2012), The influence of rate heterogeneity among sites on the time dependence of molecular
    rates, Molecular Biology and Evolution 29, 3345-3358.

    Examples
    --------
    >>> FreeRates.of([0.2, 1.8], weights=[0.5, 0.5]).categories(torch.zeros(())).rates
    tensor([0.2000, 1.8000])
    """

    rate_increments: Given = None
    rate_weights: Given = None
    num_categories: int = 4

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "num_categories", whole_number("num_categories", self.num_categories, least=2))
        super().__post_init__()

    @classmethod
    def of(cls, rates: Sequence[float], weights: Sequence[float]) -> Self:
        """Return fixed rates, in any order, such as those that another program has estimated.

        Parameters
        ----------
        rates : sequence of float
            Above 0 and different, scaled to mean one.
        weights : sequence of float
            Probabilities of the rates, above 0, scaled to sum to one.

        Raises
        ------
        SettingsError
            If rates are equal or not above 0, or there are not as many weights.

        Examples
        --------
        >>> FreeRates.of([3.0, 1.0], weights=[0.5, 0.5]).categories(torch.zeros(())).rates
        tensor([0.5000, 1.5000])
        """
        ordered = sorted(zip(rates, weights, strict=False))
        increments = [now - before for (now, _), before in zip(ordered, [0.0, *sorted(rates)], strict=False)]
        if len(rates) != len(weights) or min(increments, default=0.0) <= 0:
            raise SettingsError(
                f"rates {list(rates)} and weights {list(weights)} are not pairs with different rates above 0. Remedy: "
                "give one weight for each rate, join categories of one rate, and use InvariantSites for a rate of 0."
            )
        return cls(increments, [weight for _, weight in ordered], len(rates))

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Increments and weights."""
        size = self.num_categories
        simplex = Parameter(lambda like: Dirichlet(like.new_ones(size)), size=size)
        return MappingProxyType({"rate_increments": simplex, "rate_weights": simplex})

    def categories(self, like: Tensor) -> Categories:
        """Return the categories, with the dtype and device of `like`."""
        rates, weights = self._values("rate_increments", like).cumsum(-1), self._values("rate_weights", like)
        rates, weights = torch.broadcast_tensors(rates, weights / weights.sum(-1, keepdim=True))
        return Categories(rates / (rates * weights).sum(-1, keepdim=True), weights)


@dataclass(frozen=True, eq=False)
class InvariantSites(SiteRates):
    """Mixture of invariant sites and variable sites, with mean rate one over all sites.

    Parameters
    ----------
    proportion : float, Tensor or TorchDistribution, optional
        Probability that a site is invariant, shape `(*batch,)`, in (0, 1). Or its prior: by default Beta(1, 1), as in
        MrBayes 3.2 (Ronquist et al., 2012) and BEAST 2 (Bouckaert et al., 2019).
    others : SiteRates, optional
        Rates of the variable sites, such as `GammaRates()`; by default all equal.

    Raises
    ------
    SettingsError
        If the proportion or the support of its prior is not within (0, 1), or `others` has invariant sites.

    References
    ----------
    X. Gu, Y.-X. Fu and W.-H. Li (1995), Maximum likelihood estimation of the heterogeneity of substitution rate among
    nucleotide sites, Molecular Biology and Evolution 12, 546-557.

    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> InvariantSites(proportion=0.2, others=GammaRates(shape=0.5)).categories(torch.zeros(())).rates
    tensor([0.0417, 0.3149, 1.0253, 3.6180])
    """

    proportion: Given = None
    others: SiteRates | None = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"proportion": _PROPORTION})

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if isinstance(self.others, InvariantSites):
            raise SettingsError(
                "others: nested InvariantSites have one proportion only. Remedy: give GammaRates() or None."
            )

    def priors(self, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of all parameters without a value, including those of the variable sites."""
        return {**super().priors(like), **({} if self.others is None else self.others.priors(like))}

    def with_parameters(self, values: Mapping[str, Tensor]) -> Self:
        """Return a copy with values for some parameters, including those of the variable sites."""
        made = super().with_parameters(values)
        if self.others is not None:
            object.__setattr__(made, "others", self.others.with_parameters(values))
        return made

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the parameter values."""
        others = torch.Size() if self.others is None else self.others.batch_shape
        return torch.broadcast_shapes(super().batch_shape, others)

    def categories(self, like: Tensor) -> Categories:
        """Return the categories, with the dtype and device of `like`."""
        return self._beside(one_rate(like) if self.others is None else self.others.categories(like), like)

    def category_numbers(self, like: Tensor) -> Categories:
        """Return the categories on the CPU, without derivatives."""
        return self._beside(one_rate(like) if self.others is None else self.others.category_numbers(like), like)

    def _beside(self, others: Categories, like: Tensor) -> Categories:
        """Return the categories of the variable sites with that of the invariant ones."""
        proportion = self._values("proportion", like)
        rates, weights, _ = others
        left = (1.0 - proportion)[..., None]
        return Categories(rates / left, weights * left, proportion)


def mix(logs: Tensor, categories: Categories, frequencies: Tensor, constant: Tensor) -> Tensor:
    """Return log-likelihoods of sites of unknown category, `(sites, *batch)`, from `(sites, categories, *batch)`.

    `frequencies` are `(*batch, n)`, and `constant` `(sites, n)` is 1 for states that all taxa allow at a site, else 0.
    """
    largest = logs.detach().amax(1, keepdim=True)
    largest = torch.where(largest > -torch.inf, largest, torch.zeros_like(largest))
    total = (categories.weights.movedim(-1, 0) * torch.exp(logs - largest)).sum(1)
    # NaN is kept: it is not an impossible site.
    impossible = total == 0
    mixed = torch.where(impossible, -torch.inf, torch.where(impossible, 1.0, total).log() + largest[:, 0])
    if categories.invariant is None:
        return mixed
    unchanged = torch.tensordot(constant, frequencies.movedim(-1, 0), 1)
    occurs = unchanged > 0
    logs_unchanged = torch.where(occurs, unchanged, 1.0).log() + categories.invariant.log()
    return torch.where(occurs, torch.logaddexp(mixed, logs_unchanged), mixed)
