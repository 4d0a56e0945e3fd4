"""The corrected arithmetic mean: closed forms, invariances, error bars over replicates, and what it says of itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import gammaincinv, ndtr
from scipy.stats import truncnorm
from torch.distributions import MultivariateNormal

import bayeskit as bk
from bayeskit import exact
from bayeskit._draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence import _arithmetic_mean as module
from bayeskit.inference.evidence import _bridge as bridge
from bayeskit.inference.evidence import bridge_sampling, corrected_arithmetic_mean
from bayeskit.inference.evidence._judging._diagnostics import LOOKS, WIDER, Diagnostics
from bayeskit.inference.samplers._unseen_tails import unseen_tails
from bayeskit.testing import EstimatorContract

REPLICATES = 100
F64 = torch.float64


class TestCorrectedArithmeticMean(EstimatorContract):
    method = "corrected_arithmetic_mean"


def as_draws(target, u):
    return Draws(u, *target.evaluate(u), torch.ones(len(u), dtype=u.dtype), target=target)


def skewed():
    """Two gamma posteriors on the log scale: skewed, with the closed form of a Poisson count."""
    rate, count = torch.tensor([1.0, 2.0], dtype=F64), torch.tensor([1.0, 3.0], dtype=F64)
    answer = float((rate.log() - (count + 1) * (rate + 1).log()).sum())
    target = bk.Target.from_functions(
        lambda u: (rate.log() - rate * u.exp() + u).sum(-1),
        lambda u: (count * u - u.exp() - torch.lgamma(count + 1)).sum(-1),
        2,
    )

    def draw(seed, num_draws=250, rho=0.0):
        """Autoregressive draws of exact law, through the normal quantiles of a gamma."""
        noise = np.random.default_rng(seed).standard_normal((num_draws, 4, 2))
        for i in range(1, num_draws):
            noise[i] = rho * noise[i - 1] + math.sqrt(1 - rho**2) * noise[i]
        value = gammaincinv(count.numpy() + 1, ndtr(noise)) / (rate.numpy() + 1)
        return as_draws(target, torch.from_numpy(np.log(value)).movedim(0, 1).contiguous())

    return target, answer, draw


def normal(dim=3, shift=-3.0):
    """A correlated normal posterior of evidence e^shift, its factor, and draws of it."""
    factor = torch.eye(dim, dtype=F64) + 0.5 * torch.ones(dim, dim, dtype=F64).tril(-1)
    law = MultivariateNormal(torch.zeros(dim, dtype=F64), scale_tril=factor)
    prior = MultivariateNormal(law.loc, scale_tril=math.sqrt(2) * factor)
    target = bk.Target.from_functions(
        lambda u: prior.log_prob(u), lambda u: law.log_prob(u) - prior.log_prob(u) + shift, dim
    )

    def draw(seed, chains=8, count=200):
        noise = torch.randn(chains, count, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
        return as_draws(target, noise @ factor.T)

    return target, law, draw


@pytest.fixture
def halved_box(monkeypatch):
    """Take a box of half the width, so that a good share of the draws is outside: the identity holds for any."""
    around = module._Box.around

    def narrow(fitted, x):
        box = around(fitted, x)
        return box._replace(low=box.low / 2, high=box.high / 2)

    monkeypatch.setattr(module._Box, "around", narrow)


def test_with_the_posterior_itself_only_the_share_is_uncertain(monkeypatch, halved_box):
    """Closed form: equal weights, and the probability of the box known beside its estimate."""
    target, law, draw = normal()
    monkeypatch.setattr(bridge, "normal_fit", lambda *_: (law, 0))
    monkeypatch.setattr(module, "_WIDE_SHARE", 0.0)
    draws = draw(0)
    z = corrected_arithmetic_mean(target, draws)
    white = torch.linalg.solve_triangular(law.scale_tril, draws.unconstrained.mT, upper=False).mT
    first, second = white.tensor_split(2, 1)
    low, high = first.amin((0, 1)) / 2, first.amax((0, 1)) / 2
    inside = ((second >= low) & (second <= high)).all(-1).double()
    probability = float((ndtr(high.numpy()) - ndtr(low.numpy())).prod())
    assert 0.3 < inside.mean() < 0.8 and z.diagnostics["share_inside"] == float(inside.mean())
    assert z.log_evidence == pytest.approx(-3 + math.log(probability / inside.mean()), abs=1e-9)
    binomial = math.sqrt((1 - inside.mean()) / inside.mean() / inside.numel())
    assert 0.8 < z.standard_error / binomial < 1.4


def test_the_proposal_has_its_moments(limit):
    """Mean and mean square of draws from an asymmetric box, against SciPy, and a density that integrates to one."""
    low, high = torch.tensor([-3.0, -0.5, 1.0], dtype=F64), torch.tensor([0.2, 4.0, 9.0], dtype=F64)
    factor = normal()[1].scale_tril
    box = module._Box(MultivariateNormal(torch.ones(3, dtype=F64), scale_tril=factor), low, high)
    x = box.sample(20_000, torch.Generator().manual_seed(0))
    assert bool(box.holds(x).double().mean() > 0.999)
    white = torch.linalg.solve_triangular(factor, (x - 1).T, upper=False).numpy()
    for i in range(3):
        laws = truncnorm(float(low[i]), float(high[i])), truncnorm(float(low[i]) / 2, float(high[i]) / 2, scale=2)
        for power in (1, 2):
            value, expected = white[i] ** power, 0.8 * laws[0].moment(power) + 0.2 * laws[1].moment(power)
            assert abs(value.mean() - expected) < limit(6) * value.std() / math.sqrt(len(value))
    # Uniform points of the box: the mean density is the reciprocal of the volume.
    uniform = low + (high - low) * torch.rand(200_000, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    density = box.log_prob(1 + uniform @ factor.T).exp() * float((high - low).prod() * factor.diagonal().prod())
    assert abs(density.mean() - 1) < limit() * density.std() / math.sqrt(len(density))


def test_a_box_without_end_loses_no_point():
    """Quantiles of far tails may round to infinity."""
    law = MultivariateNormal(torch.zeros(1, dtype=F64), scale_tril=torch.eye(1, dtype=F64))
    box = module._Box(law, torch.tensor([-50.0], dtype=F64), torch.tensor([50.0], dtype=F64))
    x = box.sample(100_000, torch.Generator().manual_seed(0))
    assert bool(x.isfinite().all()) and bool((box.log_prob(x) > law.log_prob(x) + math.log(0.8) - 1e-9).all())


@pytest.mark.long
@pytest.mark.parametrize("name", ["radiata_pine_m1", "eight_schools", "linreg10"])
@pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning")
def test_it_agrees_with_the_exact_answer(name, limit):
    case = exact.get(name)
    target = case.target()
    draws = bk.sample(target, 8, 200, 400, seed=1, progress=False)
    z = corrected_arithmetic_mean(target, draws)
    assert z.trusted or name == "eight_schools", str(z)  # a funnel, in whose neck weights are large
    assert abs(z.log_evidence - case.log_evidence) < limit(3) * z.standard_error < 0.2, str(z)
    search = Diagnostics(target).modes(draws).num_evaluations + len(WIDER) * LOOKS
    tails = unseen_tails(draws).num_gradients
    assert z.num_evaluations == draws.num_gradients + 8 * 200 + search + tails


def test_any_box_will_do(halved_box, limit):
    target, answer, draw = skewed()
    z = corrected_arithmetic_mean(target, draw(0), num_proposals=4000)
    assert 0.5 < z.diagnostics["share_inside"] < 0.9
    assert z.trusted and abs(z.log_evidence - answer) < limit() * z.standard_error < 0.2, str(z)


@pytest.mark.parametrize("mutation", ["share", "truncation", "jacobian"])
def test_a_lost_factor_is_noticed(mutation, halved_box, monkeypatch, limit):
    """Forget to divide by the share, to normalise the truncated density, or the volume of the standardisation."""
    target, answer, draw = skewed()
    if mutation == "share":
        right = module._share_inside
        monkeypatch.setattr(module, "_share_inside", lambda *args: (1.0, right(*args)[1]))
    else:
        lost = {
            "truncation": lambda box, x: right(box._replace(low=box.low - 9, high=box.high + 9), x),
            "jacobian": lambda box, x: right(box, x) + box.normal.scale_tril.diagonal().log().sum(),
        }
        right = module._Box.log_prob
        monkeypatch.setattr(module._Box, "log_prob", lost[mutation])
    z = corrected_arithmetic_mean(target, draw(0), num_proposals=4000)
    assert abs(z.log_evidence - answer) > limit() * z.standard_error


def test_scales_shifts_constants_and_the_order_of_chains_do_not_matter():
    target, _, draw = skewed()
    draws = draw(0)
    matrix = torch.tensor([[2.0, 0.0], [-1.0, 0.5]], dtype=F64)  # triangular, so that Cholesky factors correspond
    shift, inverse = torch.tensor([3.0, -1.0], dtype=F64), torch.linalg.inv(matrix)

    def back(v):
        return (v - shift) @ inverse.T

    other = bk.Target.from_functions(
        lambda v: target.log_prior(back(v)), lambda v: target.log_likelihood(back(v)) + 5.0, 2
    )
    first = corrected_arithmetic_mean(target, draws)
    second = corrected_arithmetic_mean(other, as_draws(other, draws.unconstrained @ matrix.T + shift))
    assert second.log_evidence == pytest.approx(first.log_evidence + 5.0, abs=1e-9)
    assert second.standard_error == pytest.approx(first.standard_error, rel=1e-6)
    flipped = corrected_arithmetic_mean(target, as_draws(target, draws.unconstrained.flip(0)))
    assert flipped.log_evidence == pytest.approx(first.log_evidence, abs=1e-9)


def scores_of(**settings):
    target, answer, draw = skewed()
    results = [corrected_arithmetic_mean(target, draw(seed, **settings), seed=seed) for seed in range(REPLICATES)]
    trusted = [z for z in results if z.trusted]
    assert len(trusted) > 0.8 * REPLICATES
    return np.array([(z.log_evidence - answer) / z.standard_error for z in results])


@pytest.mark.calibration
def test_error_bars_are_right_on_independent_draws(calibrated):
    scores = scores_of()
    assert calibrated(scores, off=0.1)  # short chains cost 10 %
    assert not calibrated(3 * scores, off=0.1)  # the mutation: a third of the standard error


@pytest.mark.calibration
def test_error_bars_are_right_on_autocorrelated_draws(calibrated):
    assert calibrated(scores_of(num_draws=1000, rho=0.8), off=0.1)


@pytest.mark.calibration
def test_error_bars_are_right_where_the_share_decides(halved_box, calibrated):
    """Half of the width: nearly all of the error is that of autocorrelated draws in the box or out of it."""
    scores = scores_of(num_draws=1000, rho=0.8)
    assert calibrated(scores, off=0.1)
    assert not calibrated(3 * scores, off=0.1)  # the mutation: a third of the standard error


def test_no_draw_outside_has_an_error_too():
    inside = torch.ones(4, 100, dtype=torch.bool)
    share, error = module._share_inside(inside, torch.randn(4, 100, generator=torch.Generator().manual_seed(0)))
    assert share == 1 and 0 < error < 0.01


def test_draws_that_miss_the_box_and_weights_of_heavy_tails_are_noticed():
    target, _, draw = normal()
    draws = draw(0)
    apart = draws.unconstrained.clone()
    apart[:, 100:] += 30.0
    z = corrected_arithmetic_mean(target, as_draws(target, apart))
    assert not z.trusted and math.isnan(z.log_evidence)
    assert any("0 draws of the second halves lie in the box" in warning for warning in z.warnings)
    cauchy = torch.distributions.Cauchy(torch.zeros(1, dtype=F64), 1.0)
    heavy = bk.Target.from_functions(lambda u: cauchy.log_prob(u).sum(-1), lambda u: 0 * u[..., 0], 1)
    noise = torch.rand(8, 200, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert not corrected_arithmetic_mean(heavy, as_draws(heavy, cauchy.icdf(noise))).trusted


def test_a_density_that_is_no_number_is_reported():
    target, _, draw = normal()
    draws = draw(0)
    holed = bk.Target.from_functions(
        target.log_prior, lambda u: torch.where(u[..., 0].abs() < 0.01, torch.nan, target.log_likelihood(u)), 3
    )
    away = draws.unconstrained.clone()
    away[..., 0] = torch.where(away[..., 0].abs() < 0.01, 0.02, away[..., 0])
    z = corrected_arithmetic_mean(holed, as_draws(holed, away))
    assert math.isfinite(z.log_evidence) and any("NaN" in warning for warning in z.warnings)


def test_single_precision(limit):
    case = exact.get("linreg10")
    target = bk.Target.from_pyro(case.model, *(x.to(torch.float32) for x in case.args))
    factor = torch.linalg.cholesky(case.posterior_covariance["b"])
    noise = torch.randn(4, 500, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    z = corrected_arithmetic_mean(
        target, as_draws(target, (case.posterior_mean["b"] + noise @ factor.T).to(torch.float32))
    )
    assert z.trusted and abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


@pytest.mark.calibration
def test_many_dimensions(limit):
    """The curvature's normal, and a box that a good part of the draws falls out of."""
    target, _, draw = normal(120)
    z = corrected_arithmetic_mean(target, draw(0, 16))
    assert z.trusted and z.diagnostics["share_inside"] < 0.95
    assert abs(z.log_evidence + 3) < limit() * z.standard_error < 0.1, str(z)


def test_seeds_and_proposals():
    target, _, draw = skewed()
    draws = draw(0)
    first, same, other = (corrected_arithmetic_mean(target, draws, seed=s).log_evidence for s in (0, 0, 1))
    assert first == same != other
    search = Diagnostics(target).modes(draws).num_evaluations + len(WIDER) * LOOKS
    assert corrected_arithmetic_mean(target, draws, num_proposals=50).num_evaluations == 50 + search


def test_it_agrees_with_the_bridge_on_the_same_draws(limit):
    target, _, draw = skewed()
    draws = draw(3)
    one, two = corrected_arithmetic_mean(target, draws), bridge_sampling(target, draws)
    assert abs(one.log_evidence - two.log_evidence) < limit() * math.hypot(one.standard_error, two.standard_error)


def test_bad_input_is_refused():
    target, _, draw = skewed()
    draws = draw(0)
    for count in (0, 1, 2.5, True, "a", math.nan):
        with pytest.raises(SettingsError, match="num_proposals"):
            corrected_arithmetic_mean(target, draws, num_proposals=count)
    with pytest.raises(DrawsError, match="another target"):
        corrected_arithmetic_mean(target, replace(draws, log_prior=draws.log_prior + 1, target=None))
    with pytest.raises(DrawsError, match="too few"):
        corrected_arithmetic_mean(target, draw(0, num_draws=10))
    still = draws.unconstrained.clone()
    still[..., 1] = 0.0
    with pytest.raises(DrawsError, match="singular"):
        corrected_arithmetic_mean(target, as_draws(target, still))
