"""Variational posteriors of the weights of one layer: their sites, moments, and local reparameterisation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from bayeskit.models.sparse_networks._log_uniform import ImproperLogUniform, log_noise_ratio
from bayeskit.models.sparse_networks._priors import (
    HorseshoePrior,
    HyperbolicSecant,
    LogUniformPrior,
    SpikeAndSlab,
    SpikeAndSlabPrior,
    WeightPrior,
)

#: A linear map without a bias: weights and inputs to outputs.
LinearMap = Callable[[Tensor, Tensor], Tensor]

_INITIAL_LOGIT = 2.0


class WeightPosterior(nn.Module, ABC):
    """Posterior of a weight ``(out, in, *kernel)``; groups are all weights of one input."""

    @abstractmethod
    def sites(self) -> dict[str, tuple[Any, Any]]:
        """Return prior and posterior of each site, by name."""

    @abstractmethod
    def weight(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the weight for values of the sites."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the weight."""

    @abstractmethod
    def importance(self) -> Tensor:
        """Return a number for each weight, equal within groups: the largest are to be kept."""

    @abstractmethod
    def is_kept(self) -> Tensor:
        """Return which weights the rule of the prior keeps."""

    def outputs(self, linear: LinearMap, x: Tensor, channel: int) -> Tensor:
        """Draw outputs, one independent draw of the weight for each; ``channel`` is the dimension of inputs."""
        mean, variance = self.moments()
        return _normal_outputs(linear, x, mean, variance)


def _normal_outputs(linear: LinearMap, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Draw normal outputs with the moments of a sum over independent weights."""
    centre, spread = linear(mean, x), linear(variance, x.square())
    # The square root has no derivative at zero, as for an input of zeros.
    return centre + spread.clamp_min(torch.finfo(spread.dtype).tiny).sqrt() * torch.randn_like(centre)


class _NormalWeights(WeightPosterior):
    """Independent normal weights under the log-uniform prior."""

    def __init__(self, weight: Tensor, scale: float, prior: LogUniformPrior) -> None:
        super().__init__()
        self.threshold = prior.threshold
        self.loc = nn.Parameter(weight.clone())
        self.log_scale = nn.Parameter(torch.full_like(weight, math.log(scale)))

    def sites(self) -> dict[str, tuple[Any, Any]]:
        posterior = dist.Normal(self.loc, self.log_scale.exp(), validate_args=False)
        return {"weight": (ImproperLogUniform(tuple(self.loc.shape)), posterior.to_event(self.loc.dim()))}

    def weight(self, values: Mapping[str, Tensor]) -> Tensor:
        return values["weight"]

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.loc, (2 * self.log_scale).exp()

    def importance(self) -> Tensor:
        return -log_noise_ratio(*self.moments())

    def is_kept(self) -> Tensor:
        return self.importance() >= -self.threshold


class _ScaledWeights(WeightPosterior):
    """Normal weights times a random scale: of any sign and log-uniform, or half-Cauchy."""

    def __init__(self, weight: Tensor, scale: float, prior: LogUniformPrior | HorseshoePrior, groups: bool) -> None:
        super().__init__()
        self.prior = prior
        # Scales start at the root mean square of the weights, so that what they multiply is of order one.
        size = weight.square()
        size = (size.mean(_others(weight), keepdim=True) if groups else size).sqrt().clamp_min(scale)
        self.loc = nn.Parameter(weight / size)
        self.log_scale = nn.Parameter((scale / size).log().expand_as(weight).clone())
        self.scale_loc = nn.Parameter(size.log() if self._is_positive else size)
        self.scale_log_scale = nn.Parameter(
            (scale / size).clamp_max(0.1).log() + (0 if self._is_positive else size.log())
        )

    @property
    def _is_positive(self) -> bool:
        return isinstance(self.prior, HorseshoePrior)

    def sites(self) -> dict[str, tuple[Any, Any]]:
        posterior = dist.Normal(self.loc, self.log_scale.exp(), validate_args=False)
        standard = dist.Normal(torch.zeros_like(self.loc), 1.0, validate_args=False)
        scales = dist.Normal(self.scale_loc, self.scale_log_scale.exp(), validate_args=False)
        dims = self.loc.dim()
        weights = (standard.to_event(dims), posterior.to_event(dims))
        if isinstance(self.prior, HorseshoePrior):
            secant = HyperbolicSecant(torch.full_like(self.scale_loc, math.log(self.prior.scale)))
            return {"log_scale": (secant.to_event(dims), scales.to_event(dims)), "weight": weights}
        return {"scale": (ImproperLogUniform(tuple(self.scale_loc.shape)), scales.to_event(dims)), "weight": weights}

    def weight(self, values: Mapping[str, Tensor]) -> Tensor:
        scale = values["log_scale"].exp() if self._is_positive else values["scale"]
        return scale * values["weight"]

    def _scale_moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean of the scale and of its square."""
        variance = (2 * self.scale_log_scale).exp()
        if self._is_positive:
            return (self.scale_loc + variance / 2).exp(), (2 * (self.scale_loc + variance)).exp()
        return self.scale_loc, self.scale_loc.square() + variance

    def moments(self) -> tuple[Tensor, Tensor]:
        first, second = self._scale_moments()
        variance = (2 * self.log_scale).exp()
        return first * self.loc, second * variance + (second - first.square()) * self.loc.square()

    def outputs(self, linear: LinearMap, x: Tensor, channel: int) -> Tensor:
        if self.scale_loc.shape == self.loc.shape:  # no groups
            return super().outputs(linear, x, channel)
        # One draw of the scales for each row, and normal sums given them.
        shape = [1 if channel < d < 0 else size for d, size in zip(range(-x.dim(), 0), x.shape, strict=True)]
        noise = torch.randn(shape, dtype=x.dtype, device=x.device)
        along = (-1, *(1,) * (-channel - 1))
        scale = self.scale_loc.reshape(along) + self.scale_log_scale.exp().reshape(along) * noise
        x = x * (scale.exp() if self._is_positive else scale)
        return _normal_outputs(linear, x, self.loc, (2 * self.log_scale).exp())

    def importance(self) -> Tensor:
        mean, variance = self.moments()
        squares = mean.square()
        if self.scale_loc.shape != self.loc.shape:
            tied = _others(mean)
            squares, variance = squares.sum(tied, keepdim=True), variance.sum(tied, keepdim=True)
        return -log_noise_ratio(squares.sqrt(), variance).expand_as(mean)

    def is_kept(self) -> Tensor:
        return self.importance() >= -self.prior.threshold


class _SpikeAndSlabWeights(WeightPosterior):
    """Weights that are zero or normal, one by one or by groups."""

    def __init__(self, weight: Tensor, scale: float, prior: SpikeAndSlabPrior, groups: bool) -> None:
        super().__init__()
        self.prior = prior
        like = weight[:1] if groups else weight
        if groups:
            like = weight.sum(_others(weight), keepdim=True)
        self.logits = nn.Parameter(torch.full_like(like, _INITIAL_LOGIT))
        self.loc = nn.Parameter(weight.clone())
        self.log_scale = nn.Parameter(torch.full_like(weight, math.log(scale)))

    def _posterior(self) -> SpikeAndSlab:
        return SpikeAndSlab(self.logits, self.loc, self.log_scale.exp())

    def sites(self) -> dict[str, tuple[Any, Any]]:
        odds = math.log(self.prior.probability) - math.log1p(-self.prior.probability)
        zeros, scale = torch.zeros_like(self.loc), torch.full_like(self.loc, self.prior.scale)
        return {"weight": (SpikeAndSlab(torch.full_like(self.logits, odds), zeros, scale), self._posterior())}

    def weight(self, values: Mapping[str, Tensor]) -> Tensor:
        return values["weight"]

    def moments(self) -> tuple[Tensor, Tensor]:
        posterior = self._posterior()
        return posterior.mean, posterior.variance

    def importance(self) -> Tensor:
        return self.logits.expand_as(self.loc)

    def is_kept(self) -> Tensor:
        return self.importance().sigmoid() > self.prior.threshold


def _others(weight: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a weight other than that of its inputs."""
    return tuple(d for d in range(weight.dim()) if d != 1)


def weight_posterior(weight: Tensor, scale: float, prior: WeightPrior, groups: bool) -> WeightPosterior:
    """Return the posterior of a weight, with its mean at the value given and the standard deviation ``scale``."""
    weight = weight.detach()
    if isinstance(prior, SpikeAndSlabPrior):
        return _SpikeAndSlabWeights(weight, scale, prior, groups)
    if isinstance(prior, LogUniformPrior) and not groups:
        return _NormalWeights(weight, scale, prior)
    return _ScaledWeights(weight, scale, prior, groups)
