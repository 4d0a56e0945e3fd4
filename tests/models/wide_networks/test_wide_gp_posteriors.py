"""Samplers and evidence estimators on Gaussian processes of wide networks, against quadrature."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import t
from torch import nn

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    ClassificationModel,
    PyroKernel,
    RegressionModel,
    nngp_posterior,
)

CHAINS, DRAWS = 32, 40


def network(weight=1.7, bias=0.0, hidden=True):
    layers = (nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)) if hidden else (nn.Linear(2, 1),)
    return infinite_width(nn.Sequential(*layers), weight_variance=weight, bias_variance=bias)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(8, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def regression(data):
    """The model with its draws, and logarithms of two variances on a grid with their joint densities."""
    x, y = data
    target = bk.Target.from_pyro(RegressionModel(network()), x, y, compile=False)
    draws = bk.sample(target, num_chains=CHAINS, num_warmup=200, num_samples=DRAWS, seed=0, progress=False)
    # Of a network with one hidden layer of ReLU and no bias the covariance grows as the square of the variance.
    values, vectors = torch.linalg.eigh(network(weight=1.0).nngp(x))
    power = (vectors.mT @ y).square()
    log_weight, log_noise = torch.meshgrid(*(torch.linspace(-9.0, 9.0, 721, dtype=torch.float64),) * 2, indexing="ij")
    spectrum = (2 * log_weight).exp()[..., None] * values + log_noise.exp()[..., None]
    likelihood = -0.5 * (power / spectrum + spectrum.log() + math.log(2 * math.pi)).sum(-1)
    prior = -0.5 * ((log_weight - math.log(1.7)).square() + (log_noise - math.log(0.1)).square()) - math.log(
        2 * math.pi
    )
    return target, draws, log_weight, log_noise, likelihood + prior


def z_of_chains(values, exact):
    """How far the mean over chains, each given by its own mean, is from the answer, on the normal scale."""
    means = values.reshape(CHAINS, -1).mean(1)
    error = float(means.std()) / math.sqrt(CHAINS)
    off = (float(means.mean()) - exact) / error
    return math.copysign(float(-torch.special.ndtri(torch.tensor(t.sf(abs(off), CHAINS - 1)).double())), off)


@pytest.mark.long
def test_evidence_of_a_regression(regression, limit):
    target, draws, _, _, joint = regression
    exact = float(joint.flatten().logsumexp(0)) + 2 * math.log(18 / 720)
    found = evidence.bridge_sampling(target, draws, seed=1)
    assert found.trusted and found.standard_error < 0.05
    assert abs(found.log_evidence - exact) < limit() * found.standard_error
    # A mutation: without the determinant, as if the noise were known, the answer is another.
    assert abs(found.log_evidence - exact - 0.5) > limit() * found.standard_error


def test_posterior_of_variances(regression, limit):
    _, draws, log_weight, log_noise, joint = regression
    weights = joint.flatten().softmax(0)
    values = draws.values()
    cases = ((values["kernel.weight_variance"].log(), log_weight), (values["noise_variance"].log(), log_noise))
    for found, grid in cases:
        mean = float((weights * grid.flatten()).sum())
        spread = float((weights * (grid.flatten() - mean).square()).sum())
        assert abs(z_of_chains(found, mean)) < limit(4)
        assert abs(z_of_chains((found - mean).square(), spread)) < limit(4)
        # A mutation: without the Jacobian of the logarithm the density would be tilted.
        tilted = (joint - log_noise).flatten().softmax(0) @ log_noise.flatten()
    assert abs(z_of_chains(values["noise_variance"].log(), float(tilted))) > limit()


def test_predictions_of_a_regression(data, regression, limit):
    x, y = data
    target, draws, log_weight, log_noise, joint = regression
    new = torch.tensor([[0.5, -0.5], [1.5, 1.0]], dtype=torch.float64)
    values = {name: value.reshape(CHAINS, DRAWS) for name, value in draws.values().items()}
    found = RegressionModel(network()).predict(values, x, y, new)
    weights = joint.flatten().softmax(0)
    likely = weights > 1e-6
    chosen = torch.stack([log_weight.flatten(), log_noise.flatten()])[:, likely]
    unit, cross = network(weight=1.0).nngp(x), network(weight=1.0).nngp(x, new)
    ratio = (chosen[1] - 2 * chosen[0]).exp()
    values, vectors = torch.linalg.eigh(unit)
    exact = ((vectors.mT @ y) / (values + ratio[:, None])) @ vectors.mT @ cross
    mean = weights[likely] @ exact / weights[likely].sum()
    for i in range(2):
        assert abs(z_of_chains(found.means[:, i], float(mean[i]))) < limit(2)


@pytest.mark.calibration
@pytest.mark.parametrize("num_classes", [2, 3])
def test_classification_against_quadrature(num_classes, limit):
    x = torch.tensor([[1.0, 0.3], [-0.4, 1.2], [0.2, -1.5]], dtype=torch.float64)[: 3 if num_classes == 2 else 2]
    labels = torch.tensor([1, 0, 1]) if num_classes == 2 else torch.tensor([2, 0])
    new = torch.tensor([[0.7, 0.7]], dtype=torch.float64)
    kernel = network(weight=2.5, bias=0.2, hidden=num_classes == 2)  # the other is quickly traced
    model = ClassificationModel(PyroKernel(kernel), num_classes, jitter=0.0)
    target = bk.Target.from_pyro(model, x, labels, compile=False)
    nodes, weights = (torch.tensor(v) for v in np.polynomial.hermite_e.hermegauss(30 if target.dim == 3 else 8))
    white = torch.tensor(list(itertools.product(nodes.tolist(), repeat=target.dim)), dtype=torch.float64)
    mass = torch.stack([v.log() for v in weights]) - 0.5 * math.log(2 * math.pi)
    log_mass = torch.cartesian_prod(*(mass,) * target.dim).sum(1)
    shape = (-1, len(x)) if num_classes == 2 else (-1, num_classes, len(x))
    function = white.reshape(shape) @ torch.linalg.cholesky(kernel.nngp(x)).mT
    if num_classes == 2:
        likelihood = torch.nn.functional.logsigmoid((2 * labels - 1) * function).sum(1)
    else:
        likelihood = function.log_softmax(1)[:, labels, torch.arange(len(x))].sum(1)
    joint = log_mass + likelihood
    exact = float(joint.logsumexp(0))

    draws = bk.sample(target, num_chains=CHAINS, num_warmup=200, num_samples=DRAWS, seed=2, progress=False)
    found = evidence.bridge_sampling(target, draws, seed=3)
    assert abs(found.log_evidence - exact) < limit() * found.standard_error
    # The function at a new input: a mean over the posterior of its mean given the values at the data.
    slopes = torch.linalg.solve(kernel.nngp(x), kernel.nngp(x, new))[:, 0]
    answer = float(joint.softmax(0) @ (function @ slopes).reshape(len(function), -1)[:, -1])
    laws = model.predict({"white": draws.values()["white"]}, x, new)
    latent = laws.means.reshape(CHAINS, DRAWS, -1)[..., -1]
    assert abs(z_of_chains(latent, answer)) < limit()
    # A mutation: the opposite labels.
    assert abs(z_of_chains(latent, -answer)) > limit()


def test_the_observed_density_is_that_of_depth_selection(data):
    """The density that models observe is the one that depth selection compares."""
    x, y = data
    exact = float(nngp_posterior(network(), x, y, 0.1).log_evidence)
    target = bk.Target.from_pyro(RegressionModel(PyroKernel(network())), x, y, compile=False)
    u = target.unconstrain({"noise_variance": torch.tensor([0.1], dtype=torch.float64)})
    assert abs(float(target.log_likelihood(u)[0]) - exact) < 1e-10
