import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import digamma, polygamma
from scipy.stats import kstest, norm

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit.errors import SamplingWarning, SettingsError, ShapeError
from bayeskit.inference.samplers import HMC, Adaptation, Control, Metric, RunSettings, run


def z_score(x, truth):
    """Standardised error of the mean of ``(chains, draws)``."""
    return abs(float((x.mean() - truth) / mean_error(x)))


def invariance_p_value(kernel, target, start, quantile, num_steps=3):
    """Start exact, step a few times, and ask whether coordinate 0 is still exact."""
    generator = torch.Generator().manual_seed(5)
    state = kernel.init(target, start)
    for _ in range(num_steps):
        state, _ = kernel.step(target, state, generator=generator)
    return kstest(quantile(state.position[:, 0].numpy()), "uniform").pvalue


def test_one_step_leaves_the_target_invariant(skewed):
    start = skewed.sample_prior(20_000, seed=3)
    from scipy.stats import gamma

    kernel = HMC(step_size=0.4, num_steps=3.0)
    p = invariance_p_value(kernel, skewed, start, lambda x: gamma.cdf(torch.tensor(x).exp(), 3))
    assert p > 1e-5


def _exponential_beyond_a_wall():
    """Coordinate 0 is exponential, with no density below zero; the others are normal."""

    def log_density(u):
        return torch.where(u[..., 0] > 0, -u[..., 0], -torch.inf) - 0.5 * u[..., 1:].square().sum(-1)

    return bk.Target.from_functions(log_density, lambda u: 0 * u[..., 0], 3, compile=False)


class _Pushed(HMC):
    """The mutation: what turned round at a wall is moved away from it."""

    def _bouncing(self, state, p, *arguments):
        q, end, here, quality = super()._bouncing(state, p, *arguments)
        turned = (quality < 1).unsqueeze(-1)
        return torch.where(turned, q + 0.1, q), end, here, quality


@pytest.mark.parametrize("num_steps", [1.0, 4.0, 9.0])
def test_trajectories_that_turn_round_at_a_wall_leave_the_target_invariant(num_steps):
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    start[:, 0].exponential_(generator=generator)
    kernel = HMC(step_size=0.3, num_steps=num_steps)
    target = _exponential_beyond_a_wall()
    state = kernel.init(target, start)
    _, info = kernel.step(target, state, generator=generator)
    assert not bool(info.diverging.any())
    assert float(info.proposal[:, 0].min()) > 0
    assert invariance_p_value(kernel, target, start, lambda x: -np.expm1(-x)) > 1e-5
    mutant = _Pushed(step_size=0.3, num_steps=num_steps)
    assert invariance_p_value(mutant, target, start, lambda x: -np.expm1(-x)) < 1e-5


def test_a_trajectory_that_turned_round_leads_back():
    target, metric = _exponential_beyond_a_wall(), Metric(torch.ones(3, dtype=torch.float64), is_dense=False)
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    start[:, 0].exponential_(generator=generator)
    kernel, step = HMC(), torch.full((500, 1), 0.4, dtype=torch.float64)
    evaluate, momentum = target.evaluator(500), torch.randn(500, 3, generator=generator, dtype=torch.float64)
    state = kernel.init(target, start)
    there = kernel._bouncing(state, momentum + 0.5 * step * state.gradient, step, metric, evaluate, 7)
    end = kernel.init(target, there[0])
    back = kernel._bouncing(end, -there[1] + 0.5 * step * end.gradient, step, metric, evaluate, 7)
    torch.testing.assert_close(back[0], start, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(-back[1], momentum, rtol=1e-12, atol=1e-12)
    assert 0.05 < float((there[3] < 1).double().mean()) < 0.95


@pytest.mark.calibration
@pytest.mark.parametrize("seed", [0, 1])
def test_the_end_of_a_uniform_distribution(seed, limit):
    """The likelihood is zero below the largest datum; exact mean of a truncated power."""
    largest, top, n = 12.4, 23.0, 7

    def model():
        theta = pyro.sample("theta", dist.Uniform(0.0, torch.tensor(top, dtype=torch.float64)))
        pyro.factor("data", torch.where(theta > largest, -n * theta.log(), -torch.inf))

    draws = bk.sample(bk.Target.from_pyro(model), 32, 200, 250, seed=seed, progress=False)
    ratio = largest / top
    mean = (n - 1) / (n - 2) * largest * (1 - ratio ** (n - 2)) / (1 - ratio ** (n - 1))
    assert z_score(draws.values()["theta"], mean) < limit()
    assert not bool(draws.sample_stats["diverging"].any())


class _WrongDensity:
    """The mutation: the acceptance step sees the density without a linear term that the gradient has."""

    def __init__(self, target):
        self._target = target

    def evaluator(self, num_vectors, num_calls=1):
        right = self._target.evaluator(num_vectors, num_calls)

        def wrong(position, beta):
            evaluation = right(position, beta)
            return evaluation._replace(log_density=evaluation.log_density - 0.2 * position[:, 0])

        return wrong


def test_the_invariance_test_notices_a_wrong_acceptance_step(skewed):
    from scipy.stats import gamma

    start = skewed.sample_prior(20_000, seed=3)
    kernel = HMC(step_size=0.4, num_steps=3.0)
    p = invariance_p_value(kernel, _WrongDensity(skewed), start, lambda x: gamma.cdf(torch.tensor(x).exp(), 3))
    assert p < 1e-5


def of_low_rank(covariance):
    directions = torch.tensor([[0.6], [-0.8]], dtype=covariance.dtype)
    return Metric.low_rank(covariance.diagonal(), directions, torch.tensor([0.5], dtype=covariance.dtype))


@pytest.mark.parametrize("groups", [(), (2,)])
def test_a_metric_of_low_rank_is_its_dense_factor(groups):
    generator = torch.Generator().manual_seed(0)
    like = {"generator": generator, "dtype": torch.float64}
    variance = torch.rand(*groups, 7, **like) + 0.1
    directions = torch.linalg.qr(torch.randn(*groups, 7, 3, **like)).Q
    stretch = torch.rand(*groups, 3, **like) * 4 + 0.1
    metric = Metric.low_rank(variance, directions, stretch)
    identity = torch.eye(7, dtype=torch.float64)
    longer = identity + directions @ torch.diag_embed(stretch - 1) @ directions.mT
    factor = variance.sqrt().unsqueeze(-1) * longer
    x = torch.randn(4, 7, **like)
    each = factor.expand(2, 7, 7).repeat_interleave(2, 0)  # of each of the four chains
    torch.testing.assert_close(metric.to_position(x), (each @ x.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(metric.to_momentum(x), (each.mT @ x.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(metric.whiten(metric.to_position(x)), x)


def test_a_metric_of_low_rank_that_is_none_is_refused():
    one, directions, stretch = torch.ones(3), torch.eye(3)[:, :1], torch.tensor([2.0])
    with pytest.raises(ShapeError, match="do not fit"):
        Metric.low_rank(one, directions, torch.ones(2))
    for wrong in ((one, 2 * directions, stretch), (one, directions, -stretch), (-one, directions, stretch)):
        with pytest.raises(SettingsError):
            Metric.low_rank(*wrong)


@pytest.mark.parametrize("metric", [Metric.diagonal, Metric.dense, of_low_rank])
def test_one_step_with_a_metric_leaves_the_target_invariant(skewed, metric):
    from scipy.stats import gamma

    start = skewed.sample_prior(20_000, seed=3)
    covariance = start.T.cov()
    kernel = HMC(step_size=0.7, metric=metric(covariance.diagonal() if metric == Metric.diagonal else covariance))
    p = invariance_p_value(kernel, skewed, start, lambda x: gamma.cdf(torch.tensor(x).exp(), 3))
    assert p > 1e-5


def test_moments_of_a_skewed_correlated_target(skewed, limit):
    draws = bk.sample(skewed, num_chains=64, num_warmup=200, num_samples=500, seed=2, progress=False)
    x, y = draws.unconstrained[..., 0], draws.unconstrained[..., 1]
    mean, variance = float(digamma(3)), float(polygamma(1, 3))
    truths = {
        "mean x": (x, mean),
        "mean y": (y, 0.8 * mean),
        "variance x": ((x - mean).square(), variance),
        "variance y": ((y - 0.8 * mean).square(), 0.64 * variance + 0.25),
        "covariance": ((x - mean) * (y - 0.8 * mean), 0.8 * variance),
        "skewness": (((x - mean) / math.sqrt(variance)) ** 3, float(polygamma(2, 3)) / variance**1.5),
    }
    scores = {name: z_score(*pair) for name, pair in truths.items()}
    assert max(scores.values()) < limit(len(scores)), scores


@pytest.mark.calibration
def test_each_chain_has_its_own_temperature(normal_normal, limit):
    beta = torch.tensor([0.0, 0.1, 0.5, 1.0], dtype=torch.float64).repeat_interleave(16)
    adaptation = Adaptation(HMC(beta=beta), 200, num_groups=4)
    result = run(normal_normal, adaptation, RunSettings(64, 200, 1000, seed=1, control=Control(progress=False)))
    x = result.position.movedim(0, 1).reshape(4, 16, 1000, 2)
    scores = []
    for level, b in enumerate((0.0, 0.1, 0.5, 1.0)):
        mean, variance = b / (1 + b), 1 / (1 + b)
        scores += [z_score(x[level, ..., i], mean) for i in range(2)]
        scores += [z_score((x[level, ..., i] - mean).square(), variance) for i in range(2)]
    assert max(scores) < limit(len(scores)), scores


class _WholeKick(HMC):
    """The mutation: whole kicks at both ends of a trajectory, an integrator of first order."""

    def step(self, target, state, *, generator):
        return super().step(target, state._replace(gradient=2 * state.gradient), generator=generator)


@pytest.mark.parametrize("kernel", [HMC, _WholeKick])
@pytest.mark.parametrize("step_size", [0.1, 0.4])
def test_the_energy_error_is_that_of_the_leapfrog(normal_normal, kernel, step_size):
    """It is of second order, and known: with precision w the leapfrog of step h conserves an energy exactly.

    That energy has the precision w (1 - h^2 w / 4), so the other one changes by h^2 w^2 / 8 times what the squared
    distance from the mean changes. Here w is 2, and the mean 1/2.
    """
    start = normal_normal.sample_prior(2000, seed=0)
    one = kernel(step_size, num_steps=round(1.2 / step_size), num_steps_jitter=0.0, step_size_jitter=0.0)
    state = one.init(normal_normal, start)
    _, info = one.step(normal_normal, state, generator=torch.Generator().manual_seed(0))
    change = ((info.proposal - 0.5).square() - (start - 0.5).square()).sum(-1)
    exact = (-0.5 * step_size**2 * change).exp().clamp(max=1.0)
    assert (float((info.acceptance_rate - exact).abs().max()) < 1e-12) == (kernel is HMC)


@pytest.mark.calibration
def test_a_nan_in_one_chain_does_not_spoil_the_others(limit):
    """The density is NaN left of -3, where one chain starts."""

    def log_prior(u):
        value = norm_log_density(u)
        return torch.where(u[..., 0] < -3, torch.nan, value)

    def norm_log_density(u):
        return (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1)

    target = bk.Target.from_functions(log_prior, lambda u: 0 * u.sum(-1), 2)
    initial = torch.zeros(8, 2, dtype=torch.float64)
    initial[3] = -5.0
    with (
        pytest.warns(bk.errors.InitializationWarning, match=r"chains \[3\]"),
        pytest.warns(bk.errors.SamplingWarning, match="diverged"),
    ):
        draws = bk.sample(target, 8, 200, 500, seed=1, initial=initial, progress=False)
    assert bool((draws.unconstrained[3] == -5).all())
    others = draws.unconstrained[[0, 1, 2, 4, 5, 6, 7]]
    assert bool(others.isfinite().all())
    assert z_score(others[..., 1], 0.0) < limit()
    assert z_score(others[..., 1].square(), 1.0) < limit()


@pytest.mark.calibration
def test_a_chain_lost_far_away_does_not_spoil_the_warm_up_of_the_others():
    """The density is zero where one of eight chains starts, a thousand standard deviations away."""

    def log_prior(u):
        return torch.where(u[..., 0] > 100, -torch.inf, (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1))

    target = bk.Target.from_functions(log_prior, lambda u: 0 * u.sum(-1), 5)
    initial = torch.zeros(8, 5, dtype=torch.float64)
    whole = bk.sample(target, 8, 200, 100, seed=1, initial=initial, progress=False)
    initial[3, 0] = 1e3
    with (
        pytest.warns(bk.errors.InitializationWarning, match=r"chains \[3\]"),
        pytest.warns(bk.errors.SamplingWarning, match="diverged"),
    ):
        lost = bk.sample(target, 8, 200, 100, seed=1, initial=initial, progress=False)
    assert lost.num_gradients < 2 * whole.num_gradients


@pytest.mark.calibration
@pytest.mark.parametrize("metric", ["diagonal", "dense", "low_rank"])
def test_a_chain_without_a_gradient_does_not_spoil_the_warm_up_of_the_others(metric, limit):
    """Nor end it: a density may be finite where a root or a logarithm beside it has no derivative."""

    def log_likelihood(u):
        rooted = torch.where(u[..., 0] < 90, u[..., 0], (u[..., 0] - 100).square().sqrt() * 1e-3)
        return -0.5 * (rooted.square() + u[..., 1:].square().sum(-1))

    target = bk.Target.from_functions(lambda u: 0 * u.sum(-1), log_likelihood, 3)
    initial = torch.zeros(8, 3, dtype=torch.float64)
    initial[3, 0] = 100.0
    with pytest.warns(SamplingWarning):
        draws = bk.sample(target, 8, 200, 300, initial=initial, metric=metric, progress=False)
    others = draws.unconstrained[torch.arange(8) != 3]
    assert max(z_score(x.square(), 1.0) for x in others.unbind(-1)) < limit(3)


def test_an_infinite_density_is_no_place_to_stay():
    """The likelihood grows without bound at one point, where a scale becomes zero."""
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: torch.where(u[..., 0] > 1, torch.inf, 0.0 * u[..., 0]), 2
    )
    kernel = HMC(step_size=0.8)
    state = kernel.init(target, torch.zeros(500, 2, dtype=torch.float64))
    seen = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        state, info = kernel.step(target, state, generator=generator)
        seen += int(info.diverging.sum())
    assert seen > 0 and bool(state.log_density.isfinite().all())


def test_divergences_are_counted():
    """A density that ends in a cliff."""
    target = bk.Target.from_functions(
        lambda u: torch.where(u[..., 0].abs() < 1, torch.zeros_like(u[..., 0]), -1e4),
        lambda u: 0 * u[..., 0],
        1,
    )
    kernel = HMC(step_size=1.5, num_steps=2.0)
    state = kernel.init(target, torch.zeros(200, 1, dtype=torch.float64))
    state, info = kernel.step(target, state, generator=torch.Generator().manual_seed(0))
    assert 0 < int(info.diverging.sum()) < 200
    assert bool((state.position.abs() < 1).all())


@pytest.mark.parametrize(
    "setting",
    [
        {"step_size": 0.0},
        {"step_size": -1.0},
        {"beta": 1.5},
        {"beta": -0.1},
        {"num_steps": 0.5},
        {"num_steps_jitter": 1.5},
    ],
)
def test_settings_outside_their_domain_are_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        HMC(**setting)


def test_same_seed_same_draws_and_float32_stays_float32():
    def model(y):
        mean = bk_normal("mean")
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    import pyro
    import pyro.distributions as dist

    def bk_normal(name):
        return pyro.sample(name, dist.Normal(0.0, 1.0))

    y = torch.tensor([0.5, 1.5, 1.0])
    target = bk.Target.from_pyro(model, y)
    first = bk.sample(target, num_warmup=50, num_samples=50, seed=7, progress=False)
    second = bk.sample(target, num_warmup=50, num_samples=50, seed=7, progress=False)
    other = bk.sample(target, num_warmup=50, num_samples=50, seed=8, progress=False)
    assert first.unconstrained.dtype == torch.float32
    assert torch.equal(first.unconstrained, second.unconstrained)
    assert not torch.equal(first.unconstrained, other.unconstrained)


def test_sampling_leaves_torch_globals_alone(normal_normal):
    state, threads, dtype = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
    bk.sample(normal_normal, num_warmup=30, num_samples=10, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads() and dtype == torch.get_default_dtype()


def test_normal_cdf_of_the_limit(limit):
    assert abs(2 * norm.sf(limit()) - 1e-5) < 1e-12
