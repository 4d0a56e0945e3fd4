"""Peaks that draws pass over, chains that disagree by chance or not, and chains that are left out."""

import math
from dataclasses import replace

import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._draws import Draws
from bayeskit.inference import evidence
from bayeskit.inference.evidence._judging._belonging import finite_chains
from bayeskit.inference.evidence._judging._chains import posterior_problems
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, from_draws

DOUBLE = torch.float64


def two_modes(width=0.3):
    """Two normal modes, one at 8 with a tenth of the mass and standard deviation `width`, one at -8; evidence one."""
    d = 3

    def log_prior(u):
        return -0.5 * (u / 10).square().sum(-1) - 0.5 * d * math.log(200 * math.pi)

    def log_likelihood(u):
        left = math.log(0.9) - 0.5 * (u + 8).square().sum(-1)
        right = math.log(0.1) - 0.5 * ((u - 8) / width).square().sum(-1) - d * math.log(width)
        return torch.logaddexp(left, right) - 0.5 * d * math.log(2 * math.pi) - log_prior(u)

    def sample_prior(n, generator):
        return 10 * torch.randn(n, d, generator=generator, dtype=DOUBLE)

    return bk.Target.from_functions(log_prior, log_likelihood, d, sample_prior)


def draws_of(target, x):
    log_prior, log_likelihood = target.evaluate(x)
    return Draws(x, log_prior, log_likelihood, torch.ones(len(x), dtype=x.dtype), target=target)


def at_modes(target, share, seed=0, chains=4, count=500):
    """Independent draws of which a share lies at the mode at 8."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(chains, count, 3, generator=generator, dtype=DOUBLE)
    right = torch.rand(chains, count, 1, generator=generator, dtype=DOUBLE) < share
    return draws_of(target, torch.where(right, 8 + 0.3 * noise, -8 + noise))


@pytest.mark.parametrize("method", ["bridge_sampling", "warp_bridge_sampling", "learned_harmonic_mean"])
def test_the_larger_mode_is_missed_from_the_higher_one(method, limit):
    """All chains are in the smaller mode, which is higher; the other holds nine tenths."""
    target = two_modes()
    draws = at_modes(target, 1.0)
    z = getattr(evidence, method)(target, draws)
    assert abs(z.log_evidence - math.log(0.1)) < limit(3) * z.standard_error
    assert not z.trusted and z.diagnostics["missed_share"] > 1


def judged(estimate, target, draws, **settings):
    return Diagnostics(target).judge(from_draws(estimate, draws, **settings))


@pytest.mark.calibration
def test_an_estimate_known_to_be_off_is_no_sign_of_a_missed_peak():
    """All draws are about the only mode; only the estimate is too small, by a gap that it knows of."""
    case = exact.get("linreg10")
    target = case.target()
    draws = bk.sample(target, 8, 200, 200, seed=0, progress=False)
    low = evidence.Evidence("trapezoid", case.log_evidence - 0.3, 0.01, 100)
    assert "a mode with a mass" in judged(low, target, draws).warnings[0]
    assert judged(low, target, draws, known_bias=0.3).trusted
    modes = two_modes()
    missed = evidence.Evidence("of one mode", math.log(0.1) - 0.3, 0.01, 100)
    assert not judged(missed, modes, at_modes(modes, 1.0), known_bias=0.3).trusted


def test_a_wide_error_does_not_hide_a_much_larger_peak():
    """A hundredth of the mass, known within a fifth: five times that error is all of what is missing."""
    modes = two_modes()
    small = evidence.Evidence("of one mode", math.log(0.01), 0.2, 100)
    assert not judged(small, modes, at_modes(modes, 1.0)).trusted


def test_draws_of_both_modes_miss_nothing(limit):
    target = two_modes()
    draws = at_modes(target, 0.1)
    found = Diagnostics(target).modes(draws).found
    assert len(found) == 2
    z = judged(evidence.Evidence("exact", 0.0, 0.01, 0), target, draws)
    # The mass of a mode over the estimate, and the share of 2000 draws there.
    error = math.hypot(max(peak.relative_error for peak in found), 0.01, 0.5 / math.sqrt(2000))
    assert z.trusted and abs(z.diagnostics["missed_share"]) < limit(2) * error


def test_a_share_of_a_tenth_is_missed(limit):
    target = two_modes(width=1.0)
    draws = at_modes(target, 0.0)
    z = judged(evidence.Evidence("nine tenths", math.log(0.9), 0.01, 0), target, draws)
    error = max(peak.relative_error for peak in Diagnostics(target).modes(draws).found)
    # A mode is weighed within an ellipsoid that holds nine tenths of it.
    assert not z.trusted and abs(z.diagnostics["missed_share"] / 0.1 - 1) < limit() * error


@pytest.mark.calibration
def test_a_peak_of_half_the_mass_is_missed(limit):
    """Spike and slab of equal mass: the estimate of the slab alone is as large as the spike."""
    case = exact.spike_and_slab(5, spike_height=1.0)
    target = case.target()
    # From draws of the prior, which are all on the slab; by itself a chain would begin nearer to the spike.
    draws = bk.sample(target, 4, 150, 400, seed=1, initial=target.sample_prior(4, seed=0), progress=False)
    z = evidence.bridge_sampling(target, draws)
    assert abs(z.log_evidence) < limit() * z.standard_error and not z.trusted


@pytest.mark.calibration
def test_no_false_alarm_on_independent_draws():
    """Two hundred sets of right draws with right estimates."""
    target = two_modes()
    estimate = evidence.Evidence("exact", 0.0, 0.001, 0)
    alarms = sum(not judged(estimate, target, at_modes(target, 0.1, s)).trusted for s in range(60))
    assert alarms == 0


def test_an_estimate_depends_on_nobody():
    """Its judgement does: it reads all modes that are known."""
    target = two_modes()
    one, other = at_modes(target, 0.1), at_modes(target, 0.1)
    first = evidence.bridge_sampling(target, one, seed=1)
    evidence.warp_bridge_sampling(target, other, seed=5)
    second = evidence.bridge_sampling(target, other, seed=1)
    assert first.log_evidence == second.log_evidence and first.trusted == second.trusted


def test_a_density_that_cannot_be_climbed_costs_no_estimate():
    def broken(n, generator):
        raise RuntimeError("no draws today")

    constant = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - constant).sum(-1), lambda u: torch.zeros_like(u[..., 0]), 2, broken
    )
    x = torch.randn(4, 400, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    z = evidence.bridge_sampling(target, draws_of(target, x))
    assert z.trusted and abs(z.log_evidence) < 5 * z.standard_error + 1e-9


def normal_draws(chains, count, correlation, seed=0):
    constant = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - constant).sum(-1), lambda u: torch.zeros_like(u[..., 0]), 2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=DOUBLE),
    )  # fmt: skip
    x = torch.randn(count, chains, 2, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    for i in range(1, count):
        x[i] = correlation * x[i - 1] + math.sqrt(1 - correlation**2) * x[i]
    return target, draws_of(target, x.movedim(0, 1).contiguous())


def test_many_short_chains_are_not_said_to_disagree():
    """Sixty-four chains of some twenty effective draws: their halves differ by chance alone."""
    alarms = 0
    for seed in range(10):
        problems, facts = posterior_problems(normal_draws(64, 400, 0.9, seed)[1])
        alarms += bool(problems)
        assert facts["effective_draws"] > 800
    assert alarms == 0


def test_a_few_chains_apart_are():
    target, draws = normal_draws(64, 400, 0.9)
    x = draws.unconstrained.clone()
    x[:3] += 2.0
    problems, _ = posterior_problems(draws_of(target, x))
    assert problems and "disagree" in problems[0]


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.inf])
def test_chains_that_are_left_out_are_said(value):
    target, draws = normal_draws(4, 200, 0.0)
    likelihood = draws.log_likelihood.clone()
    likelihood[:2, 100] = value
    bad = replace(draws, log_likelihood=likelihood)
    assert finite_chains(bad).num_chains == 2
    z = evidence.bridge_sampling(target, bad)
    assert not z.trusted and any("2 chains were left out" in warning for warning in z.warnings)
