"""Evidence from a flow fitted to posterior draws: right, calibrated, and aware of what the flow misses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

import bayeskit as bk
from bayeskit._core.statistics import pareto_shape
from bayeskit._draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence._flows import (
    FittedFlow,
    fit_flow,
    flow_importance_sampling,
    learned_harmonic_mean,
)
from bayeskit.inference.evidence._judging._diagnostics import LOOKS, WIDER, Diagnostics
from bayeskit.inference.evidence._judging._weights import shape_that_matters

F64 = torch.float64
ESTIMATORS = (flow_importance_sampling, learned_harmonic_mean)
BANANA = 1.7


def banana(dtype=F64):
    """A curved posterior of evidence e^1.7 in the plane: u2 is normal around u1 squared."""

    def log_prior(u):
        return -0.5 * u[..., 0].square() - 0.5 * (u[..., 1] / 30).square() - math.log(2 * math.pi * 30)

    def log_likelihood(u):
        curve = -0.5 * (u[..., 1] - u[..., 0].square()).square() + 0.5 * (u[..., 1] / 30).square()
        return curve + math.log(30) + BANANA

    return bk.Target.from_functions(log_prior, log_likelihood, 2, dtype=dtype)


def normal(shift=0.0, dim=3):
    """A correlated normal posterior whose evidence is e^shift, half of its exponent the prior's."""
    factor = torch.eye(dim, dtype=F64) + 0.5 * torch.ones(dim, dim, dtype=F64).tril(-1)
    inverse = torch.linalg.inv(factor).T.contiguous()

    def white(u):
        return u @ inverse

    target = bk.Target.from_functions(
        lambda u: (-0.25 * white(u).square() - 0.5 * math.log(4 * math.pi)).sum(-1),
        lambda u: (-0.25 * white(u).square() + 0.5 * math.log(2)).sum(-1) + shift,
        dim,
    )
    return target, factor


def as_draws(target, x):
    log_prior, log_likelihood = target.evaluate(x)
    return Draws(x, log_prior, log_likelihood, torch.ones(len(x), dtype=x.dtype), target=target)


def banana_draws(seed, chains=16, count=400, target=None):
    target = target or banana()
    x = torch.randn(chains, count, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)
    x[..., 1] += x[..., 0].square()
    return as_draws(target, x.to(target.dtype))


def normal_draws(seed, shift=0.0, chains=16, count=200):
    target, factor = normal(shift)
    x = torch.randn(chains, count, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return as_draws(target, x @ factor.T)


@pytest.fixture(scope="module")
def curved():
    draws = banana_draws(0)
    return draws, fit_flow(draws.target, draws, max_steps=300)


def test_a_normal_posterior_needs_no_flow(limit):
    draws = normal_draws(0, shift=-3.0)
    flow = fit_flow(draws.target, draws, max_steps=50)
    assert flow.is_normal and math.isnan(flow.gain_error)  # none was tried
    for estimator in ESTIMATORS:
        z = estimator(draws.target, draws, flow=flow)
        assert z.trusted and z.method == estimator.__name__
        assert abs(z.log_evidence + 3) < limit(2) * z.standard_error and 0 < z.standard_error < 0.05


def test_a_coordinate_that_stands_still_is_named():
    draws = normal_draws(0, shift=-3.0)
    flow = fit_flow(draws.target, draws, max_steps=50)
    x = draws.unconstrained.clone()
    x[0, :, 0] = x[0, 0, 0]
    log_prior, log_likelihood = draws.target.evaluate(x)
    still = replace(draws, unconstrained=x, log_prior=log_prior, log_likelihood=log_likelihood)
    for estimator in ESTIMATORS:
        z = estimator(draws.target, still, flow=flow)
        assert not z.trusted and any("stands still in 1 of" in warning for warning in z.warnings)


def test_with_the_posterior_itself_the_weights_are_equal():
    """Closed form: without narrowing, every ratio is the reciprocal evidence exactly."""
    draws = normal_draws(0, shift=-3.0)
    _, factor = normal()
    z = learned_harmonic_mean(draws.target, draws, flow=FittedFlow(torch.zeros(3, dtype=F64), factor), temperature=1.0)
    assert abs(z.log_evidence + 3) < 1e-10 and z.standard_error < 1e-10


@pytest.mark.calibration
def test_in_many_dimensions_the_narrowed_flow_keeps_draws_inside(limit):
    """Half the variance and half the noise are a ball in 120 dimensions that no draw of either kind is in."""
    target, factor = normal(shift=-3.0, dim=120)
    x = torch.randn(16, 200, 120, generator=torch.Generator().manual_seed(0), dtype=F64)
    flow = FittedFlow(torch.zeros(120, dtype=F64), factor)
    z = learned_harmonic_mean(target, as_draws(target, x @ factor.T), flow=flow)
    assert z.trusted and abs(z.log_evidence + 3) < limit() * z.standard_error
    # Closed form: noise of variance T, not cut off, has ratios whose mean square is (T (2 - T)) ** (-d / 2); of the
    # temperatures that are tried 0.95 is the largest.
    uncut = math.sqrt(((0.95 * 1.05) ** -60 - 1) / (16 * 100))
    assert 0.5 * uncut < z.standard_error < 2 * uncut


@pytest.mark.calibration
def test_the_density_is_that_of_the_draws(curved, limit):
    """The density integrates to one, by importance sampling from a wide normal, at either temperature."""
    _, flow = curved
    generator = torch.Generator().manual_seed(1)
    wide = FittedFlow(flow.location, 2 * flow.factor)
    x = wide.sample(20_000, generator)
    for temperature in (1.0, 0.5):
        weights = (flow.log_prob(x, temperature) - wide.log_prob(x)).exp()
        assert abs(weights.mean() - 1) < limit(2) * weights.std() / math.sqrt(len(x))
        own = flow.sample(20_000, generator, temperature)
        for function in (torch.sin, torch.tanh):
            drawn, weighed = function(own).sum(-1), weights * function(x).sum(-1)
            error = math.hypot(float(drawn.std()), float(weighed.std())) / math.sqrt(len(x))
            assert abs(float(drawn.mean() - weighed.mean())) < limit(4) * error


def test_a_curved_posterior_is_learnt(curved, limit):
    draws, flow = curved
    assert not flow.is_normal and flow.gain > max(0.5, 5 * flow.gain_error)
    plain = fit_flow(draws.target, draws, max_steps=0)
    for estimator in ESTIMATORS:
        z, without = (estimator(draws.target, draws, flow=f) for f in (flow, plain))
        assert z.trusted and abs(z.log_evidence - BANANA) < limit(2) * z.standard_error, str(z)
        assert z.standard_error < 0.6 * without.standard_error or not without.trusted


@pytest.mark.calibration
def test_shells_are_learnt(limit):
    """Two thin rings side by side, with exact draws by rejection from the prior."""
    case = bk.exact.gaussian_shells(2)
    target, generator = case.target(), torch.Generator().manual_seed(0)
    proposed = target.sample_prior(100_000, seed=generator)
    height = target.log_likelihood(proposed)
    accepted = proposed[torch.rand(len(height), generator=generator, dtype=F64).log() < height - height.max()]
    draws = as_draws(target, accepted[: len(accepted) // 16 * 16].reshape(16, -1, 2))
    flow = fit_flow(target, draws, max_steps=250)
    assert flow.gain > max(0.5, 5 * flow.gain_error)
    for estimator in ESTIMATORS:
        z = estimator(target, draws, flow=flow)
        assert abs(z.log_evidence - case.log_evidence) < limit(2) * z.standard_error or not z.trusted, str(z)
    assert flow_importance_sampling(target, draws, flow=flow).standard_error < 0.05


def test_one_dimension(limit):
    case = bk.exact.get("beta_binomial")
    draws = bk.sample(case.target(), 16, 100, 200, seed=0, progress=False)
    flow = fit_flow(draws.target, draws, max_steps=100)
    for estimator in ESTIMATORS:
        z = estimator(draws.target, draws, flow=flow)
        assert z.trusted and abs(z.log_evidence - case.log_evidence) < limit(2) * z.standard_error


def test_bounded_weights_have_no_tail():
    """A few weights unlike all others are no heavy tail unless they, or those of posterior draws, are large."""
    few = torch.zeros(10_000, dtype=F64)
    few[:40] = torch.linspace(0.1, 1.2, 40, dtype=F64) ** 3
    few[40:400] = torch.linspace(0, 1e-4, 360, dtype=F64)
    assert pareto_shape(few) > 0.7 and shape_that_matters(few, few[:100]) <= 0
    assert shape_that_matters(few, torch.tensor([3.0])) > 0.7  # a posterior draw of weight e^3
    heavy = -0.9 * torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=F64).log()
    assert shape_that_matters(heavy, heavy[:0]) > 0.7


@pytest.mark.calibration
def test_other_coordinates_give_the_same_estimate():
    """The normal is affinely equivariant, so estimates move by rounding alone; a constant moves them by itself."""
    draws = banana_draws(3)
    scale = torch.tensor([1e3, 1e-2], dtype=F64)  # diagonal and positive, so the Cholesky factors correspond
    inner = banana()
    log_volume = float(scale.log().sum())

    def log_prior(v):
        return inner.log_prior((v - 5) / scale) - log_volume

    moved_target = bk.Target.from_functions(log_prior, lambda v: inner.log_likelihood((v - 5) / scale) + 10, 2)
    moved = as_draws(moved_target, draws.unconstrained * scale + 5)
    flows = [fit_flow(d.target, d, max_steps=50) for d in (draws, moved)]
    assert not flows[0].is_normal
    for estimator in ESTIMATORS:
        z, other = (estimator(d.target, d, flow=f, seed=2) for d, f in zip((draws, moved), flows, strict=True))
        assert abs(other.log_evidence - z.log_evidence - 10) < 1e-6
        assert abs(other.standard_error - z.standard_error) < 1e-6


@pytest.fixture(scope="module")
def replicates():
    target = banana()
    return [banana_draws(1000 + seed, 4, 250, target) for seed in range(100)]


def scores(estimator, flow, replicates):
    """Scores of replicates with fresh independent draws and one flow."""
    found = []
    for seed, draws in enumerate(replicates):
        settings = {"num_draws": 500} if estimator is flow_importance_sampling else {}
        z = estimator(draws.target, draws, flow=flow, seed=seed, **settings)
        found.append((z.log_evidence - BANANA) / z.standard_error)
    return np.array(found)


@pytest.mark.long
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_errors_are_neither_too_small_nor_too_large(estimator, curved, replicates, calibrated):
    z = scores(estimator, curved[1], replicates)
    assert calibrated(z, off=0.1), (z.mean(), z.std())
    assert not calibrated(2 * z, off=0.1)  # the mutation: half the standard error


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_lost_jacobian_is_noticed(estimator, curved, limit, monkeypatch):
    """The mutation: the volume of the whitening left out of the density."""
    draws, flow = curved
    lost = flow.factor.diagonal().log().sum()
    to_noise, defensive = FittedFlow.to_noise, FittedFlow.defensive_log_prob

    def without(self, x):
        noise, log_volume = to_noise(self, x)
        return noise, log_volume + lost

    monkeypatch.setattr(FittedFlow, "to_noise", without)
    monkeypatch.setattr(FittedFlow, "defensive_log_prob", lambda self, x: defensive(self, x) + lost)
    z = estimator(draws.target, draws, flow=flow)
    assert abs(z.log_evidence - BANANA) > limit() * z.standard_error


def test_autocorrelation_widens_the_harmonic_error(curved):
    draws, flow = curved
    sticky = as_draws(draws.target, draws.unconstrained[:, ::8].repeat_interleave(8, 1))
    free, held = (learned_harmonic_mean(d.target, d, flow=flow).standard_error for d in (draws, sticky))
    assert 2 < held / free < 4  # the square root of eight


def test_a_flow_that_is_too_wide_or_elsewhere_is_noticed(curved):
    draws, flow = curved
    wide = FittedFlow(flow.location, 4 * flow.factor)
    z = learned_harmonic_mean(draws.target, draws, flow=wide)
    assert not z.trusted and any("lower the temperature" in warning for warning in z.warnings)
    elsewhere = FittedFlow(flow.location + 20, 0.3 * flow.factor)
    z = flow_importance_sampling(draws.target, draws, flow=elsewhere)
    assert not z.trusted
    narrow = FittedFlow(flow.location, 0.02 * flow.factor)
    z = flow_importance_sampling(draws.target, draws, flow=narrow, num_draws=1000)
    assert not z.trusted and any("outside the proposal" in warning for warning in z.warnings)


@pytest.mark.parametrize("reaches_prior", [True, False])
def test_the_prior_reaches_what_draws_and_flow_have_not_seen(reaches_prior, limit):
    """All draws come from one side of a wide posterior, so that flow and draws agree on a half of it."""

    def sample_prior(n, generator):
        return 100 * torch.randn(n, 2, generator=generator, dtype=F64)

    target = bk.Target.from_functions(
        lambda u: (-0.5 * (u / 100).square() - 0.5 * math.log(2 * math.pi * 100**2)).sum(-1),
        lambda u: 0 * u[..., 0],
        2,
        sample_prior=sample_prior if reaches_prior else None,
    )
    x = 100 + torch.randn(16, 200, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    flow = FittedFlow(torch.full((2,), 100.0, dtype=F64), torch.eye(2, dtype=F64))
    z = flow_importance_sampling(target, as_draws(target, x), flow=flow, num_draws=4000)
    assert (abs(z.log_evidence) < limit() * z.standard_error) == reaches_prior
    assert not reaches_prior or 0 < z.standard_error < 0.2


def wide_prior(log_likelihood):
    """A normal posterior in the plane whose prior has a scale of a thousand."""
    return bk.Target.from_functions(
        lambda u: (-0.5 * (u / 1000).square() - 0.5 * math.log(2 * math.pi * 1000**2)).sum(-1),
        log_likelihood,
        2,
        sample_prior=lambda n, generator: 1000 * torch.randn(n, 2, generator=generator, dtype=F64),
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_likelihood_that_is_no_number_far_out_in_the_prior_does_no_harm(bad, limit):
    target = wide_prior(lambda u: torch.where(u.abs().amax(-1) < 500, -0.5 * u.square().sum(-1), math.nan))
    x = torch.randn(16, 200, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    if math.isinf(bad):
        sample = target._sample_prior
        target._sample_prior = lambda n, generator: sample(n, generator).index_fill(0, torch.tensor([0]), bad)
    flow = FittedFlow(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    z = flow_importance_sampling(target, as_draws(target, x), flow=flow)
    exact = -math.log(1000**2 + 1)
    assert z.trusted and abs(z.log_evidence - exact) < limit() * z.standard_error < 0.05, str(z)


def test_how_many_draws_each_part_gives_is_not_left_to_chance():
    """Closed form: weights of the flow's draws are nearly equal, and of the prior's all but zero."""
    target = wide_prior(lambda u: -0.5 * u.square().sum(-1))
    x = torch.randn(16, 200, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    flow = FittedFlow(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
    draws = as_draws(target, x)
    errors = [flow_importance_sampling(target, draws, flow=flow, seed=s).log_evidence for s in range(40)]
    claimed = flow_importance_sampling(target, draws, flow=flow).standard_error
    by_chance = math.sqrt(0.1 / 0.9 / 10_000)  # the error of the number of prior draws alone
    spread = float(np.std(np.array(errors) + math.log(1000**2 + 1)))
    low, high = np.sqrt(chi2.ppf([5e-6, 1 - 5e-6], 39) / 39)
    assert low * claimed < spread < high * claimed and max(spread, claimed) < 0.75 * by_chance, (spread, claimed)


@pytest.mark.calibration
def test_single_precision(limit):
    target = banana(torch.float32)
    draws = banana_draws(5, target=target)
    flow = fit_flow(target, draws, max_steps=75)
    assert flow.sample(3, torch.Generator()).dtype == torch.float32
    for estimator in ESTIMATORS:
        z = estimator(target, draws, flow=flow)
        assert abs(z.log_evidence - BANANA) < limit(2) * z.standard_error or not z.trusted


@pytest.mark.calibration
def test_the_seed_decides_and_the_global_stream_does_not():
    draws = banana_draws(6, 8, 200)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.no_grad():
        flows = [fit_flow(draws.target, draws, seed=seed, max_steps=25) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    x = draws.unconstrained[0]
    first, same, other = (flow.log_prob(x) for flow in flows)
    assert torch.equal(first, same) and not torch.equal(first, other)
    first, same, other = (flow_importance_sampling(draws.target, draws, flow=flows[0], seed=s) for s in (0, 0, 1))
    assert first.log_evidence == same.log_evidence != other.log_evidence


def test_evaluations_are_counted(curved):
    draws, flow = curved
    search = Diagnostics(draws.target).modes(draws).num_evaluations + len(WIDER) * LOOKS
    assert flow_importance_sampling(draws.target, draws, flow=flow, num_draws=123).num_evaluations == 123 + search
    assert learned_harmonic_mean(draws.target, draws, flow=flow).num_evaluations == 2000 + search


def test_bad_input_is_refused(curved):
    draws, flow = curved
    other, _ = normal()
    few = as_draws(draws.target, draws.unconstrained[:, :15])
    still = as_draws(draws.target, draws.unconstrained * torch.tensor([1.0, 0.0], dtype=F64))
    shifted = bk.Target.from_functions(draws.target.log_prior, lambda u: draws.target.log_likelihood(u) + 1, 2)
    for call in (fit_flow, *ESTIMATORS):
        with pytest.raises(DrawsError, match="dimension 2, the target 3"):
            call(other, draws)
        with pytest.raises(DrawsError, match="another target"):
            call(shifted, draws)
        with pytest.raises(DrawsError, match="too few to fit"):
            call(draws.target, few)
        with pytest.raises(DrawsError, match="singular"):
            call(draws.target, still)
    with pytest.raises(SettingsError, match="max_steps"):
        fit_flow(draws.target, draws, max_steps=-1)
    with pytest.raises(SettingsError, match="num_draws"):
        flow_importance_sampling(draws.target, draws, flow=flow, num_draws=1)
    for temperature in (0.0, 1.5):
        with pytest.raises(SettingsError, match="temperature"):
            learned_harmonic_mean(draws.target, draws, flow=flow, temperature=temperature)
    three = FittedFlow(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
    for estimator in ESTIMATORS:
        with pytest.raises(SettingsError, match="the flow has dimension 3"):
            estimator(draws.target, draws, flow=three)
