"""Targets with known moments."""

import math

import pytest
import torch

import bayeskit as bk


@pytest.fixture(scope="session")
def skewed():
    """(x, y): x the logarithm of a Gamma(3, 1) variable, y normal about 0.8 x with sd 0.5; the likelihood is 1."""

    def log_density(u):
        x, y = u[..., 0], u[..., 1]
        log_x = 3 * x - x.exp() - math.lgamma(3)
        return log_x - 0.5 * ((y - 0.8 * x) / 0.5).square() - math.log(0.5 * math.sqrt(2 * math.pi))

    def sample(n, generator):
        x = torch._standard_gamma(torch.full((n,), 3.0, dtype=torch.float64), generator=generator).log()
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        return torch.stack([x, 0.8 * x + 0.5 * noise], -1)

    return bk.Target.from_functions(log_density, lambda u: 0 * u[..., 0], 2, sample)


@pytest.fixture(scope="session")
def normal_normal():
    """Prior N(0, 1) on two coordinates, likelihood N(1; u, 1) each: conjugate at every temperature."""
    constant = 0.5 * math.log(2 * math.pi)
    return bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - constant).sum(-1),
        lambda u: (-0.5 * (u - 1).square() - constant).sum(-1),
        2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64),
    )
