"""Estimators on ladders: against sums in closed form, over replicates, and on the problems that must be owned up to."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import binom

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import r_hat
from bayeskit._draws import Draws
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.inference.evidence import _ladder as _integration
from bayeskit.inference.evidence._judging._chains import ladder_problems
from bayeskit.inference.evidence._judging._diagnostics import LOOKS, WIDER, Diagnostics
from bayeskit.inference.evidence._ladder import (
    modified_path_sampling,
    path_sampling,
    stepping_stone,
    temperatures,
    thermodynamic_integration,
)
from bayeskit.inference.samplers import sample_ladder
from bayeskit.inference.samplers._ladder import Ladder

FAILURE_RATE = 1e-5
REPLICATES, JUDGED = 60, 20
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
    return _integration.IntegrandCurve(0.0, no_draws[:1], beta, mean, variance, third, no_draws, no_draws, (), {})


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


@pytest.fixture(scope="module")
def replicates(linear):
    """Estimates on independent ladders; the search for other peaks, which changes no number, is made in some."""
    case, target = linear
    results = {path_sampling: [], modified_path_sampling: [], stepping_stone: []}
    for seed in range(REPLICATES):
        ladder = exact_ladder(case, target, grid(24), seed, count=128)
        for method, found in results.items():
            found.append((method if seed < JUDGED else method.__wrapped__)(target, ladder))
    return case.log_evidence, results


@pytest.mark.calibration
def test_coverage_on_independent_draws(replicates, calibrated):
    known, results = replicates
    for method in (modified_path_sampling, stepping_stone):
        z = [(each.log_evidence - known) / each.standard_error for each in results[method]]
        assert calibrated(z, off=0.1), method
        # Short chains seem correlated by chance, now and then.
        assert sum(each.trusted for each in results[method]) >= binom.ppf(FAILURE_RATE, REPLICATES, 0.99)
        assert not calibrated([2 * value for value in z], off=0.1)


@pytest.mark.calibration
def test_the_plain_rule_knows_its_bias(replicates, calibrated):
    known, results = replicates
    plain = results[path_sampling]
    bias = sum(each.log_evidence - known for each in plain) / len(plain)
    alone = [each.diagnostics["monte_carlo_error"] for each in plain]
    error = math.hypot(*alone) / len(plain)
    gap = sum(each.diagnostics["trapezoid_gap"] for each in plain) / len(plain)
    assert bias < -5 * error and abs(bias + gap) < 4.5 * error
    assert all(each.standard_error > abs(each.diagnostics["trapezoid_gap"]) for each in plain)
    # About its own mean the Monte Carlo error is right as well.
    errors = zip(plain, alone, strict=True)
    assert calibrated(((each.log_evidence - known - bias) / one for each, one in errors), off=0.1)


@pytest.mark.calibration
def test_a_flipped_correction_is_noticed(linear, replicates, monkeypatch, calibrated):
    known, _ = replicates
    case, target = linear
    right = _integration.IntegrandCurve.corrections
    monkeypatch.setattr(_integration.IntegrandCurve, "corrections", property(lambda self: -right.fget(self)))
    z = [modified_path_sampling(target, exact_ladder(case, target, grid(24), seed)) for seed in range(20)]
    assert not calibrated(((each.log_evidence - known) / each.standard_error for each in z), off=0.1)


def test_a_coarse_ladder_is_owned_up_to(linear):
    case, target = linear
    ladder = exact_ladder(case, target, grid(5), 0)
    for method in (path_sampling, modified_path_sampling):
        z = method(target, ladder)
        assert abs(z.log_evidence - case.log_evidence) < 3 * z.standard_error or not z.trusted


def test_a_gap_of_more_than_a_nat_is_refused_and_a_small_one_is_part_of_the_error(linear):
    case, target = linear
    wide, narrow = (path_sampling(target, exact_ladder(case, target, grid(steps), 0, count=128)) for steps in (8, 24))
    assert abs(wide.diagnostics["trapezoid_gap"]) > 1 and not wide.trusted
    assert "the trapezoidal rule misses about" in wide.warnings[0]
    assert narrow.standard_error > abs(narrow.diagnostics["trapezoid_gap"]) > narrow.diagnostics["monte_carlo_error"]


def test_a_constant_moves_every_estimate_by_itself(linear):
    case, target = linear
    ladder = exact_ladder(case, target, grid(20), 3)
    moved = replace(ladder, draws=replace(ladder.draws, log_likelihood=ladder.draws.log_likelihood + 7.25))
    for method in (path_sampling, modified_path_sampling, stepping_stone):
        assert method(target, moved).log_evidence == pytest.approx(method(target, ladder).log_evidence + 7.25, abs=1e-9)


# -- what a ladder cannot show ----------------------------------------------------------------


def peaked():
    """Four standard normal coordinates, each seen at 1.5 with error 0.2; the power posteriors are normal."""
    half = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - half).sum(-1),
        lambda u: (-0.5 * ((u - 1.5) / 0.2).square() - half - math.log(0.2)).sum(-1),
        4,
        lambda n, g: torch.randn(n, 4, generator=g, dtype=torch.float64),
    )
    return target, -2 * math.log(2 * math.pi * 1.04) - 2 * 1.5**2 / 1.04


def ladder_of_peaked(target, levels, seed, count=100):
    beta = torch.tensor(levels, dtype=torch.float64)
    precision = 1 + 25 * beta
    generator = new_generator(seed, stream="peaked")
    u = torch.randn(len(beta), 4, count, 4, generator=generator, dtype=torch.float64)
    u = (37.5 * beta / precision)[:, None, None, None] + u * precision.rsqrt()[:, None, None, None]
    u = u.flatten(0, 1)
    draws = Draws(u, *target.evaluate(u), beta.repeat_interleave(4), num_gradients=1, target=target)
    return Ladder(beta, draws)


HIGH = [0.0, 0.3, 0.36, 0.43, 0.51, 0.62, 0.74, 0.87, 1.0]
LOW = [0.0, *(1e-3 * 1000 ** (i / 24) for i in range(25))]


@pytest.mark.calibration
def test_a_first_step_that_rests_on_a_few_draws_is_owned_up_to():
    """The prior's draws are 400, but few of them count at the first temperature."""
    target, known = peaked()
    ladders = [ladder_of_peaked(target, HIGH, seed) for seed in range(25)]
    found = [modified_path_sampling(target, ladder) for ladder in ladders]
    plain = path_sampling(target, ladders[0])
    wrong = [abs(z.log_evidence - known) > 3 * z.standard_error for z in found]
    assert sum(wrong) >= 3 and not any(z.trusted for z in [plain, *found])
    assert max(z.diagnostics["first_step_effective_draws"] for z in found) < 100
    z = modified_path_sampling(target, ladder_of_peaked(target, LOW, 0))
    assert z.trusted and z.diagnostics["first_step_effective_draws"] > 350, str(z)
    assert z.diagnostics["first_step_pareto_shape"] < 0.7


def test_weights_of_the_first_step_with_a_heavy_tail_are_owned_up_to():
    """Their shape is 0.9 while the effective draws, which do not see what was not drawn, are enough."""
    target, ladder = crafted(grid(12)[torch.tensor([0, *range(5, 13)])], 4096)
    uniform = torch.rand(4, 4096, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = ladder.draws.log_likelihood.clone()
    values[:4] = torch.log1p(0.05 * (uniform.pow(-0.9) - 1)) / ladder.beta[1]
    heavy = replace(ladder, draws=replace(ladder.draws, log_likelihood=values))
    path = _integration.curve(target, replace(heavy, draws=replace(heavy.draws, target=target)))
    assert path.diagnostics["first_step_effective_draws"] > 100
    assert path.diagnostics["first_step_pareto_shape"] > 0.7 and not path.first_step_holds


def test_thermodynamic_integration_is_not_content_with_a_poor_first_step(limit):
    target, known = peaked()
    settings = {"tolerance": 1.0, "num_chains": 4, "num_warmup": 60, "num_samples": 100}
    z = thermodynamic_integration(target, ladder=ladder_of_peaked(target, HIGH, 0), **settings)
    assert z.diagnostics["rounds"] >= 1 and z.diagnostics["first_step_effective_draws"] > 100
    assert abs(z.log_evidence - known) < limit() * z.standard_error


@pytest.mark.calibration
def test_too_few_temperatures_show_no_discretisation():
    """Of one interval, or three, every second temperature cannot be left out."""
    target, _ = peaked()
    for levels in ([0.0, 0.002, 1.0], [0.0, 0.002, 0.02, 0.2, 1.0]):
        ladder = ladder_of_peaked(target, levels, 0)
        assert _integration.curve(target, ladder).coarse_gap() == math.inf
        for method in (path_sampling, modified_path_sampling):
            assert not method(target, ladder).trusted
        settings = {"tolerance": 50.0, "num_chains": 4, "num_warmup": 60, "num_samples": 50}
        assert thermodynamic_integration(target, ladder=ladder, **settings).diagnostics["rounds"] >= 1


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_constant_likelihood_has_the_error_of_a_sum(dtype, limit):
    """Every temperature adds its rounding."""
    for constant, steps in ((-3.7, 30), (-12345.678, 50), (-0.1, 200)):
        whole = normal_normal(dtype)
        target = bk.Target.from_functions(
            whole.log_prior,
            lambda u, c=constant: 0 * u[..., 0] + c,
            1,
            lambda n, generator, whole=whole: whole.sample_prior(n, seed=generator),
            dtype=dtype,
        )
        beta = grid(steps).to(dtype)
        u = torch.randn(4 * len(beta), 16, 1, generator=torch.Generator().manual_seed(1), dtype=dtype)
        draws = Draws(u, *target.evaluate(u), beta.repeat_interleave(4), num_gradients=1, target=target)
        for method in (path_sampling, modified_path_sampling, stepping_stone):
            z = method(target, Ladder(beta, draws))
            assert abs(z.log_evidence - constant) < limit(9) * z.standard_error
            assert z.standard_error < 2 * steps * abs(constant) * torch.finfo(dtype).eps


def test_what_is_no_ladder_is_refused():
    target, ladder = crafted(BETA)
    for method in (path_sampling, modified_path_sampling, stepping_stone):
        for wrong in (None, ladder.draws):
            with pytest.raises(SettingsError, match="sample_ladder"):
                method(target, wrong)
        with pytest.raises(DrawsError, match="dimension"):
            method(peaked()[0], ladder)
    with pytest.raises(SettingsError, match="sample_ladder"):
        thermodynamic_integration(target, ladder=ladder.draws)


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


@pytest.mark.calibration
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
    search = Diagnostics(target).modes(ladder.draws).num_evaluations + len(WIDER) * LOOKS
    assert z.num_evaluations == ladder.num_evaluations + search and z.diagnostics["rounds"] == 0
    assert z.log_evidence == modified_path_sampling(target, ladder).log_evidence


@pytest.mark.calibration
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


@pytest.mark.calibration
def test_prior_draws_without_likelihood_have_effective_draws():
    """Half of the prior's draws have no likelihood; how well they mix is a number all the same."""
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: torch.where(u[..., 0] > 0, -0.5 * u[..., 0], -torch.inf),
        1,
        sample_prior=lambda n, generator: torch.randn(n, 1, generator=generator, dtype=torch.float64),
    )
    ladder = sample_ladder(target, seed=0, progress=False)
    assert bool((ladder.log_likelihood[0] == -torch.inf).any())
    assert math.isfinite(stepping_stone(target, ladder).diagnostics["effective_draws"])


def test_short_chains_may_differ_by_chance_and_not_by_more():
    """Autocorrelated chains of one distribution, of which each has few effective draws, and one chain that is apart."""
    levels, chains, count, correlation = 40, 128, 150, 0.88
    generator = new_generator(5, stream="short chains")
    noise = torch.randn(count, levels, chains, generator=generator, dtype=torch.float64)
    x = [noise[0]]
    for step in noise[1:]:
        x.append(correlation * x[-1] + math.sqrt(1 - correlation**2) * step)
    position, beta = torch.stack(x, -1), torch.linspace(0, 1, levels, dtype=torch.float64)

    def problems(position):
        flat = position.flatten(0, 1)
        draws = Draws(flat.unsqueeze(-1), torch.zeros_like(flat), flat, beta.repeat_interleave(chains))
        return [said for said in ladder_problems(Ladder(beta, draws))[0] if "disagree" in said]

    assert float(r_hat(position).max()) > 1.1 and problems(position) == []
    apart = position.clone()
    apart[20, :32] += 2
    assert len(problems(apart)) == 1


def test_few_divergences_count_where_chains_move_slowly():
    """One transition in 200 diverges; what lies behind is a hundred times as much where chains forget a hundredth."""
    levels, chains, count = 5, 8, 2000
    beta = torch.linspace(0, 1, levels, dtype=torch.float64)
    generator = new_generator(6, stream="divergences")
    noise = torch.randn(levels, chains, count, generator=generator, dtype=torch.float64)
    diverging = torch.rand(levels * chains, count, generator=generator) < 0.005

    def problems(correlation):
        x = torch.empty_like(noise)
        x[..., 0] = noise[..., 0]
        for i in range(1, count):
            x[..., i] = correlation * x[..., i - 1] + math.sqrt(1 - correlation**2) * noise[..., i]
        flat = x.flatten(0, 1)
        draws = Draws(
            flat.unsqueeze(-1),
            torch.zeros_like(flat),
            flat,
            beta.repeat_interleave(chains),
            sample_stats={"diverging": diverging},
        )
        return [said for said in ladder_problems(Ladder(beta, draws))[0] if "diverge" in said]

    assert problems(0.0) == []
    assert len(problems(0.97)) == 1 and "move slowly" in problems(0.97)[0]


@pytest.mark.calibration
def test_rough_temperatures_are_refined_by_a_pilot(monkeypatch, limit):
    # A sharp normal likelihood: the eight temperatures given leave an error of more than a nat.
    scale, made = 300.0, []
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: -0.5 * (scale * u).square().sum(-1),
        4,
        lambda n, generator: torch.randn(n, 4, generator=generator, dtype=torch.float64),
    )
    known = -2 * math.log1p(scale**2)
    draw = _integration.sample_ladder

    def noted(*arguments, **settings):
        made.append(draw(*arguments, **settings))
        return made[-1]

    given = sample_ladder(target, 8, 8, 100, 200, progress=False)
    assert abs(float(_integration.curve(target, given).gaps.sum())) > 1
    monkeypatch.setattr(_integration, "sample_ladder", noted)
    settings = {"num_chains": 8, "num_warmup": 100, "num_samples": 200, "progress": False}
    z = thermodynamic_integration(target, ladder=given, **settings)
    assert made[0].draws.num_draws == 50 and made[-1].draws.num_draws == 200
    assert abs(z.log_evidence - known) < limit() * z.standard_error
    # What is left of the error of the rule is small beside the Monte Carlo error, and no reason for another ladder.
    assert abs(z.diagnostics["gap"]) <= max(0.01, 0.25 * z.diagnostics["monte_carlo_error"])
