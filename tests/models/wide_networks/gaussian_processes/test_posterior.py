"""Posteriors of networks of infinite width: densities, gradients with respect to variances, jitter, bad data."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import nn

from bayeskit.errors import DataError, JitterWarning, KernelError, SettingsError, ShapeError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import nngp_posterior, ntk_posterior
from bayeskit.models.wide_networks.gaussian_processes._factors import cholesky, spectrum

NOISE = 0.05
POSTERIOR = {"nngp": nngp_posterior, "ntk": ntk_posterior}


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
    posterior = POSTERIOR[covariance](kernel, x, y, NOISE)
    prior = getattr(kernel, covariance)
    total = prior(x).numpy() + NOISE * np.eye(len(x))
    density = multivariate_normal(np.zeros(len(x)), total).logpdf(y.numpy())
    assert abs(float(posterior.log_evidence) - density) < 1e-10
    # A mutation: without its noise the density is another.
    assert abs(multivariate_normal(np.zeros(len(x)), prior(x).numpy()).logpdf(y.numpy()) - density) > 0.1
    cross = prior(x, new).numpy()
    assert np.abs(posterior.mean(new).numpy() - cross.T @ np.linalg.solve(total, y.numpy())).max() < 1e-10
    left = prior(new).numpy() - cross.T @ np.linalg.solve(total, cross)
    assert np.abs(posterior.covariance(new).numpy() - left).max() < 1e-10
    assert np.abs(posterior.variance(new).numpy() - np.diag(left)).max() < 1e-10
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
        return POSTERIOR[covariance](changed, x, y, values[6]).log_evidence

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
    found = nngp_posterior(network(), x, y)
    assert float((found.mean(x) - y).abs().max()) < 1e-10 and float(found.variance(x).abs().max()) < 1e-10


@pytest.mark.parametrize("decompose", [cholesky, spectrum])
def test_both_decompositions_need_and_report_the_same_jitter(data, decompose):
    x = data[0]
    matrix = network().nngp(torch.cat([x, x, x]))
    identity = torch.eye(len(matrix), dtype=torch.float64)
    least = 10 * torch.finfo(torch.float64).eps * float(torch.linalg.eigvalsh(matrix)[-1])
    with pytest.warns(JitterWarning, match="1e-1. was added"):
        found = decompose(matrix, 0.0, "NNGP")
    assert found.jitter in (10.0 ** math.ceil(math.log10(least)), 10.0 ** (math.ceil(math.log10(least)) + 1))
    if decompose is cholesky:
        product = found.lower @ found.lower.mT
    else:
        product = found.eigenvectors @ (found.eigenvalues[:, None] * found.eigenvectors.mT)
    # The product of the factors is the matrix with the jitter that is reported, up to rounding.
    added = (product - matrix).diagonal().mean()
    assert abs(float(added) - found.jitter) < least
    assert decompose(matrix, 0.1, "NNGP").jitter == 0.0
    assert decompose(matrix + 2 * found.jitter * identity, 0.0, "NNGP").jitter == 0.0


@pytest.mark.parametrize("decompose", [cholesky, spectrum])
def test_matrices_that_jitter_cannot_help(decompose):
    with pytest.raises(KernelError, match="smallest eigenvalue is -1"):
        decompose(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64), 0.0, "NNGP")
    with pytest.raises(KernelError, match="not positive definite"):
        decompose(torch.zeros(2, 2, dtype=torch.float64), 0.0, "NNGP")
    with pytest.raises(DataError, match="not finite"):
        decompose(torch.tensor([[float("nan")]]), 0.0, "NNGP")
    with pytest.raises(SettingsError, match="max_jitter"):
        decompose(torch.ones(2, 2), 0.0, "NNGP", max_jitter=-1.0)


def test_bad_data(data):
    x, y, _ = data
    with pytest.raises(ShapeError, match="one row for each of the 12"):
        nngp_posterior(network(), x, y[:3], NOISE)
    with pytest.raises(DataError, match="convert one"):
        nngp_posterior(network(), x, y.float(), NOISE)
    with pytest.raises(DataError, match="row 2"):
        nngp_posterior(network(), x, y.index_fill(0, torch.tensor([2]), float("inf")), NOISE)
    with pytest.raises(DataError, match="row 1"):
        nngp_posterior(network(), x.index_fill(0, torch.tensor([1]), float("nan")), y, NOISE)
    for noise in (-1.0, torch.tensor(-1.0), torch.ones(2)):
        with pytest.raises(SettingsError, match="noise_variance"):
            nngp_posterior(network(), x, y, noise)
