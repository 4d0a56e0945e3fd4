"""Spike-and-slab regression: every subset against a multivariate t density, quadrature, and the oracle."""

import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from mpmath import mp, mpf
from scipy import integrate, stats

from bayeskit.core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.exact.enumeration import enumerate_latents
from bayeskit.inference.gradients import UnorderedSet
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete import spike_and_slab
from bayeskit.models.discrete.spike_and_slab import BetaBinomialInclusion, IndependentInclusion, SpikeAndSlabRegression

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
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda a: (cholesky(a)[0] * (1 + 1e-6), None))
    assert largest_error(SpikeAndSlabRegression(**SETTINGS), x, y) > 1e-6


def exact_evidence(regression, subset, x, y):
    """Return a subset's log evidence in 400 digits."""
    with mp.workdps(400):
        n, a, b = len(y), mpf(regression.noise_shape), mpf(regression.noise_rate)
        scales = [mpf(regression.intercept_scale)] + [mpf(regression.slab_scale)] * len(subset)
        rows = [[scales[0], *(s * v for s, v in zip(scales[1:], row, strict=True))] for row in x[:, subset].tolist()]
        design, response = mp.matrix(rows), mp.matrix(y.tolist())
        precision = design.T * design + mp.eye(len(scales))
        projected = design.T * response
        squares = (response.T * response - projected.T * mp.lu_solve(precision, projected))[0]
        constant = a * mp.log(b) + mp.loggamma(a + mpf(n) / 2) - mp.loggamma(a) - n * mp.log(2 * mp.pi) / 2
        return float(constant - mp.log(mp.det(precision)) / 2 - (a + mpf(n) / 2) * mp.log(b + squares / 2))


@pytest.mark.parametrize(
    ("shift", "sd", "offset", "settings"),
    [
        (0.0, 1.0, 0.0, {}),
        (1e6, 0.01, 0.0, {"intercept_scale": 1e8, "noise_rate": 1e-4}),
        (1e9, 1.0, 0.0, {"intercept_scale": 1e9}),
        (1e3, 1.0, 1e8, {"intercept_scale": 1e4}),
        (0.0, 1e-9, 0.0, {"noise_rate": 1e-20, "slab_scale": 1e3}),
        (3.0, 1.0, 0.0, {"intercept_scale": 1e160}),
    ],
)
def test_offsets_of_the_data_cost_no_digits(shift, sd, offset, settings):
    x, e = data(n=20, p=2)
    x, y = x + offset, shift + sd * (2 * x[:, 0] + e)
    regression = SpikeAndSlabRegression(**settings)
    found = regression.posterior(x, y).log_evidence_each
    exact = [exact_evidence(regression, subset, x, y) for subset in ([], [0], [1], [0, 1])]
    assert float((found - found.new_tensor(exact)).abs().max()) < 1e-8


def test_single_precision_loses_what_its_data_lose():
    x, e = data(n=40, p=3)
    x, y = x.float(), (1e3 + 2 * x[:, 0] + e).float()
    regression = SpikeAndSlabRegression(intercept_scale=1e4)
    subsets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    found = regression.log_evidence(subsets, x, y)
    exact = [exact_evidence(regression, subset, x, y) for subset in ([0], [], [0, 1, 2])]
    assert found.dtype == torch.float32
    assert float((found - torch.tensor(exact)).abs().max()) < 1e-4
    assert regression.log_evidence(subsets, x, y.double()).dtype == torch.float64


def test_log_evidence_is_differentiable_between_subsets_too():
    x, y = data(p=3)
    inclusion = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
    inputs = [value.requires_grad_() for value in (inclusion, x, y)]
    assert torch.autograd.gradcheck(SpikeAndSlabRegression(**SETTINGS).log_evidence, inputs)


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


@pytest.mark.parametrize(("alpha", "dtype"), [(1e8, torch.float32), (1e14, torch.float64), (1e300, torch.float64)])
def test_beta_binomial_prior_tends_to_fair_coins(alpha, dtype):
    subset = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    assert abs(float(BetaBinomialInclusion(alpha, alpha).log_prob(subset)) - 3 * math.log(0.5)) < 1e-6


@pytest.mark.parametrize("alpha", [19.5, 20.5, 3e5])
def test_beta_binomial_prior_is_a_product_of_predictions(alpha):
    subset = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    total = alpha + 7.0
    exact = sum(math.log(v) for v in (alpha, alpha + 1, 7.0, 8.0, 9.0)) - sum(math.log(total + i) for i in range(5))
    assert abs(float(BetaBinomialInclusion(alpha, 7.0).log_prob(subset)) - exact) < 1e-12


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
    """Of all eight subsets its loss is the enumerated one, and of three on average."""
    x, y = data(p=3)
    regression = SpikeAndSlabRegression(**SETTINGS)
    logits = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)

    def guide(k):
        def draw(x, y):
            site = dist.Bernoulli(logits=logits).to_event(1)
            pyro.sample("inclusion", site, infer={"gradient": UnorderedSet(k=k)})

        return draw

    posterior = regression.posterior(x, y)
    log_joint = posterior.log_evidence_each + regression.inclusion.log_prob(posterior.subsets)
    log_guide = dist.Bernoulli(logits=logits).to_event(1).log_prob(posterior.subsets)
    exact = float((log_guide.exp() * (log_joint - log_guide)).sum())
    with global_stream(new_generator(0)):
        loss = float(ELBO().differentiable_loss(regression.model, guide(8), x, y).detach())
        losses = [float(ELBO().differentiable_loss(regression.model, guide(3), x, y).detach()) for _ in range(60)]
    assert abs(loss + exact) < 1e-10  # eight points are all there are
    error = torch.tensor(losses, dtype=torch.float64) + exact
    assert abs(float(error.mean() / (error.std() / len(losses) ** 0.5))) < limit(1)
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
    with pytest.raises(SettingsError, match=r"IndependentInclusion\(0.5\)"):
        SpikeAndSlabRegression(inclusion=0.5)
    with pytest.raises(ShapeError, match="0 rows and 4 predictors"):
        regression.posterior(x[:0], y[:0])
    for settings, predictors, responses in (
        ({"slab_scale": 1e160}, x, y),
        ({}, x, 1e160 * y),
        ({"slab_scale": 1e9}, x[:, [0, 0]], y),
    ):
        with pytest.raises(DataError, match="centre and scale"):
            SpikeAndSlabRegression(**settings).posterior(predictors, responses)
    with pytest.raises(ShapeError, match=r"\(n, p\)"):
        regression.posterior(x, y[1:])
    with pytest.raises(ShapeError, match="4 predictors"):
        regression.log_evidence(torch.ones(3), x, y)
    with pytest.raises(DataError, match=r"y is not finite at index \(0,\)"):
        regression.posterior(x, torch.full_like(y, torch.nan))
    with pytest.raises(DataError, match="x is an array of"):
        regression.posterior([["a"]], [1.0])
    with pytest.raises(SettingsError, match=str(2**21)):
        regression.posterior(x.new_ones(5, 21), x.new_ones(5))
    with pytest.raises(SettingsError, match="16 subsets"):
        regression.posterior(x, y).most_probable(17)
    with pytest.raises(ShapeError, match=r"\(m, 4\)"):
        regression.posterior(x, y).predict(x[:, :2])
