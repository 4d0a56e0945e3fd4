"""The Laplace approximation, and importance sampling from a Student-t at the same mode."""

import math
from dataclasses import FrozenInstanceError

import mpmath
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import DrawsError, SettingsError, ShapeError
from bayeskit.inference import _optimize as optimize
from bayeskit.inference._proposals import Mixture, StudentT, student_log_constant
from bayeskit.inference.evidence import _laplace_approximation as module
from bayeskit.inference.evidence import _modes as search
from bayeskit.inference.evidence._laplace_approximation import (
    _smoothed,
    laplace,
    laplace_importance_sampling,
    scale_factor,
)
from bayeskit.inference.evidence._modes import find_mode

DOUBLE = torch.float64


def rate(y, units):
    x = pyro.sample("x", dist.LogNormal(y.new_zeros(2), 1.0).to_event(1))
    pyro.sample("y", dist.Normal((x * units).log(), 0.5).to_event(1), obs=y)


def test_exact_where_the_posterior_is_normal():
    case = exact.get("linreg10")
    z = laplace(case.target())
    assert abs(z.log_evidence - case.log_evidence) < 1e-6
    assert math.isnan(z.standard_error) and not z.trusted and len(z.warnings) == 1


def test_exact_where_the_logarithms_are_normal():
    y = torch.tensor([0.3, -1.0], dtype=DOUBLE)
    z = laplace(bk.Target.from_pyro(rate, y, torch.ones(2, dtype=DOUBLE), compile=False))
    assert abs(z.log_evidence - float(dist.Normal(0.0, 1.25**0.5).log_prob(y).sum())) < 1e-6


def test_a_binomial_by_hand():
    """Uniform p, 3 of 10 in unconstrained space: mode at p = 4/12, curvature 12 p (1 - p)."""

    def model(heads):
        p = pyro.sample("p", dist.Uniform(torch.zeros((), dtype=DOUBLE), 1.0))
        pyro.sample("heads", dist.Binomial(10, p), obs=heads)

    z = laplace(bk.Target.from_pyro(model, torch.tensor(3.0, dtype=DOUBLE), compile=False))
    p = 4 / 12
    height = math.log(120) + 4 * math.log(p) + 8 * math.log(1 - p)
    assert abs(z.log_evidence - (height + 0.5 * math.log(2 * math.pi / (12 * p * (1 - p))))) < 1e-6


@pytest.mark.calibration
def test_coordinates_and_constants():
    """Rotated, scaled and moved coordinates change nothing; a constant moves the estimate by itself."""
    inner = exact.get("three_taxon_tree").target()
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE))[0]
    matrix = turn * torch.tensor([0.5, 1.0, 3.0], dtype=DOUBLE)
    log_determinant = float(torch.linalg.slogdet(matrix).logabsdet)
    moved = bk.Target.from_functions(
        lambda u: inner.log_prior(u @ matrix.T - 2.0) + log_determinant,
        lambda u: inner.log_likelihood(u @ matrix.T - 2.0) + 7.0,
        dim=3,
    )
    assert abs(laplace(moved).log_evidence - 7.0 - laplace(inner).log_evidence) < 1e-5


def skewed(units):
    """Three correlated and skewed coordinates, measured in the given units."""
    prior = dist.Normal(torch.zeros_like(units), units)

    def log_likelihood(u):
        x = u / units
        return 3 * torch.nn.functional.logsigmoid(x).sum(-1) - 0.5 * (x[..., 0] + x[..., 2] - 1).square()

    return bk.Target.from_functions(
        lambda u: prior.log_prob(u).sum(-1),
        log_likelihood,
        3,
        lambda n, g: units * torch.randn(n, 3, generator=g, dtype=units.dtype),
        dtype=units.dtype,
        compile=False,
    )


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_units_change_nothing(dtype):
    """Also where one coordinate curves 1e18 times less than another."""
    units = torch.tensor([1e-5, 1.0, 1e4], dtype=dtype)
    scaled, plain = skewed(units), skewed(torch.ones(3, dtype=dtype))
    point = torch.tensor([0.7, 0.9, 0.7], dtype=dtype)
    bends = optimize.negative_hessian(scaled.value_and_grad, units * point)[0] * units * units[:, None]
    close = {"rtol": 0, "atol": 1e-6 if dtype == DOUBLE else 2e-3}
    torch.testing.assert_close(bends, optimize.negative_hessian(plain.value_and_grad, point)[0], **close)
    if dtype == DOUBLE:  # in single precision a search may stop short, and says so
        assert abs(laplace(scaled).log_evidence - laplace(plain).log_evidence) < 1e-5
    a, b = (laplace_importance_sampling(target, 4000) for target in (scaled, plain))
    assert (a.trusted and b.trusted) or dtype != DOUBLE
    assert abs(a.log_evidence - b.log_evidence) < 4.5 * math.hypot(a.standard_error, b.standard_error)


def test_no_curvature_is_no_normal_distribution():
    """A direction in which the density does not change at all."""
    flat = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: 0.5 * u[..., 1].square() - (u[..., 0] - 1.0).square(),
        dim=2,
    )
    z = laplace(flat)
    assert math.isnan(z.log_evidence) and "is not concave" in z.warnings[-1]


def test_a_mode_where_the_density_has_no_bound():
    case = exact.get("neals_funnel")
    z = laplace(case.target())
    assert len(z.warnings) >= 2 and "unbounded" in z.warnings[1]


def test_one_mode_serves_all(monkeypatch, limit):
    target = exact.get("three_taxon_tree").target()
    mode = find_mode(target)
    alone, sampled = laplace(target), laplace_importance_sampling(target, 2000, seed=1)

    def forbidden(*_, **__):
        raise RuntimeError("a second search")

    monkeypatch.setattr(search, "find_modes", forbidden)
    shared = laplace(target, mode=mode)
    assert shared.log_evidence == alone.log_evidence and shared.num_evaluations == alone.num_evaluations
    again = laplace_importance_sampling(target, 2000, seed=0, mode=mode)
    error = math.hypot(again.standard_error, sampled.standard_error)
    assert abs(again.log_evidence - sampled.log_evidence) < limit() * error
    with pytest.raises(FrozenInstanceError):
        mode.value = 0.0


def test_the_mode_is_one():
    target = exact.get("pima_m1").target()
    mode = find_mode(target)
    value, gradient = target.value_and_grad(mode.position.unsqueeze(0))
    assert float(value) == pytest.approx(mode.value, abs=1e-9) and float(gradient.abs().max()) < 1e-3
    hessian = torch.autograd.functional.hessian(lambda u: target.log_density(u), mode.position)
    assert torch.allclose(mode.precision, -hessian, rtol=1e-5, atol=1e-5)


def counted(*counts):
    """Logarithms of the rates of Poisson counts, with Gamma(2, 1) priors: a skewed target, and its log evidence."""
    y = torch.tensor(counts, dtype=DOUBLE)
    target = bk.Target.from_functions(
        lambda u: (2 * u - u.exp()).sum(-1),
        lambda u: (y * u - u.exp() - torch.lgamma(y + 1)).sum(-1),
        len(y),
        lambda n, g: torch._standard_gamma(torch.full((n, len(y)), 2.0, dtype=DOUBLE), generator=g).log(),
        compile=False,
    )
    return target, float((torch.lgamma(y + 2) - torch.lgamma(y + 1) - (y + 2) * math.log(2)).sum())


def scores(smoothed, replicates=60):
    target, log_evidence = counted(0.0, 1.0, 4.0)
    settings = {"mode": find_mode(target), "smoothed": smoothed}
    found = [laplace_importance_sampling(target, 1000, seed=s, **settings) for s in range(replicates)]
    assert sum(z.trusted for z in found) >= 0.95 * replicates
    return np.array([(z.log_evidence - log_evidence) / z.standard_error for z in found])


@pytest.mark.long
@pytest.mark.parametrize("smoothed", [True, False])
def test_the_standard_error_is_right(smoothed, monkeypatch, calibrated):
    if not smoothed:  # the same draws, which have been searched for missed modes
        monkeypatch.setattr(module, "missed_mass", lambda *_, **__: ([], 0))
    z = scores(smoothed)
    assert calibrated(z, off=0.05) and not calibrated(2 * z, off=0.05)


@pytest.mark.calibration
def test_tails_are_chosen():
    """Light ones for a normal posterior, heavy ones for a Student-t; a number given is kept."""
    case = exact.get("linreg10")
    target, mode = case.target(), find_mode(case.target())
    chosen, fixed = (laplace_importance_sampling(target, 4000, mode=mode, degrees_of_freedom=df) for df in (None, 5))
    assert chosen.diagnostics["degrees_of_freedom"] >= 50 and fixed.diagnostics["degrees_of_freedom"] == 5
    assert chosen.standard_error < 0.5 * fixed.standard_error
    assert abs(chosen.log_evidence - case.log_evidence) < 4.5 * chosen.standard_error

    student = StudentT(torch.zeros(2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE), 3.0)
    heavy = bk.Target.from_functions(
        lambda u: student.log_prob(u.reshape(-1, 2)).reshape(u.shape[:-1]), lambda u: 0.0 * u.sum(-1), dim=2
    )
    z = laplace_importance_sampling(heavy, 20_000)
    wanted = 0.0
    assert z.diagnostics["degrees_of_freedom"] <= 5 and abs(z.log_evidence - wanted) < 4.5 * z.standard_error


def test_mass_around_the_proposal_is_noticed(limit):
    """A narrow peak of 99 % inside a slab ten times as wide: draws that fit the peak alone look perfect."""
    case = exact.spike_and_slab(20)
    z = laplace_importance_sampling(case.target(), degrees_of_freedom=200.0)
    assert z.diagnostics["pareto_shape"] < 0.7 and abs(z.log_evidence - case.log_evidence) > limit() * z.standard_error
    assert not z.trusted and "wider draws" in z.warnings[0]
    # By default some fits find the slab, and then their errors tell of it.
    z = laplace_importance_sampling(case.target())
    assert not z.trusted or abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


def test_a_share_of_heavy_tails():
    """Draws and density of the mixture belong together: ratios of densities have mean one."""
    location, factor = torch.ones(2, dtype=DOUBLE), torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=DOUBLE)
    main, heavy = StudentT(location, factor, 50.0), StudentT(location - 1, 2 * factor, 5.0)
    mixture = Mixture([main, heavy], [0.7, 0.3])
    x = mixture.sample(20_000, torch.Generator().manual_seed(0))
    for part, share in ((main, 0.7), (heavy, 0.3)):
        ratio = (part.log_prob(x) - mixture.log_prob(x)).exp()
        assert abs(float(ratio.mean()) - 1) < 4.5 * float(ratio.std()) / math.sqrt(20_000)
        assert float(ratio.max()) <= 1 / share + 1e-9


def test_smoothing_leaves_what_is_below_the_tail():
    quantile = (torch.arange(4000, dtype=DOUBLE) + 0.5) / 4000
    log_weights = -0.6 * quantile.log()[None] - 12.0
    smooth = _smoothed(log_weights)
    same = (smooth - log_weights).abs() < 1e-12
    assert 0.9 < float(same.double().mean()) < 0.99
    assert float(smooth.max()) <= float(log_weights.max()) + 1e-12
    # The prior shrinks a shape of .6 in 190 weights by .005, which moves the tail, a third of the sum, by .01.
    assert abs(float(smooth.logsumexp(1) - log_weights.logsumexp(1))) < 0.005
    nothing = torch.full((1, 100), -torch.inf, dtype=DOUBLE)
    assert torch.equal(_smoothed(nothing), nothing)


def test_a_lost_determinant_is_noticed(monkeypatch):
    case = exact.get("linreg10")
    original = optimize.negative_hessian

    def wrong(*args):
        precision, count = original(*args)
        return precision / 2, count

    monkeypatch.setattr(optimize, "negative_hessian", wrong)
    assert abs(laplace(case.target()).log_evidence - case.log_evidence) > 1


def test_single_precision():
    y = torch.tensor([0.3, -1.0])
    target = bk.Target.from_pyro(rate, y, torch.ones(2), compile=False)
    wanted = float(dist.Normal(0.0, 1.25**0.5).log_prob(y).sum())
    assert abs(laplace(target).log_evidence - wanted) < 0.01
    z = laplace_importance_sampling(target, 4000)
    assert abs(z.log_evidence - wanted) < 5 * z.standard_error


@pytest.mark.calibration
def test_bad_inputs_are_refused():
    target, other = exact.get("beta_binomial").target(), exact.get("three_taxon_tree").target()
    draws, mode = bk.sample(target, 2, 50, 20, seed=0, progress=False), find_mode(target)
    for estimator in (laplace, laplace_importance_sampling):
        with pytest.raises(DrawsError, match="dimension"):
            estimator(other, draws=draws)
        with pytest.raises(ShapeError, match="dimension"):
            estimator(other, mode=mode)
    shifted = bk.Target.from_functions(target.log_prior, lambda u: target.log_likelihood(u) - 5.0, 1, compile=False)
    for estimator in (laplace, laplace_importance_sampling):
        with pytest.raises(DrawsError, match="another target"):
            estimator(shifted, draws=draws)
        with pytest.raises(SettingsError, match="another target"):
            estimator(shifted, mode=mode)
    for settings in (
        {"num_draws": 1},
        {"num_draws": 2.5},
        {"num_draws": True},
        {"num_draws": "9"},
        {"degrees_of_freedom": 2.0},
        {"degrees_of_freedom": "5"},
    ):
        with pytest.raises(SettingsError):
            laplace_importance_sampling(target, **settings)
    assert laplace(target, draws=draws).num_evaluations > draws.num_gradients


@pytest.mark.parametrize("dim", (1, 10, 2000))
def test_the_constant_of_a_student_t_is_right_however_light_its_tails(dim):
    for df in (2.1, 5.0, 1999.9, 2000.1, 1e4, 1e6, 1e9, 1e16, 1e25, 1e200, 1e307):
        with mpmath.workdps(40 + int(1.2 * math.log10(df))):
            half, more = mpmath.mpf(df) / 2, mpmath.mpf(dim) / 2
            wanted = mpmath.loggamma(half + more) - mpmath.loggamma(half) - more * mpmath.log(df * mpmath.pi)
            off = float(student_log_constant(df, dim) - wanted)
        # Gamma functions of moderate size are differences of their logarithms, each with its rounding.
        assert abs(off) < 1e-12 * dim + 1e-11, df


@pytest.mark.calibration
@pytest.mark.parametrize("df", (1e6, 1e12, 1e25, 1e300))
def test_light_tails_are_those_of_a_normal_distribution(df, limit):
    case = exact.get("linreg10")
    z = laplace_importance_sampling(case.target(), 4096, degrees_of_freedom=df)
    assert abs(z.log_evidence - case.log_evidence) < max(limit() * z.standard_error, 1e-5) and z.trusted
    y = torch.tensor([0.3, -1.0], dtype=DOUBLE)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    normal = dist.MultivariateNormal(y, scale_tril=torch.tensor([[2.0, 0.0], [0.5, 0.1]], dtype=DOUBLE))
    student = StudentT(y, normal.scale_tril, df)
    points = y + x @ normal.scale_tril.T
    assert float((student.log_prob(points) - normal.log_prob(points)).abs().max()) < 100 / df + 1e-12


def test_a_nearly_flat_direction_is_factorised_in_single_precision():
    """Single precision alone cannot tell a covariance with such directions from a singular one."""
    turn = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))[0]
    precision = turn @ torch.diag(torch.logspace(-7, 3, 20)) @ turn.T
    factor = scale_factor(0.5 * (precision + precision.T))
    assert factor.dtype == torch.float32 and bool(factor.isfinite().all()) and bool((factor.diagonal() > 0).all())
