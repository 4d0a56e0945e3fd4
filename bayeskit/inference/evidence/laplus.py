"""Laplus: a distribution on the positive half line for each coordinate, matched to the density at its mode."""

from __future__ import annotations

import torch
from torch import Tensor

#: A mode below this counts as one at zero.
ZERO = 1e-6


def gamma_laplus(mode: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
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
    >>> gamma_laplus(mode, torch.zeros_like(mode), -2 / mode**2)
    (tensor(3., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    rate = -second * mode
    inside = (mode >= ZERO) & (second < 0)
    # A slope of nothing at zero has no exponential distribution; a huge mean stands for it.
    slope = first.abs().clamp(min=torch.finfo(mode.dtype).tiny ** 0.5)
    return torch.where(inside, rate * mode + 1, 1.0), torch.where(inside, rate, slope)
