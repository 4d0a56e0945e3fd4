import math
import sys
from dataclasses import replace

import pytest
import torch
from scipy.stats import t as student

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit._draws import Draws
from bayeskit.errors import CheckpointError, SamplingWarning, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.samplers import HMC, Adaptation, Chains, Control, RunSettings, sample_ladder
from bayeskit.inference.samplers._chains import PriorDraws, Tempering
from bayeskit.inference.samplers._ladder import Exchange, Ladder

PRIOR_SCALE, WIDTH = 5.0, 0.5
MODES = torch.tensor([[-4.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)


@pytest.fixture(scope="module")
def bimodal():
    """Two normal modes eight widths apart under a wide normal prior; weights and evidence by conjugacy."""

    def log_prior(u):
        return (-0.5 * (u / PRIOR_SCALE).square() - math.log(PRIOR_SCALE) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_likelihood(u):
        distance = ((u.unsqueeze(-2) - MODES) / WIDTH).square().sum(-1)
        return (WEIGHTS.log() - 0.5 * distance - 2 * math.log(WIDTH * math.sqrt(2 * math.pi))).logsumexp(-1)

    def sample(n, generator):
        return PRIOR_SCALE * torch.randn(n, 2, generator=generator, dtype=torch.float64)

    return bk.Target.from_functions(log_prior, log_likelihood, 2, sample)


def exact_bimodal():
    variance = PRIOR_SCALE**2 + WIDTH**2
    log_mass = WEIGHTS.log() - 0.5 * MODES.square().sum(-1) / variance - math.log(2 * math.pi * variance)
    return float(log_mass.logsumexp(0)), float(log_mass.softmax(0)[1])


def upper_weight(ladder):
    draws = ladder.draws.unconstrained[-len(ladder.exchange.round_trips) :, :, 0]
    inside = (draws > 0).to(torch.float64)
    return float(inside.mean()), float(mean_error(inside))


@pytest.fixture(scope="module")
def tempered(bimodal):
    return sample_ladder(bimodal, 10, 8, 300, 2000, seed=1, exchange=True, progress=False)


@pytest.mark.calibration
def test_both_modes_get_their_weight(tempered, limit):
    weight, error = upper_weight(tempered)
    exact = exact_bimodal()[1]
    assert abs(weight - exact) < limit() * error, (weight, error)
    # Sharp enough to notice eight chains that stay where they began.
    assert limit() * error < math.sqrt(exact * (1 - exact) / 8)


@pytest.mark.calibration
def test_plain_chains_flag_the_modes_they_cannot_weigh(bimodal):
    with pytest.warns(SamplingWarning, match="chains disagree"):
        draws = bk.sample(bimodal, 8, 300, 200, progress=False)
    z = evidence.bridge_sampling(bimodal, draws)
    assert not z.trusted and "chains disagree" in z.warnings[0]
    apart = sample_ladder(bimodal, 10, 8, 150, 150, seed=1, progress=False)
    assert not evidence.stepping_stone(bimodal, apart).trusted


@pytest.mark.calibration
@pytest.mark.parametrize("method", [evidence.stepping_stone, evidence.modified_path_sampling])
def test_the_evidence_of_an_exchanging_ladder_is_right_and_trusted(bimodal, tempered, method, limit):
    z = method(bimodal, tempered)
    assert z.trusted, z.warnings
    assert abs(z.log_evidence - exact_bimodal()[0]) < limit(2) * z.standard_error
    # Sharp enough to notice that the smaller mode is lost.
    assert limit(2) * z.standard_error < -math.log(exact_bimodal()[1])


def replicates(ladder, num_chains):
    """Split a ladder of many chains, which do not know of one another, into ladders of a few."""
    beta, draws, exchange = ladder.beta, ladder.draws, ladder.exchange
    columns = (draws.unconstrained, draws.log_prior, draws.log_likelihood, draws.beta)
    columns = [column.unflatten(0, (len(beta), -1)).split(num_chains, 1) for column in columns]
    for trips, *parts in zip(exchange.round_trips.split(num_chains), *columns, strict=True):
        own = Draws(*(part.flatten(0, 1) for part in parts), target=draws.target)
        yield Ladder(beta, own, replace(exchange, round_trips=trips))


@pytest.mark.calibration
def test_error_bars_of_an_exchanging_ladder_are_calibrated(normal_normal, calibrated):
    """Temperatures are correlated by exchange; z-scores over replicates have variance one."""
    truth = -0.5 * 2 * math.log(2 * math.pi * 2) - 2 * 0.25
    ladder = sample_ladder(normal_normal, 6, 8 * 40, 60, 250, exchange=True, progress=False)
    for method in (evidence.stepping_stone, evidence.modified_path_sampling):
        found = [method(normal_normal, each) for each in replicates(ladder, 8)]
        assert calibrated((z.log_evidence - truth) / z.standard_error for z in found), method


class _Backwards(Tempering):
    """The mutation: exchanges are decided with the sign of the log ratio dropped."""

    def _decide(self, state, iteration, generator):
        probability = super()._decide(state, iteration, generator)[1]
        turn = (torch.arange(len(probability)) + iteration) % 2 == 0
        return (torch.rand(probability.shape, generator=generator) < 1 - probability) & turn.unsqueeze(-1), probability


def test_a_dropped_sign_is_noticed(bimodal, monkeypatch, limit):
    monkeypatch.setattr(sys.modules["bayeskit.inference.samplers._chains"], "Tempering", _Backwards)
    ladder = sample_ladder(bimodal, 10, 8, 100, 500, seed=1, exchange=True, progress=False)
    z = evidence.stepping_stone(bimodal, ladder)
    assert abs(z.log_evidence - exact_bimodal()[0]) > limit() * z.standard_error


class _ExactChains(Chains):
    """Chains that forget at once: independent draws of every power posterior of the conjugate model."""

    def advance(self, state, iteration, generator):
        beta = self.adaptation.kernel.beta.unsqueeze(-1)
        noise = torch.randn(len(beta), 2, generator=generator, dtype=torch.float64)
        position = (beta + (1 + beta).sqrt() * noise) / (1 + beta)
        kernel = self.adaptation.kernel.evaluate(self.target, position)
        return state._replace(kernel=kernel), {"position": position}


class _EverySecondTime(Tempering):
    """The mutation: the same pairs are tried all the time, so that replicas walk back and forth."""

    def _decide(self, state, iteration, generator):
        return super()._decide(state, iteration // 2, generator)


def travels(cls, target, num_ladders=64, num_iterations=600, num_warmup=40):
    """Run exact chains at three temperatures above the prior, and return what is known of their exchanges."""
    beta = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64).repeat_interleave(num_ladders)
    generator = torch.Generator().manual_seed(2)
    adaptation = Adaptation(HMC(beta=beta), num_warmup, num_groups=3, metric="diagonal")
    chains = _ExactChains(target, adaptation, RunSettings(len(beta), num_warmup, num_iterations))
    algorithm, probability = cls(chains, PriorDraws(target, num_ladders, seed=0)), []
    state = algorithm.start(generator)
    for i in range(num_warmup + num_iterations):
        state, row = algorithm.advance(state, i, generator)
        probability.append(row["exchange_probability"])
    rejection = 1 - torch.stack(probability).mean((0, 2))
    return Exchange(rejection, state.round_trips, num_iterations)


def trips_score(exchange):
    """Standardised excess of the round trips over the ideal, the error from the spread over ladders."""
    rates = exchange.round_trips.double() / exchange.num_iterations
    return float((rates.mean() - exchange.ideal_round_trip_rate) / rates.std()) * math.sqrt(len(rates))


@pytest.mark.calibration
@pytest.mark.parametrize("cls", [Tempering, _EverySecondTime])
def test_round_trips_of_chains_that_forget_are_ideal(normal_normal, cls):
    """Where every draw is independent the formula is exact, and rejections are known much better than trips."""
    exchange = travels(cls, normal_normal)
    score = trips_score(exchange)
    assert (abs(score) < student.isf(0.5e-5, 63)) == (cls is Tempering), (score, exchange)


@pytest.mark.calibration
def test_round_trips_come_at_most_as_often_as_the_barrier_allows(tempered):
    """Chains that remember make replicas turn back more often than independent draws would."""
    exchange = tempered.exchange
    assert exchange.round_trips.shape == (8,) and exchange.num_iterations == 2000
    few = student.isf(1e-5, 7)  # eight ladders
    assert trips_score(exchange) < few
    rates = exchange.round_trips.double()
    assert float(rates.mean() / rates.std()) * math.sqrt(8) > few  # and there are some
    assert exchange.rejection.shape == (10,) and bool(((exchange.rejection >= 0) & (exchange.rejection < 1)).all())


def test_replicas_are_a_permutation_of_themselves(normal_normal):
    beta = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64).repeat_interleave(4)
    generator = torch.Generator().manual_seed(0)
    adaptation = Adaptation(HMC(beta=beta), 20, num_groups=3, metric="diagonal")
    chains = Chains(normal_normal, adaptation, RunSettings(12, 20, 20, control=Control(progress=False)))
    tempering = Tempering(chains, PriorDraws(normal_normal, 4, seed=0))
    state = tempering.start(generator)
    for i in range(40):
        state, _ = tempering.advance(state, i, generator)
        assert sorted(state.replica.flatten().tolist()) == list(range(16))
        assert bool((state.replica % 4 == torch.arange(4)).all())  # ladders never mix
        kernel = state.chains.kernel
        value, gradient = normal_normal.value_and_grad(kernel.position, beta)
        torch.testing.assert_close(kernel.log_density, value)
        torch.testing.assert_close(kernel.gradient, gradient)
    assert int(state.round_trips.sum()) > 0


@pytest.mark.calibration
def test_equal_rejections_shorten_the_longest_step(bimodal, tempered):
    beta = tempered.exchange.temperatures(tempered.beta, 10)
    assert beta[0] == 0 and beta[-1] == 1 and bool((beta.diff() > 0).all())
    again = sample_ladder(
        bimodal, beta=beta, num_chains=8, num_warmup=300, num_samples=500, exchange=True, progress=False
    )
    assert float(again.exchange.rejection.max()) < float(tempered.exchange.rejection.max())
    assert float(again.exchange.rejection.std()) < float(tempered.exchange.rejection.std())


def test_too_few_round_trips_are_flagged(bimodal):
    ladder = sample_ladder(bimodal, 60, 1, 30, 60, exchange=True, progress=False)
    z = evidence.stepping_stone(bimodal, ladder)
    assert any("round trips" in warning for warning in z.warnings)


def test_an_exchanging_ladder_resumes_bit_for_bit(tmp_path, normal_normal, monkeypatch):
    settings = {"num_temperatures": 4, "num_chains": 2, "num_warmup": 30, "num_samples": 30, "exchange": True}
    whole = sample_ladder(normal_normal, **settings, progress=False)
    path, calls = tmp_path / "state", []
    advance = Tempering.advance

    def fails_at_45(self, *arguments):
        calls.append(1)
        if len(calls) == 45:
            raise ArithmeticError
        return advance(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Tempering, "advance", fails_at_45)
        with pytest.raises(ArithmeticError):
            sample_ladder(normal_normal, **settings, checkpoint=path, checkpoint_seconds=0, progress=False)
    resumed = sample_ladder(normal_normal, **settings, checkpoint=path, progress=False)
    assert torch.equal(resumed.draws.unconstrained, whole.draws.unconstrained)
    assert torch.equal(resumed.exchange.round_trips, whole.exchange.round_trips)
    with pytest.raises(CheckpointError, match="exchange"):
        sample_ladder(normal_normal, **settings | {"exchange": False}, checkpoint=path, progress=False)


def test_a_ladder_without_chains_is_refused(normal_normal):
    with pytest.raises(SettingsError, match="num_chains"):
        sample_ladder(normal_normal, num_chains=0, exchange=True, progress=False)


def test_no_iterations_have_no_round_trips():
    assert Exchange(torch.zeros(1), torch.zeros(2), 0).round_trip_rate == 0


def ill_conditioned(scales):
    """Return a target with a standard normal prior, ``log L = -|S R b|^2 / 2``, and its mean log likelihoods."""
    d = len(scales)
    generator = torch.Generator().manual_seed(3)
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    design = scales.unsqueeze(-1) * rotation

    def log_prior(u):
        return -0.5 * u.square().sum(-1) - 0.5 * d * math.log(2 * math.pi)

    def log_likelihood(u):
        return -0.5 * (u @ design.T).square().sum(-1)

    def sample(n, generator):
        return torch.randn(n, d, generator=generator, dtype=torch.float64)

    def mean(beta):
        return -0.5 * (scales.square() / (1 + beta.unsqueeze(-1) * scales.square())).sum(-1)

    return bk.Target.from_functions(log_prior, log_likelihood, d, sample), mean


def test_an_ill_conditioned_posterior_needs_short_trajectories(limit):
    # Condition 1e6, and axes that are no coordinates: a diagonal metric needs hundreds of steps for each trajectory.
    target, mean = ill_conditioned(torch.logspace(-0.5, 3, 10, dtype=torch.float64))
    ladder = sample_ladder(target, 8, 16, 150, 100, seed=2, progress=False)
    found, exact = ladder.log_likelihood[1:], mean(ladder.beta[1:])
    z = (found.mean((1, 2)) - exact) / mean_error(found)
    assert float(z.abs().max()) < limit(len(z)), z
    # 0.4 pi in the metric takes two to three steps in ten dimensions; in early windows, in a wrong metric, more.
    transitions = 8 * 16 * 250
    assert ladder.num_evaluations < 10 * transitions, ladder.num_evaluations / transitions
