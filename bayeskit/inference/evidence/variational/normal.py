"""Independent normal and Student-t distributions: draws and densities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEGREES_OF_FREEDOM = 3.0


def sample_normal(location: Tensor, scale: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Draw from independent normal distributions, shape ``(num_draws, d)``; ``generator`` is one of the CPU."""
    noise = torch.randn(num_draws, len(location), generator=generator, dtype=torch.float64)
    return location + scale * noise.to(location)


def normal_log_prob(location: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Return the log density of independent normal distributions, in double precision."""
    z, log_scale = _standardised(location, scale, x)
    return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi)) - log_scale


def sample_tails(location: Tensor, scale: Tensor, num_draws: int, generator: torch.Generator) -> Tensor:
    """Draw from independent Student-t distributions, shape ``(num_draws, d)``."""
    normal = torch.randn(num_draws, len(location), generator=generator, dtype=torch.float64)
    half = torch.full_like(normal, DEGREES_OF_FREEDOM / 2)
    spread = (half / torch._standard_gamma(half, generator=generator)).sqrt()
    return location + scale * (normal * spread).to(location)


def tails_log_prob(location: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """Return the log density of independent Student-t distributions, in double precision."""
    z, log_scale = _standardised(location, scale, x)
    df = DEGREES_OF_FREEDOM
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    kernel = (z.square() / df).log1p().sum(-1)
    return z.shape[-1] * constant - (df + 1) / 2 * kernel - log_scale


def _standardised(location: Tensor, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x.double() - location.double()) / scale.double(), scale.double().log().sum()
