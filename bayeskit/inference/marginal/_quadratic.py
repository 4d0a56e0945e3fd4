"""The integral of a density that is normal by the inner coordinates: one Newton step from anywhere ends at the mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from bayeskit.inference.marginal._inner_density import RemainingPrior
from bayeskit.inference.marginal._integral import IntegralValue, SearchedIntegral
from bayeskit.inference.marginal._laplace import LaplaceIntegral


@dataclass(frozen=True)
class QuadraticIntegral(SearchedIntegral):
    """The exact integral of a log density that is quadratic by the inner coordinates."""

    @property
    def description(self) -> str:
        """The structure of the Hessian in words."""
        return f"normal: {self.hessian.description}"

    def evaluate(self, r: Tensor, start: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals after one Newton step from ``start``."""
        hessian, structure = self.hessian, self.hessian.structure
        minus, slope, _ = hessian.curve(r, start, hessian.constant(r, start))
        factor, definite = structure.factorised(minus)
        # The slope at the mode is zero, so the gradient is that at a fixed mode.
        z = (start + structure.solved(factor, slope)).detach()
        gradient, value = self.density.gradient(r, z)
        gradient = gradient - hessian.half_log_det_gradient(r, z, structure.inverted(minus, factor))[0]
        value = value - structure.half_log_det(factor) + 0.5 * self.density.num_inner * math.log(2 * math.pi)
        return IntegralValue(
            log_likelihood=value - prior.value,
            gradient=gradient - prior.gradient,
            found=definite & value.isfinite() & gradient.sum(-1).isfinite(),
            next_start=z,
        )

    def searched(self, r: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return Laplace's approximations, which do not assume that the density is normal."""
        return LaplaceIntegral(self.density, self.hessian, self.prediction, num_steps=1).searched(r, prior)
