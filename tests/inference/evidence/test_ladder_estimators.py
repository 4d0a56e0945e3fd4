"""Estimators on ladders: against sums in closed form, over replicates, and on the problems that must be owned up to."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import chi2

import bayeskit as bk
from bayeskit import exact
from bayeskit._rebased import RebasedTarget
from bayeskit._torch import new_generator
from bayeskit.draws import Draws
from bayeskit.errors import DrawsError, ModelError, SettingsError
from bayeskit.inference.evidence.ladder import (
    _integration,
    generalised_stepping_stone,
    modified_path_sampling,
    path_sampling,
    stepping_stone,
    thermodynamic_integration,
)
from bayeskit.inference.evidence.ladder.generalised_stepping_stone import fit_reference
from bayeskit.inference.evidence.ladder.placement import temperatures
from bayeskit.inference.evidence.ladder.reference import SplitStudentT
from bayeskit.inference.evidence.peaks import highest_peak
from bayeskit.inference.samplers import Ladder, sample_ladder

FAILURE_RATE = 1e-5
Y = 1.5
LOG_Z = -0.5 * math.log(4 * math.pi) - Y**2 / 4


def normal_normal(dtype=torch.float64):
    """``u ~ N(0, 1)``, one observation ``Y ~ N(u, 1)``: evidence ``N(Y; 0, 2)``."""
    constant = 0.5 * math.log(2 * math.pi)
    return bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - constant).sum(-1),
        lambda u: (-0.5 * (u - Y).square() - constant).sum(-1),
        1,
        lambda n, g: torch.randn(n, 1, generator=g, dtype=dtype),
        dtype=dtype,
    )


def moments(beta):
    """Mean, variance and third central moment of the log likelihood at ``beta``, a quadratic of a normal variable."""
    variance = 1 / (1 + beta)
    away = beta * variance * Y - Y
    mean = -0.5 * (away.square() + variance) - 0.5 * math.log(2 * math.pi)
    return mean, 0.5 * variance.square() + variance * away.square(), -variance.pow(3) - 3 * variance.square() * away**2


def crafted(beta, num_draws=64):
    """A ladder whose log likelihoods have exactly the true mean and variance at every temperature."""
    mean, variance, _ = moments(beta)
    pattern = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64).repeat(4, num_draws // 4)
    log_likelihood = mean[:, None, None] + variance.sqrt()[:, None, None] * pattern
    target = normal_normal()
    flat = log_likelihood.flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(*flat.shape, 1, generator=generator, dtype=torch.float64)
    return target, Ladder(beta, Draws(u, torch.zeros_like(flat), flat, beta.repeat_interleave(4), target=target))


BETA = torch.tensor([0.0, 0.05, 0.2, 0.5, 1.0], dtype=torch.float64)


def rules(beta):
    """Both sums by hand, from the second temperature up, and the ratio of constants below it."""
    mean, variance, _ = (x[1:] for x in moments(beta))
    width = beta[1:].diff()
    trapezoid = float(sum(h * (a + b) / 2 for h, a, b in zip(width, mean, mean[1:], strict=False)))
    correction = float(-sum(h * h / 12 * (b - a) for h, a, b in zip(width, variance, variance[1:], strict=False)))
    return trapezoid, correction


def test_both_rules_are_the_sums_written_by_hand():
    target, ladder = crafted(BETA)
    start = float((BETA[1] * ladder.log_likelihood[0]).exp().mean().log())
    trapezoid, correction = rules(BETA)
    plain, modified = path_sampling(target, ladder), modified_path_sampling(target, ladder)
    assert plain.log_evidence == pytest.approx(start + trapezoid, abs=1e-12)
    assert modified.log_evidence == pytest.approx(start + trapezoid + correction, abs=1e-12)
    assert plain.diagnostics["trapezoid_gap"] == pytest.approx(correction, abs=1e-12)
    # On the true curve the correction removes nearly all that the trapezoid misses.
    whole = LOG_Z - float(
        -0.5 * torch.log(1 + BETA[1]) - 0.5 * BETA[1] * (math.log(2 * math.pi) + Y**2 / (1 + BETA[1]))
    )
    assert abs(trapezoid + correction - whole) < 0.03 * abs(trapezoid - whole)


def exact_curve(beta):
    mean, variance, third = moments(beta)
    no_draws = torch.zeros(len(beta), 1, 1, dtype=torch.float64)
    return _integration.Curve(0.0, no_draws[:1], beta, mean, variance, third, no_draws, no_draws, (), {})


def test_estimated_gaps_are_those_of_the_exact_curve():
    """On a fine grid the leading terms are all that the two rules miss, interval by interval."""
    beta = torch.linspace(0.1, 1.0, 10, dtype=torch.float64)
    path, low = exact_curve(beta), beta[:-1]
    nodes = torch.linspace(0, 1, 2001, dtype=torch.float64)
    for i, width in enumerate(path.width):
        values = moments(low[i] + width * nodes)[0]
        integral = float(width * (values[0] / 2 + values[1:-1].sum() + values[-1] / 2) / 2000)
        missed = integral - float(width * (path.mean[i] + path.mean[i + 1]) / 2)
        assert float(path.corrections[i]) == pytest.approx(missed, rel=0.02)
        assert float(path.gaps[i]) == pytest.approx(missed - float(path.corrections[i]), rel=0.25)


# -- linreg10: the power posteriors are normal ------------------------------------------------


@pytest.fixture(scope="module")
def linear():
    """linreg10 as a target of functions, which is traced in no time."""
    case = exact.get("linreg10")

    def log_prior(u):
        prior = case.args[3]
        return -0.5 * (u / prior).square().sum(-1) - 10 * (prior.log() + 0.5 * math.log(2 * math.pi))

    def log_likelihood(u):
        x, y, noise, _ = case.args
        residual = (y - u @ x.T) / noise
        return -0.5 * residual.square().sum(-1) - len(y) * (noise.log() + 0.5 * math.log(2 * math.pi))

    def sample_prior(n, generator):
        return case.args[3] * torch.randn(n, 10, generator=generator, dtype=torch.float64)

    return case, bk.Target.from_functions(log_prior, log_likelihood, 10, sample_prior)


def exact_ladder(case, target, beta, seed, chains=4, count=64):
    """Independent draws of every power posterior, which are normal."""
    x, y, noise, prior = case.args
    generator = new_generator(seed, stream="exact power posteriors")
    positions = []
    for b in beta:
        precision = b * x.T @ x / noise**2 + torch.eye(10, dtype=torch.float64) / prior**2
        factor = torch.linalg.cholesky(precision)
        mean = torch.cholesky_solve((b * x.T @ y / noise**2).unsqueeze(-1), factor).squeeze(-1)
        z = torch.randn(10, chains * count, generator=generator, dtype=torch.float64)
        positions.append((mean + torch.linalg.solve_triangular(factor.T, z, upper=True).T).reshape(chains, count, 10))
    u = torch.cat(positions)
    log_prior, log_likelihood = target.evaluate(u)
    draws = Draws(u, log_prior, log_likelihood, beta.repeat_interleave(chains), num_gradients=1, target=target)
    return Ladder(beta, draws)


def grid(steps):
    return torch.linspace(0, 1, steps + 1, dtype=torch.float64) ** (1 / 0.3)


def check(z):
    """Compare the scatter of z with a standard normal's, allowing errors to be 10 % off."""
    z = torch.tensor(z, dtype=torch.float64)
    n = len(z)
    low, high = chi2.ppf([FAILURE_RATE / 2, 1 - FAILURE_RATE / 2], n - 1) / (n - 1)
    assert 0.9**2 * low < float(z.var()) < 1.1**2 * high, float(z.std())
    assert abs(float(z.mean())) < 4.5 * float(z.std()) / math.sqrt(n), float(z.mean())


@pytest.fixture(scope="module")
def replicates(linear):
    case, target = linear
    results = {path_sampling: [], modified_path_sampling: [], stepping_stone: []}
    for seed in range(100):
        ladder = exact_ladder(case, target, grid(24), seed)
        for method, found in results.items():
            found.append(method(target, ladder))
    return case.log_evidence, results


def test_coverage_on_independent_draws(replicates):
    known, results = replicates
    for method in (modified_path_sampling, stepping_stone):
        z = [(each.log_evidence - known) / each.standard_error for each in results[method]]
        check(z)
        assert sum(each.trusted for each in results[method]) > 94
        with pytest.raises(AssertionError):
            check([2 * value for value in z])


def test_the_plain_rule_knows_its_bias(replicates):
    known, results = replicates
    plain = results[path_sampling]
    bias = sum(each.log_evidence - known for each in plain) / len(plain)
    error = math.sqrt(sum(each.standard_error**2 for each in plain)) / len(plain)
    gap = sum(each.diagnostics["trapezoid_gap"] for each in plain) / len(plain)
    assert bias < -5 * error and abs(bias + gap) < 4.5 * error
    assert not any(each.trusted for each in plain) and "trapezoidal rule" in plain[0].warnings[0]
    # About its own mean its error bar is right as well.
    check([(each.log_evidence - known - bias) / each.standard_error for each in plain])


def test_a_flipped_correction_is_noticed(linear, replicates, monkeypatch):
    known, _ = replicates
    case, target = linear
    right = _integration.Curve.corrections
    monkeypatch.setattr(_integration.Curve, "corrections", property(lambda self: -right.fget(self)))
    z = [modified_path_sampling(target, exact_ladder(case, target, grid(24), seed)) for seed in range(20)]
    with pytest.raises(AssertionError):
        check([(each.log_evidence - known) / each.standard_error for each in z])


def test_a_coarse_ladder_is_owned_up_to(linear):
    case, target = linear
    ladder = exact_ladder(case, target, grid(5), 0)
    for method in (path_sampling, modified_path_sampling):
        z = method(target, ladder)
        assert abs(z.log_evidence - case.log_evidence) < 3 * z.standard_error or not z.trusted


def test_a_constant_moves_every_estimate_by_itself(linear):
    case, target = linear
    ladder = exact_ladder(case, target, grid(20), 3)
    moved = replace(ladder, draws=replace(ladder.draws, log_likelihood=ladder.draws.log_likelihood + 7.25))
    for method in (path_sampling, modified_path_sampling, stepping_stone):
        assert method(target, moved).log_evidence == pytest.approx(method(target, ladder).log_evidence + 7.25, abs=1e-9)


# -- thermodynamic integration ----------------------------------------------------------------


def test_placed_temperatures_meet_their_gap():
    """From an exact pilot curve: the exact curve on the new ladder misses what was asked for, or less."""
    target, _ = crafted(BETA)
    ladder = sample_ladder(target, 6, 8, 20, 20, seed=0, progress=False)
    previous = 0
    for gap in (1e-3, 1e-5, 1e-7):
        beta = temperatures(exact_curve(ladder.beta[1:]), ladder, gap, 400)
        assert beta[0] == 0 and beta[-1] == 1 and bool((beta.diff() > 0).all())
        path = exact_curve(beta[1:])
        mean = moments(torch.linspace(float(beta[1]), 1, 20_001, dtype=torch.float64))[0]
        integral = float((mean[0] / 2 + mean[1:-1].sum() + mean[-1] / 2) * (1 - beta[1]) / 20_000)
        assert abs(path.trapezoid + float(path.corrections.sum()) - integral) < 3 * gap
        assert len(beta) > previous
        previous = len(beta)
    assert len(temperatures(exact_curve(ladder.beta[1:]), ladder, 1e-12, 30)) <= 31


def test_a_pilot_that_starts_too_high_is_extended_downwards(linear):
    case, target = linear
    beta = torch.tensor([0.0, 0.1, 0.3, 0.6, 1.0], dtype=torch.float64)
    ladder = exact_ladder(case, target, beta, 0)
    levels = temperatures(_integration.curve(target, ladder), ladder, 0.01, 100)
    assert float(levels[1]) < 0.01 and bool((levels.diff() > 0).all()) and levels[-1] == 1


def test_thermodynamic_integration_reaches_its_tolerance(linear, limit):
    case, target = linear
    z = thermodynamic_integration(target, num_warmup=100, num_samples=100, seed=1)
    assert z.trusted, z.warnings
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error
    assert abs(z.diagnostics["gap"]) <= 0.01 and z.diagnostics["rounds"] >= 1
    assert z.standard_error == pytest.approx(math.hypot(z.diagnostics["monte_carlo_error"], z.diagnostics["gap"]))


def test_a_ladder_that_is_fine_enough_is_used_as_it_is(linear):
    case, target = linear
    ladder = exact_ladder(case, target, grid(60), 0)
    z = thermodynamic_integration(target, ladder=ladder, tolerance=0.05)
    search = highest_peak(target, ladder.draws).num_evaluations
    assert z.num_evaluations == ladder.num_evaluations + search and z.diagnostics["rounds"] == 0
    assert z.log_evidence == modified_path_sampling(target, ladder).log_evidence


def test_a_gap_above_the_tolerance_is_said():
    case = exact.get("beta_binomial")
    z = thermodynamic_integration(
        case.target(), tolerance=1e-9, num_temperatures=4, max_temperatures=4, num_warmup=40, num_samples=40
    )
    assert not z.trusted and "above the tolerance" in " ".join(z.warnings)
    with pytest.raises(SettingsError, match="tolerance"):
        thermodynamic_integration(case.target(), tolerance=0.0)
    with pytest.raises(SettingsError, match="max_temperatures"):
        thermodynamic_integration(case.target(), num_temperatures=20, max_temperatures=10)


# -- generalised stepping stone ---------------------------------------------------------------


def test_the_reference_is_a_density_and_its_draws_follow_it(limit):
    reference = SplitStudentT(*(torch.tensor([v], dtype=torch.float64) for v in (0.3, 0.5, 2.0)))
    u = torch.linspace(-2000, 2000, 2_000_001, dtype=torch.float64).unsqueeze(-1)
    density = reference.log_prob(u).exp()
    assert float(density.sum() * 2e-3) == pytest.approx(1, abs=1e-6)
    x = reference.sample(40_000, new_generator(0))[:, 0]
    cumulative = density.cumsum(0) * 2e-3
    for point in (-1.0, 0.3, 2.0, 6.0):
        p = float(cumulative[int((point + 2000) / 2e-3)])
        share = float((x < point).to(torch.float64).mean())
        assert abs(share - p) < limit(4) * math.sqrt(p * (1 - p) / 40_000), point


def test_the_reference_follows_skewness_and_moves_with_the_coordinates():
    generator = torch.Generator().manual_seed(1)
    skewed = torch._standard_gamma(torch.full((4000, 2), 0.7, dtype=torch.float64), generator=generator).log()
    fitted = SplitStudentT.fit(skewed)
    assert bool((fitted.left > 1.5 * fitted.right).all())
    moved = SplitStudentT.fit(3 - 2 * skewed)
    torch.testing.assert_close(moved.log_prob(3 - 2 * skewed), fitted.log_prob(skewed) - 2 * math.log(2))


def draws_of(case, target, seed, chains=4, count=200):
    return replace(
        exact_ladder(case, target, torch.ones(1, dtype=torch.float64), seed, chains, count).draws, target=target
    )


def test_a_rebased_target_has_the_same_posterior(linear):
    case = linear[0]
    target = case.target()
    reference, _ = fit_reference(draws_of(case, target, 0))
    path = RebasedTarget(target, reference)
    u = reference.sample(70, new_generator(2))
    torch.testing.assert_close(path.log_density(u), target.log_density(u))
    for beta in (0.0, 0.3, 1.0):
        leaf = u.clone().requires_grad_(True)
        density = path.log_density(leaf, beta)
        value, gradient = path.value_and_grad(u, beta)
        torch.testing.assert_close(value, density.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(density.sum(), leaf)[0])
    assert torch.equal(path.constrain(u)["b"], target.constrain(u)["b"]) and path.can_sample_prior
    other = RebasedTarget(target, SplitStudentT(reference.location, reference.left, 1.01 * reference.right))
    assert path.fingerprint() != other.fingerprint()
    with pytest.raises(ModelError, match="rebased"):
        path.pointwise_log_likelihood(u)


def test_generalised_stepping_stone_is_exact_and_sharp(linear):
    """Over replicates z is standard normal, with an error far below that of a ladder from the prior."""
    case, target = linear
    found = [
        generalised_stepping_stone(
            target, draws_of(case, target, seed), num_temperatures=5, num_warmup=60, num_samples=100, seed=seed
        )
        for seed in range(12)
    ]
    assert all(z.trusted for z in found), [z.warnings for z in found]
    check([(z.log_evidence - case.log_evidence) / z.standard_error for z in found])
    assert max(z.standard_error for z in found) < 0.03


def test_a_reference_that_is_not_normalised_is_noticed(linear, limit, monkeypatch):
    case, target = linear
    right = SplitStudentT.log_prob
    monkeypatch.setattr(SplitStudentT, "log_prob", lambda self, u: right(self, u) + math.log(1.2))
    z = generalised_stepping_stone(target, draws_of(case, target, 0), num_warmup=60, num_samples=120)
    assert abs(z.log_evidence - case.log_evidence) > limit() * z.standard_error


def test_a_prior_that_cannot_be_drawn_from_is_no_hindrance(limit):
    """And in single precision."""
    whole = normal_normal(torch.float32)
    target = bk.Target.from_functions(whole.log_prior, whole.log_likelihood, 1, dtype=torch.float32)
    draws = bk.sample(target, 4, 100, 200, seed=0, progress=False)
    z = generalised_stepping_stone(target, draws, num_temperatures=4, num_warmup=60, num_samples=200)
    assert z.trusted and abs(z.log_evidence - LOG_Z) < limit() * z.standard_error, str(z)


def test_lighter_tails_of_the_reference_are_seen(linear, monkeypatch):
    """A reference of 0.6 standard deviations and nearly normal tails leaves out what two steps cannot bring back."""
    case, target = linear
    right = SplitStudentT.fit

    def narrow(x):
        fitted = right(x)
        return SplitStudentT(fitted.location, 0.6 * fitted.left, 0.6 * fitted.right, 200.0)

    monkeypatch.setattr(SplitStudentT, "fit", narrow)
    z = generalised_stepping_stone(
        target, draws_of(case, target, 0, 4, 500), num_temperatures=2, num_warmup=60, num_samples=60
    )
    assert not z.trusted and "lighter tails" in " ".join(z.warnings)


def test_draws_that_the_ladder_does_not_meet_are_seen(linear):
    """The posterior draws lie in one of two modes, the ladder's other end in the other."""
    centre = torch.tensor([4.0, 0.0], dtype=torch.float64)

    def log_prior(u):
        return (-0.5 * (u / 5).square() - math.log(5) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_likelihood(u):
        near, far = (-0.5 * ((u - c) / 0.3).square().sum(-1) for c in (centre, -centre))
        return torch.logaddexp(near, far + 1)

    target = bk.Target.from_functions(
        log_prior, log_likelihood, 2, lambda n, g: 5 * torch.randn(n, 2, generator=g, dtype=torch.float64)
    )
    noise = torch.randn(4, 400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here = centre * 25 / (25 + 0.3**2) + noise * math.sqrt(25 * 0.09 / 25.09)
    u = here * torch.tensor([1.0, 1.0, 1.0, -1.0]).double()[:, None, None]  # one chain of four in the heavier mode
    draws = Draws(u, log_prior(u), log_likelihood(u), torch.ones(4, dtype=torch.float64), target=target)
    z = generalised_stepping_stone(target, draws, num_temperatures=4, num_warmup=60, num_samples=120)
    assert not z.trusted and "disagree" in " ".join(z.warnings)


def test_what_cannot_be_fitted_is_refused(linear):
    case, target = linear
    few = draws_of(case, target, 0, 2, 16)
    with pytest.raises(DrawsError, match="too few to fit"):
        generalised_stepping_stone(target, few)
    still = draws_of(case, target, 0)
    still.unconstrained[..., 3] = 1.0
    with pytest.raises(DrawsError, match=r"coordinates \[3\] do not move"):
        fit_reference(still)
    with pytest.raises(DrawsError, match="another target"):
        generalised_stepping_stone(exact.linear_regression(prior_sd=1.0).target(), draws_of(case, target, 0))
    with pytest.raises(SettingsError, match="num_temperatures"):
        generalised_stepping_stone(target, draws_of(case, target, 0), num_temperatures=1)
