"""Kaufman's partition function of the homogeneous Ising torus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError, ShapeError

#: The coupling at which an infinite square lattice begins to order.
CRITICAL_COUPLING = 0.5 * math.asinh(1.0)


def kaufman_log_partition(
    height: int, width: int, vertical: Tensor | float, horizontal: Tensor | float | None = None
) -> Tensor:
    r"""Return the exact log partition function of a torus without a field, of any size.

    Parameters
    ----------
    height, width : int
        At least two. With two, each pair of neighbours is joined by two bonds.
    vertical, horizontal : Tensor or float
        Couplings in units of the temperature, positive, shape ``(*batch)``; the same in both directions by default.

    Returns
    -------
    Tensor
        Shape ``(*batch)``, computed in double precision and returned in that of the couplings; plain numbers count as
        double.

    Raises
    ------
    SettingsError
        If a coupling is not positive and finite, or a side has less than two sites.
    ShapeError
        If the batches of the couplings do not broadcast.

    References
    ----------
    Kaufman, B. (1949). Crystal statistics. II. Partition function evaluated by spinor analysis.
    Physical Review 76, 1232-1243.

    Examples
    --------
    >>> round(float(kaufman_log_partition(64, 64, CRITICAL_COUPLING)) / 64**2, 6)
    0.929852
    """
    height = whole_number("height", height, least=2)
    width = whole_number("width", width, least=2)
    between = _positive("vertical", vertical)
    within = between if horizontal is None else _positive("horizontal", horizontal)
    dtype = torch.promote_types(between.dtype, within.dtype)
    try:
        between, within = torch.broadcast_tensors(between.double(), within.double())
    except RuntimeError as error:
        shapes = f"{tuple(between.shape)} and {tuple(within.shape)}"
        raise ShapeError(f"the batches of vertical and horizontal do not broadcast: {shapes}") from error
    gamma, growth = _modes(width, between, within)
    # Of each mode cosh(height gamma / 2), less cosh(K) per site, and the sign-carrying ratio of sinh to it.
    size = torch.where(gamma > 0, gamma, -gamma)  # of which the slope at zero is that of the growth
    log_cosh = 0.5 * height * growth + (-height * size).exp().log1p()
    ratio = (0.5 * height * gamma).tanh()
    odd, even = log_cosh[..., 1::2].sum(-1), log_cosh[..., 0::2].sum(-1)
    largest = torch.maximum(odd, even).detach()
    total = (odd - largest).exp() * (1 + ratio[..., 1::2].prod(-1))
    total = total + (even - largest).exp() * (1 + ratio[..., 0::2].prod(-1))
    log_two_cosh = between + (-2 * between).exp().log1p()
    return (height * width * log_two_cosh + largest + total.log() - math.log(2)).to(dtype)


def _modes(width: int, between: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent of each mode per row, ``(*batch, 2 * width)``, and by how much it exceeds ``-log(tanh(K))``.

    That is the exponent which all have in common where neighbours in a row are not coupled: it grows without bound as
    the coupling ``K`` between rows vanishes, when only the excess counts. With ``tanh`` for ``tanh(K)`` and ``decay``
    for ``exp(-2 K')`` of the coupling in rows, ``cosh(gamma) - 1 = distance / (tanh * decay)``.
    """
    between, within = between.unsqueeze(-1), within.unsqueeze(-1)
    log_tanh = (-(-2 * between).expm1()).log() - (-2 * between).exp().log1p()
    # The mode at angle zero has a sign, which turns at the critical coupling.
    zero = 2 * within + log_tanh
    zero_growth = torch.where(zero > 0, zero + log_tanh, -2 * within)
    angle = torch.arange(1, 2 * width).to(between) * (math.pi / width)
    tanh, decay = between.tanh(), (-2 * within).exp()
    below_one = 2 * (-2 * between).exp() / (1 + (-2 * between).exp())  # 1 - tanh
    distance = 0.5 * ((-2 * within).expm1() + below_one).square()
    distance = distance - 0.5 * below_one * (1 + tanh) * (-4 * within).expm1() * (angle / 2).sin().square()
    scale = tanh * decay
    growth = 2 * within + (scale + distance + (distance * (distance + 2 * scale)).sqrt()).log()
    return torch.cat([zero, growth - log_tanh], -1), torch.cat([zero_growth, growth], -1)


def _positive(name: str, value: Tensor | float) -> Tensor:
    coupling = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    if not bool(((coupling > 0) & coupling.isfinite()).all()):
        raise SettingsError(f"{name} must be positive and finite, not {value}; the closed form is for ferromagnets")
    return coupling if coupling.is_floating_point() else coupling.to(torch.get_default_dtype())
