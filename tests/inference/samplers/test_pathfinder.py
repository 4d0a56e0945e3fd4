"""Starts: normal approximations along searches, and where chains go by them."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chi2, norm

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import mean_error
from bayeskit.inference._optimize import lbfgs_path
from bayeskit.inference.samplers._starts import pathfinder

DOUBLE = torch.float64
FAILURE_RATE = 1e-5


def normal_target(mean, covariance):
    precision, d = torch.linalg.inv(covariance), len(mean)
    constant = -0.5 * torch.logdet(2 * math.pi * covariance)

    def log_likelihood(u):
        return constant - 0.5 * (((u - mean) @ precision) * (u - mean)).sum(-1)

    return bk.Target.from_functions(lambda u: 0 * u.sum(-1), log_likelihood, d)


def test_chains_come_home_from_far_away_whatever_the_units():
    """On a normal posterior the last approximation is exact: starts are draws from it, and the covariance is known."""
    generator = new_generator(5)
    d, n = 6, 40
    scales = torch.tensor([1e-4, 1e-2, 1.0, 10.0, 1e3, 1e4], dtype=DOUBLE)
    root = torch.randn(d, d, generator=generator, dtype=DOUBLE)
    correlation = root @ root.T
    correlation = correlation / correlation.diagonal().sqrt().outer(correlation.diagonal().sqrt())
    covariance = scales[:, None] * correlation * scales
    mean = 50 * scales
    target = normal_target(mean, covariance)
    points = 1000 * scales * torch.randn(n, d, generator=generator, dtype=DOUBLE)
    start = pathfinder(target, points, torch.ones(n, dtype=DOUBLE), 300 * scales, generator)
    distance = ((start.position - mean) @ torch.linalg.inv(covariance) * (start.position - mean)).sum(-1)
    # Medians of a few draws: none lies further out than a draw may, and they do not all lie at the top.
    low, high = chi2.ppf([FAILURE_RATE / (2 * n), 1 - FAILURE_RATE / (2 * n)], d)
    assert low < float(distance.min()) and float(distance.max()) < high
    assert len(start.position.unique(dim=0)) == n
    assert start.covariance is not None
    # Curvature of the directions that a climb took last: within a factor of two on the whole.
    whitened = torch.linalg.solve(covariance, start.covariance)
    spread = torch.linalg.eigvals(whitened).real
    assert 0.2 < float(spread.min()) and float(spread.max()) < 5


def test_chains_stay_in_the_mode_that_they_are_near():
    def log_likelihood(u):
        return torch.logaddexp(-0.5 * (u - 30).square().sum(-1), -0.5 * (u + 30).square().sum(-1) - 3)

    target = bk.Target.from_functions(lambda u: 0 * u.sum(-1), log_likelihood, 2)
    points = torch.tensor([[25.0, 40.0], [-20.0, -33.0], [31.0, 12.0], [-40.0, -40.0]], dtype=DOUBLE)
    scale = torch.full((2,), 10.0, dtype=DOUBLE)
    start = pathfinder(target, points, torch.ones(4, dtype=DOUBLE), scale, new_generator(0))
    assert torch.equal(start.position.sign(), points.sign())
    assert float((start.position.abs() - 30).abs().max()) < 6


@pytest.mark.parametrize("low", [40.0, 10.0])
def test_chains_leave_a_hill_on_which_no_draw_would_be(low):
    """Two hills, one lower by `low` nats: by more than 22 it is left, by less it is kept, at every temperature."""

    def log_likelihood(u):
        return torch.logaddexp(-0.5 * (u - 30).square().sum(-1), -0.5 * (u + 30).square().sum(-1) - low)

    target = bk.Target.from_functions(lambda u: 0 * u.sum(-1), log_likelihood, 2)
    points = torch.tensor([[25.0, 40.0], [-20.0, -33.0], [31.0, 12.0], [-40.0, -40.0], [-28.0, -31.0]], dtype=DOUBLE)
    scale = torch.full((2,), 10.0, dtype=DOUBLE)
    # The last chain is the only one of its temperature, and stays where it is.
    beta = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9], dtype=DOUBLE)
    start = pathfinder(target, points, beta, scale, new_generator(0))
    side = torch.ones(5, dtype=DOUBLE) if low == 40 else points[:, 0].sign()
    side[4] = -1
    assert torch.equal(start.position.sign(), side.unsqueeze(-1).expand(5, 2))
    assert len(start.position.unique(dim=0)) == 5
    assert float((start.position.abs() - 30).abs().max()) < 6


def test_a_funnel_is_not_climbed_to_its_end():
    """Neal's funnel grows without limit towards minus infinity, where there is no mass."""

    def log_prior(u):
        width = u[..., 0]
        return -0.5 * (width / 3).square() - 0.5 * (u[..., 1:].square().sum(-1) * (-width).exp()) - 4.5 * width

    target = bk.Target.from_functions(log_prior, lambda u: 0 * u.sum(-1), 10)
    points = torch.randn(8, 10, generator=new_generator(6), dtype=DOUBLE)
    start = pathfinder(target, points, torch.ones(8, dtype=DOUBLE), torch.ones(10, dtype=DOUBLE), new_generator(7))
    assert float(start.position[:, 0].abs().max()) < 3 * norm.isf(FAILURE_RATE / 8)


def test_points_without_a_slope_stay():
    target = bk.Target.from_functions(lambda u: 0 * u.sum(-1), lambda u: 0 * u.sum(-1), 3)
    points = torch.randn(4, 3, generator=new_generator(0), dtype=DOUBLE)
    start = pathfinder(target, points, torch.ones(4, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE), new_generator(0))
    assert torch.equal(start.position, points) and start.covariance is None


@pytest.mark.calibration
def test_an_ordinary_regression_with_wide_priors_comes_home(limit):
    """Intercept, a covariate far from zero and their priors a thousand wide: least squares is known."""
    generator = new_generator(8)
    x = 100 + 15 * torch.randn(200, generator=generator, dtype=DOUBLE)
    design = torch.stack([torch.ones_like(x), x], -1)
    y = 20 + 0.6 * x + 18 * torch.randn(200, generator=generator, dtype=DOUBLE)

    def model():
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2, dtype=DOUBLE), 1000.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfCauchy(torch.tensor(2.5, dtype=DOUBLE)))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(design @ beta, sigma), obs=y)

    draws = bk.sample(bk.Target.from_pyro(model), seed=1, num_warmup=200, num_samples=500, progress=False)
    fitted = torch.linalg.lstsq(design, y).solution  # which the prior moves by less than a thousandth of an error
    beta = draws.values()["beta"].movedim(-1, 0)
    assert float(((beta.mean((1, 2)) - fitted) / mean_error(beta)).abs().max()) < limit(2)
    assert float(draws.sample_stats["n_steps"].double().mean()) < 8


@pytest.fixture(scope="module")
def cliff():
    zeros = torch.zeros(2, dtype=torch.float64)

    def model():
        rate = pyro.sample("rate", dist.Gamma(zeros[0] + 0.00855, zeros[0] + 48.9))
        with pyro.plate("data", 2):
            pyro.sample("y", dist.Poisson(rate), obs=zeros)

    return bk.Target.from_pyro(model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")  # of a tail of hundreds of units
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cliff_of_overflow_is_no_home(cliff, seed):
    """A rate of e**700 has no density, and one of e**50 hardly any: chains began there, or learning ended in NaN."""
    draws = bk.sample(cliff, 64, 150, 20, seed=seed, progress=False)
    # The rate has a gamma distribution of shape .00855 and rate 50.9: below one but once in e**50.
    assert float(draws.unconstrained.max()) < 0
    assert bool(draws.log_density.isfinite().all())


def hierarchy(num_groups):
    generator = new_generator(6)
    groups = 1 + 0.5 * torch.randn(num_groups, generator=generator, dtype=DOUBLE)
    y = groups[:, None] + torch.randn(num_groups, 2, generator=generator, dtype=DOUBLE)

    def model(y):
        mean = pyro.sample("mean", dist.Normal(torch.tensor(0.0, dtype=DOUBLE), 5.0))
        deviation = pyro.sample("deviation", dist.HalfNormal(torch.tensor(1.0, dtype=DOUBLE)))
        with pyro.plate("groups", len(y)):
            group = pyro.sample("group", dist.Normal(mean, deviation))
            pyro.sample("y", dist.Normal(group[:, None], 1.0).to_event(1), obs=y)

    return model, y


@pytest.mark.calibration
def test_a_search_takes_no_chain_down_the_neck_of_a_funnel_of_many_groups():
    """There the density is infinite, and from there no chain came home."""
    model, y = hierarchy(200)
    target = bk.Target.from_pyro(model, y)
    draws = target.sample_prior(24, seed=0)
    prior, scale = target.constrain(draws), draws.std(0)
    # Draws whose deviation is plausible, so that a start in the neck can only come from the climb.
    group = prior["mean"][:, None] + 0.5 * (prior["group"] - prior["mean"][:, None]) / prior["deviation"][:, None]
    points = target.unconstrain({**prior, "deviation": torch.full((24,), 0.5, dtype=DOUBLE), "group": group})

    def value_and_gradient(u):
        found = target.evaluator(24)(u, torch.ones(24, dtype=DOUBLE))
        return found.log_density, found.gradient

    *_, last = lbfgs_path(value_and_gradient, points, 150, scale, 40)
    start = pathfinder(target, points, torch.ones(24, dtype=DOUBLE), scale, new_generator(1))
    assert float(target.constrain(last.position)["deviation"].max()) < 0.01
    assert float(target.constrain(start.position)["deviation"].min()) > 0.05
