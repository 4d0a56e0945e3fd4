"""Laplus: a distribution on the positive half line for each coordinate, matched to the density at its mode."""

from __future__ import annotations

import torch
from torch import Tensor

#: A mode below this counts as one at zero, unless the density of the coordinate's logarithm is bent as much as this.
ZERO, BENT = 1e-6, 0.1


def is_inside(mode: Tensor, second: Tensor) -> Tensor:
    """Tell at which coordinates the mode is inside and the log density concave, shape `(*batch)`."""
    return (second < 0) & ((mode >= ZERO) | (-second * mode.square() > BENT))


def slope_at_zero(first: Tensor) -> Tensor:
    """Return the rate of the exponential distribution with the same slope, `(*batch)`."""
    # A slope of nothing at zero has no exponential distribution; a huge mean stands for it.
    return first.abs().clamp(min=torch.finfo(first.dtype).tiny ** 0.5)


def match_gamma(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Match gamma distributions to a log density at its mode, each coordinate by itself.

    Where the mode is inside, the gamma distribution has the same mode and the same second derivative of its log
    density there; where it is at zero, or the log density is not concave, the exponential distribution with the same
    slope.

    Parameters
    ----------
    mode : Tensor
        Positive coordinates of the mode, shape `(*batch)`.
    first, second : Tensor
        First and second derivatives of the log density by each coordinate at the mode, shape `(*batch)`.

    Returns
    -------
    shape, rate : Tensor
        Of the gamma distributions, shape `(*batch)`.

    References
    ----------
    Fourment, M., Magee, A. F., Whidden, C., Bilge, A., Matsen, F. A., Minin, V. N. (2020). 19 dubious ways to compute
    the marginal likelihood of a phylogenetic tree topology. Systematic Biology 69, 209-220.

    Examples
    --------
    Of a gamma distribution itself, with shape 3 and rate 4:

    >>> import torch
    >>> mode = torch.tensor(0.5, dtype=torch.float64)
    >>> match_gamma(mode, torch.zeros_like(mode), -2 / mode**2)
    (tensor(3., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    inside, rate = is_inside(mode, second), -second * mode
    return torch.where(inside, rate * mode + 1, 1.0), torch.where(inside, rate, slope_at_zero(first))


def match_beta_prime(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Match beta prime distributions, with densities in proportion to x^(a - 1) (1 + x)^(-a - b).

    Parameters
    ----------
    mode, first, second : Tensor
        As of :func:`match_gamma`. Where the mode is not inside, the distribution has `a` of one and the same slope at
        zero.

    Returns
    -------
    first_shape, second_shape : Tensor
        `a` and `b`, shape `(*batch)`; `b` may be negative where tails are too heavy for any.

    Examples
    --------
    Of a beta prime distribution itself, with shapes 3 and 4, whose mode is 2 / 5:

    >>> import torch
    >>> mode = torch.tensor(0.4, dtype=torch.float64)
    >>> match_beta_prime(mode, torch.zeros_like(mode), -2 / mode**2 + 7 / (1 + mode) ** 2)
    (tensor(3., dtype=torch.float64), tensor(4.0000, dtype=torch.float64))
    """
    inside, bent = is_inside(mode, second), -second * mode * (mode + 1)
    return torch.where(inside, bent * mode + 1, 1.0), torch.where(inside, bent - 1, slope_at_zero(first) - 1)


def match_lognormal(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Match lognormal distributions.

    Parameters
    ----------
    mode, first, second : Tensor
        As of :func:`match_gamma`. Where the mode is not inside, the distribution has mean and variance of the
        exponential distribution with the same slope, for a lognormal one has no mode at zero.

    Returns
    -------
    location, scale : Tensor
        Mean and standard deviation of the logarithm, shape `(*batch)`.

    Examples
    --------
    Of a lognormal distribution itself, with location 0.3 and scale 0.5:

    >>> import torch
    >>> mode = torch.tensor(0.3 - 0.25, dtype=torch.float64).exp()
    >>> match_lognormal(mode, torch.zeros_like(mode), -1 / (0.25 * mode**2))
    (tensor(0.3000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    inside, half = is_inside(mode, second), torch.tensor(2.0, dtype=mode.dtype).log()
    variance = torch.where(inside, -1 / (second * mode.square()), half)
    location = torch.where(inside, mode.log() + variance, -slope_at_zero(first).log() - half / 2)
    return location, variance.sqrt()
