"""The evidence by populations that adapt: right, nearly unbiased, resumable, and aware of its failures."""

import math
import sys

import pytest
import torch
from scipy.stats import norm

import bayeskit as bk
from bayeskit.errors import CheckpointError, InitializationError, SettingsError
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, FoundModes
from bayeskit.inference.evidence._sequential import adaptive_smc
from bayeskit.inference.samplers._populations import learn_metric
from bayeskit.inference.samplers._smc import AdaptiveTempering
from bayeskit.inference.samplers._weighted_particles import conditional_share, next_common_temperature

F64 = torch.float64
MODULE = sys.modules["bayeskit.inference.evidence._sequential"]
POPULATIONS = sys.modules["bayeskit.inference.samplers._populations"]
SMALL = {"num_particles": 64, "num_replicates": 16, "ess_threshold": 0.9}


def _normal(n=1, shift=0.0, wrong=None):
    def log_likelihood(u):
        value = -0.5 * (u - shift).square().sum(-1)
        return value if wrong is None else torch.where(u[..., 0] < 1, value, wrong)

    return bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        log_likelihood,
        n,
        lambda k, g: torch.randn(k, n, generator=g, dtype=F64),
    )


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["linreg10", "radiata_pine_m1", "beta_binomial", "eight_schools", "three_taxon_tree"])
def test_it_agrees_with_the_exact_answer(name, limit):
    case = bk.exact.get(name)
    target = case.target()
    target.compile = False
    z = adaptive_smc(target, seed=1, num_replicates=8, ess_threshold=0.9)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error, str(z)
    assert z.method == "adaptive_smc" and z.trusted and 0 < z.standard_error < 0.1, str(z)


def unsearched(monkeypatch):
    monkeypatch.setattr(Diagnostics, "modes", lambda self, draws: FoundModes((), 0))
    monkeypatch.setattr(Diagnostics, "_mass_outside", lambda self, draws, estimate: ([], 0))


def _scores(num_runs, dim, monkeypatch):
    unsearched(monkeypatch)
    target, truth = _normal(dim, 2.0), dim * (-0.5 * math.log(2) - 1.0)
    target.compile = False
    runs = [adaptive_smc(target, num_particles=32, num_replicates=16, seed=seed) for seed in range(num_runs)]
    return torch.tensor([(z.log_evidence - truth) / z.standard_error for z in runs])


@pytest.mark.calibration
def test_bias_is_small_against_the_error_and_the_error_is_right(monkeypatch, calibrated):
    """With as few as 32 particles: the bias falls with their number, so at 128 it is a quarter of this."""
    scores = _scores(32, 4, monkeypatch)
    assert calibrated(scores, off=0.2, bias=0.5), scores


@pytest.mark.calibration
def test_metrics_of_its_own_particles_would_bias_it(monkeypatch, limit):
    """The mutation: each population moves by the covariance of the particles that it moves."""

    def own(particles, centred):
        rows = zip(particles.position, particles.log_weight, strict=True)
        return POPULATIONS.Metric(torch.stack([learn_metric(*row).factor for row in rows]), True)

    monkeypatch.setattr(POPULATIONS, "crossed_metrics", own)
    assert float(_scores(8, 10, monkeypatch).mean()) < -0.5 - limit() / math.sqrt(8)


def test_a_constant_moves_the_log_evidence_by_itself():
    target = _normal(2, 1.0)
    moved = bk.Target.from_functions(
        target.log_prior, lambda u: target.log_likelihood(u) + 7.0, 2, lambda k, g: target.sample_prior(k, seed=g)
    )
    one, other = (adaptive_smc(x, seed=3, **SMALL) for x in (target, moved))
    assert other.log_evidence - one.log_evidence == pytest.approx(7.0, abs=1e-6)


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    # Each run has a target of its own: what a run has found of its target counts in the judgement of the next.
    case = bk.exact.get("beta_binomial")
    whole = adaptive_smc(case.target(), seed=2, **SMALL)
    advance = AdaptiveTempering.advance

    def failing(self, state, iteration, generator):
        if iteration == 3:
            raise KeyboardInterrupt
        return advance(self, state, iteration, generator)

    # A checkpoint after every stage, of which the last but one is resumed.
    control = MODULE.Control
    monkeypatch.setattr(MODULE, "Control", lambda path, progress: control(path, 0.0, progress=progress))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AdaptiveTempering, "advance", failing)
        adaptive_smc(case.target(), seed=2, checkpoint=tmp_path / "run", **SMALL)
    assert adaptive_smc(case.target(), seed=2, checkpoint=tmp_path / "run", **SMALL) == whole
    with pytest.raises(CheckpointError):
        adaptive_smc(case.target(), seed=4, checkpoint=tmp_path / "run", **SMALL)


def test_every_evaluation_is_counted(monkeypatch):
    unsearched(monkeypatch)
    target, rows = bk.exact.get("beta_binomial").target(), []
    evaluator, evaluate = target.evaluator, target.evaluate

    def counted(n, num_calls=1):
        call = evaluator(n, num_calls)
        return lambda u, beta: (rows.append(len(u)), call(u, beta))[1]

    monkeypatch.setattr(target, "evaluator", counted)
    monkeypatch.setattr(target, "evaluate", lambda u, **how: (rows.append(len(u)), evaluate(u, **how))[1])
    z = adaptive_smc(target, **SMALL)
    # Of whether the draws belong, and of the fingerprint.
    assert 0 <= sum(rows) - z.num_evaluations <= 16


def test_single_precision(limit):
    case = bk.exact.get("beta_binomial")
    z = adaptive_smc(case.target(torch.float32), seed=1, **SMALL)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error and z.trusted


@pytest.mark.calibration
def test_a_missed_spike_is_said():
    case = bk.exact.spike_and_slab(20)
    z = adaptive_smc(case.target(), seed=0, **SMALL)
    assert not z.trusted or abs(z.log_evidence - case.log_evidence) < 3 * z.standard_error


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_likelihood_that_is_no_number_is_said(wrong, limit):
    z = adaptive_smc(_normal(1, 0.0, wrong), **SMALL)
    below = -0.5 * math.log(2) + math.log(norm.cdf(math.sqrt(2)))
    assert abs(z.log_evidence - below) < limit(2) * z.standard_error
    assert not z.trusted and "NaN or infinite" in " ".join(z.warnings)


def test_populations_without_likelihood_do_not_hang(limit):
    """Only one prior draw in 150 has a likelihood, so many a population of 64 has none."""
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: torch.where(u[..., 0] > 2.5, 0.0, -torch.inf),
        1,
        lambda k, g: torch.randn(k, 1, generator=g, dtype=F64),
    )
    z = adaptive_smc(target, seed=0, **SMALL)
    assert not z.trusted and abs(z.log_evidence - norm.logsf(2.5)) < limit() * z.standard_error


def test_bad_input_is_refused():
    target = _normal()
    for bad in ({"num_particles": 1}, {"num_replicates": 1}, {"ess_threshold": 1.0}, {"max_moves": 0}, {"seed": 0.5}):
        with pytest.raises(SettingsError, match=next(iter(bad))):
            adaptive_smc(target, **bad)
    without = bk.Target.from_functions(target.log_prior, target.log_likelihood, 1)
    with pytest.raises(SettingsError, match="sample_prior"):
        adaptive_smc(without)
    impossible = bk.Target.from_functions(
        target.log_prior,
        lambda u: torch.full_like(u[..., 0], -torch.inf),
        1,
        lambda k, g: target.sample_prior(k, seed=g),
    )
    with pytest.raises(InitializationError):
        adaptive_smc(impossible, **SMALL)


def test_populations_share_their_way():
    """Chosen by the particles that it then weighs, a temperature makes the evidence too low."""
    generator = torch.Generator().manual_seed(0)
    log_weight = torch.full((4, 50), -math.log(50), dtype=F64)
    log_ratio = -20 * torch.rand(4, 50, generator=generator, dtype=F64)
    reached = next_common_temperature(log_weight, log_ratio, torch.zeros(4, dtype=F64), 0.8)
    assert bool((reached == reached[0]).all()) and 0 < float(reached[0]) < 1
    left = conditional_share((log_weight - math.log(4)).flatten(), reached[0] * log_ratio.flatten())
    assert float(left) == pytest.approx(0.8, abs=1e-6)
