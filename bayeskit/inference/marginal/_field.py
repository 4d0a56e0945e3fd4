"""Laplace's approximation for a multivariate normal prior and data that factorise over it, each log-concave."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit.errors import ModelError
from bayeskit.inference.marginal._hessian import Hessian, HessianSamples, derivative_rounding, trace_gradient
from bayeskit.inference.marginal._inner_density import LIKELIHOOD, PRIOR, RemainingPrior
from bayeskit.inference.marginal._integral import IntegralValue, SearchedIntegral
from bayeskit.inference.marginal._laplace import LaplaceIntegral, is_at_mode
from bayeskit.inference.marginal._modes import InnerModes

#: Newton steps of one evaluation, and evaluations to a mode, each of which goes on where the last one ended.
_NUM_STEPS, _NUM_EVALUATIONS = 3, 8


class _Curvature(NamedTuple):
    """The log likelihood about ``n`` vectors of a field, with ``W`` minus its Hessian, which is diagonal."""

    value: Tensor  # (n,)
    slope: Tensor  # (n, m)
    root: Tensor  # (n, m), of W
    factor: Tensor  # (n, m, m), Cholesky factor of 1 + sqrt(W) K sqrt(W)
    info: Tensor  # (n,), zero where the factor exists

    def divided(self, right: Tensor) -> Tensor:
        """Return ``right`` divided by ``K + 1 / W``, ``(n, m)``."""
        lower = torch.linalg.solve_triangular(self.factor, (self.root * right).unsqueeze(-1), upper=False)
        return self.root * torch.linalg.solve_triangular(self.factor.mT, lower, upper=True).squeeze(-1)


@dataclass(frozen=True)
class FieldIntegral(SearchedIntegral):
    """Laplace's approximation from the covariance ``K`` of the prior, which is neither inverted nor factorised.

    All is found from Cholesky factors of ``1 + sqrt(W) K sqrt(W)``, with ``W`` the diagonal minus Hessian of the log
    likelihood (Rasmussen and Williams 2006, section 3.4), and the gradient by all parameters of ``K`` is one
    contraction with ``dK``.
    """

    @property
    def description(self) -> str:
        """The size of the field."""
        return f"Gaussian field of {self.density.num_inner}"

    def evaluate(self, r: Tensor, start: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return integrals after a few undamped Newton steps from ``start``."""
        z, (mean, covariance) = start, self.density.normal_prior(r)
        eye = torch.eye(self.density.num_inner, dtype=r.dtype, device=r.device)
        weights = torch.zeros_like(z)  # of the covariance's columns: z = mean + K weights after a step

        def times(right: Tensor) -> Tensor:
            return (covariance @ right.unsqueeze(-1)).squeeze(-1)

        for _ in range(_NUM_STEPS):
            curve = self._curvature(r, z, covariance, eye)
            right = curve.root.square() * (z - mean) + curve.slope
            weights = right - curve.divided(times(right))
            z = mean + times(weights)
        curve = self._curvature(r, z, covariance, eye)
        lower = torch.linalg.solve_triangular(curve.factor, torch.diag_embed(curve.root), upper=False)
        within, beside = lower.mT @ lower, lower @ covariance  # (K + 1/W)^-1, and what K loses by the data
        variance = covariance.diagonal(dim1=-2, dim2=-1) - beside.square().sum(-2)
        rest = curve.slope - weights
        step = times(rest - curve.divided(times(rest)))
        decrement = (rest * step).sum(-1)
        # Half the log determinant moves with W, which depends on r and z; the mode z moves with r.
        outer, inner = trace_gradient(self.density, self.hessian.parts[1:], r, z, [variance.unsqueeze(0)])
        pulled = times(inner)
        back = inner - curve.divided(pulled)  # K^-1 A^-1 inner
        gradient = self.density.shifted_gradient(r, z, times(back), LIKELIHOOD) - outer
        half = 0.5 * weights - back
        adjoint = weights.unsqueeze(-1) * half.unsqueeze(-2) - 0.5 * within  # derivative of the value by K
        # To first order the mode is a step away, so the error of the value is of second order.
        value = curve.value - 0.5 * (weights * times(weights)).sum(-1)
        value = value + 0.5 * decrement - (inner * step).sum(-1)
        value = value - curve.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

        def along(r: Tensor, adjoint: Tensor, weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            mean, covariance = self.density.normal_prior(r)
            return (adjoint * covariance).sum() + (weights * mean).sum(), ()

        gradient = gradient + gradient_and_rest(along, r, adjoint, weights - back)[0]
        at_mode = is_at_mode(decrement, self.density.num_inner)
        return IntegralValue(
            log_likelihood=value,
            gradient=gradient,
            found=(curve.info == 0) & at_mode & gradient.sum(-1).isfinite(),
            next_start=z + step,
        )

    def searched(self, r: Tensor, prior: RemainingPrior) -> IntegralValue:
        """Return Laplace's approximations without what is assumed of a field."""
        return LaplaceIntegral(self.density, self.hessian, self.prediction, num_steps=_NUM_STEPS).searched(r, prior)

    def modes(self, r: Tensor) -> InnerModes:
        """Return modes and Cholesky factors of the precision there."""
        z, prior = self.start(r), self.density.prior(r)
        for _ in range(_NUM_EVALUATIONS):
            integral = self.evaluate(r, z, prior)
            z = integral.next_start
        factor = self.factor(r, z)
        is_finite = integral.log_likelihood.isfinite() & factor.isfinite().flatten(1).all(-1)
        return InnerModes(z=z, factor=factor, found=integral.found & is_finite)

    def factor(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the Cholesky factor of the precision at modes, from the covariance, ``(n, m, m)``."""
        covariance = self.density.normal_prior(r)[1]
        eye = torch.eye(self.density.num_inner, dtype=r.dtype, device=r.device)
        curve = self._curvature(r, z, covariance, eye)
        beside = torch.linalg.solve_triangular(curve.factor, curve.root.unsqueeze(-1) * covariance, upper=False)
        # A factor of the covariance, from the last coordinate on, is the inverse of one of the precision.
        upper = torch.linalg.cholesky((covariance - beside.mT @ beside).flip(-1, -2)).flip(-1, -2)
        return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT

    def spread(self, factor: Tensor, x: Tensor) -> Tensor:
        """Return draws with the inverse of the precision as covariance from standard normal ones, ``(n, m)``."""
        return torch.linalg.solve_triangular(factor.mT, x.unsqueeze(-1), upper=True).squeeze(-1)

    def separate_scales(self, modes: InnerModes) -> Tensor | None:
        """Return standard deviations of coordinates ``(n, m)`` if the covariance is diagonal, else None."""
        return 1 / modes.factor.diagonal(dim1=-2, dim2=-1) if self.hessian.structure.is_separate else None

    def _curvature(self, r: Tensor, z: Tensor, covariance: Tensor, eye: Tensor) -> _Curvature:
        minus, slope, value = self.density.hessian_product(r, z, torch.ones_like(z), LIKELIHOOD)
        # NaN where the likelihood is not log-concave.
        root = torch.where(minus <= derivative_rounding(slope), -minus, torch.nan).clamp(min=0).sqrt()
        factor, info = torch.linalg.cholesky_ex(eye + root.unsqueeze(-1) * covariance * root.unsqueeze(-2))
        return _Curvature(value=value, slope=slope, root=root, factor=factor, info=info)


def is_field(hessian: Hessian, samples: HessianSamples) -> bool:
    """Tell whether the prior is one multivariate normal and the likelihood factorises and is log-concave."""
    density, r, z = samples.density, samples.r, samples.z
    if len(density.over) > 1 or len(hessian.parts) == 1 or hessian.parts[1].stencil.num_directions > 1:
        return False
    try:
        mean, covariance = density.normal_prior(r)
    except ModelError:
        return False
    slope, _ = density.slope(r, z, PRIOR)
    gap = (covariance @ slope.unsqueeze(-1)).squeeze(-1) + z - mean
    near = math.sqrt(torch.finfo(density.dtype).eps) * (1 + (z - mean).abs().amax())
    curvature, slope, _ = density.hessian_product(r, z, torch.ones_like(z), LIKELIHOOD)
    is_concave = (curvature <= derivative_rounding(slope)).all()
    return bool((gap.abs().amax() <= near) & is_concave)
