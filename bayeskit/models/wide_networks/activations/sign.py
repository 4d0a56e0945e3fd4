"""Activations that are constant on either side of zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.models.wide_networks.activations.activation import Activation, Moments
from bayeskit.models.wide_networks.covariance import angle, gap_of, root, where_zero


@dataclass(frozen=True)
class Step(Activation):
    """``left`` below zero, ``right`` above and their mean at zero: the sign, or Heaviside's function.

    Its derivative is zero almost everywhere, so that gradients do not pass, neither here nor in a finite network.
    """

    left: float = -1.0
    right: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's values."""
        middle = 0.5 * (self.left + self.right)
        return middle + 0.5 * (self.right - self.left) * torch.sign(x)

    def moments(self, k: Tensor, a: Tensor, b: Tensor, gap: Tensor | None = None, derivative: bool = True) -> Moments:
        """Return moments of the function of two normal numbers."""
        middle, height = 0.5 * (self.left + self.right), 0.5 * (self.right - self.left)
        between = angle(root(gap_of(k, a, b) if gap is None else gap), k)
        # A number without variance is zero, where the function is half way: as if at a right angle to all.
        between = where_zero(a, b, between, 0.5 * math.pi, 0.5 * math.pi)
        nngp = middle**2 + height**2 * (1 - (2 / math.pi) * between)
        return Moments(nngp, torch.zeros_like(nngp) if derivative else None)

    def mean(self, a: Tensor) -> Tensor | None:
        """Return the expectation of the function of a normal number with variance ``a``."""
        return torch.full_like(a, 0.5 * (self.left + self.right))

    def gain(self) -> Activation:
        """Return zero."""
        return Step(0.0, 0.0)
