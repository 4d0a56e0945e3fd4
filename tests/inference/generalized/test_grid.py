"""Exact posteriors on a grid."""

import math

import pytest
import torch

from bayeskit.errors import CoherenceError, DataError, SettingsError, ShapeError
from bayeskit.inference.generalized import losses
from bayeskit.inference.generalized._exact import grid_posterior
from bayeskit.inference.generalized.losses._prediction import Pinball

X = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
GRID = torch.arange(5.0, dtype=torch.float64)
# Enumerated by hand from exp(-sum of losses), as Bissiri, Holmes and Walker (2016) define the update.
ABSOLUTE = [0.009694, 0.194706, 0.529266, 0.194706, 0.071628]
MAXIMUM = [0.011656, 0.031685, 0.086129, 0.234122, 0.636409]
PINBALL = [0.186101, 0.393976, 0.306829, 0.087908, 0.025186]


def absolute(**settings):
    return grid_posterior(losses.Absolute(), GRID, X, **settings)


@pytest.mark.parametrize(
    ("loss", "pooling", "wanted"),
    [
        (losses.Absolute(), "sum", ABSOLUTE),
        (losses.Absolute(), "max", MAXIMUM),
        (Pinball(0.25), "sum", PINBALL),
        (lambda m, x: torch.where(x > m, 0.25, -0.75) * (x - m), "sum", PINBALL),
    ],
)
def test_probabilities_of_reference(loss, pooling, wanted):
    found = grid_posterior(loss, GRID, X, pooling=pooling).probabilities
    torch.testing.assert_close(found, found.new_tensor(wanted), rtol=0, atol=5e-7)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-14)


def test_a_wrong_sign_fails_the_same_check():
    found = grid_posterior(lambda m, x: -(x - m).abs(), GRID, X).probabilities
    assert float((found - found.new_tensor(ABSOLUTE)).abs().max()) > 0.1


def test_mean_quantiles_and_evidence():
    posterior = absolute()
    assert float(posterior.mean) == pytest.approx(2.123869, abs=5e-7)
    assert [float(posterior.quantile(q)) for q in (0.005, 0.1, 0.5, 0.8, 0.99)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    total = (X - GRID[:, None]).abs().sum(-1)
    assert posterior.log_evidence == pytest.approx(math.log(float((-total).exp().mean())), abs=1e-12)


def test_quantiles_of_an_unordered_grid_and_of_equal_masses():
    flat = grid_posterior(lambda m, x: 0 * (x - m), torch.tensor([3.0, 1.0, 2.0]).double(), X)
    assert [float(flat.quantile(q)) for q in (1 / 3, 0.34, 2 / 3, 0.7)] == [1.0, 2.0, 2.0, 3.0]


def test_updates_are_coherent_for_sums_in_any_order_and_evidences_add_up():
    whole = absolute(weight=0.7)
    one = grid_posterior(losses.Absolute(), GRID, X[2:], weight=0.7).update(X[:1]).update(X[1:2])
    torch.testing.assert_close(one.log_probabilities, whole.log_probabilities, rtol=0, atol=1e-12)
    assert one.log_evidence == pytest.approx(whole.log_evidence, abs=1e-12)
    for pooling in ("max", "mean"):
        with pytest.raises(CoherenceError, match="Absolute pooled by M"):
            absolute(pooling=pooling).update(X)


def test_the_prior_counts_and_need_not_be_normalized():
    masses = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0], dtype=torch.float64)
    found = absolute(log_prior=masses.log())
    wanted = masses * (-(X - GRID[:, None]).abs().sum(-1)).exp()
    torch.testing.assert_close(found.probabilities, wanted / wanted.sum(), rtol=0, atol=1e-14)
    assert found.log_evidence == pytest.approx(math.log(float(wanted.sum() / 10)), abs=1e-12)
    torch.testing.assert_close(
        found.update(X).probabilities, absolute(log_prior=masses.log(), weight=2.0).probabilities
    )


def test_excluded_values_may_have_any_loss():
    found = grid_posterior(lambda m, x: (x - m) / m, GRID[:2], X, log_prior=torch.tensor([-math.inf, 0.0]))
    assert found.probabilities.tolist() == [0.0, 1.0]


def test_grids_of_vectors_and_of_whole_numbers():
    grid = torch.cartesian_prod(GRID, GRID)
    found = grid_posterior(lambda p, x: (x - p[0]).abs() + p[1] / 3, grid, X)
    torch.testing.assert_close(found.mean[0], absolute().mean, rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match="no order"):
        found.quantile(0.5)
    whole = grid_posterior(losses.Absolute(), torch.arange(5), X.long())
    torch.testing.assert_close(whole.probabilities, whole.probabilities.new_tensor(ABSOLUTE), rtol=0, atol=1e-6)


def test_a_scaled_loss_is_a_scaled_weight():
    scaled = grid_posterior(lambda m, x: 3 * (x - m).abs(), GRID, X, weight=0.2)
    torch.testing.assert_close(scaled.log_probabilities, absolute(weight=0.6).log_probabilities, rtol=0, atol=1e-12)


def nan_at_two(m, x):
    return torch.where(m == 2, torch.nan, x - m)


@pytest.mark.parametrize(
    ("settings", "error", "place"),
    [
        ({"weight": -1.0}, SettingsError, "weight"),
        ({"pooling": "median"}, SettingsError, "pooling"),
        ({"grid": torch.tensor(1.0)}, ShapeError, "grid"),
        ({"grid": object()}, DataError, "grid"),
        ({"grid": torch.tensor([])}, ShapeError, "grid"),
        ({"grid": torch.tensor([0.0, math.nan])}, DataError, "value 1 of the grid"),
        ({"log_prior": torch.zeros(4)}, ShapeError, r"log_prior must have shape \(5,\)"),
        ({"log_prior": torch.tensor([0.0, 0.0, math.nan, 0.0, 0.0])}, DataError, "prior of value 2"),
        ({"log_prior": torch.full((5,), -math.inf)}, DataError, "every value"),
        ({"log_prior": b"x"}, DataError, "log_prior"),
        ({"data": torch.tensor([1.0, math.nan])}, DataError, "datum 1"),
        ({"loss": nan_at_two}, DataError, "value 2 of the grid, 2.0"),
        ({"loss": lambda m, x: torch.inf + x - m}, DataError, "infinite at every value"),
        ({"loss": lambda m, x: (x - m).sum()}, ShapeError, r"\(\) instead of \(3,\)"),
        ({"loss": losses.Absolute}, SettingsError, r"Absolute\(\.\.\.\)"),
    ],
)
def test_bad_input(settings, error, place):
    with pytest.raises(error, match=place):
        grid_posterior(**{"loss": losses.Absolute(), "grid": GRID, "data": X, **settings})


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, math.nan, "half"])
def test_levels_that_are_none(level):
    with pytest.raises(SettingsError, match="level"):
        absolute().quantile(level)


@pytest.mark.parametrize("masses", [[0.98, 0.01, 0.01], [0.0, 1.0, 0.0], [0.333, 0.333, 0.333]])
def test_probabilities_are_not_taken_for_logarithms(masses):
    with pytest.raises(SettingsError, match="log_prior looks like probabilities.*logarithms"):
        grid_posterior(losses.Absolute(), GRID[:3], X, log_prior=masses)
    found = grid_posterior(losses.Absolute(), GRID[:3], X, log_prior=torch.tensor(masses).log())
    assert float(found.probabilities.sum()) == pytest.approx(1.0, abs=1e-12)


def test_losses_may_branch_on_values():
    def branching(m, x):
        return (x - m).abs() if m > 1 else (x - float(m)).abs()

    found = grid_posterior(branching, GRID, X)
    torch.testing.assert_close(found.log_probabilities, absolute().log_probabilities, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="size of tensor"):  # an error of the loss is shown as it is
        grid_posterior(lambda m, x: (x - m) * torch.ones(2), GRID, X)
