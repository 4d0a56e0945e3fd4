"""Densities that are normal by what is integrated out: exact values and draws."""

import math

import pyro.distributions as dist
import torch
from hierarchies import FLOAT, HEIGHTS, marginal, normal_means, points

import bayeskit as bk


def test_normal_means_are_integrated_exactly():
    target = marginal(normal_means, ["effect"], HEIGHTS)
    u = points(target, 4)
    values = target.constrain(u)
    total = (values["scale"].square() + 0.7**2).sqrt()
    exact = dist.Normal(values["mean"][:, None], total[:, None]).log_prob(HEIGHTS).sum(-1)
    torch.testing.assert_close(target.log_likelihood(u), exact, rtol=1e-10, atol=0)
    three, two = torch.tensor([3.0, 2.0], dtype=FLOAT)
    prior = dist.Normal(0 * three, three).log_prob(values["mean"]) + dist.HalfNormal(two).log_prob(values["scale"])
    prior = prior + u[:, 1]
    torch.testing.assert_close(target.log_prior(u), prior, rtol=1e-10, atol=0)
    assert target.is_exact
    assert target.curvature == "normal: 5 groups of 1"


def test_latents_of_normal_means_have_their_exact_distribution(limit):
    target = marginal(normal_means, ["effect"], HEIGHTS)
    u = target.unconstrain({"mean": torch.tensor(1.0), "scale": torch.tensor(1.5)}).expand(2, 2000, -1)
    zeros = torch.zeros(2, 2000, dtype=FLOAT)
    draws = target.with_latents(bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT)), seed=1)
    precision = 1 / 1.5**2 + 1 / 0.7**2
    mean = (1.0 / 1.5**2 + HEIGHTS / 0.7**2) / precision
    z = (draws["effect"].flatten(0, 1) - mean) * math.sqrt(precision)
    assert float((z.mean(0) * math.sqrt(4000)).abs().max()) < limit(10)
    assert float(((z.var(0) - 1) * math.sqrt(4000 / 2)).abs().max()) < limit(10)
    covariance = (z - z.mean(0)).T @ (z - z.mean(0)) / 4000
    assert float((covariance - covariance.diagonal().diag()).abs().max() * math.sqrt(4000)) < limit(10)
    torch.testing.assert_close(draws.log_density, target.whole.log_density(draws.unconstrained))
    assert set(draws.values()) == {"mean", "scale", "effect"}
