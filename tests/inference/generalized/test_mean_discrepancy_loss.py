"""Maximum mean discrepancy as a loss: closed forms against sums and quadrature, common random numbers, outliers."""

import math

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import CoherenceError, DataError, ImproperPosteriorError, ModelError, SettingsError, ShapeError
from bayeskit.inference._kernel_discrepancy import InverseMultiquadric, RadialBasis, maximum_mean_discrepancy
from bayeskit.inference.generalized import Flat, GibbsPosterior
from bayeskit.inference.generalized.losses._mean_discrepancy import (
    GaussianEmbedding,
    MaximumMeanDiscrepancy,
    Simulated,
)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def location(mean):
    return dist.Normal(mean, 1.0)


def shift(mean, noise):
    return mean + noise


X = double(-1.0, 0.0, 0.5, 1.0, 3.0)
THETA = torch.tensor(0.4, dtype=torch.float64)


def test_closed_form_against_quadrature():
    grid = torch.linspace(-9, 9, 1201, dtype=torch.float64)
    mass = dist.Normal(THETA, 1.3).log_prob(grid).exp() * (grid[1] - grid[0])

    def kernel(a, b):
        return (-((a[:, None] - b) ** 2) / (2 * 0.7**2)).exp()

    discrepancy = mass @ kernel(grid, grid) @ mass - 2 * (mass @ kernel(grid, X)).mean() + kernel(X, X).mean()
    loss = MaximumMeanDiscrepancy(GaussianEmbedding(lambda m: dist.Normal(m, 1.3)), RadialBasis(0.7))
    torch.testing.assert_close(loss.total(THETA, X), 5 * discrepancy, rtol=1e-11, atol=0)


def test_normal_laws_agree_with_one_another():
    x = torch.stack([X, X.flip(0)], -1)
    theta, scales = double(0.2, -0.5), double(0.8, 1.4)
    laws = (
        lambda p: dist.Normal(p, scales),
        lambda p: dist.Normal(p, scales).to_event(1),
        lambda p: dist.MultivariateNormal(p, scales.square().diag()),
    )
    totals = [MaximumMeanDiscrepancy(GaussianEmbedding(law), RadialBasis(0.9)).total(theta, x) for law in laws]
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=1e-13, atol=0)
    # A product kernel and a product law: means are products over the entries.
    each = [GaussianEmbedding(lambda p, j=j: dist.Normal(p[j], scales[j])) for j in (0, 1)]
    one = torch.ones((), dtype=torch.float64)
    parts = [e.means(theta, x[:, j], RadialBasis(0.9), one, "V") for j, e in enumerate(each)]
    joint = GaussianEmbedding(laws[2]).means(theta, x, RadialBasis(0.9), one, "V")
    for found, a, b in zip(joint, *parts, strict=True):
        torch.testing.assert_close(found, a * b, rtol=1e-13, atol=0)


def test_correlated_normal_law_against_quadrature():
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.8]], dtype=torch.float64)
    law = dist.MultivariateNormal(double(0.2, -0.1), covariance)
    axis = torch.linspace(-7, 7, 281, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    mass = law.log_prob(grid).exp() * 0.05**2
    y = torch.tensor([[0.3, 1.0], [-1.0, 0.5]], dtype=torch.float64)
    kernel = (-(grid[:, None] - y).square().sum(-1) / (2 * 0.8**2)).exp()
    one = torch.ones((), dtype=torch.float64)
    _, found = GaussianEmbedding(lambda p: law).means(THETA, y, RadialBasis(0.8), one, "V")
    torch.testing.assert_close(found, mass @ kernel, rtol=1e-11, atol=0)


@pytest.mark.parametrize("kernel", [InverseMultiquadric(1.3), RadialBasis(0.8)])
def test_simulated_statistics_by_hand(kernel):
    model = Simulated(shift, num_draws=7, seed=3)
    draws, one = model.draws(THETA, X), torch.ones((), dtype=torch.float64)

    def k(a, b):
        return kernel((a - b) ** 2, one)

    for statistic in ("V", "U"):
        loss = MaximumMeanDiscrepancy(model, kernel, statistic)

        def mean(z, w, statistic=statistic):
            pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if statistic == "V" or i != j]
            return sum(w[i] * w[j] * k(z[i], z[j]) for i, j in pairs) / sum(w[i] * w[j] for i, j in pairs)

        w = double(0.5, 2.0, 1.0, 0.7, 1.0)
        across = sum(w[i] * k(x, y) for i, x in enumerate(X) for y in draws) / (7 * w.sum())
        expected = w.sum() * (mean(draws, [1.0] * 7) + mean(X, w) - 2 * across)
        torch.testing.assert_close(loss.total(THETA, X, w), expected, rtol=1e-12, atol=0)
    # The U-statistic is the estimate of two samples.
    two = maximum_mean_discrepancy(draws[:, None], X[:, None], kernel)
    torch.testing.assert_close(MaximumMeanDiscrepancy(model, kernel, "U").total(THETA, X), 5 * two, rtol=1e-12, atol=0)


def test_simulation_approaches_the_closed_form(limit):
    exact = MaximumMeanDiscrepancy(GaussianEmbedding(location), RadialBasis(1.0), "U")
    estimates = torch.stack(
        [
            MaximumMeanDiscrepancy(Simulated(shift, 50, seed=seed), RadialBasis(1.0), "U").total(THETA, X)
            for seed in range(400)
        ]
    )
    # Without the pairs of a draw with itself the estimate is unbiased.
    z = (estimates.mean() - exact.total(THETA, X)) / (estimates.std() / 20)
    assert z.abs() < limit()
    biased = [
        MaximumMeanDiscrepancy(Simulated(shift, 50, seed=s), RadialBasis(1.0)).total(THETA, X) for s in range(400)
    ]
    exact = MaximumMeanDiscrepancy(GaussianEmbedding(location), RadialBasis(1.0)).total(THETA, X)
    z = (torch.stack(biased).mean() - exact) / (torch.stack(biased).std() / 20)
    assert z.abs() > limit()


def test_random_numbers_are_common_and_chosen_by_the_seed():
    before = torch.get_rng_state()
    first, again, other = (Simulated(shift, 8, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.draws(THETA, X), again.draws(THETA, X))
    assert not torch.equal(first.draws(THETA, X), other.draws(THETA, X))
    torch.testing.assert_close(first.draws(THETA + 1, X), first.draws(THETA, X) + 1)
    assert first == again != other
    uniform = Simulated(shift, 8, noise=dist.Uniform(0.0, 1.0)).draws(torch.zeros_like(THETA), X)
    assert uniform.dtype == torch.float64 and 0 <= uniform.min() and uniform.max() <= 1
    vectors = Simulated(lambda m, noise: m + noise, 8, noise=dist.Normal(torch.zeros(2), 1.0).to_event(1))
    assert vectors.draws(double(0.0, 1.0), X[:, None].expand(-1, 2)).shape == (8, 2)


def test_outliers_stop_to_matter():
    grid = torch.linspace(-5, 25, 3001, dtype=torch.float64)

    def minimiser(loss, far):
        x = double(-1.0, 0.0, 0.5, 1.0, far)
        return grid[torch.func.vmap(lambda mean: loss.total(mean, x))(grid).argmin()].item()

    exact = MaximumMeanDiscrepancy(GaussianEmbedding(location), RadialBasis(1.0))
    found = [minimiser(exact, far) for far in (10.0, 100.0, 1000.0)]
    clean = grid[torch.func.vmap(lambda m: exact.total(m, double(-1.0, 0.0, 0.5, 1.0)))(grid).argmin()].item()
    assert max(abs(m - clean) for m in found) < 0.011  # the grid's spacing
    # As the bandwidth grows the kernel compares means alone, and the outlier counts again.
    wide = MaximumMeanDiscrepancy(GaussianEmbedding(location), RadialBasis(1e3))
    assert minimiser(wide, 100.0) > 19


def test_median_scale():
    squared = torch.stack([(a - b) ** 2 for i, a in enumerate(X) for b in X[:i]]).median().item()
    for kernel, same in (
        (InverseMultiquadric(), InverseMultiquadric(squared)),
        (RadialBasis(), RadialBasis(math.sqrt(squared / 2))),
    ):
        open_scale, fixed = (MaximumMeanDiscrepancy(Simulated(shift, 9), k).total(THETA, X) for k in (kernel, same))
        torch.testing.assert_close(open_scale, fixed, rtol=1e-13, atol=0)
    open_scale, fixed = (
        MaximumMeanDiscrepancy(GaussianEmbedding(location), k).total(THETA, X)
        for k in (RadialBasis(), RadialBasis(math.sqrt(squared / 2)))
    )
    torch.testing.assert_close(open_scale, fixed, rtol=1e-13, atol=0)


def test_refusals():
    loss, prior = MaximumMeanDiscrepancy(GaussianEmbedding(location), RadialBasis(1.0)), dist.Normal(0.0, 5.0)
    with pytest.raises(ImproperPosteriorError):
        GibbsPosterior(Flat(), loss, X)
    assert loss.total(torch.tensor(1e3, dtype=torch.float64), X) == loss.total(
        torch.tensor(1e6, dtype=torch.float64), X
    )
    with pytest.raises(CoherenceError, match="MaximumMeanDiscrepancy"):
        GibbsPosterior(prior, loss, X).update(X)
    with pytest.raises(ShapeError, match="covariates"):
        GibbsPosterior(prior, loss, (X, X))
    with pytest.raises(DataError, match="floating"):
        GibbsPosterior(prior, loss, torch.tensor([1, 2]))
    with pytest.raises(DataError, match="two data at least"):
        GibbsPosterior(prior, MaximumMeanDiscrepancy(GaussianEmbedding(location), statistic="U"), X[:1])
    with pytest.raises(SettingsError, match="statistic must"):
        MaximumMeanDiscrepancy(GaussianEmbedding(location), statistic="W")
    with pytest.raises(SettingsError, match="model must"):
        MaximumMeanDiscrepancy(location)
    with pytest.raises(SettingsError, match="num_draws"):
        Simulated(shift, 1)
    with pytest.raises(SettingsError, match="bandwidth must"):
        RadialBasis(0.0)
    with pytest.raises(ModelError, match="InverseMultiquadric under a normal law"):
        MaximumMeanDiscrepancy(GaussianEmbedding(location), InverseMultiquadric(1.0)).total(THETA, X)
    with pytest.raises(ModelError, match="not Laplace"):
        MaximumMeanDiscrepancy(GaussianEmbedding(lambda m: dist.Laplace(m, 1.0))).total(THETA, X)
    with pytest.raises(ShapeError, match="simulate returns"):
        MaximumMeanDiscrepancy(Simulated(lambda m, noise: m, 5)).total(THETA, X)
    with pytest.raises(ShapeError, match="law of a datum"):
        MaximumMeanDiscrepancy(GaussianEmbedding(lambda m: dist.Normal(double(0.0, 1.0), 1.0))).total(THETA, X)


@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        (GaussianEmbedding(location), RadialBasis()),
        (Simulated(shift), RadialBasis()),
        (Simulated(shift), InverseMultiquadric()),
    ],
)
def test_ties_leave_no_bandwidth(model, kernel):
    x = double(0.0, 0.0, 0.0, 0.0, 1.0)
    with pytest.raises(DataError, match=f"tied.*{type(kernel).__name__}.*give the kernel a bandwidth"):
        GibbsPosterior(dist.Normal(0.0, 3.0), MaximumMeanDiscrepancy(model, kernel), x)
    MaximumMeanDiscrepancy(model, kernel).check(double(0.0, 0.0, 1.0, 1.0, 3.0))
    MaximumMeanDiscrepancy(model, type(kernel)(1.0)).check(x)
    # A single datum has no pairs, and gets a bandwidth of one.
    MaximumMeanDiscrepancy(model, kernel).check(x[:1])
