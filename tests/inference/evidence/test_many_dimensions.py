"""Evidence where the dimensions are so many that draws do not know a covariance."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import multivariate_normal

import bayeskit as bk
from bayeskit._draws import Draws
from bayeskit.errors import DrawsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence import _bridge as fits

F64 = torch.float64
SIZE = 60


def regression():
    """``y ~ N(X b, 1)`` with ``b ~ N(0, 1)``: the evidence is a normal density."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2 * SIZE, SIZE))
    y = x @ draw.standard_normal(SIZE) + draw.standard_normal(2 * SIZE)

    def model(design, data):
        b = pyro.sample("b", dist.Normal(design.new_zeros(SIZE), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(b @ design.mT, 1.0).to_event(1), obs=data)

    exact = multivariate_normal.logpdf(y, np.zeros(2 * SIZE), np.eye(2 * SIZE) + x @ x.T)
    return bk.Target.from_pyro(model, torch.from_numpy(x), torch.from_numpy(y)), float(exact)


def hierarchy():
    """Groups of one datum each: given their standard deviation the data are normal."""
    draw = np.random.default_rng(1)
    y = 1.0 + draw.standard_normal(SIZE) + draw.standard_normal(SIZE)

    def model(data):
        mean = pyro.sample("mean", dist.Normal(data.new_zeros(()), 5.0))
        sd = pyro.sample("sd", dist.LogNormal(data.new_zeros(()), 1.0))
        z = pyro.sample("z", dist.Normal(torch.zeros_like(data), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mean + sd * z, 1.0).to_event(1), obs=data)

    def log_term(s):
        covariance = (1 + math.exp(2 * s)) * np.eye(SIZE) + 25.0
        return multivariate_normal.logpdf(y, np.zeros(SIZE), covariance) - 0.5 * (s * s + math.log(2 * math.pi))

    height = log_term(0.0)
    area = quad(lambda s: math.exp(log_term(s) - height), -6.0, 3.0, points=[-2.0, -0.5, 0.0, 0.5], epsabs=1e-10)[0]
    return bk.Target.from_pyro(model, torch.from_numpy(y)), height + math.log(area)


@pytest.mark.long
@pytest.mark.parametrize(
    "case, methods",
    [
        (regression, ("bridge_sampling", "warp_bridge_sampling", "laplace_importance_sampling")),
        (hierarchy, ("bridge_sampling", "warp_bridge_sampling", "generalised_stepping_stone")),
    ],
)
def test_three_methods_are_right_and_trusted(case, methods, limit):
    target, exact = case()
    ladder = {"ladder_chains": 8, "ladder_warmup": 100, "ladder_samples": 150, "num_reference_temperatures": 5}
    budget = evidence.Budget(16, 300, 200, **ladder)
    table = evidence.compare(target, methods, seed=2, budget=budget, progress=False)
    for z in table:
        assert abs(z.log_evidence - exact) < limit(len(methods)) * z.standard_error, z
        # How well the chains of a ladder mix is known too roughly for a verdict that chance does not decide.
        assert z.standard_error < 0.2 and (z.trusted or z.method == "generalised_stepping_stone"), z


def as_draws(target, u):
    return Draws(u, *target.evaluate(u), torch.ones(len(u), dtype=F64), target=target)


def normal(dim=SIZE):
    """A correlated normal posterior of evidence one, with exact draws of it."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(dim, dim, generator=generator, dtype=F64).tril(-1) / 4 + torch.eye(dim, dtype=F64)
    law = torch.distributions.MultivariateNormal(torch.ones(dim, dtype=F64), scale_tril=factor, validate_args=False)

    def sample_prior(n, generator):
        return law.loc + torch.randn(n, dim, generator=generator, dtype=F64) @ factor.mT

    target = bk.Target.from_functions(law.log_prob, lambda u: 0.0 * u[..., 0], dim, sample_prior)
    noise = torch.randn(8, 500, dim, generator=generator, dtype=F64)
    return target, law, law.loc + noise @ factor.mT


def test_the_covariance_of_a_normal_posterior_is_that_of_its_curvature():
    """No direction differs: draws that vary by chance leave it as it is."""
    target, law, x = normal()
    fitted, spent = fits.normal_fit(target, x[:, :250])
    off = (fitted.covariance_matrix - law.covariance_matrix).abs().max() / law.covariance_matrix.abs().max()
    assert float(off) < 1e-5
    assert spent >= 2 * SIZE
    assert torch.allclose(fitted.loc, x[:, :250].mean((0, 1)))


def test_in_few_dimensions_the_draws_say_it():
    target, _, x = normal(8)
    fitted, spent = fits.normal_fit(target, x)
    assert spent == 0 and torch.allclose(fitted.covariance_matrix, torch.cov(x.flatten(0, 1).mT), rtol=1e-12)


@pytest.mark.calibration
def test_where_the_density_curves_upwards_the_draws_say_how_wide_it_is(limit):
    """One coordinate of two peaks, one on a rotated axis that the other has nothing of, all others normal."""
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3), dtype=F64))[0]
    standard = torch.distributions.Normal(torch.zeros((), dtype=F64), 1.0)

    def log_prior(u):
        v = u @ turn
        peaks = torch.logaddexp(standard.log_prob(v[..., 0] - 1.5), standard.log_prob(v[..., 0] + 1.5)) - math.log(2)
        return peaks + standard.log_prob(v[..., 1:]).sum(-1)

    def sample_prior(n, generator):
        v = torch.randn(n, SIZE, generator=generator, dtype=F64)
        v[:, 0] += 3 * (torch.rand(n, generator=generator) < 0.5) - 1.5
        return v @ turn.mT

    target = bk.Target.from_functions(log_prior, lambda u: 0.0 * u[..., 0], SIZE, sample_prior)
    draws = as_draws(target, sample_prior(4000, torch.Generator().manual_seed(4)).unflatten(0, (8, 500)))
    axis = turn[:, 0]
    fitted, _ = fits.normal_fit(target, draws.unconstrained[:, :250])
    # The fourth moment of that coordinate is 3 + 6 * 1.5**2 + 1.5**4, its variance 1 + 1.5**2.
    error = math.sqrt((3 + 6 * 2.25 + 2.25**2 - 3.25**2) / 2000)
    assert abs(float(axis @ fitted.covariance_matrix @ axis) - 3.25) < limit() * error
    for estimate in (evidence.bridge_sampling, evidence.warp_bridge_sampling):
        z = estimate(target, draws)
        assert abs(z.log_evidence) < limit(2) * z.standard_error and z.standard_error < 0.1


def test_without_a_curvature_the_draws_say_it(monkeypatch):
    target, _, x = normal()
    monkeypatch.setattr(fits, "negative_hessian", lambda target, u: (torch.full((SIZE, SIZE), torch.nan, dtype=F64), 7))
    fitted, spent = fits.normal_fit(target, x[:, :250])
    assert spent == 7 and torch.allclose(fitted.covariance_matrix, torch.cov(x[:, :250].flatten(0, 1).mT), rtol=1e-9)


def test_a_coordinate_that_does_not_move_is_refused():
    target, _, x = normal()
    x[..., 3] = 1.0
    with pytest.raises(DrawsError, match="singular"):
        evidence.bridge_sampling(target, as_draws(target, x))


@pytest.mark.calibration
def test_the_evaluations_of_the_curvature_are_counted(monkeypatch):
    target, _, x = normal()
    draws, curvature = as_draws(target, x[:, :60]), fits.negative_hessian
    before = evidence.bridge_sampling(target, draws)
    monkeypatch.setattr(fits, "negative_hessian", lambda *given: (curvature(*given)[0], curvature(*given)[1] + 1000))
    assert evidence.bridge_sampling(target, draws).num_evaluations == before.num_evaluations + 1000
