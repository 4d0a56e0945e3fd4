"""The posterior bootstrap: exact moments of a Dirichlet process's mean, its two ends, and losses with two minima."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import beta

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.inference.generalized import _bootstrap as module
from bayeskit.inference.generalized._bootstrap import posterior_bootstrap

X = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
PRIOR = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 5.0)
SD = 1.5


def mean_posterior(data=X):
    return GibbsPosterior(PRIOR, losses.HalfSquared(), data)


def exact_moments(c, count, n=4):
    """Mean and variance of the mean of a Dirichlet process posterior, with ``count`` pseudo-samples of N(0, SD^2)."""
    mean = float(X.sum()) / (n + c)
    variance = (float(X.square().sum()) + c * SD**2) / (n + c) - mean**2
    of_samples = c**2 * SD**2 / (count * (n + c) ** 2)
    return mean, of_samples + (variance - of_samples) / (n + c + 1)


def scores(draws, mean, variance):
    centred = draws - mean
    spread, root = centred.square(), math.sqrt(len(draws))
    return (
        np.abs([float(centred.mean() / centred.std()), float((spread.mean() - variance) / spread.std())]).max() * root
    )


def theta(draws):
    return draws.values()["theta"][0]


CENTRING = dist.Normal(torch.tensor(0.0, dtype=torch.float64), SD)


@pytest.mark.parametrize(("c", "count"), [(0.0, 1), (0.5, 3), (4.0, 20), (50.0, 100), (1e7, 40)])
def test_moments_of_the_mean(c, count, limit):
    draws = posterior_bootstrap(
        mean_posterior(), 4000, concentration=c, centring=CENTRING, num_pseudo_samples=count, seed=1
    )
    assert scores(theta(draws), *exact_moments(c, count)) < limit(10)


def test_mutation_pseudo_samples_of_full_weight_fail(limit, monkeypatch):
    right = module.dirichlet
    monkeypatch.setattr(module, "dirichlet", lambda shape, generator: right(torch.ones_like(shape), generator))
    draws = posterior_bootstrap(mean_posterior(), 4000, concentration=4.0, centring=CENTRING, num_pseudo_samples=20)
    assert scores(theta(draws), *exact_moments(4.0, 20)) > limit(10)


def test_a_centring_posterior_is_recovered_by_a_large_concentration(limit):
    """Each replicate draws its own mean from N(3, 0.5^2), and then data of unit variance: a mixture of processes."""
    count = 50

    def centring(replicates, pseudo, generator):
        means = 3 + 0.5 * torch.randn(replicates, 1, generator=generator, dtype=torch.float64)
        return means + torch.randn(replicates, pseudo, generator=generator, dtype=torch.float64)

    draws = posterior_bootstrap(
        mean_posterior(), 4000, concentration=1e9, centring=centring, num_pseudo_samples=count, seed=2
    )
    assert scores(theta(draws), 3.0, 0.25 + 1 / count) < limit(2)


def test_regression_data_have_two_columns():
    generator = np.random.default_rng(0)
    design = torch.tensor(np.stack([np.ones(30), generator.standard_normal(30)], 1))
    outcome = design @ torch.tensor([1.0, -2.0], dtype=torch.float64)
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0).to_event(1)
    posterior = GibbsPosterior(prior, losses.HalfSquared(losses.linear), (design, outcome))

    def centring(replicates, pseudo, generator):
        rows = torch.randint(30, (replicates, pseudo), generator=generator)
        return design[rows], outcome[rows]

    draws = posterior_bootstrap(posterior, 100, concentration=5.0, centring=centring, num_pseudo_samples=10)
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64).expand(100, 2)
    torch.testing.assert_close(theta(draws), exact, rtol=0, atol=1e-8)  # no noise: every weighting has one minimum


def two_clusters():
    data = torch.tensor([-8.0] * 6 + [8.0] * 5, dtype=torch.float64)
    loss = losses.FunctionLoss(lambda mean, x: 1 - (-(x - mean).square() / 8).exp(), bounded=True)
    return GibbsPosterior(dist.Normal(torch.tensor(0.0, dtype=torch.float64), 8.0), loss, data)


@pytest.mark.calibration
def test_restarts_find_the_deeper_of_two_minima(limit):
    """The first cluster of six and five is the better place where its Beta(6, 5) weight exceeds one half."""
    exact = beta(6, 5).sf(0.5)
    count = 300
    with_restarts = theta(posterior_bootstrap(two_clusters(), count, num_restarts=10, seed=3))
    assert bool(((with_restarts.abs() - 8).abs() < 1e-3).all())
    root = math.sqrt(count * exact * (1 - exact))
    assert abs(int((with_restarts < 0).sum()) - count * exact) / root < limit(2)
    without = theta(posterior_bootstrap(two_clusters(), count, seed=3))
    assert abs(int((without < 0).sum()) - count * exact) / root > limit(2)


def test_seeds_settings_and_arviz():
    first, second = (posterior_bootstrap(mean_posterior(), 20, seed=5).unconstrained for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, posterior_bootstrap(mean_posterior(), 20, seed=6).unconstrained)
    draws = posterior_bootstrap(mean_posterior(), 20, concentration=1.0, centring=CENTRING, num_pseudo_samples=7)
    assert draws.settings["num_pseudo_samples"] == 7 and draws.settings["method"] == "posterior_bootstrap"
    assert draws.to_arviz().posterior["theta"].shape == (1, 20)


def test_bad_settings():
    for bad in ({"concentration": -1.0}, {"concentration": math.nan}, {"num_restarts": -1}, {"concentration": 1.0}):
        with pytest.raises(SettingsError):
            posterior_bootstrap(mean_posterior(), 5, **bad)
    with pytest.raises(SettingsError, match="centring must be"):
        posterior_bootstrap(mean_posterior(), 5, concentration=1.0, centring=3.0)
    with pytest.raises(ShapeError, match="replicate and pseudo-sample"):
        posterior_bootstrap(mean_posterior(), 5, concentration=1.0, centring=lambda r, t, g: torch.zeros(t, r))
    with pytest.raises(DataError, match="not finite"):
        posterior_bootstrap(
            mean_posterior(), 5, concentration=1.0, centring=lambda r, t, g: torch.full((r, t), math.nan)
        )
