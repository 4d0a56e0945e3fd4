import math
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import linprog
from torch.distributions import constraints

from bayeskit.errors import ShapeError
from bayeskit.inference import _optimize as optimize
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized import _minimizer as minimizer
from bayeskit.inference.generalized._minimizer import WIDTHS, minimize, residual_spread
from bayeskit.inference.generalized.losses._prediction import Pinball

# Brownlee, K. A. (1965). Statistical theory and methodology in science and engineering, p. 454: air flow, water
# temperature, acid concentration, stack loss of 21 days.
STACKLOSS = torch.tensor(
    [
        [80, 80, 75, 62, 62, 62, 62, 62, 58, 58, 58, 58, 58, 58, 50, 50, 50, 50, 50, 56, 70],
        [27, 27, 25, 24, 22, 23, 24, 24, 23, 18, 18, 17, 18, 19, 18, 18, 19, 19, 20, 20, 20],
        [89, 88, 90, 87, 87, 87, 93, 93, 87, 80, 89, 88, 82, 93, 89, 86, 72, 79, 80, 82, 91],
        [42, 37, 37, 28, 18, 18, 19, 20, 15, 14, 14, 13, 11, 12, 8, 7, 8, 8, 9, 15, 15],
    ],
    dtype=torch.float64,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def regression(num_data=60, seed=0):
    draw = generator(seed)
    x = torch.randn(num_data, 2, generator=draw, dtype=torch.float64)
    covariates = torch.cat([torch.ones(num_data, 1, dtype=torch.float64), x], 1)
    noise = torch.randn(num_data, generator=draw, dtype=torch.float64)
    return covariates, covariates @ torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64) + noise


def dirichlet_weights(rows, num_data, seed=1):
    weights = -torch.rand(rows, num_data, generator=generator(seed), dtype=torch.float64).log()
    return num_data * weights / weights.sum(1, keepdim=True)


def quantile_by_linear_program(covariates, outcomes, weights, level):
    """Return the smallest weighted pinball loss of a linear quantile, by the simplex method."""
    x, y, w = (a.numpy() for a in (covariates, outcomes, weights))
    cost = np.concatenate([np.zeros(x.shape[1]), level * w, (1 - level) * w])
    equal = np.hstack([x, np.eye(len(x)), -np.eye(len(x))])
    bounds = [(None, None)] * x.shape[1] + [(0, None)] * (2 * len(x))
    return linprog(cost, A_eq=equal, b_eq=y, bounds=bounds, method="highs").fun


def excess_bound(posterior, found, weights):
    """Bound the loss that stopping at the last smoothed version can cost: its width for each unit of weight."""
    spread = torch.stack([residual_spread(posterior, u) for u in found.position]).mean()
    return 1.1 * WIDTHS[-1] * float(spread) * weights.sum(1)


def least_squares(covariates, outcomes, weights):
    weighted = covariates * weights[:, None]
    return torch.linalg.solve(weighted.mT @ covariates, weighted.mT @ outcomes)


@pytest.mark.calibration
@pytest.mark.parametrize("level", [0.1, 0.5, 0.8])
def test_quantile_regression_agrees_with_linear_programming(level):
    covariates, outcomes = regression()
    weights = dirichlet_weights(8, 60)
    posterior = GibbsPosterior(Flat((3,)), Pinball(level, predict=losses.linear), (covariates, outcomes))
    found = minimize(posterior, weights=weights)
    exact = torch.tensor(
        [quantile_by_linear_program(covariates, outcomes, w, level) for w in weights], dtype=torch.float64
    )
    excess = found.value - exact
    assert bool(found.converged.all())
    assert bool((excess > -1e-9).all())
    assert bool((excess <= excess_bound(posterior, found, weights)).all())


def test_stopping_at_a_wide_smoothing_would_be_noticed(monkeypatch):
    covariates, outcomes = regression()
    weights = dirichlet_weights(8, 60)
    posterior = GibbsPosterior(Flat((3,)), Pinball(0.1, predict=losses.linear), (covariates, outcomes))
    limit = excess_bound(posterior, minimize(posterior, weights=weights), weights)
    monkeypatch.setattr(minimizer, "WIDTHS", WIDTHS[:2])
    rough = minimize(posterior, weights=weights)
    exact = torch.tensor(
        [quantile_by_linear_program(covariates, outcomes, w, 0.1) for w in weights], dtype=torch.float64
    )
    assert bool((rough.value - exact > limit).any())


def test_least_absolute_deviations_of_the_stack_loss_data():
    # Coefficients as printed by R's quantreg, rq(stack.loss ~ ., data = stackloss).
    covariates = torch.cat([torch.ones(1, 21, dtype=torch.float64), STACKLOSS[:3]]).mT
    found = minimize(GibbsPosterior(Flat((4,)), losses.Absolute(losses.linear), (covariates, STACKLOSS[3])))
    expected = torch.tensor([-39.68985507, 0.83188406, 0.57391304, -0.06086957], dtype=torch.float64)
    assert bool(((found.position - expected).abs() < 1e-5).all())


def test_weighted_least_squares_is_exact_in_every_row():
    covariates, outcomes = regression()
    weights = dirichlet_weights(50, 60)
    posterior = GibbsPosterior(Flat((3,)), losses.HalfSquared(losses.linear), (covariates, outcomes))
    found = minimize(posterior, weights=weights)
    exact = torch.stack([least_squares(covariates, outcomes, w) for w in weights])
    assert bool(found.converged.all())
    assert float((found.position - exact).abs().max()) < 1e-10


def test_data_sets_of_their_own_size_are_minimised_in_one_batch():
    draws = torch.randn(20, 15, generator=generator(), dtype=torch.float64) + torch.arange(20.0)[:, None] * 50
    posterior = GibbsPosterior(Flat(), losses.HalfSquared(), torch.zeros(4, dtype=torch.float64))
    found = minimize(posterior, data=draws)
    assert float((found.position[:, 0] - draws.mean(1)).abs().max()) < 1e-10
    weights = dirichlet_weights(20, 15)
    both = minimize(posterior, data=draws, weights=weights)
    assert float((both.position[:, 0] - (weights * draws).sum(1) / 15).abs().max()) < 1e-10


@pytest.mark.calibration
def test_batched_rows_equal_a_loop():
    covariates, outcomes = regression()
    weights = dirichlet_weights(6, 60)
    posterior = GibbsPosterior(Flat((3,)), losses.Absolute(losses.linear), (covariates, outcomes))
    together = minimize(posterior, weights=weights)
    alone = torch.cat([minimize(posterior, weights=w[None]).value for w in weights])
    assert bool(((together.value - alone).abs() <= excess_bound(posterior, together, weights)).all())


def test_a_constrained_parameter_is_found_in_unconstrained_coordinates():
    x = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)
    found = minimize(GibbsPosterior(dist.Gamma(2.0, 1.0), losses.HalfSquared(), x))
    assert found.position.item() == pytest.approx(math.log(2.0), abs=1e-10)
    flat = GibbsPosterior(Flat((3,), support=constraints.simplex), losses.HalfSquared(), torch.eye(3).double())
    assert flat.parameter(minimize(flat).position).tolist() == pytest.approx([1 / 3] * 3, abs=1e-8)


def test_the_prior_counts_as_often_as_asked():
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x)
    for weight in (0.0, 1.0, 2.0):
        assert minimize(posterior, prior_weight=weight).position.item() == pytest.approx(7 / (3 + weight), abs=1e-10)


def two_modes(seed=0):
    draw = generator(seed)
    lower, upper = torch.randn(30, generator=draw).double() - 6, torch.randn(50, generator=draw).double() + 6
    loss = losses.FunctionLoss(lambda theta, x: (x - theta).square().log1p())
    return GibbsPosterior(dist.Normal(0.0, 6.0), loss, torch.cat([lower, upper]))


def test_the_lower_of_two_minima_is_found_wherever_the_start():
    posterior = two_modes()
    grid = torch.linspace(-10, 10, 20001, dtype=torch.float64)[:, None]
    lowest = float(posterior.total_loss(grid).min())
    for seed in range(5):
        assert float(minimize(posterior, seed=seed).value) <= lowest + 1e-9


def test_one_start_in_the_wrong_basin_would_be_noticed():
    posterior = two_modes()
    wrong = minimize(posterior, start=torch.tensor([-6.0]))
    assert bool(wrong.converged)
    assert float(wrong.value) > float(minimize(posterior).value) + 1


def test_data_sets_with_minima_far_apart_start_each_for_itself():
    posterior = two_modes()
    data = torch.stack([posterior.data, -posterior.data])
    found = minimize(posterior, data=data)
    assert found.value[0].item() == pytest.approx(found.value[1].item(), abs=1e-9)
    assert found.position[0].item() == pytest.approx(-found.position[1].item(), abs=1e-6)


def test_losses_that_fall_off_for_ever_are_flagged():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    mixed, separated = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])

    def logistic(theta, data):
        return torch.nn.functional.softplus(-data[1] * (data[0] @ theta))

    posterior = GibbsPosterior(Flat((1,)), losses.FunctionLoss(logistic), (x, mixed.double()))
    both = minimize(posterior, data=(torch.stack([x, x]), torch.stack([mixed, separated]).double()))
    assert both.converged.tolist() == [True, False]


def test_a_step_up_would_be_noticed(monkeypatch):
    covariates, outcomes = regression()
    posterior = GibbsPosterior(Flat((3,)), losses.HalfSquared(losses.linear), (covariates, outcomes))
    step = optimize._newton_step
    monkeypatch.setattr(optimize, "_newton_step", lambda g, h: (-step(g, h)[0], step(g, h)[1]))
    found = minimize(posterior)
    exact = least_squares(covariates, outcomes, torch.ones(60, dtype=torch.float64))
    assert not bool(found.converged) and float((found.position - exact).abs().max()) > 1e-3


def test_the_loss_in_other_units_has_the_same_minimiser():
    covariates, outcomes = regression()
    outcomes = 1e6 * outcomes
    weights = dirichlet_weights(4, 60)
    posterior = GibbsPosterior(Flat((3,)), losses.Absolute(losses.linear), (covariates, outcomes))
    found = minimize(posterior, weights=weights)
    exact = (
        torch.tensor(
            [quantile_by_linear_program(covariates, outcomes / 1e6, w, 0.5) for w in weights], dtype=torch.float64
        )
        * 2e6
    )
    assert bool(((found.value - exact).abs() <= 2 * excess_bound(posterior, found, weights)).all())


def test_shapes_that_do_not_fit_are_refused():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    for bad in (
        {"weights": torch.ones(2)},
        {"weights": torch.ones(2, 3)},
        {"data": x},
        {"data": torch.ones(4, 2), "weights": torch.ones(3, 2)},
        {"start": torch.zeros(2)},
        {"weights": torch.ones(3, 2), "start": torch.zeros(2, 1)},
    ):
        with pytest.raises(ShapeError):
            minimize(posterior, **bad)


def test_problems_of_some_rows_are_those_rows():
    covariates, outcomes = regression()
    posterior = GibbsPosterior(Flat((3,)), losses.HalfSquared(losses.linear), (covariates, outcomes))
    weights = dirichlet_weights(5, 60)
    problem = minimizer._Problem(posterior, posterior.loss, 0.0, weights, None)
    u = torch.randn(5, 3, generator=generator(), dtype=torch.float64)
    rows, every = torch.tensor([3, 1]), torch.arange(5)
    assert torch.equal(problem.values(u[rows], rows), problem.values(u, every)[rows])
    value, gradient, hessian = problem.derivatives(u, every)
    assert torch.allclose(value, problem.values(u, every), atol=1e-10)
    exact = torch.einsum("rn,ni,nj->rij", weights, covariates, covariates)
    assert float((hessian - exact).abs().max()) < 1e-10
    shifted = replace(problem, prior_weight=1.0).values(u, every)
    assert float((shifted - value).abs().max()) < 1e-12  # a flat prior adds nothing
    assert gradient.shape == (5, 3)
