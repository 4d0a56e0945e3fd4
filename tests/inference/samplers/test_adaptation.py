import math

import pytest
import torch

import bayeskit as bk
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers import HMC, Adaptation, RunSettings, run


def gaussian(scales, correlation=0.0):
    scales = torch.tensor(scales, dtype=torch.float64)
    d = len(scales)
    matrix = torch.full((d, d), correlation, dtype=torch.float64)
    matrix.fill_diagonal_(1.0)
    covariance = scales[:, None] * matrix * scales
    precision = torch.linalg.inv(covariance)
    constant = -0.5 * torch.logdet(2 * math.pi * covariance)
    return bk.Target.from_functions(
        lambda u: constant - 0.5 * ((u @ precision) * u).sum(-1), lambda u: 0 * u.sum(-1), d
    ), covariance


def test_the_metric_learns_variances_over_seven_orders_of_magnitude(limit):
    target, covariance = gaussian([1e-2, 1.0, 30.0])
    result = run(target, Adaptation(HMC(), 600), RunSettings(16, 600, 1, progress=False))
    ratio = result.state.inverse_mass[0] / covariance.diagonal()
    # The last window pools 16 chains over some 250 draws; 20 % is above ten of its standard errors.
    assert bool(((ratio - 1).abs() < 0.2).all()), ratio
    assert result.state.num_steps < 4


def test_the_trajectory_grows_with_correlation():
    alone, _ = gaussian([1.0] * 5)
    tied, _ = gaussian([1.0] * 5, 0.95)
    short = run(alone, Adaptation(HMC(), 400), RunSettings(16, 400, 1, progress=False)).state
    long = run(tied, Adaptation(HMC(), 400), RunSettings(16, 400, 1, progress=False)).state
    # Equicorrelation 0.95 in five dimensions: the largest eigenvalue is 1 + 4 * 0.95 = 4.8.
    assert abs(float(long.correlation_scale) / math.sqrt(4.8) - 1) < 0.1
    assert float(short.correlation_scale) < 1.2
    assert long.num_steps > 2 * short.num_steps


def test_acceptance_comes_near_its_target():
    target, _ = gaussian([1.0] * 20)
    for wanted in (0.6, 0.8, 0.95):
        adaptation = Adaptation(HMC(), 600, target_acceptance=wanted)
        result = run(target, adaptation, RunSettings(32, 600, 300, progress=False))
        assert abs(float(result.records["acceptance_rate"].mean()) - wanted) < 0.08


def test_groups_adapt_apart(normal_normal):
    beta = torch.tensor([1e-4, 1.0], dtype=torch.float64).repeat_interleave(16)

    def log_likelihood(u):
        return -0.5 * (u / 0.01).square().sum(-1)

    target = bk.Target.from_functions(normal_normal.log_prior, log_likelihood, 2)
    result = run(target, Adaptation(HMC(beta=beta), 400, num_groups=2), RunSettings(32, 400, 1, progress=False))
    variance = result.state.inverse_mass
    exact = 1 / (1 + torch.tensor([1e-4, 1.0], dtype=torch.float64) * 1e4)
    assert bool(((variance / exact[:, None] - 1).abs() < 0.25).all()), variance


def test_settings_outside_their_domain_are_refused(normal_normal):
    with pytest.raises(SettingsError, match="num_warmup"):
        Adaptation(HMC(), 3)
    with pytest.raises(SettingsError, match="target_acceptance"):
        Adaptation(HMC(), 100, target_acceptance=1.0)
    with pytest.raises(SettingsError, match="groups"):
        run(normal_normal, Adaptation(HMC(), 50, num_groups=3), RunSettings(4, 50, 1, progress=False))
