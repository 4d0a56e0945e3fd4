"""Models of the data within one segment whose parameters are integrated out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError, ShapeError
from bayeskit.models.discrete.inputs import as_real


class SegmentModel(Protocol):
    """What a change-point model needs to know of one segment's data."""

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment.

        Parameters
        ----------
        x : Tensor
            Shape ``(n,)``.
        max_length : int

        Returns
        -------
        Tensor
            ``(n, max_length)``: entry ``[j, l]`` is that of the ``l + 1`` data up to and including ``x[j]``. Entries
            that would begin before the data are not read.
        """

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's mean, laid out as the log marginals."""


@dataclass(frozen=True)
class NormalSegments:
    r"""Normal data; mean and variance differ from segment to segment.

    .. math:: \sigma^2 \sim \mathrm{InverseGamma}(a, b), \qquad \mu \mid \sigma^2 \sim N(m_0, \sigma^2 / k_0).

    Parameters
    ----------
    mean : float
        :math:`m_0`.
    precision : float
        :math:`k_0`, the number of data that the prior of the mean is worth.
    shape, rate : float
        :math:`a` and :math:`b`.

    Raises
    ------
    SettingsError
        If a number is not finite, or one but ``mean`` is not above zero.

    References
    ----------
    Bernardo, J. M., Smith, A. F. M. (1994). Bayesian theory. Wiley, section 5.2.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import NormalSegments
    >>> model = NormalSegments(mean=0.0, precision=1.0, shape=2.0, rate=1.0)
    >>> model.log_marginals(torch.tensor([0.5, -0.5, 0.1]), max_length=1)[:, 0]
    tensor([-1.1324, -1.1324, -0.9871])
    """

    mean: float
    precision: float
    shape: float
    rate: float

    def __post_init__(self) -> None:
        real_number("mean", self.mean, (-math.inf, math.inf))
        for name in ("precision", "shape", "rate"):
            real_number(name, getattr(self, name), (0.0, math.inf))

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment, ``(n, max_length)``.

        Raises
        ------
        DataError
            If ``x`` is not finite.
        """
        x = _finite(x)
        count, mean, spread = _moments(x, max_length)
        precision, shape = self.precision + count, self.shape + count / 2
        off = self.precision * count / precision * (mean - self.mean).square()
        rate = self.rate + 0.5 * (spread + off)
        marginals = (
            torch.lgamma(shape)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - shape * rate.log()
            + 0.5 * (math.log(self.precision) - precision.log())
            - 0.5 * count * math.log(2 * math.pi)
        )
        return marginals.to(x.dtype)

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's mean, ``(n, max_length)``."""
        x = _finite(x)
        count, mean, _ = _moments(x, max_length)
        return (self.mean + count / (self.precision + count) * (mean - self.mean)).to(x.dtype)


@dataclass(frozen=True)
class PoissonSegments:
    r"""Counts from Poisson distributions; the rate differs from segment to segment, :math:`\lambda \sim \Gamma(a, b)`.

    Parameters
    ----------
    shape, rate : float
        :math:`a` and :math:`b`, so that the mean is ``shape / rate``.

    Raises
    ------
    SettingsError
        If a number is not above zero and finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import PoissonSegments
    >>> PoissonSegments(1.0, 1.0).log_marginals(torch.tensor([0.0, 1.0, 2.0]), max_length=1)[:, 0].exp()
    tensor([0.5000, 0.2500, 0.1250])
    """

    shape: float
    rate: float

    def __post_init__(self) -> None:
        for name in ("shape", "rate"):
            real_number(name, getattr(self, name), (0.0, math.inf))

    def log_marginals(self, x: Tensor, max_length: int) -> Tensor:
        """Return the log marginal likelihood of every segment, ``(n, max_length)``.

        Raises
        ------
        DataError
            If ``x`` is not made of whole numbers from zero.
        """
        x = _finite(x)
        if bool(((x < 0) | (x != x.round())).any()):
            raise DataError("the counts hold a negative number or a fraction; give whole numbers from zero")
        counts = _windows(x, max_length)
        length, total = _lengths(counts), counts.cumsum(1)
        marginals = (
            torch.lgamma(self.shape + total)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - (self.shape + total) * (self.rate + length).log()
            - torch.lgamma(counts + 1).cumsum(1)
        )
        return marginals.to(x.dtype)

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's rate, ``(n, max_length)``."""
        x = _finite(x)
        counts = _windows(x, max_length)
        return ((self.shape + counts.cumsum(1)) / (self.rate + _lengths(counts))).to(x.dtype)


def _finite(x: Tensor) -> Tensor:
    """Return ``x`` in floating point, or raise DataError that names the first number that is not finite."""
    x = as_real("x", x, torch.float64)
    if x.dim() != 1 or not len(x):
        raise ShapeError(f"x has shape {tuple(x.shape)}; give a sequence of numbers, (n,)")
    bad = (~x.isfinite()).nonzero()
    if len(bad):
        raise DataError(f"x[{int(bad[0])}] is {float(x[bad[0]])}; give finite data")
    return x


def _windows(x: Tensor, max_length: int) -> Tensor:
    """Return the datum so many places before each, float64, ``(n, max_length)``; the first one before the data."""
    x = x.double()
    padded = torch.cat([x[:1].expand(max_length - 1), x])
    return padded.unfold(0, max_length, 1).flip(1)


def _lengths(windows: Tensor) -> Tensor:
    return torch.arange(1, windows.shape[1] + 1, dtype=windows.dtype, device=windows.device)


def _moments(x: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean and sum of squares about the mean of the data of every segment, the latter two ``(n, L)``.

    A segment grows towards its start, and every datum more raises the sum of squares (Welford): nothing is subtracted,
    so nothing cancels. Means are taken relative to the last datum, lest data far from zero lose digits.
    """
    off = _windows(x, max_length) - x.double().unsqueeze(1)
    count = _lengths(off)
    mean = off.cumsum(1) / count
    rises = (off[:, 1:] - mean[:, :-1]).square() * count[:-1] / count[1:]
    spread = torch.cat([torch.zeros_like(off[:, :1]), rises.cumsum(1)], 1)
    return count, x.double().unsqueeze(1) + mean, spread
