"""Laplace's approximation of the integral, at a mode that Newton's method finds for each vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit.inference.curvature._structure import DiagonalBlocks, Factor
from bayeskit.inference.marginal._inner_density import RemainingPrior
from bayeskit.inference.marginal._integral import IntegralValue, SearchedIntegral
from bayeskit.inference.marginal._modes import InnerModes


@dataclass(frozen=True)
class LaplaceIntegral(SearchedIntegral):
    """The integral of the normal density that has the mode and the curvature there in common with the density."""

    #: Newton steps of one evaluation. As each squares the error, a few serve a wide neighbourhood of the mode.
    num_steps: int = 4

    @property
    def description(self) -> str:
        """The structure of the Hessian in words."""
        return self.hessian.description

    def evaluate(self, r: Tensor, start: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals after a few undamped Newton steps from ``start``."""
        hessian, structure, num_inner = self.hessian, self.hessian.structure, self.density.num_inner
        z, constant = start, hessian.constant(r, start)
        for _ in range(self.num_steps):
            minus, slope, _ = hessian.curve(r, z, constant)
            z = z + structure.solved(structure.factorised(minus)[0], slope)
        minus, slope, value = hessian.curve(r, z, constant)
        factor, definite = structure.factorised(minus)
        step = structure.solved(factor, slope)
        decrement = (slope * step).sum(-1)
        # The mode moves with r: by the implicit function theorem, its part of the gradient is that of a shifted slope.
        outer, inner = hessian.half_log_det_gradient(r, z, structure.inverted(minus, factor))
        gradient = self.density.shifted_gradient(r, z, structure.solved(factor, inner)) - outer
        # To first order the mode is a step away, so the error of the value is of second order.
        value = value + 0.5 * decrement - (inner * step).sum(-1) - structure.half_log_det(factor)
        value = value + 0.5 * num_inner * math.log(2 * math.pi)
        return IntegralValue(
            log_likelihood=value - prior.value,
            gradient=gradient - prior.gradient,
            found=definite & is_at_mode(decrement, num_inner) & gradient.sum(-1).isfinite(),
            next_start=z + step,
        )

    def searched(self, r: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals at modes by a guarded search."""
        return self.evaluate(r, self.guarded_modes(r).z, prior)

    def modes(self, r: Tensor) -> InnerModes:
        """Return modes by a guarded search."""
        return self.guarded_modes(r)

    def factor(self, r: Tensor, z: Tensor) -> Factor:
        """Return the factor of minus the Hessian."""
        return self.hessian.structure.factorised(self.hessian.curve(r, z, self.hessian.constant(r, z))[0])[0]

    def spread(self, factor: Factor, x: Tensor) -> Tensor:
        """Return draws with the inverse of minus the Hessian as covariance from standard normal ones, ``(n, m)``."""
        return self.hessian.structure.spread(factor, x)

    def separate_scales(self, modes: InnerModes) -> Tensor | None:
        """Return standard deviations of coordinates ``(n, m)`` if each is a group of its own, else None."""
        structure = self.hessian.structure
        if isinstance(structure, DiagonalBlocks) and structure.is_separate:
            return structure.scattered(1 / modes.factor)
        return None


def is_at_mode(decrement: Tensor, num_inner: int) -> Tensor:
    """Tell where the squared length of a Newton step in standard deviations is no more than rounding, ``(n,)``."""
    return decrement <= torch.finfo(decrement.dtype).eps * max(1.0, 0.01 * num_inner)
