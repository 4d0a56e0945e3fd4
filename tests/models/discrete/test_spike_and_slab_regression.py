"""Spike-and-slab regression: every subset against a multivariate t density, quadrature, and the oracle."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats

from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact.enumerate_latents import enumerate_latents
from bayeskit.inference.gradients import UnorderedSet
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete import spike_and_slab
from bayeskit.models.discrete.spike_and_slab import (
    BetaBinomialInclusion,
    IndependentInclusion,
    SpikeAndSlabRegression,
)

SETTINGS = {"slab_scale": 0.7, "intercept_scale": 3.0, "noise_shape": 2.5, "noise_rate": 1.5}
PRIORS = [IndependentInclusion(0.3), BetaBinomialInclusion(0.8, 2.0)]


def data(n=12, p=4, seed=0):
    generator = new_generator(seed, stream="regression data")
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, 1.0 + 1.5 * x[:, 0] - 0.8 * x[:, p // 2] + noise


def student_t(regression, subset, x, y):
    """Return a subset's log evidence as the density of all responses at once, and its mean coefficients."""
    design = np.column_stack([np.ones(len(y)), x.numpy()[:, subset]])
    scales = np.array([regression.intercept_scale] + [regression.slab_scale] * len(subset))
    a, b = regression.noise_shape, regression.noise_rate
    covariance = np.eye(len(y)) + design @ np.diag(scales**2) @ design.T
    density = stats.multivariate_t.logpdf(y.numpy(), loc=np.zeros(len(y)), shape=b / a * covariance, df=2 * a)
    return density, np.diag(scales**2) @ design.T @ np.linalg.solve(covariance, y.numpy())


def largest_error(regression, x, y):
    posterior = regression.posterior(x, y)
    errors = []
    for row, inclusion in enumerate(posterior.subsets):
        subset = inclusion.nonzero().flatten().tolist()
        density, means = student_t(regression, subset, x, y)
        found = posterior.coefficients_each[row]
        expected = torch.zeros_like(found)
        expected[[0, *(j + 1 for j in subset)]] = torch.from_numpy(means)
        errors += [abs(float(posterior.log_evidence_each[row]) - density), float((found - expected).abs().max())]
    return max(errors)


# --- Exact values


def test_every_subset_is_a_multivariate_t():
    x, y = data()
    regression = SpikeAndSlabRegression(**SETTINGS)
    assert largest_error(regression, x, y) < 1e-10


def test_a_lost_determinant_is_seen(monkeypatch):
    x, y = data()
    cholesky = torch.linalg.cholesky
    monkeypatch.setattr(torch.linalg, "cholesky", lambda a: cholesky(a) * (1 + 1e-6))
    assert largest_error(SpikeAndSlabRegression(**SETTINGS), x, y) > 1e-6


def test_evidence_of_one_predictor_is_an_integral():
    """Integrate over coefficient and noise by quadrature, with the intercept all but absent."""
    x, y = data(n=4, p=1)
    regression = SpikeAndSlabRegression(0.7, 1e-9, 2.5, 1.5)
    # The trapezoidal rule: what is smooth and vanishes at the ends it integrates almost exactly.
    beta = torch.linspace(-40, 40, 3000, dtype=torch.float64).unsqueeze(-1)
    log_variance = torch.linspace(-4, 14, 500, dtype=torch.float64)
    variance = log_variance.exp()
    log_density = dist.Normal(beta.unsqueeze(-1) * x[:, 0], variance.sqrt().unsqueeze(-1)).log_prob(y).sum(-1)
    log_density = log_density + dist.Normal(0, 0.7 * variance.sqrt()).log_prob(beta)
    log_density = log_density + dist.InverseGamma(x.new_tensor(2.5), x.new_tensor(1.5)).log_prob(variance)
    width = (beta[1] - beta[0]) * (log_variance[1] - log_variance[0])
    exact = float((log_density + log_variance).flatten().logsumexp(0) + width.log())
    found = float(regression.log_evidence(torch.ones(1), x, y))
    assert abs(found - exact) < 1e-7


@pytest.mark.parametrize("prior", PRIORS)
def test_priors_add_up_to_one(prior):
    subsets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=5)), dtype=torch.float64)
    assert abs(float(prior.log_prob(subsets).logsumexp(0))) < 1e-12


def test_beta_binomial_prior_is_a_mixture_of_independent_ones():
    subset = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    beta = stats.beta(0.8, 2.0)
    exact, _ = integrate.quad(lambda t: t**2 * (1 - t) ** 3 * beta.pdf(t), 0, 1)
    assert abs(float(BetaBinomialInclusion(0.8, 2.0).log_prob(subset)) - math.log(exact)) < 1e-8


@pytest.mark.parametrize("prior", PRIORS)
def test_posterior_is_what_the_oracle_enumerates(prior):
    x, y = data()
    regression = SpikeAndSlabRegression(**SETTINGS, inclusion=prior)
    posterior, oracle = regression.posterior(x, y), enumerate_latents(regression.model, x, y)
    assert abs(posterior.log_evidence - oracle.log_evidence) < 1e-10
    exact = oracle.expectation(lambda sites: sites["inclusion"])
    torch.testing.assert_close(posterior.inclusion_probabilities, exact.to(x), rtol=0, atol=1e-10)


def test_averages_are_sums_over_subsets(monkeypatch):
    x, y = data()
    monkeypatch.setattr(spike_and_slab, "_BATCH", 3)
    posterior = SpikeAndSlabRegression(**SETTINGS).posterior(x, y)
    new = torch.ones(2, 4, dtype=torch.float64)
    sizes, prediction, total = torch.zeros(5, dtype=torch.float64), 0.0, 0.0
    for subset, probability, coefficients in zip(
        posterior.subsets, posterior.probabilities, posterior.coefficients_each, strict=True
    ):
        sizes[int(subset.sum())] += probability
        prediction = prediction + probability * coefficients.sum()
        total += float(probability)
    assert abs(total - 1) < 1e-12
    torch.testing.assert_close(posterior.size_probabilities, sizes, rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior.predict(new), prediction.expand(2), rtol=0, atol=1e-12)
    best, probability = posterior.most_probable(2)
    assert best.shape == (2, 4)
    assert float(probability[0]) == float(posterior.probabilities.max())


def test_inclusion_probabilities_are_calibrated(limit):
    """Over data drawn from the prior, a predictor is in as often as its posterior probability says."""
    regression = SpikeAndSlabRegression(**SETTINGS, inclusion=IndependentInclusion(0.4))
    generator = torch.Generator().manual_seed(3)
    x, _ = data(n=10, p=3)
    errors = []
    with global_stream(generator):
        for _ in range(300):
            inclusion = torch.bernoulli(torch.full((3,), 0.4, dtype=torch.float64))
            variance = 1 / dist.Gamma(x.new_tensor(2.5), 1.5).sample()
            beta = inclusion * torch.randn(3, dtype=torch.float64) * 0.7 * variance.sqrt()
            intercept = torch.randn((), dtype=torch.float64) * 3.0 * variance.sqrt()
            y = intercept + x @ beta + variance.sqrt() * torch.randn(10, dtype=torch.float64)
            errors.append(inclusion - regression.posterior(x, y).inclusion_probabilities)
    error = torch.stack(errors)
    z = error.mean(0) / (error.std(0) / len(errors) ** 0.5)
    assert float(z.abs().max()) < limit(3)


# --- Use


def test_a_guide_of_the_inclusion_by_an_unordered_set(limit):
    """A guide of one event whose loss and draws agree with the enumerated ones."""
    x, y = data(p=3)
    regression = SpikeAndSlabRegression(**SETTINGS)
    logits = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)

    def guide(x, y):
        site = dist.Bernoulli(logits=logits).to_event(1)
        pyro.sample("inclusion", site, infer={"gradient": UnorderedSet(k=8)})

    posterior = regression.posterior(x, y)
    log_joint = posterior.log_evidence_each + regression.inclusion.log_prob(posterior.subsets)
    log_guide = dist.Bernoulli(logits=logits).to_event(1).log_prob(posterior.subsets)
    exact = float((log_guide.exp() * (log_joint - log_guide)).sum())
    with global_stream(new_generator(0)):
        loss = float(ELBO().differentiable_loss(regression.model, guide, x, y))
    assert abs(loss + exact) < 1e-10  # eight points are all there are
    assert exact < posterior.log_evidence


def test_no_predictor_in_is_a_subset():
    x, y = data(p=1)
    assert SpikeAndSlabRegression().posterior(x, y).subsets.tolist() == [[0.0], [1.0]]


def test_bad_input():
    x, y = data()
    regression = SpikeAndSlabRegression()
    for settings in ({"slab_scale": 0.0}, {"noise_rate": -1.0}, {"intercept_scale": math.nan}):
        with pytest.raises(SettingsError, match=next(iter(settings))):
            SpikeAndSlabRegression(**settings)
    for probability in (0.0, 1.0, "half"):
        with pytest.raises(SettingsError, match="probability"):
            IndependentInclusion(probability)
    with pytest.raises(SettingsError, match="beta"):
        BetaBinomialInclusion(1.0, 0.0)
    with pytest.raises(ShapeError, match=r"\(n, p\)"):
        regression.posterior(x, y[1:])
    with pytest.raises(ShapeError, match="4 predictors"):
        regression.log_evidence(torch.ones(3), x, y)
    with pytest.raises(DataError, match=r"y is not finite at index \(0,\)"):
        regression.posterior(x, torch.full_like(y, torch.nan))
    with pytest.raises(DataError, match="int64"):
        regression.posterior(x.long(), y)
    with pytest.raises(SettingsError, match=str(2**21)):
        regression.posterior(x.new_ones(5, 21), x.new_ones(5))
    with pytest.raises(SettingsError, match="16 subsets"):
        regression.posterior(x, y).most_probable(17)
    with pytest.raises(ShapeError, match=r"\(m, 4\)"):
        regression.posterior(x, y).predict(x[:, :2])
