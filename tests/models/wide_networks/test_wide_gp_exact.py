"""Exact regression on networks of infinite width: densities, gradients, predictions, jitter."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from bayeskit.errors import ConversionWarning, DataError, KernelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import exact_regression, factorize

NOISE = 0.05


def network(weight=1.7, bias=0.3):
    layers = nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)
    return infinite_width(nn.Sequential(*layers), weight_variance=weight, bias_variance=bias)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]), torch.randn(4, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("covariance", ["nngp", "ntk"])
def test_density_and_prediction_are_those_of_dense_formulas(data, covariance):
    x, y, new = data
    kernel = network()
    posterior = exact_regression(kernel, x, y, NOISE, covariance)
    prior = getattr(kernel, covariance)
    total = prior(x).numpy() + NOISE * np.eye(len(x))
    density = multivariate_normal(np.zeros(len(x)), total).logpdf(y.numpy())
    assert abs(float(posterior.log_marginal_likelihood) - density) < 1e-10
    # A mutation: without its noise the density is another.
    assert abs(multivariate_normal(np.zeros(len(x)), prior(x).numpy()).logpdf(y.numpy()) - density) > 0.1
    cross = prior(x, new).numpy()
    found = posterior.predict(new)
    assert np.abs(found.mean.numpy() - cross.T @ np.linalg.solve(total, y.numpy())).max() < 1e-10
    left = prior(new).numpy() - cross.T @ np.linalg.solve(total, cross)
    assert np.abs(found.covariance.numpy() - left).max() < 1e-10
    assert np.abs(found.variance.numpy() - np.diag(left)).max() < 1e-10
    assert posterior.jitter == 0.0


@pytest.mark.parametrize("covariance", ["nngp", "ntk"])
def test_gradients_with_respect_to_variances_are_differences(data, covariance):
    x, y, _ = data
    kernel = network()
    names = list(kernel.variances.weight)

    def density(values):
        weight = dict(zip(names, values[:3], strict=True))
        bias = dict(zip(names, values[3:6], strict=True))
        changed = kernel.with_variances(weight=weight, bias=bias)
        return exact_regression(changed, x, y, values[6], covariance).log_marginal_likelihood

    values = torch.tensor([1.3, 1.7, 2.1, 0.2, 0.3, 0.4, NOISE], dtype=torch.float64)
    leaf = values.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(density(leaf), leaf)
    step = 1e-3 * values
    for i in range(len(values)):
        e = torch.zeros_like(values)
        e[i] = step[i]
        # Fourth order: errors of rounding are about 1e-12, those of the fourth power of the step smaller still.
        near, far = density(values + e) - density(values - e), density(values + 2 * e) - density(values - 2 * e)
        difference = float((8 * near - far) / (12 * step[i]))
        assert abs(difference - float(gradient[i])) < 1e-7 * max(abs(difference), 1.0), i


def test_data_are_interpolated_without_noise(data):
    x, y, _ = data
    found = exact_regression(network(), x, y, 0.0).predict(x)
    assert float((found.mean - y).abs().max()) < 1e-10 and float(found.variance.abs().max()) < 1e-10


def test_jitter_is_reported(data):
    x, y, _ = data
    twice, values = torch.cat([x, x, x]), torch.cat([y, y, y])
    with pytest.warns(ConversionWarning, match="was added to its diagonal"):
        posterior = exact_regression(network(), twice, values, 0.0)
    assert posterior.jitter > 0
    kernel = network().nngp(twice)
    again = torch.linalg.cholesky(kernel + posterior.jitter * torch.eye(len(twice), dtype=torch.float64))
    assert torch.equal(again, posterior.factor.lower)
    assert posterior.jitter <= 1e-6 * float(kernel.diagonal().mean())


def test_matrices_that_jitter_cannot_help():
    with pytest.raises(KernelError, match="smallest eigenvalue -1"):
        factorize(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))
    with pytest.raises(KernelError, match="not positive definite"):
        factorize(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(KernelError, match="not finite"):
        factorize(torch.tensor([[float("nan")]]))
    with pytest.raises(ShapeError, match=r"\(n, n\)"):
        factorize(torch.ones(2, 3))
    with pytest.raises(SettingsError, match="max_jitter"):
        factorize(torch.eye(2), max_jitter=-1.0)


def test_bad_data(data):
    x, y, new = data
    with pytest.raises(ShapeError, match="one value for each of 12"):
        exact_regression(network(), x, y[:3], NOISE)
    with pytest.raises(ShapeError, match="one dtype"):
        exact_regression(network(), x, y.float(), NOISE)
    with pytest.raises(DataError, match="position 2"):
        exact_regression(network(), x, y.index_fill(0, torch.tensor([2]), float("inf")), NOISE)
    with pytest.raises(DataError, match="row 1"):
        exact_regression(network(), x.index_fill(0, torch.tensor([1]), float("nan")), y, NOISE)
    with pytest.raises(SettingsError, match="noise_variance"):
        exact_regression(network(), x, y, -1.0)
    with pytest.raises(SettingsError, match="nngp"):
        exact_regression(network(), x, y, NOISE, covariance="rbf")
