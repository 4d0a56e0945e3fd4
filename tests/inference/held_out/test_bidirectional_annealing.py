"""Bounds from both sides, against the exact likelihood of the data simulated."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import ModelError, SettingsError
from bayeskit.inference.held_out import _annealing as bidirectional
from bayeskit.inference.held_out import bidirectional_annealing

DOUBLE = torch.float64
X = torch.zeros(600, dtype=DOUBLE)
SMALL = {"num_temperatures": 6, "num_chains": 4, "batch_size": 600}


def model(x):
    with pyro.plate("data", len(x)):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(3.0, dtype=DOUBLE), 0.5))
        pyro.sample("x", dist.Poisson(rate), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("rate", dist.LogNormal((0.5 * x + 1).log(), 0.7))


@pytest.fixture
def simulated(monkeypatch):
    """Note the data that were simulated."""
    found = []
    original = bidirectional._simulated

    def noted(*arguments):
        found.append(original(*arguments))
        return found[-1]

    monkeypatch.setattr(bidirectional, "_simulated", noted)
    return found


def scores(bounds, simulated):
    """Return z-scores of the means of the likelihood's and its inverse's estimates, both relative to the truth."""
    (x,), _ = simulated[-1]
    exact = dist.NegativeBinomial(torch.tensor(3.0, dtype=DOUBLE), 1 / 1.5).log_prob(x)
    ratios = (bounds.lower - exact).exp(), (exact - bounds.upper).exp()
    return [float((r.mean() - 1) / (r.std() / math.sqrt(len(r)))) for r in ratios]


@pytest.mark.parametrize("initial", ["guide", "prior"])
def test_both_directions_are_unbiased(simulated, initial, limit):
    bounds = bidirectional_annealing(model, guide, X, initial=initial, **SMALL)
    assert max(map(abs, scores(bounds, simulated))) < limit(2)
    assert bounds.gap > 3 * bounds.gap_standard_error


@pytest.mark.calibration
def test_more_temperatures_close_the_gap():
    short, long = (bidirectional_annealing(model, guide, X, **SMALL | {"num_temperatures": n}).gap for n in (3, 40))
    assert abs(long) < short / 3


def test_codes_that_are_no_posterior_draws_are_noticed(simulated, monkeypatch, limit):
    noted = bidirectional._simulated

    def wrong(*arguments):
        (x,), _ = noted(*arguments)
        return (x,), {"rate": (3 + x) / 1.5}  # the posterior's mean

    monkeypatch.setattr(bidirectional, "_simulated", wrong)
    bounds = bidirectional_annealing(model, guide, X, **SMALL)
    assert abs(scores(bounds, simulated)[1]) > limit()


def test_models_that_cannot_simulate_are_refused():
    def transformed(x):
        with pyro.plate("data", len(x)):
            rate = pyro.sample("rate", dist.Gamma(torch.tensor(3.0, dtype=DOUBLE), 0.5))
            pyro.sample("x", dist.Poisson(rate), obs=x + 1)

    def with_factor(x):
        with pyro.plate("data", len(x)):
            rate = pyro.sample("rate", dist.Gamma(torch.tensor(3.0, dtype=DOUBLE), 0.5))
            pyro.factor("f", -rate)

    with pytest.raises(ModelError, match="no argument"):
        bidirectional_annealing(transformed, guide, X[:3])
    with pytest.raises(ModelError, match="'f' cannot be simulated, because it is a factor"):
        bidirectional_annealing(with_factor, guide, X[:3])
    with pytest.raises(SettingsError, match="num_chains"):
        bidirectional_annealing(model, guide, X[:3], num_chains=0)
