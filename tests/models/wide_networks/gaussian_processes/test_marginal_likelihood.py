"""Depth and variances by marginal likelihood, on data drawn from networks whose depth is known."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import fit_depths, fit_variances, nngp_posterior
from bayeskit.models.wide_networks.gaussian_processes._marginal_likelihood import MarginalLikelihoodObjective
from bayeskit.models.wide_networks.gaussian_processes._parameters import Parameters

# Draws from a deep network's prior are nearly constant.
pytestmark = pytest.mark.filterwarnings("ignore:y has mean:bayeskit.errors.AccuracyWarning")

NOISE, SHALLOW, DEEP = 0.01, 1, 6


def module(depth):
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), *hidden, nn.Linear(8, 1))


def network(depth):
    return infinite_width(module(depth), weight_variance=2.0, bias_variance=0.1)


def inputs(n):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def draws(depth, x, number, seed):
    """Data from the prior of one depth, ``(number, n)``."""
    lower = torch.linalg.cholesky(network(depth).nngp(x) + NOISE * torch.eye(len(x), dtype=x.dtype))
    return torch.randn(number, len(x), generator=torch.Generator().manual_seed(seed), dtype=x.dtype) @ lower.mT


@pytest.mark.parametrize(("truth", "other"), [(SHALLOW, DEEP), (DEEP, SHALLOW)])
def test_the_true_depth_wins_by_the_divergence_of_the_two_laws(truth, other, limit):
    x, number = inputs(25), 400
    y = draws(truth, x, number, seed=truth)

    def densities(depth):
        posterior = nngp_posterior(network(depth), x, y[0], NOISE)
        return torch.stack([replace(posterior, y=row).log_evidence for row in y])

    difference = densities(truth) - densities(other)
    identity = torch.eye(len(x), dtype=x.dtype)
    first, second = (network(depth).nngp(x) + NOISE * identity for depth in (truth, other))
    ratio = torch.linalg.solve(second, first)
    divergence = float(0.5 * (ratio.trace() - len(x) - torch.linalg.slogdet(ratio).logabsdet))
    error = float(difference.std()) / math.sqrt(number)
    assert abs(float(difference.mean()) - divergence) < limit() * error
    assert divergence > 10 * error
    # A mutation: with the depths exchanged the mean has the other sign.
    assert abs(-float(difference.mean()) - divergence) > limit() * error


@pytest.mark.calibration
@pytest.mark.parametrize("truth", [SHALLOW, DEEP])
def test_the_depth_of_the_data_is_found(truth):
    x = inputs(50)
    gains = []
    for y in draws(truth, x, 3, seed=10 + truth):
        compared = fit_depths(module, [SHALLOW, DEEP], x, y, num_starts=1)
        table = compared.to_pandas().set_index("depth")["log_evidence"]
        gains.append(float(table[truth] - table[SHALLOW + DEEP - truth]))
        assert compared.best == table.idxmax()
    # What is expected to be positive is the mean.
    assert sum(gains) > 0 and sum(gain > 0 for gain in gains) >= 2, gains


def test_fits_end_where_gradients_vanish():
    x = inputs(40)
    y = draws(2, x, 1, seed=5)[0]
    found = fit_variances(network(2), x, y, num_starts=3)
    assert found.gradient < 1e-3 and not found.at_bound
    assert found.log_evidence == max(found.starts)
    assert max(found.starts) - min(found.starts) < 1e-6
    at_truth = nngp_posterior(network(2), x, y, NOISE).log_evidence
    assert found.log_evidence > float(at_truth)
    posterior = found.posterior
    assert abs(float(posterior.log_evidence) - found.log_evidence) < 1e-9
    # Any step away from it is a step down.
    weight, bias = (next(iter(v.values())) for v in (found.network.variances.weight, found.network.variances.bias))
    for factors in ((1.05, 1, 1), (0.95, 1, 1), (1, 1.1, 1), (1, 0.9, 1), (1, 1, 1.05), (1, 1, 0.95)):
        moved = found.network.with_variances(weight=weight * factors[0], bias=bias * factors[1])
        value = nngp_posterior(moved, x, y, found.noise_variance * factors[2]).log_evidence
        assert float(value) < found.log_evidence


def test_one_variance_a_layer_reaches_at_least_as_high():
    x = inputs(30)
    y = draws(2, x, 1, seed=6)[0]
    tied = fit_variances(network(2), x, y, num_starts=1)
    own = fit_variances(network(2), x, y, num_starts=1, tied=False)
    assert own.log_evidence >= tied.log_evidence - 1e-6
    assert len({float(v) for v in own.network.variances.weight.values()}) == 3


def test_noise_that_is_known_stays(limit):
    x = inputs(30)
    y = draws(2, x, 1, seed=7)[0]
    found = fit_variances(network(2), x, y, noise_variance=NOISE, num_starts=1, covariance="ntk")
    assert found.noise_variance == NOISE and found.posterior.prior == "NTK"


def test_bounds_are_reported():
    x = inputs(30)
    found = fit_variances(network(1), x, 2.0 * x[:, 0], num_starts=1)  # without noise
    assert "noise_variance" in found.at_bound and "noise_variance at its bound" in repr(found)


def test_starts_end_once_two_agree():
    x = inputs(25)
    y = draws(2, x, 1, seed=5)[0]
    found = fit_variances(network(2), x, y[:, None], num_starts=50)
    assert 2 <= len(found.starts) < 50 and found.finished
    first, second = sorted(found.starts)[-2:]
    assert second - first < 1e-6 and repr(found).endswith(f"2 of {len(found.starts)} starts agree")
    assert repr(found).startswith(f"Fit: log evidence {found.log_evidence:.6g}, weights ")


def test_differences_of_matrices_are_the_derivative():
    layers = nn.Conv2d(1, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    kernel = infinite_width(nn.Sequential(*layers), weight_variance=1.7, bias_variance=0.3)
    x = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for tied, noise in ((True, None), (False, None), (True, 0.1)):
        objective = MarginalLikelihoodObjective(Parameters(kernel, tied), "nngp", x, x[:, 0, 0, 0].sin(), noise)
        value, gradient = objective(objective.first.numpy())
        exact_value, exact = objective._by_backpropagation(objective.first)
        assert abs(value - float(exact_value)) < 1e-10
        # Each derivative of the matrix is good to the square of the step, and to rounding over the step.
        error = float((torch.as_tensor(gradient) - exact).abs().max())
        assert error < 1e-8 * len(x) and len(gradient) == (4 if not tied else 2) + (noise is None)
    # A mutation: one-sided differences of this step would not do.
    step = torch.finfo(x.dtype).eps ** (1 / 3)
    moved = objective._by_backpropagation(objective.first + 0.5 * torch.tensor([step, 0.0]))[1]
    assert float((moved - exact).abs().max()) > 1e-8 * len(x)


def test_time_and_iterations_end_the_search():
    x = inputs(25)
    y = draws(2, x, 1, seed=5)[0]
    with pytest.warns(AccuracyWarning, match="time_budget"):
        found = fit_variances(network(2), x, y, time_budget=1e-9)
    assert len(found.starts) == 1 and not found.finished and repr(found).endswith("not finished")
    with pytest.warns(AccuracyWarning, match="max_iterations"):
        fit_variances(network(2), x, y, num_starts=1, max_iterations=2)


def test_data_that_are_not_centred():
    x = inputs(10)
    with pytest.warns(AccuracyWarning, match="y has mean 151"):
        fit_variances(network(1), x, 151 + x[:, 0] - x[:, 0].mean(), num_starts=1)


def test_comparisons_are_shown():
    x = inputs(12)
    compared = fit_depths(module, [1, 2], x, draws(1, x, 1, seed=3)[0], num_starts=1)
    table = compared.to_pandas().set_index("depth")
    for depth, found in compared.fits.items():
        weight = float(next(iter(found.network.variances.weight.values())))
        assert (
            table["weight_variance"][depth] == found.variances["weight_variance"]
            and abs(math.log(weight / found.variances["weight_variance"])) < 1e-12
        )
    line = compared.plot().lines[0]
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == list(table["log_evidence"])
    assert (
        repr(compared).startswith(f"DepthComparison: depth {compared.best} is best") and repr(compared).count("\n") == 2
    )


def test_bad_settings():
    x = inputs(5)
    with pytest.raises(DataError, match="zero everywhere"):
        fit_variances(network(1), x, torch.zeros(5, dtype=x.dtype))
    with pytest.raises(SettingsError, match="num_starts"):
        fit_variances(network(1), x, x[:, 0], num_starts=0)
    with pytest.raises(SettingsError, match="depths"):
        fit_depths(module, [], x, x[:, 0])
    with pytest.raises(ModelError, match="wrap it"):
        fit_variances(module(1), x, x[:, 0])
    with pytest.raises(SettingsError, match="time_budget"):
        fit_variances(network(1), x, x[:, 0], time_budget=0.0)
    with pytest.raises(SettingsError, match="nngp"):
        fit_variances(network(1), x, x[:, 0], covariance="both")
