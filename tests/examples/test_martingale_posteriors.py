"""Predictive rules of a page: the urn's counts, and a step of the copula by quadrature."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

X = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def page(definitions):
    return definitions("martingale_posteriors")


def score(draws, mean, variance):
    """Return the larger z score of mean and variance of independent draws ``(R,)``."""
    centred = draws - mean
    spread, root = centred.square(), math.sqrt(len(draws))
    return max(abs(float(centred.mean() / centred.std())), abs(float((spread.mean() - variance) / spread.std()))) * root


@pytest.mark.calibration
def test_the_urn_is_the_bayesian_bootstrap(page, limit):
    """Mean 4 and variance 1.9 in the limit; after N draws a share of N / (n + N) of it."""
    means = page.completed(page.urn, X, 5000, 400, seed=0).cumsum(1)
    for horizon in (25, 100, 400):
        assert score(means[:, 3 + horizon] / (4 + horizon), 4.0, 9.5 / 5 * horizon / (4 + horizon)) < limit(6)


@pytest.mark.calibration
def test_mutation_an_urn_that_does_not_learn_fails(page, limit):
    def stuck(data, generator):
        return page.urn(data[:, :4], generator)

    means = page.completed(stuck, X, 5000, 200, seed=0).mean(1)
    assert score(means, 4.0, 9.5 / 5 * 200 / 204) > limit(6)


@pytest.mark.calibration
def test_the_copula_is_that_of_a_normal_law(page):
    x, y, rho, size = 0.3, -0.8, 0.6, 4
    u, v = (torch.tensor([[norm.cdf(z)]]) for z in (x, y))
    rate = (2 - 1 / (size + 1)) / (size + 2)
    exact = (1 - rate) * norm.cdf(x) + rate * norm.cdf(x, rho * y, math.sqrt(1 - rho**2))
    assert float(page.updated(u, v, size, rho)) == pytest.approx(exact, abs=1e-12)


@pytest.mark.calibration
@pytest.mark.parametrize("start", [0.05, 0.3, 0.9])
def test_a_step_of_the_copula_is_a_martingale(page, start):
    def moved(v, rho):
        at = torch.tensor([[v]], dtype=torch.float64)
        return float(page.updated(torch.full((1, 1), start, dtype=torch.float64), at, 4, rho)) - start

    assert quad(moved, 0, 1, args=(0.7,))[0] == pytest.approx(0, abs=1e-7)


@pytest.mark.calibration
@pytest.mark.parametrize("rho", [0.35, 0.5, 0.8])
def test_the_mean_of_normal_data_has_the_spread_of_two_correlations(page, monkeypatch, rho, limit):
    """A datum moves the mean of a normal law by its correlation, twice as far as a running mean is moved."""
    normal = torch.special.ndtri((torch.arange(60, dtype=torch.float64) + 0.5) / 60)
    names = page.smooth_laws.__globals__
    monkeypatch.setitem(names, "updated", lambda cdf, at, size, updated=page.updated: updated(cdf, at, size, rho))
    points, cdf = page.smooth_laws(normal, 400, 600, seed=0, num_points=100)
    means = (cdf.diff(dim=1) * (points[1:] + points[:-1]) / 2).sum(1)
    exact = rho * math.sqrt(sum(((2 - 1 / (t + 1)) / (t + 2)) ** 2 for t in range(60, 660)))
    # The law that the data leave has their spread within a tenth.
    assert abs(math.log(float(means.std()) / exact)) < limit(3) / math.sqrt(2 * 400) + 0.1
