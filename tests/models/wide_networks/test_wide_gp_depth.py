"""Depth and variances by marginal likelihood, on data drawn from networks whose depth is known."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayeskit.errors import DataError, SettingsError
from bayeskit.models.wide_networks import infinite_width, nngp_posterior
from bayeskit.models.wide_networks.gaussian_processes import fit, fit_depths

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
    found = fit(network(2), x, y, num_starts=3)
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
    tied = fit(network(2), x, y, num_starts=1)
    own = fit(network(2), x, y, num_starts=1, tied=False)
    assert own.log_evidence >= tied.log_evidence - 1e-6
    assert len({float(v) for v in own.network.variances.weight.values()}) == 3


def test_noise_that_is_known_stays(limit):
    x = inputs(30)
    y = draws(2, x, 1, seed=7)[0]
    found = fit(network(2), x, y, noise_variance=NOISE, num_starts=1, covariance="ntk")
    assert found.noise_variance == NOISE and found.posterior.prior == "NTK"


def test_bounds_are_reported():
    x = inputs(30)
    found = fit(network(1), x, 3.0 + 2.0 * x[:, 0], num_starts=1)  # without noise
    assert "noise_variance" in found.at_bound


def test_bad_settings():
    x = inputs(5)
    with pytest.raises(DataError, match="zero everywhere"):
        fit(network(1), x, torch.zeros(5, dtype=x.dtype))
    with pytest.raises(SettingsError, match="num_starts"):
        fit(network(1), x, x[:, 0], num_starts=0)
    with pytest.raises(SettingsError, match="depths"):
        fit_depths(module, [], x, x[:, 0])
    with pytest.raises(SettingsError, match="nngp"):
        fit(network(1), x, x[:, 0], covariance="both")
