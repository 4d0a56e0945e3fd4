"""Maximum mean discrepancy: a kernel distance between two sets of draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number
from bayeskit.errors import ShapeError


class Kernel(Protocol):
    """A positive definite function of the squared distance."""

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel at ``(*batch, n, m)``; the median, ``typical (*batch, 1, 1)``, is the default scale."""
        ...


@dataclass(frozen=True)
class RadialBasis:
    """``exp(-d**2 / (2 bandwidth**2))``.

    Parameters
    ----------
    bandwidth : float, optional
        By default ``2 bandwidth**2`` is the median squared distance.

    Raises
    ------
    SettingsError
        If it is not positive.

    Examples
    --------
    >>> import torch
    >>> round(float(RadialBasis(1.0)(torch.tensor(2.0), torch.tensor(1.0))), 6)
    0.367879
    """

    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.bandwidth is not None:
            real_number("bandwidth", self.bandwidth, "(0, inf)")

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel, of the shape of ``squared_distance``."""
        return (-squared_distance / (typical if self.bandwidth is None else 2 * self.bandwidth**2)).exp()


@dataclass(frozen=True)
class InverseMultiquadric:
    """``scale / (scale + d**2)``, whose heavy tails are sensitive to distant draws.

    Parameters
    ----------
    scale : float, optional
        By default the median squared distance.

    Raises
    ------
    SettingsError
        If it is not positive.

    Examples
    --------
    >>> import torch
    >>> float(InverseMultiquadric(1.0)(torch.tensor(3.0), torch.tensor(1.0)))
    0.25
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            real_number("scale", self.scale, "(0, inf)")

    def __call__(self, squared_distance: Tensor, typical: Tensor) -> Tensor:
        """Return the kernel, of the shape of ``squared_distance``."""
        scale = typical if self.scale is None else self.scale
        return scale / (scale + squared_distance)


def maximum_mean_discrepancy(x: Tensor, y: Tensor, kernel: Kernel | None = None) -> Tensor:
    """Estimate the squared maximum mean discrepancy of two distributions by draws from each.

    Parameters
    ----------
    x : Tensor
        Shape ``(*batch, n, d)`` with ``n >= 2``.
    y : Tensor
        Shape ``(*batch, m, d)`` with ``m >= 2``.
    kernel : Kernel, optional
        :class:`InverseMultiquadric` by default.

    Returns
    -------
    Tensor
        Shape ``(*batch)``. Unbiased for a kernel of fixed scale, so possibly negative. A scale from the draws has no
        gradient.

    Raises
    ------
    ShapeError
        If the shapes do not fit, or there are fewer than two draws.

    References
    ----------
    Gretton, A., Borgwardt, K. M., Rasch, M. J., Schoelkopf, B., Smola, A. (2012). A kernel two-sample test. JMLR 13,
    723-773.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> float(maximum_mean_discrepancy(x, x + 1, InverseMultiquadric(1.0)))
    -0.39999...
    """
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-1] or min(x.shape[-2], y.shape[-2]) < 2:
        raise ShapeError(
            f"x and y must have shapes (*batch, n, d) and (*batch, m, d) with at least two draws each, not "
            f"{tuple(x.shape)} and {tuple(y.shape)}"
        )
    kernel = InverseMultiquadric() if kernel is None else kernel
    among_x, among_y, between = _squared_distance(x, x), _squared_distance(y, y), _squared_distance(x, y)
    typical = between.detach().flatten(-2).median(-1).values[..., None, None]
    typical = typical.clamp_min(torch.finfo(typical.dtype).tiny)
    return (
        _mean_off_diagonal(kernel(among_x, typical))
        + _mean_off_diagonal(kernel(among_y, typical))
        - 2 * kernel(between, typical).mean((-2, -1))
    )


def _squared_distance(x: Tensor, y: Tensor) -> Tensor:
    # Differences first: the expanded square cancels where draws are far from the origin.
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


def _mean_off_diagonal(values: Tensor) -> Tensor:
    count = values.shape[-1]
    diagonal = values.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (values.sum((-2, -1)) - diagonal) / (count * (count - 1))
