import math

import pytest
import torch
from scipy.optimize import brentq

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers import HMC, Adaptation, ChEES, Control, LongestAxis, Metric, RunSettings, run
from bayeskit.inference.samplers._adaptation import FLOOR, DualAveraging
from bayeskit.inference.samplers._hmc import HMCInfo
from bayeskit.inference.samplers._metric import Moments, Window

FAILURE_RATE = 1e-5
# Groups adapt apart and are replicates of each other. The chains of a window move by a kernel that still adapts to
# them, which biases what it learns by the order of one over the chains of a group, where its error falls only with
# the square root: with many chains a group and few groups the bias is lost in the error.
NUM_GROUPS, PER_GROUP = 16, 64
# What one draw's weight for the metric before leaves of its error, in windows of 640 draws and more: 1 / 640 of it
# after the first, a share of 1 / 1280 of that after the second, and so on down to rounding.
EXACT = 1e-8


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


def z_scores(replicates, truth):
    """Standardised errors of the mean over the leading dimension."""
    return (replicates.mean(0) - truth) / replicates.std(0) * math.sqrt(len(replicates))


def steps_of(result, adaptation):
    return adaptation.tuned(result.state).num_steps


@pytest.mark.calibration
@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_the_metric_learns_variances_over_seven_orders_of_magnitude(metric, limit):
    scales = [1e-2, 1.0, 30.0]
    target, covariance = gaussian(scales)
    adaptation = Adaptation(HMC(), 600, num_groups=NUM_GROUPS, metric=metric)
    result = run(target, adaptation, RunSettings(NUM_GROUPS * PER_GROUP, 600, 1, control=Control(progress=False)))
    factor = result.state.factor
    variance = factor.square().sum(-1) if metric == "dense" else factor.square()
    if metric == "dense":  # which sees gradients, too: exact on a normal, but for the weight of one draw each window
        assert float((variance / covariance.diagonal() - 1).abs().max()) < EXACT
    else:
        z = z_scores(variance, covariance.diagonal())
        assert float(z.abs().max()) < limit(3, NUM_GROUPS - 1), z
    # Without the metric the smallest scale bounds the step, to stay stable, at twice itself, and the largest asks for
    # a quarter of its period.
    assert steps_of(result, adaptation) < math.pi / 2 * scales[-1] / (2 * scales[0])


@pytest.mark.calibration
def test_a_dense_metric_takes_correlation_up_and_a_diagonal_one_needs_longer_trajectories():
    tied, covariance = gaussian([1.0] * 5, 0.95)
    dense, diagonal = (Adaptation(HMC(), 200, num_groups=NUM_GROUPS, metric=kind) for kind in ("dense", "diagonal"))
    first = run(tied, dense, RunSettings(NUM_GROUPS * PER_GROUP, 200, 1, control=Control(progress=False)))
    second = run(tied, diagonal, RunSettings(NUM_GROUPS * 16, 200, 1, control=Control(progress=False)))
    factor = first.state.factor
    assert float((factor @ factor.mT - covariance).abs().max()) < EXACT
    assert steps_of(second, diagonal) > steps_of(first, dense)


def of_few_directions(d):
    """A normal posterior of very different scales and three directions that no coordinate shows."""
    generator = new_generator(0)
    scales = 10 ** (2 * torch.rand(d, generator=generator, dtype=torch.float64) - 1)
    axes = torch.linalg.qr(torch.randn(d, 3, generator=generator, dtype=torch.float64)).Q
    variance = torch.tensor([900.0, 100.0, 0.01], dtype=torch.float64)

    def log_likelihood(u):
        z = u / scales
        return -0.5 * (z.square().sum(-1) + ((z @ axes).square() * (1 / variance - 1)).sum(-1))

    root = scales.unsqueeze(-1) * (torch.eye(d, dtype=torch.float64) + axes * (variance.sqrt() - 1) @ axes.T)
    return bk.Target.from_functions(lambda u: 0 * u.sum(-1), log_likelihood, d), root


@pytest.mark.calibration
def test_a_metric_of_low_rank_finds_the_directions_that_matter():
    """Of standard deviations from .1 to 30 a diagonal metric leaves nearly all, one of low rank a tenth and less."""
    target, root = of_few_directions(200)
    adaptation = Adaptation(HMC(), 200)
    result = run(target, adaptation, RunSettings(4, 200, 1, control=Control(progress=False)))
    found, exact = adaptation.tuned(result.state).metric, Metric.diagonal(root.norm(dim=1))
    assert found.directions is not None
    deviations = [torch.linalg.svdvals(metric.whiten(root.T)) for metric in (found, exact)]
    left, of_diagonal = (float(x.max() / x.min()) for x in deviations)
    assert left < of_diagonal / 10, (left, of_diagonal)


def test_a_window_keeps_draws_evenly_spread_over_all_of_it():
    window = Window.start(2, torch.zeros(8, 3))
    slots = window.draws.shape[1]
    total = 3 * slots + 5
    for time in range(total):
        position = torch.full((8, 3), float(time))
        window = window.update(position, -position, torch.arange(8) != 5)
    kept = window.draws[0, :, 0, 0]
    kept = kept[kept.isfinite()]
    assert len(kept) > slots / 2 and kept[0] == 0 and total - kept[-1] <= window.stride
    assert torch.equal(kept.diff(), torch.full_like(kept[1:], float(window.stride)))
    known = window.draws.isfinite().all(-1)
    assert bool(known[0, : len(kept)].all()) and not bool(known[1, :, 1].any())  # the sixth chain is dead
    assert torch.equal(window.gradients[known], -window.draws[known])


@pytest.mark.calibration
def test_the_longest_axis_sets_the_trajectory(limit):
    # Equicorrelation 0.95 in five dimensions: the largest eigenvalue is 1 + 4 * 0.95 = 4.8.
    tied, covariance = gaussian([1.0] * 5, 0.95)
    rule, exact = LongestAxis(), 0.4 * math.pi * math.sqrt(4.8)
    state = rule.restart(rule.start(covariance), covariance.unsqueeze(0))
    assert abs(float(state.log_length.exp()) - exact) < 1e-13
    adaptation = Adaptation(HMC(), 80, metric="diagonal", trajectory=rule)
    lengths = [
        run(tied, adaptation, RunSettings(128, 80, 1, seed=seed, control=Control(progress=False))) for seed in range(8)
    ]
    lengths = torch.stack([result.state.trajectory.log_length.exp() for result in lengths])
    assert abs(float(z_scores(lengths, exact))) < limit(1, 7), lengths


def test_the_longest_axis_in_a_dense_metric():
    root = torch.tensor([[[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [-1.0, 3.0, 4.0]]], dtype=torch.float64)
    stretched = torch.tensor([9.0, 1.0, 0.25], dtype=torch.float64)
    rule, count = LongestAxis(), 300.0
    moments = Moments(torch.full((1, 1), count, dtype=torch.float64), root[:, 0], count * (root * stretched) @ root.mT)
    # Of the identity in three dimensions, known by 100 independent draws, chance makes (1 + sqrt(3 / 100))^2.
    spread, chance = moments.spread(root), (1 + math.sqrt(0.03)) ** 2
    assert torch.allclose(spread[0], torch.diag(stretched) / chance, atol=1e-12)
    state = rule.restart(rule.start(root[0]), None, spread)
    assert abs(float(state.log_length.exp()) - 0.4 * math.pi * 3 / math.sqrt(chance)) < 1e-12
    # One that chance explains leaves the length as it was.
    still = rule.restart(rule.start(root[0]), None, moments._replace(cross=count * root @ root.mT).spread(root))
    assert abs(float(still.log_length.exp()) - 0.4 * math.pi) < 1e-12


def chees_root(jitter):
    """Length where the expected gradient of ChEES is zero on a standard normal, time spread evenly within a share.

    At time t it is proportional to t sin(2 t), whose mean over the spread has this root next to a quarter period.
    """
    share = torch.linspace(-jitter, jitter, 10_001, dtype=torch.float64)

    def gradient(length):
        time = length * (1 + share)
        return float((time * (2 * time).sin()).mean())

    return brentq(gradient, 1.0, 2.0)


@pytest.mark.calibration
def test_chees_finds_a_quarter_period_of_a_normal(limit):
    """For a standard normal the change in squared distance is largest where the cosine of the length is zero."""
    target, _ = gaussian([1.0] * 10)
    adaptation = Adaptation(HMC(step_size_jitter=0.0, num_steps_jitter=0.1), 200, metric="diagonal")
    settings = (RunSettings(64, 200, 1, seed=seed, control=Control(progress=False)) for seed in range(8))
    lengths = torch.stack([run(target, adaptation, s).state.trajectory.log_length.exp() for s in settings])
    assert abs(float(z_scores(lengths, chees_root(0.1)))) < limit(1, 7), lengths


class _WrongSign(ChEES):
    """The mutation: the gradient of the criterion is followed downwards."""

    def update(self, state, before, info, *rest):
        return super().update(state, before, info._replace(momentum=-info.momentum), *rest)


@pytest.mark.calibration
@pytest.mark.parametrize("rule", [ChEES(), _WrongSign()], ids=["right", "mutated"])
def test_chees_finds_the_root_where_the_flow_is_exact(rule, limit):
    """Exact positions and momenta on a harmonic oscillator, so that only the stochastic gradient is at work."""
    generator, metric = torch.Generator().manual_seed(0), Metric.diagonal(torch.ones(3, dtype=torch.float64))
    one, centre, logs = torch.ones(256, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), []
    for _ in range(8):
        state = rule.start(centre)
        state = state._replace(log_length=state.log_length + 0.3, log_average=state.log_average + 0.3)
        for _ in range(200):
            x, p = torch.randn(2, 256, 3, generator=generator, dtype=torch.float64)
            time = state.log_length.exp()
            end, momentum = x * time.cos() + p * time.sin(), p * time.cos() - x * time.sin()
            info = HMCInfo(one, one > 2, one, one.to(torch.int64), end, momentum)
            state = rule.update(state, x, info, centre, metric, time * one)
        logs.append(state.log_average)
    z = float(z_scores(torch.stack(logs), math.log(math.pi / 2)))
    assert (abs(z) < limit(1, 7)) == (type(rule) is ChEES), z


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
    everything = z + 2 * z[:, :1]
    torch.testing.assert_close(tied.mean[0], everything.mean(0))
    torch.testing.assert_close(tied.cross[0] / 1999, everything.T.cov())
    # A third of 2,000 draws counts as independent, so noise alone has weights of about three, that is one, for the
    # identity; what is tied keeps all but the share that noise has in its squares.
    assert torch.equal(alone.correlation()[0], torch.eye(6, dtype=torch.float64))
    exact, identity = everything.T.corrcoef(), torch.eye(6, dtype=torch.float64)
    apart = exact * (1 - identity)
    noise = float(((1 - apart.square()).square() * (1 - identity)).sum()) / (2000 / 3)
    weight = noise / float(apart.square().sum())
    assert float((tied.correlation()[0] - (1 - weight) * apart - identity).abs().max()) < 1e-12


def test_dual_averaging_finds_the_step_size_of_a_known_curve():
    """Its errors add up to what separates the step size from the centre, so they fall with the square root of time.

    After T updates the log step size is off by gamma (centre - root) / (2 sqrt(T) slope) to leading order, gamma being
    0.05 and the slope that of the acceptance in the log step size; the average lags a little behind.
    """
    exact = math.sqrt(-math.log(0.8))
    slope = 2 * exact**2 * 0.8
    state = DualAveraging.start(torch.tensor([5.0, 0.01], dtype=torch.float64))
    for count in range(1, 2001):
        state = state.update((-state.step_size.square()).exp(), 0.8)
        if count in (500, 2000):
            leading = 0.05 * (state.centre - math.log(exact)) / (2 * math.sqrt(count) * slope)
            assert bool(((state.step_size.log() - math.log(exact)) / leading - 1).abs().max() < 1 / count**0.25)
            share = (state.averaged.log() - math.log(exact)) / leading
            assert bool(((share > 1) & (share < 1 + 4 / count**0.25)).all()), share


@pytest.mark.long
def test_acceptance_comes_near_its_target(limit):
    """The harmonic mean over a group's chains, from which it learns, keeps the wanted mean after warm-up.

    Nearly: the step size kept is an average over the last sixty or so iterations, which are too few for dual averaging
    to have arrived. By the identity of the test above their mean acceptance is off by gamma |centre - log step| /
    sqrt(60), and centre and step stay within a factor of ten.
    """
    target, _ = gaussian([1.0] * 20)
    bias = 0.05 * math.log(10) / math.sqrt(60)
    for wanted in (0.6, 0.8, 0.95):
        adaptation = Adaptation(HMC(), 600, num_groups=30, target_acceptance=wanted, metric="diagonal")
        result = run(target, adaptation, RunSettings(30 * 16, 600, 100, control=Control(progress=False)))
        rates = result.records["acceptance_rate"].reshape(100, 30, 16)
        harmonic = (1 / rates.clamp(min=FLOOR).reciprocal().mean(-1)).mean(0)
        error = float(harmonic.std()) / math.sqrt(30)
        assert abs(float(harmonic.mean()) - wanted) < bias + limit(3, 29) * error, (wanted, harmonic)


@pytest.mark.calibration
def test_groups_adapt_apart(normal_normal, limit):
    """Groups at two temperatures, in turn, each with its own variance."""
    levels = torch.tensor([1e-4, 1.0], dtype=torch.float64).repeat(NUM_GROUPS // 2)

    def log_likelihood(u):
        return -0.5 * (u / 0.01).square().sum(-1)

    target = bk.Target.from_functions(normal_normal.log_prior, log_likelihood, 2)
    result = run(
        target,
        Adaptation(HMC(beta=levels.repeat_interleave(PER_GROUP)), 400, num_groups=NUM_GROUPS, metric="diagonal"),
        RunSettings(NUM_GROUPS * PER_GROUP, 400, 1, control=Control(progress=False)),
    )
    exact = 1 / (1 + levels * 1e4)
    relative = (result.state.factor.square() / exact[:, None]).reshape(-1, 2, 2)
    z = z_scores(relative, 1.0)
    assert float(z.abs().max()) < limit(4, len(relative) - 1), z


def test_settings_outside_their_domain_are_refused(normal_normal):
    with pytest.raises(SettingsError, match="num_warmup"):
        Adaptation(HMC(), 3)
    for value in (1.0, "0.8", None, math.nan):
        with pytest.raises(SettingsError, match="target_acceptance"):
            Adaptation(HMC(), 100, target_acceptance=value)
    with pytest.raises(SettingsError, match="metric"):
        Adaptation(HMC(), 100, metric="full")
    with pytest.raises(SettingsError, match="cost_exponent"):
        ChEES(cost_exponent=2.0)
    with pytest.raises(SettingsError, match="groups"):
        run(normal_normal, Adaptation(HMC(), 50, num_groups=3), RunSettings(4, 50, 1, control=Control(progress=False)))


@pytest.mark.parametrize("name", ["max_steps", "num_groups"])
def test_nothing_to_adapt_is_refused(name):
    with pytest.raises(SettingsError, match=name):
        Adaptation(HMC(), 30, **{name: 0})


def test_a_dense_metric_lies_in_memory_as_a_checkpoint_gives_it_back():
    """Products of a matrix in another layout round differently, and a resumed run would not be the same to the bit."""
    target, generator = bk.exact.get("linreg10").target(), torch.Generator().manual_seed(0)
    adaptation = Adaptation(HMC(), 60, metric="dense")
    state = adaptation.init(target, target.sample_prior(32, seed=0), generator=generator)
    for _ in range(60):
        state, _ = adaptation.step(target, state, generator=generator)
    assert state.factor.dim() == 3 and not torch.equal(state.factor, torch.diag_embed(state.factor.diagonal(0, 1, 2)))
    assert state.factor.is_contiguous()
    assert Metric.dense(torch.eye(3).expand(2, 3, 3) * 2).factor.is_contiguous()
