"""Kaufman's partition function of the homogeneous Ising torus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError

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
        Shape ``(*batch)``.

    Raises
    ------
    SettingsError
        If a coupling is not positive, or a side has less than two sites.

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
    between, within = torch.broadcast_tensors(
        _positive("vertical", vertical), _positive("horizontal", vertical if horizontal is None else horizontal)
    )
    # A row's bonds, and the dual of those between rows: tanh(dual) = exp(-2 K).
    dual = between.neg().mul(2).exp().atanh()
    angle = torch.arange(2 * width).to(between) * (math.pi / width)
    across, along = 2 * dual.unsqueeze(-1), 2 * within.unsqueeze(-1)
    # cosh(gamma) - 1, written without the difference of numbers near one.
    excess = 2 * ((across - along) / 2).sinh().square() + across.sinh() * along.sinh() * (1 - angle.cos())
    gamma = 2 * (excess / 2).sqrt().asinh()
    # The mode at angle zero has a sign, which turns at the critical coupling.
    gamma = torch.cat([along - across, gamma[..., 1:]], dim=-1)
    log_terms, signs = [], []
    for modes in (gamma[..., 1::2], gamma[..., 0::2]):
        exponent = 0.5 * height * modes
        size = exponent.abs()
        log_terms.append((size + (-2 * size).exp().log1p()).sum(-1))
        log_terms.append((size + (-(-2 * size).expm1()).log()).sum(-1))
        signs += [torch.ones_like(between), exponent.sign().prod(-1)]
    stacked, weights = torch.stack(log_terms), torch.stack(signs)
    largest = stacked.amax(0)
    total = largest + (weights * (stacked - largest).exp()).sum(0).log()
    return 0.5 * height * width * (2 * (2 * between).sinh()).log() + total - math.log(2)


def _positive(name: str, value: Tensor | float) -> Tensor:
    coupling = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    if not bool((coupling > 0).all()):
        raise SettingsError(f"{name} must be positive, not {value}; kaufman_log_partition is for ferromagnets")
    return coupling
