"""Models of the data within one segment whose parameters are integrated out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError


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
        # Differences of running sums cancel least about the mean of all data.
        center = x.mean()
        count, total, squares = _moments(x - center, max_length)
        precision, shape = self.precision + count, self.shape + count / 2
        spread = squares - total.square() / count
        off = self.precision * count / precision * (total / count + center - self.mean).square()
        rate = self.rate + 0.5 * (spread.clamp_min(0) + off)
        return (
            torch.lgamma(shape)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - shape * rate.log()
            + 0.5 * (math.log(self.precision) - precision.log())
            - 0.5 * count * math.log(2 * math.pi)
        )

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's mean, ``(n, max_length)``."""
        count, total, _ = _moments(_finite(x) - self.mean, max_length)
        return self.mean + total / (self.precision + count)


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
        count, total, _ = _moments(x, max_length)
        factorials, _ = _window_sums(torch.lgamma(x + 1), max_length)
        return (
            torch.lgamma(self.shape + total)
            - math.lgamma(self.shape)
            + self.shape * math.log(self.rate)
            - (self.shape + total) * (self.rate + count).log()
            - factorials
        )

    def levels(self, x: Tensor, max_length: int) -> Tensor:
        """Return the posterior mean of every segment's rate, ``(n, max_length)``."""
        count, total, _ = _moments(_finite(x), max_length)
        return (self.shape + total) / (self.rate + count)


def _finite(x: Tensor) -> Tensor:
    """Return ``x`` in floating point, or raise DataError that names the first number that is not finite."""
    x = x if x.is_floating_point() else x.double()
    bad = (~x.isfinite()).nonzero()
    if len(bad):
        raise DataError(f"x[{int(bad[0])}] is {float(x[bad[0]])}; give finite data")
    return x


def _moments(x: Tensor, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, sum and sum of squares of the data of every segment, each ``(n, max_length)``."""
    total, count = _window_sums(x, max_length)
    return count, total, _window_sums(x.square(), max_length)[0]


def _window_sums(values: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Add up the last values at each place, and count them: both ``(n, max_length)``."""
    length = torch.arange(1, max_length + 1, device=values.device)
    start = (torch.arange(1, len(values) + 1, device=values.device).unsqueeze(1) - length).clamp_min(0)
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return sums[1:].unsqueeze(1) - sums[start], length.to(values).expand(start.shape)
