"""What an activation function must know of itself: moments under normal laws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Moments of a function of two jointly normal numbers ``u`` and ``v`` with mean zero.

    Attributes
    ----------
    nngp : Tensor
        The expectation of ``f(u) f(v)``.
    derivative : Tensor or None
        The expectation of ``f'(u) f'(v)``.
    gap : Tensor or None
        The product of the expectations of ``f(u)**2`` and ``f(v)**2`` minus the square of ``nngp``, if it is known to
        more digits than the difference has.
    """

    nngp: Tensor
    derivative: Tensor | None = None
    gap: Tensor | None = None


class Activation(ABC):
    """A function of one number, applied to each feature of a layer."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""

    @abstractmethod
    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers.

        Parameters
        ----------
        k : Tensor
            Their covariances.
        a, b : Tensor
            Their variances, which broadcast against ``k``.
        gap : Tensor, optional
            ``a b - k**2``, if it is known to more digits than the difference has.
        derivative : bool, default True
            Whether the moment of derivatives is wanted.

        Returns
        -------
        Moments
        """

    @abstractmethod
    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``; None if it is zero."""

    @abstractmethod
    def gain(self) -> Activation:
        """Return the function's derivative with respect to the logarithm of its argument, ``x f'(x)``."""
