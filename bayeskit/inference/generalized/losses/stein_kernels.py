"""Kernels for Stein discrepancies, with the derivatives that these need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.inference.kernel_discrepancy import Kernel


@dataclass(frozen=True)
class GeneralInverseMultiquadric:
    r"""``(1 + d**2 / bandwidth**2) ** -exponent``.

    With exponents in (0, 1) the Stein discrepancy of this kernel controls weak convergence; with faster decaying
    kernels such as :class:`~bayeskit.inference.kernel_discrepancy.RadialBasis` it does not beyond two dimensions.

    Parameters
    ----------
    bandwidth : float, default 1.0
        Positive.
    exponent : float, default 0.5
        Positive.

    Raises
    ------
    SettingsError
        If one is not positive.

    References
    ----------
    Gorham, J., Mackey, L. (2017). Measuring sample quality with kernels. ICML.

    Examples
    --------
    >>> import torch
    >>> GeneralInverseMultiquadric()(torch.tensor(3.0), torch.tensor(1.0)).item()
    0.5
    """

    bandwidth: float = 1.0
    exponent: float = 0.5

    def __post_init__(self) -> None:
        real_number("bandwidth", self.bandwidth, between=(0.0, float("inf")))
        real_number("exponent", self.exponent, between=(0.0, float("inf")))

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel, of the shape of ``squared_distance``."""
        return (1 + squared_distance / self.bandwidth**2) ** -self.exponent


def radial_derivatives(kernel: Kernel, squared_distance: Tensor, typical: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a kernel and its first two derivatives with respect to the squared distance, entry by entry.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.kernel_discrepancy import RadialBasis
    >>> [x.item() for x in radial_derivatives(RadialBasis(2**-0.5), torch.tensor(0.0), torch.tensor(1.0))]
    [1.0, -1.0..., 1.0...]
    """

    def value(t: Tensor) -> Tensor:
        return kernel(t, typical)

    def first(t: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda s: value(s).sum())(t)
        return gradient

    second = torch.func.grad(lambda s: first(s).sum())(squared_distance)
    return value(squared_distance), first(squared_distance), second


def typical_squared_distance(squared_distance: Tensor) -> Tensor:
    """Return the median between different data, of all squared distances ``(n, n)``, as a constant."""
    count = len(squared_distance)
    if count < 2:
        return squared_distance.new_ones(())
    rows, others = torch.triu_indices(count, count, offset=1, device=squared_distance.device)
    median = squared_distance.detach()[rows, others].median()
    return median.clamp_min(torch.finfo(median.dtype).tiny)
