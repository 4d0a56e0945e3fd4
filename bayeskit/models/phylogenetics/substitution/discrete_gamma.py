"""Categories of a Gamma distribution with mean one, differentiable by its shape.

All is in double precision. With `x` the argument of the Gamma distribution with rate one and `y = log x`,

    P(shape, x) = g (1 + T),    P(shape + 1, x) = g T,    g = x^shape exp(-x) / Gamma(shape + 1),
    T = sum over n >= 1 of x^n / ((shape + 1) ... (shape + n)),

where all terms are positive, so nothing cancels. Quantiles are found by Newton's method on `log P` as a function of
`y`, which is increasing and concave; its last steps carry the derivative by the shape.

References
----------
Z. Yang (1994), Maximum likelihood phylogenetic estimation from DNA sequences with variable rates over sites:
approximate methods, Journal of Molecular Evolution 39, 306-314.

E. A. Cornish and R. A. Fisher (1938), Moments and cumulants in the specification of distributions, Revue de
l'Institut International de Statistique 5, 307-320.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Terms of the series: enough up to the shape from which on the expansion takes over.
_NUM_TERMS = 256
_LARGE_SHAPE = 400.0
#: From here on all rates are one, to twelve digits.
_LARGEST_SHAPE = 1e24
_NUM_STEPS = 5


def category_means(shape: Tensor, num_categories: int) -> Tensor:
    """Return the mean of each of several equally likely categories.

    Parameters
    ----------
    shape : Tensor
        Shape of the Gamma distribution with mean one, shape `(*batch)`, above 0.
    num_categories : int
        Number of categories `K`.

    Returns
    -------
    Tensor
        Shape `(*batch, K)`, float64; their mean is one.

    Examples
    --------
    >>> category_means(torch.tensor(0.5), 4)
    tensor([0.0334, 0.2519, 0.8203, 2.8944], dtype=torch.float64)
    """
    shape = shape.to(torch.float64)[..., None]
    bounds = torch.arange(1, num_categories, dtype=torch.float64, device=shape.device) / num_categories
    small, large = _split(shape)
    by_newton = _by_newton(small, bounds)
    by_series = torch.exp(_log_density(small, by_newton)) * _series(by_newton, _log_factors(small))
    by_difference = bounds - torch.exp(_log_density_near(large, _deviations(large, bounds)))
    shares = torch.where(shape > _LARGE_SHAPE, by_difference, by_series)
    none = torch.zeros_like(shape)
    return num_categories * torch.diff(torch.cat([none, shares, none + 1.0], -1))


def category_medians(shape: Tensor, num_categories: int) -> Tensor:
    """Return the median of each of several equally likely categories, scaled to a mean of one.

    Parameters
    ----------
    shape : Tensor
        Shape of the Gamma distribution with mean one, shape `(*batch)`, above 0.
    num_categories : int
        Number of categories `K`.

    Returns
    -------
    Tensor
        Shape `(*batch, K)`, float64; their mean is one.

    Examples
    --------
    >>> category_medians(torch.tensor(0.5), 4)
    tensor([0.0291, 0.2807, 0.9248, 2.7654], dtype=torch.float64)
    """
    shape = shape.to(torch.float64)[..., None]
    middles = (torch.arange(num_categories, dtype=torch.float64, device=shape.device) + 0.5) / num_categories
    return num_categories * torch.softmax(log_quantiles(shape, middles), -1)


def log_quantiles(shape: Tensor, probabilities: Tensor) -> Tensor:
    """Return the logarithms of quantiles of the Gamma distribution with rate one.

    Parameters
    ----------
    shape : Tensor
        Above 0, float64, any shape that broadcasts with that of `probabilities`.
    probabilities : Tensor
        Between 0 and 1, float64.

    Returns
    -------
    Tensor
        The quantiles' logarithms; differentiable by `shape`.

    Examples
    --------
    >>> log_quantiles(torch.ones(1, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)).exp()
    tensor([0.6931], dtype=torch.float64)
    """
    small, large = _split(shape)
    newton, expansion = _by_newton(small, probabilities), large.log() + torch.log1p(_deviations(large, probabilities))
    return torch.where(shape > _LARGE_SHAPE, expansion, newton)


def _split(shape: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shape for the series and for the expansion; each must be finite where the other is used."""
    return shape.clamp(max=_LARGE_SHAPE), shape.clamp(_LARGE_SHAPE, _LARGEST_SHAPE)


def _by_newton(shape: Tensor, probabilities: Tensor) -> Tensor:
    """Return logarithms of quantiles for shapes that the series serves."""
    fixed = shape.detach()
    # A first guess: Wilson and Hilferty's, but no less than a bound from below.
    bound = (probabilities.log() + torch.lgamma(fixed + 1.0)) / fixed
    root = 1.0 - 1.0 / (9.0 * fixed) + torch.special.ndtri(probabilities) / (3.0 * fixed.sqrt())
    logs = torch.maximum(bound, fixed.log() + 3.0 * root.clamp(min=1e-3).log())
    factors = _log_factors(shape)
    for _ in range(_NUM_STEPS):
        logs = _newton_step(logs, fixed, factors.detach(), probabilities)
    # With the first of these steps the first derivative by the shape is exact, with the second the next two are.
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
