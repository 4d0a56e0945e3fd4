"""Multivariate normal priors with log-concave data that factorise over them."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from hierarchies import FLOAT, HEIGHTS, at, gradient_error, marginal, points, rows


@pytest.mark.calibration
def test_rates_that_round_to_nothing_are_concave():
    """With a vague intercept some draws from the prior have rates of 1e-13 and less, whose curvature is rounding."""

    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, torch.tensor(30.0, dtype=FLOAT)))
        size = pyro.sample("size", dist.HalfNormal(1.0))
        place = torch.arange(len(y), dtype=y.dtype)
        covariance = size**2 * (-(place[:, None] - place).abs() / 3).exp()
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((level + f).exp()), obs=y)

    target = marginal(model, ["f"], torch.tensor([2.0, 3, 1, 4, 6, 2, 3, 5], dtype=FLOAT))
    assert target.curvature == "Gaussian field of 8"
    u = torch.tensor([[1.0, 0.1], [-25.0, 0.5]], dtype=FLOAT)
    assert target.log_density(u).isfinite().all()
    assert gradient_error(target, u) < 1e-8


def smooth(y, white=False):
    """Poisson counts with a Gaussian process on the log rate, centred or in terms of standard normal coordinates."""
    size = pyro.sample("size", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.LogNormal(1.0, 0.5))
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    place = torch.arange(len(y), dtype=y.dtype)
    distance = (place[:, None] - place) / length
    covariance = size**2 * (-0.5 * distance.square()).exp() + 1e-4 * torch.eye(len(y), dtype=y.dtype)
    if white:
        noise = pyro.sample("field", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
        rate = level + torch.linalg.cholesky(covariance) @ noise
    else:
        mean = level.expand(y.shape)
        rate = pyro.sample("field", dist.MultivariateNormal(mean, covariance_matrix=covariance))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate.exp()), obs=y)


@pytest.mark.long
def test_a_gaussian_field_is_that_of_standard_normal_coordinates(limit):
    y = torch.tensor([0.0, 2, 1, 0, 4, 7, 3, 1, 0, 1], dtype=FLOAT)
    field, white = marginal(smooth, ["field"], y), marginal(smooth, ["field"], y, True)
    assert (field.curvature, white.curvature) == ("Gaussian field of 10", "dense, 10")
    u = points(field, 4, 0.5)
    value, gradient = field.value_and_grad(u)
    again, other = white.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, other, rtol=1e-7, atol=1e-7)
    assert gradient_error(field, u) < 1e-8
    # What the approximation misses is the same, too, from independent points.
    first, second = (target.correction(at(target, u[:1], 200), seed=k) for k, target in enumerate((field, white)))
    error = math.hypot(first.standard_error, second.standard_error)
    assert abs(first.log_ratio - second.log_ratio) < limit(1) * error
    assert error < 0.02 < first.log_ratio


def test_a_field_with_normal_data_is_exact():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        covariance = scale**2 * ROOT @ ROOT.T
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    target = marginal(model, ["f"], HEIGHTS)
    u = points(target, 4)
    covariance = target.constrain(u)["scale"][:, None, None].square() * ROOT @ ROOT.T
    total = covariance + 0.25 * torch.eye(5, dtype=FLOAT)
    exact = dist.MultivariateNormal(torch.zeros(5, dtype=FLOAT), covariance_matrix=total).log_prob(HEIGHTS)
    torch.testing.assert_close(target.log_likelihood(u), exact, rtol=1e-10, atol=0)


ROOT = torch.eye(5, dtype=FLOAT) + 0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(6), dtype=FLOAT)


@pytest.mark.calibration
def test_a_field_of_independent_coordinates_is_corrected_as_such():
    """The prior is multivariate normal with a diagonal covariance, or a plate of normal ones."""

    def model(y, together):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        if together:
            prior = dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=torch.diag_embed(scale**2 * y))
            f = pyro.sample("f", prior)
        with pyro.plate("data", len(y)):
            if not together:
                f = pyro.sample("f", dist.Normal(0.0, scale * y.sqrt()))
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    y = torch.tensor([1.0, 4, 3, 2], dtype=FLOAT)
    field, groups = marginal(model, ["f"], y, True), marginal(model, ["f"], y, False)
    assert (field.curvature, groups.curvature) == ("Gaussian field of 4", "4 groups of 1")
    u = points(field, 8, 0.5)
    torch.testing.assert_close(field.log_likelihood(u), groups.log_likelihood(u), rtol=1e-10, atol=1e-10)
    first, second = (target.correction(rows(target, u), progress=False) for target in (field, groups))
    torch.testing.assert_close(first.log_weights, second.log_weights, rtol=0, atol=1e-8)


def heavy(y):
    """Student t data about a field: a likelihood that is not log-concave."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    covariance = scale**2 * ROOT @ ROOT.T
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(3.0, f, 0.5), obs=y)


@pytest.mark.calibration
def test_a_likelihood_that_is_not_log_concave_takes_the_dense_way():
    target = marginal(heavy, ["f"], HEIGHTS)
    assert "dense" in target.curvature
    assert gradient_error(target, points(target, 3, 0.5)) < 1e-8
