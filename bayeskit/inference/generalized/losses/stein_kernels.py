"""Kernels for Stein discrepancies, with the derivatives that these need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError
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


def check_bandwidth(kernel: Kernel, x: Tensor) -> None:
    """Refuse ties that would give a kernel without a bandwidth of its own that of zero.

    Parameters
    ----------
    kernel : Kernel
    x : Tensor
        Data, shape ``(n, ...)``.

    Raises
    ------
    DataError
        If the kernel takes its scale from the data, and the median distance between them is zero.

    Examples
    --------
    >>> import torch
    >>> check_bandwidth(GeneralInverseMultiquadric(), torch.zeros(3))  # has a bandwidth
    """
    probe, one = x.new_tensor([0.5, 1.0, 2.0]), x.new_ones(())
    if len(x) < 2 or torch.equal(kernel(probe, one), kernel(probe, 2 * one)):
        return
    rows = x.detach().reshape(len(x), -1)
    squared = (rows.unsqueeze(1) - rows).square().sum(-1)
    if not bool(_median_squared_distance(squared) > 0):
        raise DataError(
            f"at least half of the pairs of data are tied, so that the median distance between them, from which "
            f"{type(kernel).__name__} takes its bandwidth, is zero; give the kernel a bandwidth"
        )


def typical_squared_distance(squared_distance: Tensor) -> Tensor:
    """Return the median between different data, of all squared distances ``(n, n)``, as a constant."""
    if len(squared_distance) < 2:
        return squared_distance.new_ones(())
    median = _median_squared_distance(squared_distance)
    return median.clamp_min(torch.finfo(median.dtype).tiny)


def _median_squared_distance(squared_distance: Tensor) -> Tensor:
    count = len(squared_distance)
    rows, others = torch.triu_indices(count, count, offset=1, device=squared_distance.device)
    return squared_distance.detach()[rows, others].median()
