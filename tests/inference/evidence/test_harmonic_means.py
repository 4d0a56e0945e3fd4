"""Harmonic means: what they solve, and that they do not pass for the evidence."""

import math

import numpy as np
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence._likelihood_weights import harmonic_mean, stabilised_harmonic_mean

DELTA = 0.01


def independent(case, target, shape, seed):
    """Draws from the normal posterior of linreg10, or the beta posterior of beta_binomial."""
    generator = torch.Generator().manual_seed(seed)
    if case.name == "linreg10":
        factor = torch.linalg.cholesky(case.posterior_covariance["b"])
        noise = torch.randn(*shape, target.dim, generator=generator, dtype=torch.float64)
        u = case.posterior_mean["b"] + noise @ factor.T
    else:
        p = np.random.default_rng(seed).beta(3, 9, size=(*shape, 1))
        u = torch.from_numpy(np.log(p) - np.log1p(-p))
    prior, likelihood = target.evaluate(u)
    return Draws(u, prior, likelihood, torch.ones(shape[0], dtype=torch.float64), target=target)


@pytest.fixture(scope="module")
def beta():
    case = exact.get("beta_binomial")
    return case, case.target()


@pytest.fixture(scope="module")
def linear():
    case = exact.get("linreg10")
    return case, case.target()


@pytest.fixture(scope="module")
def several(beta, linear):
    """Draws of each posterior, the same for every estimator, so that other peaks are looked for once."""
    return [[independent(*one, (4, 250), seed) for seed in range(n)] for one, n in ((beta, 100), (linear, 20))]


def limit_of(delta):
    """Log of the estimator's limit on beta_binomial, by quadrature and bisection."""
    p = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    likelihood = 45 * p**2 * (1 - p) ** 8
    low, high = 1e-3, 10.0
    for _ in range(100):
        z = math.sqrt(low * high)
        # Under the posterior, which is prior times likelihood.
        balance = float((likelihood * (likelihood - z) / (delta * z + (1 - delta) * likelihood)).sum())
        low, high = (z, high) if balance > 0 else (low, z)
    return math.log(low)


def test_newton_and_rafterys_equation_holds(linear):
    """The published equation, imagined draws and all, with n = 400 and delta = 0.01."""
    case, target = linear
    draws = independent(case, target, (4, 100), 0)
    z = stabilised_harmonic_mean(target, draws, delta=DELTA).log_evidence
    f, n = (draws.log_likelihood.flatten() - z).exp(), 400
    mixture = DELTA + (1 - DELTA) * f
    imagined = DELTA * n / (1 - DELTA)
    assert float((imagined + (f / mixture).sum()) / (imagined + (1 / mixture).sum())) == pytest.approx(1.0, abs=1e-8)


@pytest.mark.calibration
@pytest.mark.parametrize("delta", [0.01, 0.2])
def test_error_bars_are_those_of_the_limit(delta, beta, several, calibrated):
    """The estimate is consistent for another number than the evidence, and scatters about that as it says.

    It says that it is biased by itself, before other peaks are looked for.
    """
    case, target = beta
    known, scores = limit_of(delta), []
    assert known > case.log_evidence + 0.1
    for draws in several[0]:
        z = stabilised_harmonic_mean.__wrapped__(target, draws, delta=delta)
        scores.append((z.log_evidence - known) / z.standard_error)
        assert not z.trusted
    assert calibrated(scores)


def test_the_shift_is_measured_where_the_likelihood_is_mild(limit):
    """Three data with much noise: the first order suffices, and the estimate says by how much it is off."""
    case = exact.linear_regression([[1.0], [0.5], [2.0]], [0.3, -0.2, 0.6], noise_sd=4.0, prior_sd=1.0)
    target = case.target()
    generator = torch.Generator().manual_seed(0)
    sd = math.sqrt(float(case.posterior_covariance["b"]))
    u = case.posterior_mean["b"] + sd * torch.randn(4, 20_000, 1, generator=generator, dtype=torch.float64)
    prior, likelihood = target.evaluate(u)
    draws = Draws(u, prior, likelihood, torch.ones(4, dtype=torch.float64), target=target)
    z = stabilised_harmonic_mean(target, draws, delta=0.5)
    off = z.log_evidence - case.log_evidence
    shift, doubt = z.diagnostics["shift"], z.diagnostics["shift_error"]
    assert off > 0.005 and abs(off - shift) < limit() * math.hypot(doubt, z.standard_error)
    assert any(f"by {shift:+.2g}" in warning and "to first order" in warning for warning in z.warnings)
    # With few imagined draws the same posterior is as good as the harmonic mean, which works here.
    few = stabilised_harmonic_mean(target, draws, delta=1e-4)
    assert few.trusted and abs(few.log_evidence - case.log_evidence) < limit() * few.standard_error
    plain = harmonic_mean(target, draws)
    assert plain.trusted and abs(plain.log_evidence - case.log_evidence) < limit() * plain.standard_error


def test_few_imagined_draws_lead_to_the_harmonic_mean(beta):
    case, target = beta
    draws = independent(case, target, (4, 250), 3)
    difference = stabilised_harmonic_mean(target, draws, delta=1e-9).log_evidence
    assert difference == pytest.approx(harmonic_mean(target, draws).log_evidence, abs=1e-4)


@pytest.mark.calibration
@pytest.mark.parametrize("estimate", [harmonic_mean, stabilised_harmonic_mean])
def test_neither_is_trusted_where_it_is_off(estimate, linear, several):
    case, target = linear
    for seed, draws in enumerate(several[1]):
        z = estimate(target, draws, seed=seed)
        assert z.log_evidence - case.log_evidence > 3 * z.standard_error and not z.trusted
        assert z.diagnostics["missed_prior"] > 0.9
        if estimate is stabilised_harmonic_mean:  # a first order of 1.6, where all of 20 nats are missing
            assert any("by at least a nat" in warning for warning in z.warnings)


@pytest.mark.parametrize("estimate", [harmonic_mean, stabilised_harmonic_mean])
def test_a_peak_that_no_draw_found_is_missed(estimate):
    """Draws that all sit on the flat part of the likelihood make an error of exactly zero."""
    d, sd = 5, 0.01

    def log_likelihood(u):
        squares = u.square().sum(-1)
        narrow = -0.5 * squares / sd**2 - d * math.log(sd) + 0.5 * squares
        return torch.logaddexp(torch.zeros_like(narrow), math.log(100.0) + narrow)

    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1) - 0.5 * d * math.log(2 * math.pi),
        log_likelihood,
        d,
        lambda n, generator: torch.randn(n, d, generator=generator, dtype=torch.float64),
    )
    u = torch.randn(4, 250, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
    z = estimate(target, draws)
    assert abs(z.log_evidence) < 1e-9 and z.standard_error < 1e-9  # of the slab; the whole has log 101
    assert not z.trusted


@pytest.mark.calibration
def test_weights_near_infinite_variance_do_not_pass_for_finite():
    """Likelihoods whose reciprocals have Pareto k of 0.6: trusted by the luck of the largest draw only, and rarely."""
    precision = 1.5  # of the likelihood, so that 1 / L = exp(precision u^2 / 2) has k = precision / (1 + precision)
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    target = bk.Target.from_functions(
        lambda u: normal.log_prob(u).sum(-1),
        lambda u: -0.5 * precision * u.square().sum(-1),
        1,
        lambda n, generator: torch.randn(n, 1, generator=generator, dtype=torch.float64),
    )
    known, wrong = -0.5 * math.log(1 + precision), {harmonic_mean: 0, stabilised_harmonic_mean: 0}
    for seed in range(60):
        u = torch.randn(4, 250, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        u = u / math.sqrt(1 + precision)
        draws = Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
        for estimate in wrong:
            z = estimate(target, draws)
            wrong[estimate] += z.trusted and abs(z.log_evidence - known) > 3 * z.standard_error
    assert max(wrong.values()) <= 2


def test_without_prior_draws_the_limit_is_unknown():
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    target = bk.Target.from_functions(lambda u: normal.log_prob(u).sum(-1), lambda u: -0.01 * u.square().sum(-1), 1)
    u = torch.randn(4, 500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / math.sqrt(1.02)
    draws = Draws(u, *target.evaluate(u), torch.ones(4, dtype=torch.float64), target=target)
    z = stabilised_harmonic_mean(target, draws)
    assert not z.trusted and len(z.warnings) == 1 and "asymptotic bias of the estimate is unknown" in z.warnings[0]


def test_a_constant_in_the_likelihood_moves_the_estimate_by_just_that(beta):
    case, target = beta
    draws = independent(case, target, (4, 250), 1)
    moved = bk.Target.from_functions(target.log_prior, lambda u: target.log_likelihood(u) - 700.0, 1)
    shifted = Draws(draws.unconstrained, draws.log_prior, draws.log_likelihood - 700.0, draws.beta, target=moved)
    before, after = stabilised_harmonic_mean(target, draws), stabilised_harmonic_mean(moved, shifted)
    assert after.log_evidence == pytest.approx(before.log_evidence - 700.0, abs=1e-6)
    assert after.standard_error == pytest.approx(before.standard_error, rel=1e-6)


def test_error_grows_with_autocorrelation(beta):
    case, target = beta
    draws = independent(case, target, (4, 1000), 2)
    sticky = Draws(
        *(x[:, ::10].repeat_interleave(10, 1) for x in (draws.unconstrained, draws.log_prior, draws.log_likelihood)),
        draws.beta,
        target=target,
    )
    ratio = (
        stabilised_harmonic_mean(target, sticky).standard_error / stabilised_harmonic_mean(target, draws).standard_error
    )
    assert 2 < ratio < 5


def test_single_precision():
    case = exact.get("linreg10")
    model, args = case.model, tuple(x.to(torch.float32) for x in case.args)
    target = bk.Target.from_pyro(model, *args)
    u = independent(case, case.target(), (4, 250), 0).unconstrained.to(torch.float32)
    z = stabilised_harmonic_mean(target, Draws(u, *target.evaluate(u), torch.ones(4), target=target))
    assert math.isfinite(z.log_evidence) and not z.trusted


def test_bad_input_is_refused(beta, linear):
    case, target = beta
    draws = independent(case, target, (4, 50), 0)
    for delta in (0.0, 1.0, math.nan, "a", None, True):
        with pytest.raises(SettingsError, match="delta"):
            stabilised_harmonic_mean(target, draws, delta=delta)
    with pytest.raises(DrawsError, match="dimension"):
        stabilised_harmonic_mean(linear[1], draws)


@pytest.mark.calibration
def test_likelihoods_that_are_far_apart_leave_no_slope_at_the_estimate():
    """The iteration is long on its way from the median to a lower quantile, between the values of two draws."""
    constant = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1) - constant, lambda u: 1e6 * u[..., 0], 1)
    u = torch.linspace(-0.9, 1.1, 300, dtype=torch.float64).reshape(3, 100, 1)
    draws = Draws(u, *target.evaluate(u), torch.ones(3, dtype=torch.float64), target=target)
    z = stabilised_harmonic_mean(target, draws)
    assert z.standard_error == math.inf
    assert any("did not converge" in warning for warning in z.warnings)
