"""The mean field, its bound and the weights from it, against closed forms."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import roots_hermitenorm

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import DrawsError, InitializationError, SettingsError, ShapeError
from bayeskit.inference.evidence import _variational as mean_field
from bayeskit.inference.evidence._judging import _weights as coverage
from bayeskit.inference.evidence._variational import (
    _tails,
    balanced_normal_draws,
    evidence_lower_bound,
    fit_mean_field,
    variational_importance_sampling,
)

# The package exports a function of the same name as this module.
importance = sys.modules[variational_importance_sampling.__module__]
DOUBLE = torch.float64
PRODUCT = torch.tensor([0.5, 3.0, 40.0], dtype=DOUBLE)
CORRELATED = torch.tensor([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]], dtype=DOUBLE)
PULL = torch.tensor([1.0, -2.0, 0.7], dtype=DOUBLE)


def normal_posterior(precision, pull=PULL, constant=0.0, stretch=1.0, dtype=DOUBLE):
    """Prior N(0, I), log likelihood -u'Au/2 + pull'u + constant, in the coordinates u / stretch."""
    precision, pull = precision.to(dtype), pull.to(dtype)
    d = len(pull)
    scale = torch.as_tensor(stretch, dtype=dtype).expand(d)
    prior = torch.distributions.Normal(torch.zeros(d, dtype=dtype), 1 / scale, validate_args=False)

    def log_likelihood(v):
        u = v * scale
        return -0.5 * ((u @ precision) * u).sum(-1) + u @ pull + constant

    return bk.Target.from_functions(
        lambda v: prior.log_prob(v).sum(-1),
        log_likelihood,
        d,
        lambda n, g: torch.randn(n, d, generator=g, dtype=dtype) / scale,
        dtype=dtype,
        compile=False,
    )


def answers(precision, pull=PULL):
    """Posterior mean, diagonal of the posterior precision, log evidence, and the gap of the mean field."""
    total = torch.eye(len(pull), dtype=DOUBLE) + precision
    mean, log_determinant = torch.linalg.solve(total, pull), float(torch.logdet(total))
    log_z = 0.5 * float(pull @ mean) - 0.5 * log_determinant
    gap = 0.5 * (float(total.diagonal().log().sum()) - log_determinant)
    return SimpleNamespace(mean=mean, diagonal=total.diagonal(), log_evidence=log_z, gap=gap)


def test_exact_where_the_posterior_is_a_product_of_normals():
    target, wanted = normal_posterior(torch.diag(PRODUCT)), answers(torch.diag(PRODUCT))
    q = fit_mean_field(target)
    assert wanted.gap == pytest.approx(0.0, abs=1e-12)
    torch.testing.assert_close(q.location, wanted.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(q.scale, wanted.diagonal.rsqrt(), rtol=1e-6, atol=0)
    assert q.bound == pytest.approx(wanted.log_evidence, abs=1e-6)
    assert evidence_lower_bound(target, mean_field=q).log_evidence == pytest.approx(wanted.log_evidence, abs=1e-6)
    plain = variational_importance_sampling(target, mean_field=q, tail_share=0.0)
    assert plain.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-6) and plain.standard_error < 1e-6


def test_closed_form_optimum_and_gap_for_a_correlated_normal(limit):
    target, wanted = normal_posterior(CORRELATED), answers(CORRELATED)
    q = fit_mean_field(target)
    torch.testing.assert_close(q.location, wanted.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(q.scale, wanted.diagonal.rsqrt(), rtol=1e-5, atol=0)
    assert wanted.gap > 0.04
    assert q.bound == pytest.approx(wanted.log_evidence - wanted.gap, abs=1e-6)
    bound = evidence_lower_bound(target, mean_field=q)
    difference = bound.log_evidence - (wanted.log_evidence - wanted.gap)
    assert abs(difference) < limit() * bound.diagnostics["bound_error"]
    assert wanted.gap > 10 * bound.diagnostics["bound_error"]
    z = variational_importance_sampling(target, mean_field=q)
    assert z.trusted and abs(z.log_evidence - wanted.log_evidence) < limit() * z.standard_error


def test_the_bound_is_never_taken_for_the_evidence():
    z = evidence_lower_bound(normal_posterior(CORRELATED), seed=3)
    assert math.isnan(z.standard_error) and not z.trusted
    assert "lower bound" in z.warnings[0] and "variational_importance_sampling" in z.warnings[0]


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["beta_binomial", "three_taxon_tree"])
def test_agrees_with_a_bound_by_quadrature(name):
    case = exact.get(name)
    target = bk.Target.from_pyro(case.model, *case.args, compile=False)
    d = target.dim
    nodes, weights = roots_hermitenorm(14 if d == 3 else 80)
    grid = torch.as_tensor(np.stack(np.meshgrid(*[nodes] * d, indexing="ij"), -1).reshape(-1, d))
    mass = torch.as_tensor(np.prod(np.stack(np.meshgrid(*[weights] * d, indexing="ij"), -1).reshape(-1, d), -1))
    mass /= mass.sum()

    q = fit_mean_field(target)
    log_density, gradient = target.value_and_grad(q.location + q.scale * grid)
    bound = float(mass @ log_density) + float(q.scale.log().sum()) + 0.5 * d * (1 + math.log(2 * math.pi))
    assert abs(q.bound - bound) < 0.01
    # Slopes in nats a standard deviation: half their square is what the bound could still gain.
    slope = q.scale * (mass @ gradient)
    scale_slope = 1 + q.scale * (mass @ (gradient * grid))
    assert float(slope.square().sum() + scale_slope.square().sum()) / 2 < 0.002


def test_same_bound_in_other_units():
    stretch = torch.tensor([1e-12, 1.0, 1e10], dtype=DOUBLE)
    one, other = (
        fit_mean_field(normal_posterior(CORRELATED)),
        fit_mean_field(normal_posterior(CORRELATED, stretch=stretch)),
    )
    assert one.bound == pytest.approx(other.bound, abs=1e-6)
    torch.testing.assert_close(one.scale, other.scale * stretch, rtol=1e-4, atol=0)


def test_a_constant_moves_everything_by_itself():
    q, moved = (fit_mean_field(normal_posterior(CORRELATED, constant=c)) for c in (0.0, 123.25))
    assert moved.bound - q.bound == pytest.approx(123.25, abs=1e-6)
    assert moved.height - q.height == pytest.approx(123.25, abs=1e-4)
    # The same proposal for both.
    a, b = (
        variational_importance_sampling(
            normal_posterior(CORRELATED, constant=c), mean_field=replace(q, height=q.height + c)
        )
        for c in (0.0, 123.25)
    )
    assert b.log_evidence - a.log_evidence == pytest.approx(123.25, abs=1e-9)
    assert b.standard_error == pytest.approx(a.standard_error, rel=1e-6)


def test_order_of_the_data_does_not_matter():
    case = exact.get("linreg10")
    design, response, *others = case.args
    order = torch.randperm(len(response), generator=torch.Generator().manual_seed(4))
    a = bk.Target.from_pyro(case.model, design, response, *others, compile=False)
    b = bk.Target.from_pyro(case.model, design[order], response[order], *others, compile=False)
    assert fit_mean_field(a).bound == pytest.approx(fit_mean_field(b).bound, abs=1e-5)


REPLICATES = 100


def test_the_error_of_the_bound_is_as_large_as_it_says(calibrated):
    target, wanted = normal_posterior(CORRELATED), answers(CORRELATED)
    q = fit_mean_field(target)
    bounds = [evidence_lower_bound(target, mean_field=q, num_draws=500, seed=s) for s in range(REPLICATES)]
    centre = wanted.log_evidence - wanted.gap
    z = [(b.log_evidence - centre) / b.diagnostics["bound_error"] for b in bounds]
    assert calibrated(z) and not calibrated([2 * x for x in z]) and not calibrated([x / 2 for x in z])


@pytest.mark.calibration
@pytest.mark.parametrize("tail_share", [0.0, 0.5])
def test_the_standard_error_is_as_large_as_it_says(tail_share, monkeypatch, calibrated):
    monkeypatch.setattr(importance, "CHECK_DRAWS", 100)
    target, wanted = normal_posterior(CORRELATED), answers(CORRELATED)
    q = fit_mean_field(target)
    weights = [
        variational_importance_sampling(target, mean_field=q, num_draws=500, tail_share=tail_share, seed=s)
        for s in range(REPLICATES)
    ]
    z = [(w.log_evidence - wanted.log_evidence) / w.standard_error for w in weights]
    assert calibrated(z) and not calibrated([2 * x for x in z]) and not calibrated([x / 2 for x in z])


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["linreg10", "three_taxon_tree", "radiata_pine_m1", "beta_binomial"])
def test_right_and_trusted_on_exact_cases(name, limit):
    case = exact.get(name)
    z = variational_importance_sampling(bk.Target.from_pyro(case.model, *case.args, compile=False), seed=2)
    assert z.trusted, z.warnings
    assert abs(z.log_evidence - case.log_evidence) < limit(4) * z.standard_error
    assert z.num_evaluations > 10_000


def test_without_tails_a_skewed_posterior_is_flagged():
    case = exact.get("three_taxon_tree")
    target = bk.Target.from_pyro(case.model, *case.args, compile=False)
    assert not variational_importance_sampling(target, tail_share=0.0, seed=1).trusted


def test_strong_correlation_is_flagged():
    precision = torch.tensor([[100.0, 98.0], [98.0, 100.0]], dtype=DOUBLE)
    z = variational_importance_sampling(normal_posterior(precision, PULL[:2]))
    assert not z.trusted and z.diagnostics["local_pareto_shape"] == pytest.approx(98 / 101, abs=1e-3)
    assert any("curvature" in warning for warning in z.warnings)


@pytest.mark.calibration
@pytest.mark.parametrize("case", [exact.spike_and_slab(20), exact.get("eggbox")], ids=lambda case: case.name)
def test_other_optima_are_flagged(case):
    target = bk.Target.from_pyro(case.model, *case.args, compile=False)
    q = fit_mean_field(target)
    assert q.others
    z = variational_importance_sampling(target, mean_field=q)
    assert not z.trusted and any("hardly covers" in warning for warning in z.warnings)


def test_posterior_draws_outside_the_proposal_are_noticed(monkeypatch):
    target = normal_posterior(torch.diag(PRODUCT))
    draws = bk.sample(target, 4, 100, 100, progress=False)
    assert variational_importance_sampling(target, draws=draws).trusted
    elsewhere = fit_mean_field(normal_posterior(torch.diag(PRODUCT), pull=PULL + 30 * PRODUCT))
    elsewhere = replace(elsewhere, height=float(target.log_density(elsewhere.location)))
    z = variational_importance_sampling(target, mean_field=elsewhere, draws=draws)
    assert any("posterior draws" in warning for warning in z.warnings)
    assert z.num_evaluations > draws.num_gradients
    assert coverage.missed_draws(lambda x: torch.zeros_like(x[:, 0]), draws, math.inf) == []
    with pytest.raises(DrawsError, match="another target"):
        variational_importance_sampling(normal_posterior(CORRELATED), draws=draws)


def test_a_wrong_entropy_would_be_noticed(monkeypatch):
    monkeypatch.setattr(mean_field, "_entropy", lambda dim: 0.5 * dim * math.log(2 * math.pi))
    wanted = answers(torch.diag(PRODUCT))
    assert abs(fit_mean_field(normal_posterior(torch.diag(PRODUCT))).bound - wanted.log_evidence) > 1


def test_a_wrong_density_of_the_fit_would_be_noticed(monkeypatch):
    def without_scale(self, x):
        z = (x - self.location) / self.scale
        return -0.5 * (z.square().sum(-1) + z.shape[-1] * math.log(2 * math.pi))

    monkeypatch.setattr(mean_field.MeanField, "log_prob", without_scale)
    wanted, target = answers(torch.diag(PRODUCT)), normal_posterior(torch.diag(PRODUCT))
    assert abs(evidence_lower_bound(target).log_evidence - wanted.log_evidence) > 1


def test_draws_of_the_tails_have_their_density(limit):
    location, scale = PULL, PRODUCT
    tails = _tails(location, scale)
    x = tails.sample(40_000, torch.Generator().manual_seed(5))
    reference = torch.distributions.StudentT(3.0, location, scale)
    torch.testing.assert_close(tails.log_prob(x), reference.log_prob(x).sum(-1))
    inside = ((x - location).abs() < scale).to(DOUBLE).mean(0)
    wanted = 0.6089977810442294  # within one scale, Student-t with three degrees of freedom
    error = math.sqrt(wanted * (1 - wanted) / len(x))
    assert bool(((inside - wanted).abs() < limit(3) * error).all())


def test_fixed_draws_have_exact_moments_as_far_as_they_can():
    z = balanced_normal_draws(256, 5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(z.T @ z / 256, torch.eye(5, dtype=DOUBLE))
    few = balanced_normal_draws(16, 20, torch.Generator().manual_seed(1))
    torch.testing.assert_close(few.square().mean(0), torch.ones(20, dtype=DOUBLE))
    assert few.isfinite().all() and float(few.mean(0).abs().max()) < 1e-12


def test_too_few_fixed_draws_are_said():
    case = exact.get("eight_schools")
    target = bk.Target.from_pyro(case.model, *case.args, compile=False)
    q = fit_mean_field(target, max_draws=32)
    assert any("max_draws" in problem for problem in q.problems)
    assert any("max_draws" in warning for warning in evidence_lower_bound(target, mean_field=q).warnings)
    assert any("max_draws" in warning for warning in variational_importance_sampling(target, mean_field=q).warnings)


def test_no_convergence_is_said(monkeypatch):
    monkeypatch.setattr(mean_field, "MAX_ITERATIONS", 1)
    case = exact.get("three_taxon_tree")
    q = fit_mean_field(bk.Target.from_pyro(case.model, *case.args, compile=False))
    assert any("did not converge" in problem for problem in q.problems)


def box(half_width):
    prior = torch.distributions.Normal(torch.zeros((), dtype=DOUBLE), 1.0)
    return bk.Target.from_functions(
        lambda u: prior.log_prob(u).sum(-1),
        lambda u: torch.where((u.abs() < half_width).all(-1), 0.0, -torch.inf).to(u.dtype),
        2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=DOUBLE),
        compile=False,
    )


def test_a_density_that_is_zero_beyond_a_wall(limit):
    target, wanted = box(1.0), 2 * math.log(0.6826894921370859)
    q = fit_mean_field(target)
    assert math.isfinite(q.bound) and q.bound < wanted
    z = variational_importance_sampling(target, mean_field=q)
    assert not z.trusted or abs(z.log_evidence - wanted) < limit() * z.standard_error


def test_a_density_that_is_zero_everywhere_is_refused():
    with pytest.raises(InitializationError):
        fit_mean_field(box(0.0))


def test_single_precision(limit):
    target, wanted = normal_posterior(CORRELATED, dtype=torch.float32), answers(CORRELATED)
    q = fit_mean_field(target)
    assert q.location.dtype == torch.float32 and q.problems == ()
    assert q.bound == pytest.approx(wanted.log_evidence - wanted.gap, abs=1e-4)
    z = variational_importance_sampling(target, mean_field=q)
    assert z.trusted and abs(z.log_evidence - wanted.log_evidence) < limit() * z.standard_error


def test_same_seed_same_numbers():
    one, same, other = (
        variational_importance_sampling(normal_posterior(CORRELATED), num_draws=200, seed=s) for s in (1, 1, 2)
    )
    assert one == same and one.log_evidence != other.log_evidence


def test_bad_settings_are_refused():
    target = normal_posterior(CORRELATED)
    for call in (
        lambda: evidence_lower_bound(target, num_draws=1),
        lambda: variational_importance_sampling(target, num_draws=0),
        lambda: variational_importance_sampling(target, num_draws=True),
        lambda: variational_importance_sampling(target, tail_share=1.0),
        lambda: variational_importance_sampling(target, tail_share=math.nan),
        lambda: variational_importance_sampling(target, tail_share="0.5"),
        lambda: fit_mean_field(target, tolerance=-1.0),
        lambda: fit_mean_field(target, max_draws=1),
    ):
        with pytest.raises(SettingsError):
            call()


@pytest.mark.parametrize("estimator", [evidence_lower_bound, variational_importance_sampling])
def test_a_mean_field_of_another_target_is_refused(estimator):
    q = fit_mean_field(normal_posterior(CORRELATED))
    with pytest.raises(SettingsError, match="another target"):
        estimator(normal_posterior(CORRELATED, constant=-1.0), mean_field=q)
    with pytest.raises(ShapeError, match="dimension"):
        estimator(normal_posterior(CORRELATED[:2, :2], PULL[:2]), mean_field=q)


def test_a_given_mean_field_is_not_fitted_again(monkeypatch):
    target = normal_posterior(CORRELATED)
    q = fit_mean_field(target)
    monkeypatch.setattr(mean_field, "_Objective", None)
    for estimator in (evidence_lower_bound, variational_importance_sampling):
        assert estimator(target, mean_field=q).num_evaluations >= q.num_evaluations + 10_000
