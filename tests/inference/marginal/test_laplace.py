"""Laplace's approximation: its numbers, its gradients, and vectors without a mode."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from hierarchies import COUNTS, FLOAT, HEIGHTS, at, counted, gradient_error, marginal, passed, points, trials
from scipy.integrate import quad
from scipy.stats import norm, poisson

import bayeskit as bk
from bayeskit.errors import DrawsError
from bayeskit.inference.marginal import _hessian as hessian


def field(y):
    """Poisson counts on a line, with a Gaussian process as log rate."""
    log_length = pyro.sample("log_length", dist.Normal(1.0, 0.5))
    log_size = pyro.sample("log_size", dist.Normal(0.0, 0.5))
    place = torch.arange(len(y), dtype=y.dtype)
    distance = (place[:, None] - place) / log_length.exp()
    covariance = (2 * log_size).exp() * (-0.5 * distance.square()).exp() + 1e-4 * torch.eye(len(y), dtype=y.dtype)
    noise = pyro.sample("noise", dist.Normal(torch.zeros(len(y), dtype=y.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((torch.linalg.cholesky(covariance) @ noise).exp()), obs=y)


def pulled(y, together=False):
    """Normal coordinates times a factor that has no integral where ``pull`` is one or more."""
    pull = pyro.sample("pull", dist.Normal(0.0, 0.3))
    z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    pyro.factor("data", 0.5 * pull * (z.sum().square() / len(y) if together else z.square().sum()))


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("y", "scale", "known", "error"),
    [(1, 1.0, -1.475985, 0.0022), (1, 2.0, -1.845893, -0.0228), (0, 1.0, None, 0.0078)],
)
def test_the_error_of_one_count_is_that_of_laplace(y, scale, known, error):
    target = marginal(counted, ["effect"], torch.tensor([float(y)], dtype=FLOAT))
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(math.log(scale), dtype=FLOAT)})
    found = float(target.log_likelihood(u))
    exact = math.log(
        quad(lambda z: poisson.pmf(y, math.exp(0.5 + z)) * norm.pdf(z, 0, scale), -12, 12, epsabs=1e-13)[0]
    )
    z = 0.0
    for _ in range(50):
        rate = math.exp(0.5 + z)
        z += (y - rate - z / scale**2) / (rate + 1 / scale**2)
    rate = math.exp(0.5 + z)
    height = y * (0.5 + z) - rate - math.lgamma(y + 1) + norm.logpdf(z, 0, scale)
    by_hand = height + 0.5 * math.log(2 * math.pi) - 0.5 * math.log(rate + 1 / scale**2)
    assert abs(found - by_hand) < 1e-10
    assert found - exact == pytest.approx(error, abs=6e-5)
    assert known is None or exact == pytest.approx(known, abs=6e-7)
    correction = target.correction(at(target, u, 4))
    assert correction.log_ratio == pytest.approx(exact - found, abs=1e-8)
    assert correction.trusted
    assert correction.standard_error == 0


@pytest.mark.long
def test_a_rotation_of_independent_groups_is_dense_and_changes_nothing():
    y = torch.poisson(torch.full((30,), 2.0), generator=torch.Generator().manual_seed(1)).to(FLOAT)
    rotation = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(2), dtype=FLOAT))[0]
    apart, together = marginal(counted, ["effect"], y), marginal(counted, ["effect"], y, rotation)
    assert (apart.curvature, together.curvature) == ("30 groups of 1", "dense, 30")
    u = points(apart, 3, 0.5)
    value, gradient = apart.value_and_grad(u)
    again, other = together.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


HIERARCHIES = {
    "counts": (counted, ["effect"], COUNTS, "6 groups of 1"),
    "successes": (passed, ["intercept"], trials(), "8 groups of 1"),
    "field": (field, ["noise"], torch.tensor([0.0, 1, 0, 2, 4, 3, 6, 4, 2, 1] * 2, dtype=FLOAT), "dense, 20"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", HIERARCHIES)
def test_gradients_are_those_of_the_approximation(name):
    model, sites, y, curvature = HIERARCHIES[name]
    target = marginal(model, sites, y)
    assert target.curvature == curvature
    u = points(target, 2, 0.5)
    assert gradient_error(target, u) < 1e-8
    assert target.num_failures == 0
    # Tempered, and through automatic differentiation of the two parts.
    leaf = u.clone().requires_grad_(True)
    prior, likelihood = target.evaluate(leaf)
    (by_parts,) = torch.autograd.grad((prior + 0.3 * likelihood).sum(), leaf)
    torch.testing.assert_close(by_parts, target.value_and_grad(u, 0.3)[1], rtol=1e-11, atol=1e-11)


@pytest.mark.calibration
def test_mutation_a_gradient_without_the_determinant_is_noticed(monkeypatch):
    def without(self, r, z, weights):
        return torch.zeros_like(r), torch.zeros_like(z)

    monkeypatch.setattr(hessian.Hessian, "half_log_det_gradient", without)
    target = marginal(counted, ["effect"], COUNTS)
    assert gradient_error(target, points(target, 2, 0.5)) > 1e-3


@pytest.mark.calibration
@pytest.mark.parametrize(("together", "num_directions"), [(False, 5), (True, 1)])
def test_a_chain_without_a_mode_leaves_the_others_as_they_are(together, num_directions):
    target = marginal(pulled, ["z"], HEIGHTS, together)
    u = torch.tensor([[0.1], [0.3], [-1.0], [0.5]], dtype=FLOAT)
    value, gradient = target.value_and_grad(u)
    likelihood = target.log_likelihood(u)
    torch.testing.assert_close(likelihood, -0.5 * num_directions * (-u[:, 0]).log1p(), rtol=1e-10, atol=0)
    assert target.num_failures == 0
    u[1] = 2.0
    failing, slope = target.value_and_grad(u)
    others = [0, 2, 3]
    assert torch.equal(failing[others], value[others]) and torch.equal(slope[others], gradient[others])
    assert torch.equal(target.log_likelihood(u)[others], likelihood[others])
    assert failing[1] == -math.inf and torch.isfinite(slope[1]).all()
    assert target.num_failures == 2
    assert torch.isfinite(target.log_density(u, 0.0)).all()
    zeros = torch.zeros(1, 4, dtype=FLOAT)
    with pytest.raises(DrawsError, match=r"no mode of \['z'\] is found at 1 of 4 draws"):
        target.with_latents(bk.Draws(u[None], zeros, zeros, torch.ones(1, dtype=FLOAT)))
