import math

import pytest
import torch

import bayeskit as bk
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers import HMC, Adaptation, ChEES, Control, LongestAxis, Metric, RunSettings, run
from bayeskit.inference.samplers.dual_averaging import DualAveraging
from bayeskit.inference.samplers.hmc import HMCInfo
from bayeskit.inference.samplers.moments import Moments


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


def steps_of(result, adaptation):
    return adaptation.tuned(result.state).num_steps


@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_the_metric_learns_variances_over_seven_orders_of_magnitude(metric):
    target, covariance = gaussian([1e-2, 1.0, 30.0])
    adaptation = Adaptation(HMC(), 600, metric=metric)
    result = run(target, adaptation, RunSettings(16, 600, 1, control=Control(progress=False)))
    factor = result.state.factor[0]
    variance = factor.square().sum(-1) if metric == "dense" else factor.square()
    # The last window pools 16 chains over some 250 draws; 20 % is above ten of its standard errors.
    assert bool(((variance / covariance.diagonal() - 1).abs() < 0.2).all()), variance
    assert steps_of(result, adaptation) < 4


def test_a_dense_metric_takes_correlation_up_and_a_diagonal_one_needs_longer_trajectories():
    tied, covariance = gaussian([1.0] * 5, 0.95)
    settings = RunSettings(16, 400, 1, control=Control(progress=False))
    dense, diagonal = Adaptation(HMC(), 400, metric="dense"), Adaptation(HMC(), 400, metric="diagonal")
    first, second = run(tied, dense, settings), run(tied, diagonal, settings)
    factor = first.state.factor[0]
    # 16 chains over some 200 draws: each entry has a standard error of about 0.04.
    assert bool((factor @ factor.T - covariance).abs().max() < 0.3)
    assert steps_of(second, diagonal) > 2 * steps_of(first, dense)


def test_the_longest_axis_sets_the_trajectory():
    tied, _ = gaussian([1.0] * 5, 0.95)
    adaptation = Adaptation(HMC(), 400, metric="diagonal", trajectory=LongestAxis())
    state = run(tied, adaptation, RunSettings(16, 400, 1, control=Control(progress=False))).state
    # Equicorrelation 0.95 in five dimensions: the largest eigenvalue is 1 + 4 * 0.95 = 4.8.
    assert abs(float(state.trajectory.log_length.exp()) / (0.4 * math.pi * math.sqrt(4.8)) - 1) < 0.1


def test_chees_finds_a_quarter_period_of_a_normal(limit):
    """For a standard normal the change in squared distance is largest where the cosine of the length is zero."""
    target, _ = gaussian([1.0] * 10)
    adaptation = Adaptation(HMC(step_size_jitter=0.0, num_steps_jitter=0.1), 400, metric="diagonal")
    lengths = []
    for seed in range(8):
        settings = RunSettings(64, 400, 1, seed=seed, control=Control(progress=False))
        lengths.append(run(target, adaptation, settings).state.trajectory.log_length.exp())
    lengths = torch.stack(lengths)
    error = float(lengths.std() / math.sqrt(8))
    # Steps of about a half cannot resolve the length better than to their own size over the jitter.
    assert abs(float(lengths.mean()) - math.pi / 2) < 0.1 + limit() * error, lengths


def test_the_chees_gradient_agrees_with_finite_differences():
    """On a harmonic oscillator, where positions at any time are known, with common random numbers."""
    generator = torch.Generator().manual_seed(0)
    x, p = torch.randn(2, 500, 3, generator=generator, dtype=torch.float64)
    metric = Metric.diagonal(torch.ones(3, dtype=torch.float64))

    def at(time):
        end, momentum = x * math.cos(time) + p * math.sin(time), p * math.cos(time) - x * math.sin(time)
        change = end.square().sum(-1) - x.square().sum(-1)
        return end, momentum, 0.25 * change.square().mean()

    rule = ChEES(learning_rate=1.0)
    for time, grows in ((0.7, True), (2.0, False)):
        end, momentum, _ = at(time)
        one = torch.ones(500, dtype=torch.float64)
        info = HMCInfo(one, one > 2, one, one.to(torch.int64), end, momentum)
        state = rule.update(rule.start(x), x, info, torch.zeros(3), metric, time * one)
        numeric = float(at(time * math.exp(1e-5))[2] - at(time * math.exp(-1e-5))[2]) / 2e-5
        # After one step the second moment is 0.05 of the squared gradient, so the step is its sign.
        assert abs(float((state.second_moment / 0.05).sqrt()) - abs(numeric)) < 1e-6 * abs(numeric) + 1e-6
        assert bool(state.log_length > rule.start(x).log_length) == grows == (numeric > 0)


def test_uncorrelated_draws_give_the_identity_and_correlated_ones_their_matrix():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2000, 6, generator=generator, dtype=torch.float64)
    alone, tied = Moments.start(1, z), Moments.start(1, z)
    everyone = torch.ones(100, dtype=torch.bool)
    for i in range(20):
        part = z[100 * i : 100 * (i + 1)]
        alone, tied = alone.update(part, everyone), tied.update(part + 2 * part[:, :1], everyone)
    assert float((alone.correlation()[0] - torch.eye(6)).abs().max()) < 0.03
    everything = z + 2 * z[:, :1]
    torch.testing.assert_close(tied.mean[0], everything.mean(0))
    torch.testing.assert_close(tied.cross[0] / 1999, everything.T.cov())
    assert float((tied.correlation()[0] - everything.T.corrcoef()).abs().max()) < 0.01


def test_dual_averaging_finds_the_step_size_of_a_known_curve():
    state = DualAveraging.start(torch.tensor([5.0, 0.01], dtype=torch.float64))
    for _ in range(500):
        state = state.update((-state.step_size.square()).exp(), 0.8)
    exact = math.sqrt(-math.log(0.8))
    assert bool(((state.averaged / exact - 1).abs() < 0.02).all()), state.averaged


def test_acceptance_comes_near_its_target():
    target, _ = gaussian([1.0] * 20)
    for wanted in (0.6, 0.8, 0.95):
        adaptation = Adaptation(HMC(), 600, target_acceptance=wanted)
        result = run(target, adaptation, RunSettings(32, 600, 300, control=Control(progress=False)))
        harmonic = 1 / result.records["acceptance_rate"].clamp(min=0.1).reciprocal().mean(1)
        assert abs(float(harmonic.mean()) - wanted) < 0.08


def test_groups_adapt_apart(normal_normal):
    beta = torch.tensor([1e-4, 1.0], dtype=torch.float64).repeat_interleave(16)

    def log_likelihood(u):
        return -0.5 * (u / 0.01).square().sum(-1)

    target = bk.Target.from_functions(normal_normal.log_prior, log_likelihood, 2)
    result = run(
        target,
        Adaptation(HMC(beta=beta), 400, num_groups=2, metric="diagonal"),
        RunSettings(32, 400, 1, control=Control(progress=False)),
    )
    variance = result.state.factor.square()
    exact = 1 / (1 + torch.tensor([1e-4, 1.0], dtype=torch.float64) * 1e4)
    assert bool(((variance / exact[:, None] - 1).abs() < 0.25).all()), variance


def test_settings_outside_their_domain_are_refused(normal_normal):
    with pytest.raises(SettingsError, match="num_warmup"):
        Adaptation(HMC(), 3)
    with pytest.raises(SettingsError, match="target_acceptance"):
        Adaptation(HMC(), 100, target_acceptance=1.0)
    with pytest.raises(SettingsError, match="metric"):
        Adaptation(HMC(), 100, metric="full")
    with pytest.raises(SettingsError, match="cost_exponent"):
        ChEES(cost_exponent=2.0)
    with pytest.raises(SettingsError, match="groups"):
        run(normal_normal, Adaptation(HMC(), 50, num_groups=3), RunSettings(4, 50, 1, control=Control(progress=False)))
