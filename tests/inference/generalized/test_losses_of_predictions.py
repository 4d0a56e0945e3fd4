"""Pinball and Huber's loss: a grid by enumeration, quantile regression by linear programming, kinks made round."""

import dataclasses
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import linprog
from torch.func import grad, jacrev, vmap

from bayeskit.errors import SettingsError
from bayeskit.inference.generalized import GibbsPosterior
from bayeskit.inference.generalized.losses._prediction import (
    Absolute,
    HalfSquared,
    Huber,
    Pinball,
    SmoothPinball,
    linear,
)

DATA = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
GRID = torch.arange(5, dtype=torch.float64)


def sample(n=40, seed=0):
    """Return covariates ``(n, 2)`` and outcomes ``(n,)`` whose spread grows with the covariate."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 3, n)
    y = 1 + 2 * x + (0.5 + x) * rng.standard_normal(n)
    return torch.as_tensor(np.stack([np.ones(n), x], -1)), torch.as_tensor(y)


def grid_posterior(loss):
    return torch.softmax(-vmap(loss.total, (0, None))(GRID, DATA), 0)


def test_pinball_posterior_on_a_grid():
    by_hand = [sum((0.25 if y >= t else -0.75) * (y - t) for y in (1, 2, 10)) for t in range(5)]
    weights = np.exp(-np.array(by_hand))
    found = grid_posterior(Pinball(0.25)).numpy()
    assert np.abs(found - weights / weights.sum()).max() < 1e-14
    # To the digits of a table made elsewhere.
    assert np.abs(found - [0.186101, 0.393976, 0.306829, 0.087908, 0.025186]).max() < 5e-7
    # The other tail is another posterior.
    assert np.abs(grid_posterior(Pinball(0.75)).numpy() - found).max() > 0.1


def test_pinball_of_one_half_is_half_the_absolute_error():
    theta = torch.tensor(1.7, dtype=torch.float64)
    assert torch.equal(2 * Pinball(0.5).pointwise(theta, DATA), Absolute().pointwise(theta, DATA))


@pytest.mark.parametrize("level", [0.1, 0.25, 0.5, 0.9])
def test_the_minimiser_is_the_quantile(level):
    _, y = sample(41)
    values = vmap(Pinball(level).total, (0, None))(y, y)
    # A minimiser is among the data, and there at most a share `level` lies below, at most `1 - level` above.
    best = y[values.argmin()]
    assert (y < best).sum() <= level * 41 and (y > best).sum() <= (1 - level) * 41


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_quantile_regression_is_a_linear_programme(level):
    x, y = sample()
    n = len(y)
    cost = np.concatenate([np.zeros(2), np.full(n, level), np.full(n, 1 - level)])
    constraints = np.concatenate([x.numpy(), np.eye(n), -np.eye(n)], 1)
    bounds = [(None, None)] * 2 + [(0, None)] * (2 * n)
    programme = linprog(cost, A_eq=constraints, b_eq=y.numpy(), bounds=bounds, method="highs")
    loss = Pinball(level, predict=linear)
    assert abs(float(loss.total(torch.as_tensor(programme.x[:2]), (x, y))) - programme.fun) < 1e-10
    # The optimum goes through two of the data: no line through two does better, and the best is the programme's.
    pairs = torch.combinations(torch.arange(n))
    pairs = pairs[(x[pairs[:, 0], 1] - x[pairs[:, 1], 1]).abs() > 1e-9]
    lines = torch.linalg.solve(x[pairs], y[pairs])
    values = vmap(loss.total, (0, None))(lines, (x, y))
    assert abs(float(values.min()) - programme.fun) < 1e-10
    assert np.abs(lines[values.argmin()].numpy() - programme.x[:2]).max() < 1e-8


def test_huber_is_squared_within_and_absolute_beyond():
    y = torch.tensor([-9.0, -2.0, -0.5, 0.0, 1.0, 2.0, 7.0], dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    found = Huber(2.0).pointwise(zero, y)
    assert found.tolist() == [16.0, 2.0, 0.125, 0.0, 0.5, 2.0, 12.0]
    assert torch.equal(Huber(1e6).pointwise(zero, y), HalfSquared().pointwise(zero, y))
    small = 1e-9
    assert (Huber(small).pointwise(zero, y) / small - y.abs()).abs().max() <= small
    # Curvature is one within, at the data, too, and the pull is at most the threshold.
    at = y[y.abs() < 2]
    first = vmap(grad(lambda t, z: Huber(2.0).total(t, z[None])), (None, 0))(zero, y)
    second = vmap(grad(grad(lambda t, z: Huber(2.0).total(t, z[None]))), (None, 0))(zero, at)
    assert torch.equal(first, -y.clamp(-2, 2)) and torch.equal(second, torch.ones_like(at))


SMOOTHED = [
    (Absolute(predict=linear), 1.0),
    (Pinball(0.2, predict=linear), 0.5),
    (Pinball(0.9, predict=linear), 0.5),
]


@pytest.mark.parametrize(("loss", "height"), SMOOTHED)
def test_smoothing_vanishes_with_its_width(loss, height):
    data, beta = sample(), torch.tensor([0.9, 2.1], dtype=torch.float64)
    exact = loss.pointwise(beta, data)
    for width in (1e-1, 1e-3, 1e-5):
        off = loss.smoothed(width).pointwise(beta, data) - exact
        # sqrt(r^2 + w^2) - |r| lies between 0 and w.
        assert bool((off >= -1e-14).all()) and off.max() <= height * width
    assert (grad(loss.smoothed(1e-9).total)(beta, data) - grad(loss.total)(beta, data)).abs().max() < 1e-8
    # The curvature is what finite differences of the gradient say, and positive definite.
    smooth = loss.smoothed(0.7)
    curvature = jacrev(grad(smooth.total))(beta, data)
    assert (curvature - differences(grad(smooth.total), beta, data)).abs().max() < 1e-6
    assert bool((torch.linalg.eigvalsh(curvature) > 0).all())


def test_width_and_spread_may_be_batched():
    data, beta = sample(), torch.tensor([0.9, 2.1], dtype=torch.float64)
    widths = torch.tensor([0.1, 1.0], dtype=torch.float64)
    found = vmap(lambda w: Pinball(0.3, predict=linear).smoothed(w).total(beta, data))(widths)
    assert torch.equal(found[1], SmoothPinball(0.3, 1.0, predict=linear).total(beta, data))


def differences(function, at, *rest, size=1e-5):
    steps = torch.eye(len(at), dtype=at.dtype) * size
    return torch.stack([(function(at + s, *rest) - function(at - s, *rest)) / (2 * size) for s in steps], -1)


LOSSES = [
    HalfSquared(predict=linear),
    Absolute(predict=linear),
    Pinball(0.25, predict=linear),
    Huber(0.8, predict=linear),
]


def check_gradient(loss, data, beta):
    found = grad(loss.total)(beta, data)
    # Central differences of sums of lines and parabolas are exact but for rounding, 1e-16 * 100 / 1e-5.
    return bool((found - differences(loss.total, beta, data)).abs().max() < 1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_that_of_finite_differences(loss):
    data, beta = sample(), torch.tensor([0.9, 2.1], dtype=torch.float64)
    assert check_gradient(loss, data, beta)


def test_a_gradient_cut_off_is_noticed():
    @dataclasses.dataclass(frozen=True)
    class Cut(Huber):
        def of(self, outcome, prediction):
            residual = outcome - prediction
            pull = residual.clamp(-self.threshold, self.threshold)
            return pull.detach() * (residual - pull / 2)

    assert not check_gradient(Cut(0.8, predict=linear), sample(), torch.tensor([0.9, 2.1], dtype=torch.float64))


@pytest.mark.parametrize("loss", LOSSES)
def test_batches_equal_loops_and_order_does_not_matter(loss):
    x, y = sample(12)
    betas = torch.tensor([[0.0, 1.0], [1.0, 2.0], [-1.0, 0.3]], dtype=torch.float64)
    weights = torch.as_tensor(np.random.default_rng(1).exponential(size=(3, 12)))
    sets = torch.stack([x, x.flip(0), 2 * x]), torch.stack([y, y.flip(0), -y])
    batched = vmap(loss.total)(betas, sets, weights)
    looped = [loss.total(b, (sets[0][r], sets[1][r]), weights[r]) for r, b in enumerate(betas)]
    assert (batched - torch.stack(looped)).abs().max() < 1e-12
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    again = loss.total(betas[1], (x[order], y[order]), weights[0][order])
    assert abs(again - loss.total(betas[1], (x, y), weights[0])) < 1e-12
    counts = torch.tensor([0, 1, 2, 1, 0, 3, 1, 1, 0, 1, 1, 1])
    repeated = (x.repeat_interleave(counts, 0), y.repeat_interleave(counts))
    assert abs(loss.total(betas[1], (x, y), counts) - loss.total(betas[1], repeated)) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_traced_as_a_target(loss):
    x, y = sample(12)
    posterior = GibbsPosterior(
        dist.Normal(torch.zeros(2, dtype=torch.float64), 3.0), loss, (x, y), weight=0.7, compile=False
    )
    u = torch.tensor([[0.9, 2.1], [0.0, 1.0]], dtype=torch.float64)
    value, slope = posterior.value_and_grad(u)
    for row, v, g in zip(u, value, slope, strict=True):
        prior = (-row.square() / 18 - math.log(3 * math.sqrt(2 * math.pi))).sum()
        assert abs(v - (prior - 0.7 * loss.total(row, (x, y)))) < 1e-10
        assert (g + row / 9 + 0.7 * grad(loss.total)(row, (x, y))).abs().max() < 1e-10


@pytest.mark.parametrize("level", [0.0, 1.0, -0.2, float("nan"), "0.5", True])
def test_a_level_outside_of_its_domain_is_refused(level):
    with pytest.raises(SettingsError, match="level"):
        Pinball(level)


@pytest.mark.parametrize("threshold", [0.0, -1.0, float("inf"), float("nan"), None])
def test_a_threshold_outside_of_its_domain_is_refused(threshold):
    with pytest.raises(SettingsError, match="threshold"):
        Huber(threshold)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_and_truth_values_are_covariates_and_outcomes(dtype):
    x = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 1]])
    y = torch.tensor([0, 1, 1, 0])
    theta = torch.tensor([0.3, -1.2], dtype=torch.float64)
    for loss in (HalfSquared(linear), Absolute(linear), Pinball(0.3, predict=linear), Huber(1.0, predict=linear)):
        found = loss.pointwise(theta, (x.to(dtype), y.to(dtype)))
        torch.testing.assert_close(found, loss.pointwise(theta, (x.double(), y.double())), rtol=0, atol=0)
    posterior = GibbsPosterior(dist.Normal(torch.zeros(2), 1.0), HalfSquared(linear), (x.to(dtype), y.to(dtype)))
    assert posterior.log_likelihood(torch.zeros(2)).item() == -1.0
    assert HalfSquared().pointwise(theta[0], y.to(dtype)).dtype == torch.float64
