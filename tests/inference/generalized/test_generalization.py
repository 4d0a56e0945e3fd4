"""The gap between new and own data in closed form, by many data sets, and bounds along the path of SGLD."""

import math
import os

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.special import digamma
from scipy.stats import binom

import bayeskit as bk
from bayeskit.errors import DrawsError, SettingsError, ShapeError
from bayeskit.inference.generalized import (
    Flat,
    GibbsPosterior,
    generalization_gap,
    losses,
    path_information,
)
from bayeskit.inference.samplers import SGHMC, SGLD, MinibatchTarget, sample_stochastic_gradient

SHIFT = int(os.environ.get("BAYESKIT_SEED_SHIFT", "0"))


def mean_of_ten(gamma, prior=None):
    x = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)
    prior = dist.Normal(0.0, 1.0) if prior is None else prior
    return GibbsPosterior(prior, losses.HalfSquared(), x, weight=2 * gamma / 10)


@pytest.mark.parametrize(("gamma", "gap"), [(1.0, 2 / 15), (5.0, 2 / 11), (20.0, 8 / 41)])
def test_the_gap_of_a_normal_mean(gamma, gap):
    found = generalization_gap(mean_of_ten(gamma))
    assert found.is_exact and found.trusted and found.standard_error == 0
    assert abs(2 * found.gap - gap) < 1e-12  # the squared error is twice the loss
    assert abs(found.information - gap * gamma) < 1e-11
    # The information of a normal pair: mutual and lautum information together are r^2 / (1 - r^2).
    between, within = (2 * gamma / (1 + 2 * gamma)) ** 2 / 10, 1 / (1 + 2 * gamma)
    assert abs(found.information - between / within) < 1e-11


def test_many_data_sets_find_the_same_gap(limit):
    def simulate(generator):
        return torch.randn(10, generator=generator, dtype=torch.float64)

    found = generalization_gap(mean_of_ten(5.0), simulate, num_data_sets=400, seed=SHIFT)
    assert not found.is_exact and found.population == "simulate" and found.trusted
    assert abs(2 * found.gap - 2 / 11) < limit(dof=399) * 2 * found.standard_error
    assert found.standard_error < 0.15 * found.gap


def bernoulli_gap(n, chance):
    """Gap of the log loss of a coin under a uniform prior, exactly."""
    heads = np.arange(n + 1)
    log_p, log_q = digamma(1 + heads) - digamma(2 + n), digamma(1 + n - heads) - digamma(2 + n)
    own = -(heads * log_p + (n - heads) * log_q) / n
    new = -(chance * log_p + (1 - chance) * log_q)
    return float((binom.pmf(heads, n, chance) * (new - own)).sum())


def log_loss(p, x):
    return -(x * p.log() + (1 - x) * torch.log1p(-p))


@pytest.mark.parametrize("resampled", [True, False])
def test_the_gap_of_a_coin(resampled, limit):
    n = 20
    x = (torch.arange(n) < 6).double()
    posterior = GibbsPosterior(dist.Beta(torch.tensor(1.0).double(), 1.0), log_loss, x)

    def simulate(generator):
        return (torch.rand(n, generator=generator, dtype=torch.float64) < 0.3).double()

    found = generalization_gap(posterior, None if resampled else simulate, num_data_sets=400, seed=SHIFT)
    exact = bernoulli_gap(n, 0.3)
    assert abs(found.gap - exact) < limit(dof=399) * found.standard_error
    assert found.standard_error < 0.15 * exact
    assert found.information == pytest.approx(found.gap * n)
    # mutation: the gap of half the data
    assert abs(found.gap - bernoulli_gap(n // 2, 0.3)) > limit(dof=399) * found.standard_error


def test_what_has_no_gap_is_refused():
    x = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    with pytest.raises(SettingsError, match="leave pooling at"):
        generalization_gap(GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x, pooling="mean"))
    with pytest.raises(ShapeError, match="simulate returned data of shapes"):
        generalization_gap(mean_of_ten(1.0), lambda g: torch.zeros(3), num_data_sets=2)
    assert generalization_gap(mean_of_ten(1.0, Flat())).gap == pytest.approx(1 / 10, abs=1e-12)


def target_of(y, batch_size=None):
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (y[rows] - u).square(),
        1,
        len(y),
        batch_size=batch_size or len(y),
        sample_prior=lambda n, g: torch.randn(n, 1, generator=g, dtype=torch.float64),
    )


def run(y, num_steps, kernel=None, initial=0.0, batch_size=None, seed=0, **settings):
    start = None if initial is None else torch.full((1,), initial, dtype=torch.float64)
    settings = {"num_warmup": 0, "num_samples": num_steps} | settings
    kernel = kernel or SGLD(0.01)
    return sample_stochastic_gradient(
        target_of(y, batch_size), kernel, 64, seed=seed, initial=start, progress=False, **settings
    )


def test_the_first_step_of_a_path():
    y = torch.linspace(-0.5, 1.5, 20, dtype=torch.float64)
    found = path_information(run(y, 1))
    assert float(found.by_step[0]) == pytest.approx(0.5 * math.log1p(0.01 / 4 * float(y.sum()) ** 2), rel=1e-12)
    assert found.start == 0 and found.gap_bound == pytest.approx(math.sqrt(found.information / 40))
    assert path_information(run(y, 1, initial=None)).start == pytest.approx(math.log(10))


@pytest.mark.calibration
def test_the_path_tells_more_than_the_draw(limit):
    """The information of the last draw is known: its mean is linear in the data."""
    n, step, num_steps = 20, 0.01, 60
    decay, drift, noise, information = 1 - step * (n + 1) / 2, 0.0, 0.0, 0.0
    for _ in range(num_steps):
        drift, noise = decay * drift + step / 2, decay**2 * noise + step
        information = 0.5 * math.log1p(n * drift**2 / noise)  # the sum of the data has variance n
    generator = torch.Generator().manual_seed(7 + SHIFT)
    data = torch.randn(40, n, generator=generator, dtype=torch.float64)
    # The mean over data sets belongs into the logarithm.
    temperature = torch.stack([(2 * path_information(run(y, num_steps, seed=SHIFT)).by_step).exp() for y in data])
    first = temperature[:, 0] - 1
    spread = step / 4 * n * math.sqrt(2 / len(data))  # of the mean of squares of the sums of the data
    assert float(first.mean()) == pytest.approx(step / 4 * float(data.sum(1).square().mean()), rel=1e-9)
    assert abs(float(first.mean()) - step / 4 * n) < 2 * limit() * spread
    bound = float(0.5 * temperature.mean(0).log().sum())
    assert bound > 3 * information  # it grows, although the draw knows no more


def test_paths_that_say_nothing_are_refused():
    y = torch.linspace(-0.5, 1.5, 20, dtype=torch.float64)
    with pytest.raises(DrawsError, match="num_warmup=0 and thinning=1"):
        path_information(run(y, 3, num_warmup=2))
    with pytest.raises(DrawsError, match="draw with the kernel SGLD"):
        path_information(run(y, 3, SGHMC(0.01)))
    with pytest.raises(SettingsError, match="between"):
        path_information(run(y, 3), between=(0.0, math.inf))
    small, large = (path_information(run(y, 20, batch_size=b)).information for b in (2, 20))
    assert small > large  # the noise of minibatches counts as drift


def test_a_path_from_a_point_made_of_the_data_is_refused(tmp_path):
    y = torch.linspace(-1, 2, 50, dtype=torch.float64)
    target = MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(), lambda u, r: -0.5 * (y[r] - u).square(), 1, 50, batch_size=5, control="mode"
    )
    settings = {"num_chains": 4, "num_warmup": 0, "num_samples": 5, "progress": False}
    with pytest.raises(SettingsError, match="start at the target's anchor"):
        path_information(sample_stochastic_gradient(target, SGLD(1e-3), initial=target.anchor, **settings))
    start = torch.zeros(1, dtype=torch.float64)
    draws = sample_stochastic_gradient(target, SGLD(1e-3), initial=start, **settings)
    draws.save(tmp_path / "draws.nc")
    assert path_information(bk.Draws.load(tmp_path / "draws.nc")).information == path_information(draws).information
    assert "must not depend on the data" in path_information(draws).promise
