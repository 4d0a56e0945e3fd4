"""Priors that penalise complexity: their probabilities, densities and draws."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import kstwo

from bayeskit.errors import SettingsError
from bayeskit.models.latent_gaussian import AreaGraph, PCLength, PCProportion, PCScale

FLOAT = torch.float64
GRAPH = AreaGraph(7, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (4, 5)])


def number(value):
    return torch.tensor(value, dtype=FLOAT)


def test_a_scale_exceeds_its_bound_with_its_probability():
    prior = PCScale(2.0, 0.05)()
    rate = -math.log(0.05) / 2
    assert math.isclose(1 - float(prior.cdf(number(2.0))), 0.05, rel_tol=1e-6)
    assert math.isclose(float(prior.log_prob(number(0.7))), math.log(rate) - 0.7 * rate, rel_tol=1e-6)


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_a_length_has_its_probability_and_density(dimension):
    prior = PCLength(0.4, 0.1, dimension)()
    assert math.isclose(float(prior.cdf(number(0.4))), 0.1, rel_tol=1e-5)
    rate, half = -math.log(0.1) * 0.4 ** (dimension / 2), dimension / 2
    density = half * rate * 1.3 ** (-half - 1) * math.exp(-rate * 1.3**-half)
    assert math.isclose(float(prior.log_prob(number(1.3))), math.log(density), rel_tol=1e-5)


def divergence(proportion):
    """Kullback-Leibler divergence of the mixed covariance from independent areas, from the covariance itself."""
    mixed = (1 - proportion) * torch.eye(7, dtype=FLOAT) + proportion * GRAPH.covariance
    return 0.5 * float(mixed.trace() - 7 - torch.linalg.slogdet(mixed)[1])


@pytest.mark.parametrize(("upper", "probability"), [(0.5, 2 / 3), (0.2, 0.1)])
def test_the_distance_of_a_proportion_is_exponential(upper, probability):
    prior = PCProportion(GRAPH.eigenvalues, upper, probability)
    assert math.isclose(float(prior.cdf(number(upper))), probability, rel_tol=1e-12)
    rate = -math.log1p(-probability) / math.sqrt(2 * divergence(upper))
    for value in (0.01, 0.3, 0.9, 0.999):
        survival = math.exp(-rate * math.sqrt(2 * divergence(value)))
        assert math.isclose(1 - float(prior.cdf(number(value))), survival, rel_tol=1e-10)


def test_the_density_of_a_proportion_is_the_derivative_of_its_probability():
    prior = PCProportion(GRAPH.eigenvalues)
    value = torch.tensor([1e-9, 1e-5, 9e-4, 1.1e-3, 0.1, 0.5, 0.95, 1 - 1e-6], dtype=FLOAT, requires_grad=True)
    (slope,) = torch.autograd.grad(prior.cdf(value).sum(), value)
    assert torch.allclose(prior.log_prob(value).exp(), slope, rtol=1e-9)
    for low, high in ((0.0, 0.3), (0.3, 0.99)):
        area = quad(lambda v: float(prior.log_prob(number(v)).exp()), low, high, epsabs=1e-11)[0]
        assert math.isclose(area, float(prior.cdf(number(high)) - prior.cdf(number(low))), rel_tol=1e-9)


def test_draws_of_a_proportion_have_its_probabilities():
    prior, n = PCProportion(GRAPH.eigenvalues), 4000
    with torch.random.fork_rng():
        torch.manual_seed(3)
        ordered = prior.cdf(prior.sample((n,)).sort().values)
    gap = (ordered - (torch.arange(n, dtype=FLOAT) + 0.5) / n).abs().max() + 0.5 / n
    assert float(gap) < kstwo.isf(1e-5, n)
    assert prior.expand((3,)).sample((2,)).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PCScale(-1.0, 0.1), "upper"),
        (lambda: PCScale(1.0, 1.0), "probability"),
        (lambda: PCLength(0.0, 0.1), "lower"),
        (lambda: PCLength(1.0, 0.1, 0), "dimension"),
        (lambda: PCProportion(GRAPH.eigenvalues, 1.5), "upper"),
        (lambda: PCProportion(torch.ones(4, dtype=FLOAT)), "one must be zero"),
        (lambda: PCProportion(torch.ones(4, dtype=torch.int32)), "one must be zero"),
        (lambda: PCProportion(torch.tensor([-1.0, 0.0, 2.0], dtype=FLOAT)), "not be negative"),
    ],
)
def test_priors_that_are_none_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()
