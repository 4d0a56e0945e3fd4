import inspect
import math

import pytest
import torch
from torch import nn

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.curvature import (
    BernoulliOutputs,
    Categorical,
    GaussianOutputs,
    LaplacePosterior,
    Poisson,
    empirical_fisher,
    find_parameter_mode,
    laplace_posterior,
)
from bayeskit.inference.curvature._laplace import System

DOUBLE = torch.float64
ANYWHERE = 1e9  # a tolerance for tests of formulas that hold away from modes, too


def perceptron(*sizes):
    layers = []
    for before, after in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(before, after, dtype=DOUBLE), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    size = sum(p.numel() for p in module.parameters())
    weights = torch.sin(1.7 * torch.arange(1, size + 1, dtype=DOUBLE))
    nn.utils.vector_to_parameters(weights, module.parameters())
    return module


def inputs(n, features, phase=0.0):
    return 2 * torch.cos(1.3 * torch.arange(n * features, dtype=DOUBLE) ** 2 + phase).reshape(n, features)


WAVE = [1.2092974268256818, 0.7152030239650974, 0.5081705305643898, 1.1067857788992939]
WAVE = torch.tensor([*WAVE, -0.41227313175402724, 0.8048698119762343], dtype=DOUBLE).unsqueeze(1)
CLASSES = torch.tensor([0, 0, 1, 2, 1])

# Of laplace-torch 0.3, all weights, full Gauss-Newton matrix, prior precision 0.7; see benchmarks/wide_laplace.py.
PEER = {
    "regression": {
        "data": (perceptron(1, 3, 1), GaussianOutputs(0.09), inputs(6, 1), WAVE),
        "diagonal": [3.3946824743743544, 47.382199106220526, 1.8119034592051966, 5.597577944414011, 27.20857836706079]
        + [2.7170819911819555, 46.26081153683756, 19.49501799917354, 48.06482934805408, 67.36666666666666],
        "norm": 230.71036944410517,
        "mean": [[-1.665777635020885], [-0.47477665926695056]],
        "covariance": [[[0.04386556600287521]], [[0.07854135010678491]]],
        "log_evidence": -164.34605042062532,
    },
    "classification": {
        "data": (perceptron(2, 2, 3), Categorical(), inputs(5, 2), CLASSES),
        "diagonal": [0.7573518433049334, 0.7815305779632404, 0.9654808161405705, 1.1655386000536772, 0.821929478561898]
        + [1.3781318842551937, 1.1555889471630238, 1.1644854884437752, 1.2422854322527828, 1.1609597139739483]
        + [1.351166939315954, 1.3289907872384372, 1.5341080129367106, 1.484372073925421, 1.8065144918210698],
        "norm": 5.96024805404855,
        "mean": [
            [-1.5694317367037791, 0.37077207565899384, -0.7761360117036209],
            [-1.4488101444686643, 0.24400085319246223, -0.6516332264352727],
        ],
        "covariance": [
            [
                [2.4391117949150134, 0.8714804252470939, 0.9083552564418839],
                [0.871480425247094, 2.2638211674749043, 1.1011764950944043],
                [0.9083552564418839, 1.1011764950944043, 2.207583532185257],
            ],
            [
                [2.3478846817663186, 0.7496937257188354, 0.956075123253235],
                [0.7496937257188354, 1.968606398170783, 0.9838595037419438],
                [0.9560751232532348, 0.9838595037419439, 2.112107176947414],
            ],
        ],
        "log_evidence": -13.723432445848172,
    },
}


@pytest.mark.parametrize("name", PEER)
def test_another_implementation_finds_the_same(name):
    peer = PEER[name]
    module, likelihood, x, y = peer["data"]
    posterior = laplace_posterior(module, likelihood, x, y, 0.7, tolerance=ANYWHERE)
    precision = posterior.precision()
    expected = torch.tensor(peer["diagonal"], dtype=DOUBLE)
    torch.testing.assert_close(precision.diagonal(), expected, rtol=1e-13, atol=0)
    assert abs(float(precision.norm()) / peer["norm"] - 1) < 1e-13
    found = posterior.predict(inputs(2, x.shape[1], phase=0.5))
    torch.testing.assert_close(found.mean, torch.tensor(peer["mean"], dtype=DOUBLE), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.covariance, torch.tensor(peer["covariance"], dtype=DOUBLE), rtol=1e-11, atol=0)
    assert abs(posterior.log_evidence - peer["log_evidence"]) < 1e-11


@pytest.mark.parametrize("broken", ["curvature", "log determinant"])
def test_a_wrong_posterior_is_noticed(broken, monkeypatch):
    if broken == "curvature":
        monkeypatch.setitem(
            inspect.unwrap(laplace_posterior).__globals__,
            "gauss_newton_of",
            lambda n, f, x, y: empirical_fisher(n.module, f, x, y),
        )
    else:
        monkeypatch.setattr(
            System, "log_determinant", property(lambda self: -float(self.factor.diagonal().log().sum()))
        )
    with pytest.raises(AssertionError):
        test_another_implementation_finds_the_same("regression")


def features(x):
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)


@pytest.mark.parametrize("n", [2, 9])  # fewer and more data than parameters
def test_linear_regression_is_exact(n):
    x = inputs(n, 3)
    y, prior = torch.sin(x[:, 0]), torch.tensor([0.7, 2.0, 0.1, 1.3], dtype=DOUBLE)
    module = find_parameter_mode(nn.Linear(3, 1, dtype=DOUBLE), GaussianOutputs(0.2), x, y, prior)
    posterior = laplace_posterior(module, GaussianOutputs(0.2), x, y, prior)
    assert (posterior.system.basis is not None) == (n == 2)
    design = features(x)
    precision = design.mT @ design / 0.2 + torch.diag(prior)
    torch.testing.assert_close(posterior.precision(), precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(posterior.covariance(), precision.inverse(), rtol=1e-10, atol=1e-10)
    mean = torch.linalg.solve(precision, design.mT @ y / 0.2)
    torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=1e-7)
    assert posterior.distance < 1e-6
    marginal = design / prior @ design.mT + 0.2 * torch.eye(n, dtype=DOUBLE)
    exact = torch.distributions.MultivariateNormal(torch.zeros(n, dtype=DOUBLE), marginal).log_prob(y)
    assert abs(posterior.log_evidence - float(exact)) < 1e-9
    new = inputs(3, 3, phase=0.3)
    variance = torch.einsum("np,pq,nq->n", features(new), precision.inverse(), features(new))
    torch.testing.assert_close(posterior.predict(new).covariance.flatten(), variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("width", [2, 30])
def test_dual_agrees_with_dense_algebra(width):
    module, x, y = perceptron(2, width, 3), inputs(8, 2), torch.arange(8) % 3
    size = sum(p.numel() for p in module.parameters())
    prior = torch.linspace(0.5, 2, size, dtype=DOUBLE)
    posterior = laplace_posterior(module, Categorical(), x, y, prior, tolerance=ANYWHERE)
    assert (posterior.system.basis is not None) == (size > 24)
    precision = posterior.precision()
    torch.testing.assert_close(posterior.covariance(), precision.inverse(), rtol=1e-9, atol=1e-10)
    misfit = float((prior * posterior.mean.square()).sum())
    expected = posterior.log_likelihood - 0.5 * (misfit + float(precision.logdet() - prior.log().sum()))
    assert abs(posterior.log_evidence - expected) < 1e-10


def test_variances_keep_their_digits_where_noise_is_small():
    module, x = perceptron(2, 30, 1), inputs(3, 2)
    for variance in (1e-4, 1e-8, 1e-12):
        posterior = laplace_posterior(module, GaussianOutputs(variance), x, torch.sin(x[:, 0]), 1.0, tolerance=1e300)
        rows = posterior.curvature.network.jacobian(x).squeeze(1)
        # K - K (K + v I)^{-1} K, without its difference of large numbers.
        exact = variance * (1 - variance * (rows @ rows.mT + variance * torch.eye(3)).inverse().diagonal())
        torch.testing.assert_close(posterior.predict(x).covariance.flatten(), exact, rtol=1e-11, atol=0)


@pytest.mark.parametrize("width", [1, 6])
def test_draws_have_the_covariance(width, limit):
    module, x = perceptron(1, width, 1), inputs(5, 1)
    posterior = laplace_posterior(module, GaussianOutputs(0.5), x, torch.sin(x), 0.7, tolerance=ANYWHERE)
    n, p = 4000, len(posterior.mean)
    assert (posterior.system.basis is not None) == (width == 6)
    draws = posterior.sample(n, seed=1)
    # Whitened by the exact covariance, all are independent standard normal variables.
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(posterior.covariance()), (draws - posterior.mean).mT, upper=False
    )
    z = (white @ white.mT / n - torch.eye(p)) * math.sqrt(n) / (1 + torch.eye(p)).sqrt()
    assert float(z.abs().max()) < limit(p * (p + 1) // 2)
    assert float(white.mean(1).abs().max()) * math.sqrt(n) < limit(p)
    assert torch.equal(posterior.sample(3, seed=2), posterior.sample(3, seed=2))


def test_evidence_of_one_rate_approaches_the_integral():
    # One parameter: quadrature is exact, and the approximation has an error of order 1 / n.
    errors = []
    for n in (20, 80):
        x, y = torch.ones(n, 1, dtype=DOUBLE), torch.arange(n, dtype=DOUBLE) % 5
        module = find_parameter_mode(nn.Linear(1, 1, bias=False, dtype=DOUBLE), Poisson(), x, y, 1.0)
        posterior = laplace_posterior(module, Poisson(), x, y, 1.0)
        grid = torch.linspace(-2, 3, 20_001, dtype=DOUBLE)
        log_joint = y.sum() * grid - n * grid.exp() - torch.lgamma(y + 1).sum() - 0.5 * grid.square()
        exact = (log_joint - 0.5 * math.log(2 * math.pi)).logsumexp(0) + math.log(float(grid[1] - grid[0]))
        errors.append(abs(posterior.log_evidence - float(exact)))
    assert errors[0] < 0.01 and 3 < errors[0] / errors[1] < 5


def test_modes_of_networks_are_found():
    x = inputs(30, 2)
    y = (torch.sin(x.sum(1)) > 0).to(DOUBLE)
    module = perceptron(2, 5, 1)
    before = nn.utils.parameters_to_vector(module.parameters()).clone()
    mode = find_parameter_mode(module, BernoulliOutputs(), x, y, 0.5)
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), before)
    posterior = laplace_posterior(mode, BernoulliOutputs(), x, y, 0.5, tolerance=1e-4)
    assert isinstance(posterior, LaplacePosterior)
    assert posterior.log_likelihood > -0.5 * 30 * math.log(2)


def test_away_from_a_mode_there_is_none():
    module, likelihood, x, y = PEER["regression"]["data"]
    with pytest.raises(ModelError, match="not at a mode.*17.9 posterior standard deviations.*find_parameter_mode"):
        laplace_posterior(module, likelihood, x, y, 0.7)
    mode = find_parameter_mode(module, likelihood, x, y, 0.7)
    assert laplace_posterior(mode, likelihood, x, y, 0.7).distance < 1e-3
    with pytest.raises(ModelError, match="not at a mode"):
        laplace_posterior(mode, likelihood, x, y, 7.0)


def test_an_indefinite_precision_is_refused(monkeypatch):
    module, likelihood, x, y = PEER["regression"]["data"]
    monkeypatch.setattr(GaussianOutputs, "natural", False)
    monkeypatch.setattr(GaussianOutputs, "hessian", lambda self, f, y: -self.fisher(f))
    with pytest.raises(ModelError, match="indefinite"):  # through the dual
        laplace_posterior(module, likelihood, x, y, 0.7, tolerance=ANYWHERE)
    x, y = inputs(20, 1), torch.sin(inputs(20, 1))
    with pytest.raises(ModelError, match="not positive definite.*prior_precision"):
        laplace_posterior(module, likelihood, x, y, 0.7, tolerance=ANYWHERE)


def test_the_distance_is_that_of_a_newton_step():
    x = inputs(9, 3)
    y = torch.sin(x[:, 0])
    module = nn.Linear(3, 1, dtype=DOUBLE)
    nn.init.constant_(module.weight, 1.0)
    nn.init.constant_(module.bias, 1.0)
    posterior = laplace_posterior(module, GaussianOutputs(0.2), x, y, 0.7, tolerance=ANYWHERE)
    precision = posterior.precision()
    step = torch.linalg.solve(precision, features(x).mT @ y / 0.2) - 1
    assert abs(posterior.distance - math.sqrt(float(step @ precision @ step))) < 1e-10 * posterior.distance


def test_bad_settings():
    module, likelihood, x, y = PEER["regression"]["data"]
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(SettingsError, match="prior_precision"):
            laplace_posterior(module, likelihood, x, y, wrong)
    with pytest.raises(ShapeError, match=r"\(10,\), not \(3,\)"):
        find_parameter_mode(module, likelihood, x, y, torch.ones(3))
    with pytest.raises(SettingsError, match="tolerance"):
        laplace_posterior(module, likelihood, x, y, 1.0, tolerance=0.0)
    with pytest.raises(ShapeError, match="y must be"):
        find_parameter_mode(module, likelihood, x, y[:3], 1.0)
    posterior = laplace_posterior(module, likelihood, x, y, 1.0, tolerance=ANYWHERE)
    with pytest.raises(DataError, match="not finite"):
        posterior.predict(x / 0)
    with pytest.raises(SettingsError, match="num_draws"):
        posterior.sample(0, seed=0)
