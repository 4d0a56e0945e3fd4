"""Means, variances and correlations of awkward targets, each against its exact value in Monte Carlo standard errors."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.special import digamma, polygamma

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit.errors import SamplingWarning


def largest_score(x, mean, covariance):
    """Largest |z| of all means and second moments of ``x``, ``(chains, draws, d)``, and how many there are."""
    centred = (x - mean).movedim(-1, 0)
    rows, columns = torch.triu_indices(len(mean), len(mean))
    products = centred[rows] * centred[columns]
    first = centred.mean((1, 2)) / mean_error(centred)
    second = (products.mean((1, 2)) - covariance[rows, columns]) / mean_error(products)
    scores = torch.cat([first, second]).abs()
    return float(scores.max()), len(scores)


def check(x, mean, covariance, limit):
    score, count = largest_score(x, mean, covariance)
    assert score < limit(count), score


def mixing(d, seed):
    """A well-conditioned matrix that ties all coordinates together."""
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(d, dtype=torch.float64) + 0.15 * torch.randn(d, d, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def skewed_ten():
    """Ten logarithms of Gamma variables of shapes 0.6 to 6, mixed: skewed and correlated; with mean and covariance."""
    shape = torch.linspace(0.6, 6.0, 10, dtype=torch.float64)
    matrix = mixing(10, 0)
    inverse, log_volume = torch.linalg.inv(matrix), float(torch.linalg.slogdet(matrix)[1])

    def log_density(u):
        v = u @ inverse.T
        return (shape * v - v.exp() - torch.lgamma(shape)).sum(-1) - log_volume

    target = bk.Target.from_functions(log_density, lambda u: 0 * u[..., 0], 10)
    mean = matrix @ torch.as_tensor(digamma(shape.numpy()))
    covariance = matrix @ torch.diag(torch.as_tensor(polygamma(1, shape.numpy()))) @ matrix.T
    return target, mean, covariance


@pytest.mark.calibration
@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_a_skewed_correlated_target_in_ten_dimensions(skewed_ten, limit, metric):
    target, mean, covariance = skewed_ten
    draws = bk.sample(target, 256, 200, 150, seed=1, metric=metric, progress=False)
    check(draws.unconstrained, mean, covariance, limit)


@pytest.mark.calibration
def test_a_wrong_jacobian_is_noticed(skewed_ten, limit):
    """The mutation: the term linear in the logarithm, which the change of variables brings, a twentieth too small."""
    target, mean, covariance = skewed_ten
    inverse = torch.linalg.inv(mixing(10, 0))
    wrong = bk.Target.from_functions(
        lambda u: target.log_prior(u) - 0.05 * (u @ inverse.T).sum(-1), lambda u: 0 * u[..., 0], 10
    )
    draws = bk.sample(wrong, 256, 200, 150, seed=1, progress=False)
    score, count = largest_score(draws.unconstrained, mean, covariance)
    assert score > limit(count)


@pytest.mark.calibration
def test_an_ill_conditioned_normal_in_a_hundred_dimensions(limit):
    """Standard deviations from 0.01 to 1 along random axes: condition number 10,000."""
    generator = torch.Generator().manual_seed(3)
    axes, _ = torch.linalg.qr(torch.randn(100, 100, generator=generator, dtype=torch.float64))
    covariance = axes @ torch.diag(torch.logspace(-4, 0, 100, dtype=torch.float64)) @ axes.T
    precision = torch.linalg.inv(covariance)
    mean = torch.linspace(-1, 1, 100, dtype=torch.float64)
    target = bk.Target.from_functions(
        lambda u: -0.5 * (((u - mean) @ precision) * (u - mean)).sum(-1), lambda u: 0 * u[..., 0], 100
    )
    draws = bk.sample(target, 32, 300, 150, seed=1, progress=False)
    some = axes[:, ::3]  # all pairs of a third of the axes, the shortest and the longest among them
    check(draws.unconstrained @ some, mean @ some, some.T @ covariance @ some, limit)


def funnel(centred):
    """Neal's funnel: x given v is normal with variance exp(v)."""

    def model(y):
        v = pyro.sample("v", dist.Normal(0.0, 3.0))
        with pyro.plate("nine", 9):
            if centred:
                pyro.sample("x", dist.Normal(0.0, (0.5 * v).exp()))
            else:
                z = pyro.sample("z", dist.Normal(0.0, 1.0))
                pyro.deterministic("x", z * (0.5 * v).exp())
        pyro.sample("y", dist.Normal(torch.zeros_like(y), 1.0), obs=y)  # says nothing about the funnel

    return bk.Target.from_pyro(model, torch.zeros((), dtype=torch.float64))


@pytest.mark.calibration
def test_a_funnel_without_centres(limit):
    """The logarithm of |x| is v / 2 + log |z|, whose moments are known."""
    draws = bk.sample(funnel(centred=False), 128, 200, 250, seed=2, progress=False)
    values = draws.values()
    v, size = values["v"].unsqueeze(-1), values["x"].abs().log()
    mean = torch.tensor([0.0] + [-0.5 * (np.euler_gamma + math.log(2))] * 9, dtype=torch.float64)
    covariance = torch.full((10, 10), 9 / 4, dtype=torch.float64)
    covariance[0, :] = covariance[:, 0] = 9 / 2
    covariance[0, 0] = 9.0
    covariance[range(1, 10), range(1, 10)] += math.pi**2 / 8
    check(torch.cat([v, size], -1), mean, covariance, limit)


@pytest.mark.calibration
def test_a_centred_funnel_flags_itself():
    with pytest.warns(SamplingWarning, match="diverged|disagree"):
        bk.sample(funnel(centred=True), 4, 100, 200, seed=2, reparameterize=False, progress=False)


@pytest.mark.calibration
def test_a_posterior_on_the_simplex(limit):
    """Dirichlet prior, multinomial counts: the posterior is Dirichlet."""
    prior, counts = torch.tensor([0.5, 1.0, 2.0, 1.5]), torch.tensor([0.0, 3.0, 11.0, 1.0])
    prior, counts = prior.double(), counts.double()

    def model(y):
        p = pyro.sample("p", dist.Dirichlet(prior))
        pyro.sample("counts", dist.Multinomial(int(y.sum()), p), obs=y)

    draws = bk.sample(bk.Target.from_pyro(model, counts), 128, 200, 250, seed=4, progress=False)
    alpha = prior + counts
    total = alpha.sum()
    mean = alpha / total
    covariance = (torch.diag(mean) - torch.outer(mean, mean)) / (total + 1)
    # The last coordinate is one minus the others.
    check(draws.values()["p"][..., :3], mean[:3], covariance[:3, :3], limit)


@pytest.mark.calibration
def test_a_correlation_matrix_with_a_tilted_prior(limit):
    """LKJ(1.2) times the determinant to the power 1.3 is LKJ(2.5); a correlation's variance is 1 / (2 eta + d - 1)."""

    def model(y):
        factor = pyro.sample("factor", dist.LKJCholesky(4, torch.tensor(1.2, dtype=torch.float64)))
        pyro.factor("tilt", 1.3 * 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1))
        pyro.sample("y", dist.Normal(torch.zeros_like(y), 1.0), obs=y)

    target = bk.Target.from_pyro(model, torch.zeros((), dtype=torch.float64))
    factor = bk.sample(target, 128, 200, 250, seed=5, progress=False).values()["factor"]
    matrix = factor @ factor.mT
    rows, columns = torch.tril_indices(4, 4, offset=-1)
    correlations = matrix[..., rows, columns]
    variance = 1 / (2 * 2.5 + 4 - 1)
    check(correlations, torch.zeros(6).double(), variance * torch.eye(6).double(), limit)


@pytest.mark.calibration
def test_a_correlation_given_data_against_quadrature(limit):
    generator = torch.Generator().manual_seed(6)
    noise = torch.randn(25, 2, generator=generator, dtype=torch.float64)
    data = torch.stack([noise[:, 0], 0.7 * noise[:, 0] + math.sqrt(1 - 0.49) * noise[:, 1]], -1)

    def model(y):
        factor = pyro.sample("factor", dist.LKJCholesky(2, torch.tensor(1.5, dtype=torch.float64)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(2).double(), scale_tril=factor), obs=y)

    factor = bk.sample(bk.Target.from_pyro(model, data), 128, 200, 250, seed=7, progress=False).values()["factor"]
    squares, cross = float(data.square().sum()), float((data[:, 0] * data[:, 1]).sum())

    def density(r):
        one = 1 - r * r
        return math.exp(0.5 * math.log(one) - 12.5 * math.log(one) - 0.5 * (squares - 2 * r * cross) / one + 20)

    moments = [quad(lambda r, k=k: r**k * density(r), -1, 1, epsabs=0, epsrel=1e-10)[0] for k in range(3)]
    mean, second = moments[1] / moments[0], moments[2] / moments[0]
    mean, variance = torch.tensor([mean]).double(), torch.tensor([[second - mean**2]]).double()
    check(factor[..., 1, 0].unsqueeze(-1), mean, variance, limit)
