"""The loss-likelihood bootstrap: exact moments of means and medians, and the sandwich."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import SamplingWarning, SettingsError
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.inference.generalized import _bootstrap as module
from bayeskit.inference.generalized._bootstrap import (
    _minima_as_draws,
    _replicate_batches,
    dirichlet,
    loss_likelihood_bootstrap,
)
from bayeskit.inference.generalized._minimizer import Minimum, information_matrices

X = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
PRIOR = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 5.0)


def location(loss, data=X):
    return GibbsPosterior(PRIOR, loss, data)


def moment_scores(draws, mean, variance):
    """Return z scores of mean and variance of independent draws ``(R,)``."""
    centred = draws - mean
    spread = centred.square()
    root = math.sqrt(len(draws))
    return [float(centred.mean() / centred.std() * root), float((spread.mean() - variance) / spread.std() * root)]


def theta(draws):
    return draws.values()["theta"][0]


def test_moments_of_the_mean(limit):
    """The reference case: mean 4, variance (1/n) sum (x - mean)^2 / (n + 1) = 1.9."""
    variance = float((X - 4).square().mean()) / 5
    assert variance == 1.9
    for concentration, exact in ((1.0, 1.9), (3.0, 9.5 / 13)):
        draws = theta(loss_likelihood_bootstrap(location(losses.HalfSquared()), 5000, concentration=concentration))
        assert np.abs(moment_scores(draws, 4.0, exact)).max() < limit(4)


def test_mutation_weights_of_another_law_fail(limit, monkeypatch):
    monkeypatch.setattr(module, "dirichlet", lambda shape, generator: dirichlet(2 * shape, generator))
    draws = theta(loss_likelihood_bootstrap(location(losses.HalfSquared()), 5000))
    assert np.abs(moment_scores(draws, 4.0, 1.9)).max() > limit(4)


def test_each_draw_is_the_weighted_mean_and_the_scale_of_the_loss_does_not_matter():
    weights = dirichlet(torch.ones(50, 4, dtype=torch.float64), new_generator(7, stream="loss-likelihood bootstrap"))
    draws = theta(loss_likelihood_bootstrap(location(losses.HalfSquared()), 50, seed=7))
    torch.testing.assert_close(draws, weights @ X, rtol=0, atol=1e-10)
    scaled = location(losses.FunctionLoss(lambda mean, x: 20 * (x - mean).square()))
    torch.testing.assert_close(theta(loss_likelihood_bootstrap(scaled, 50, seed=7)), draws, rtol=0, atol=1e-10)


def test_medians(limit):
    """With three data and flat Dirichlet weights each end is the median with probability 1/4."""
    data = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    draws = theta(loss_likelihood_bootstrap(location(losses.Absolute(), data), 2000))
    nearest = (draws[:, None] - data).abs().min(-1)
    assert float(nearest.values.quantile(0.95)) < 1e-3  # an even split of the weights may leave it in between
    counts = torch.bincount(nearest.indices, minlength=3)
    exact = np.array([0.25, 0.5, 0.25])
    z = (counts.numpy() - 2000 * exact) / np.sqrt(2000 * exact * (1 - exact))
    assert np.abs(z).max() < limit(3)


def heteroskedastic(n=2000):
    generator = np.random.default_rng(5)
    covariate = generator.uniform(-1, 1, n)
    outcome = 1 + 2 * covariate + (0.3 + covariate**2) * generator.standard_normal(n)
    design = np.stack([np.ones(n), covariate], 1)
    return torch.tensor(design), torch.tensor(outcome)


@pytest.mark.calibration
def test_covariance_of_a_regression_is_the_sandwich(limit):
    prior = dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0).to_event(1)
    posterior = GibbsPosterior(prior, losses.HalfSquared(losses.linear), heteroskedastic())
    found = information_matrices(posterior)
    draws = theta(loss_likelihood_bootstrap(posterior, 3000))
    centred = draws - found.position
    products = centred[:, :, None] * centred[:, None]
    # The sandwich is the limit: what is left, of order 1/n, is far below the Monte Carlo error of 1/sqrt(R).
    z = (products.mean(0) - found.sandwich) / (products.std(0) / math.sqrt(len(draws)))
    assert float(z.abs().max()) < limit(3)
    # The posterior of weight one has another covariance, and the test sees it.
    wrong = (products.mean(0) - found.posterior_covariance) / (products.std(0) / math.sqrt(len(draws)))
    assert float(wrong.abs().max()) > limit(3)


def test_the_prior_may_be_kept():
    """With half squared loss, n weights and a N(0, 25) prior the minimiser is the weighted sum over n + 1/25."""
    weights = dirichlet(torch.ones(20, 4, dtype=torch.float64), new_generator(3, stream="loss-likelihood bootstrap"))
    draws = theta(loss_likelihood_bootstrap(location(losses.HalfSquared()), 20, prior_weight=1.0, seed=3))
    torch.testing.assert_close(draws, 4 * (weights @ X) / (4 + 1 / 25), rtol=0, atol=1e-9)


def test_constrained_parameters_and_arviz():
    prior = dist.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.0)
    posterior = GibbsPosterior(prior, losses.HalfSquared(), X)
    draws = loss_likelihood_bootstrap(posterior, 200, seed=1)
    assert draws.unconstrained.shape == (1, 200, 1) and bool((theta(draws) > 0).all())
    torch.testing.assert_close(draws.unconstrained[0, :, 0].exp(), theta(draws))
    torch.testing.assert_close(
        theta(draws), theta(loss_likelihood_bootstrap(location(losses.HalfSquared()), 200, seed=1)), rtol=0, atol=1e-5
    )
    data = draws.to_arviz()
    assert data.posterior["theta"].shape == (1, 200)
    assert bool(data.sample_stats["converged"].all())


def test_blocks_cover_all_replicates_and_weights_of_zero():
    assert _replicate_batches(10, 2**22) == [1] * 10 and sum(_replicate_batches(1001, 5000)) == 1001
    weights = dirichlet(torch.tensor([[1e-3, 0.0, 1.0]], dtype=torch.float64), torch.Generator().manual_seed(0))
    assert float(weights.sum()) == 1 and float(weights[0, 1]) == 0


def test_small_concentrations_keep_their_law(limit):
    """Gamma variables of concentration 1e-4 are mostly zero to double precision; their shares are not."""
    for c in (1e-4, 1e-2, 0.5):
        weights = dirichlet(torch.full((4000, 3), c, dtype=torch.float64), torch.Generator().manual_seed(1))
        assert bool(weights.isfinite().all()) and float((weights.sum(-1) - 1).abs().max()) < 1e-12
        z = [
            (x.mean(0) - exact) / x.std(0) * math.sqrt(len(x))
            for x, exact in ((weights, 1 / 3), (weights.square(), (c + 1) / (3 * (3 * c + 1))))
        ]
        assert float(torch.stack(z).abs().max()) < limit(18)
    # By gamma variables themselves, rows underflow as a whole.
    gamma = torch._standard_gamma(torch.full((4000, 3), 1e-4).double(), generator=torch.Generator().manual_seed(1))
    naive = (gamma / gamma.sum(-1, keepdim=True)).square()
    assert not abs(float((naive.mean() - 1 / 3) / naive.std()) * math.sqrt(4000)) < limit(1)
    extremes = dirichlet(torch.tensor([[1e-320, 0.0, 1e-320]], dtype=torch.float64), torch.Generator().manual_seed(0))
    assert sorted(extremes[0].tolist()) == [0.0, 0.0, 1.0]


@pytest.mark.calibration
def test_losses_without_a_minimum_or_with_hidden_kinks_are_refused():
    endless = location(losses.FunctionLoss(lambda mean, x: mean.exp() * 0 + x * mean - x * mean.exp()))
    kinked = location(lambda mean, x: (x - mean).abs())
    for posterior in (endless, kinked):
        with pytest.raises(SettingsError, match=r"did not converge.*kinks, use losses\.Absolute"):
            loss_likelihood_bootstrap(posterior, 20)


def minima(position, converged):
    position = torch.tensor(position, dtype=torch.float64)[:, None]
    return Minimum(position, position[:, 0], torch.tensor(converged))


def test_few_failures_warn_and_draws_that_coincide_count_only_with_failures():
    posterior = location(losses.HalfSquared())
    with pytest.warns(SamplingWarning, match="1 of 3 minimisations did not converge"):
        draws = _minima_as_draws(posterior, minima([0.0, 1.0, 2.0], [True, True, False]), 0.0, {})
    assert draws.sample_stats["converged"].tolist() == [[True, True, False]]
    with pytest.raises(SettingsError, match="1 of 3"):
        _minima_as_draws(posterior, minima([1.0, 1.0, 1.0], [True, True, False]), 0.0, {})
    # Where nearly all data are one value, so are all medians.
    _minima_as_draws(posterior, minima([1.0, 1.0, 1.0], [True, True, True]), 0.0, {})


def test_poolings_without_weights_are_refused():
    with pytest.raises(SettingsError, match="Max"):
        loss_likelihood_bootstrap(GibbsPosterior(PRIOR, losses.HalfSquared(), X, pooling="max"))


@pytest.mark.parametrize("settings", [{"num_draws": 0}, {"concentration": 0.0}, {"concentration": -1.0}])
def test_bad_settings(settings):
    with pytest.raises(SettingsError):
        loss_likelihood_bootstrap(location(losses.HalfSquared()), **settings)
