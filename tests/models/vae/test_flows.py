"""Flows as distributions: change of variables, quadrature, and the density kept from a draw."""

import math
import subprocess
import sys

import pytest
import torch
import zuko
from torch.distributions import Normal

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import ConditionalFlow, FlowDistribution, FlowPrior, flow_vae
from bayeskit.models.vae._flows import inverse_autoregressive_flow

FLOWS = {
    "spline": lambda dim, context: zuko.flows.NSF(dim, context, transforms=2, hidden_features=(8,)),
    "autoregressive": lambda dim, context: zuko.flows.MAF(dim, context, transforms=2, hidden_features=(8,)),
    "inverse": lambda dim, context: inverse_autoregressive_flow(dim, context, 2, (8,)),
}


def make(name, dim=2, context=0):
    with global_stream(new_generator(0, stream=name)):
        return FLOWS[name](dim, context).double()


class WithoutJacobian(FlowDistribution):
    """Forget how the flow stretches space."""

    def log_prob(self, value):
        return self.flow.base.log_prob(self.flow.transform(value))


def error_of_density(cls, name, dim):
    """Return how far the density is from the base's times the determinant of the flow's Jacobian, at worst."""
    distribution = cls(make(name, dim)())
    points = torch.linspace(-2.5, 2.5, 5 * dim, dtype=torch.float64).view(5, dim).sin() * 2
    worst = 0.0
    for point in points:
        jacobian = torch.autograd.functional.jacobian(distribution.flow.transform, point)
        base = Normal(0, 1).log_prob(distribution.flow.transform(point)).sum()
        error = distribution.log_prob(point) - base - torch.linalg.slogdet(jacobian).logabsdet
        worst = max(worst, abs(float(error.detach())))
    return worst


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("name", FLOWS)
def test_density_is_the_change_of_variables(name, dim):
    assert error_of_density(FlowDistribution, name, dim) < 1e-10


def test_that_check_notices_a_missing_jacobian():
    assert error_of_density(WithoutJacobian, "spline", 2) > 0.01


@torch.no_grad()
def integral(distribution):
    """Return that of a density by the trapezoidal rule, with finer cells where it is steep, and a bound of its error.

    Where the slope jumps by ``s`` inside a cell, at ``a`` from one end and ``b`` from the other, the rule errs by
    ``s a b / 2``, and smooth curvature costs less than as many small jumps.
    """
    grid = distribution.flow.transform.inv(torch.linspace(-8, 8, 400_001, dtype=torch.float64).unsqueeze(1))
    density, grid = distribution.log_prob(grid).exp(), grid.squeeze(1)
    width = grid.diff()
    jump = (density.diff() / width).diff().abs()
    error = ((width[1:].square() + width[:-1].square()) * jump).sum() / 8
    return float(torch.trapezoid(density, grid)), float(error)


@pytest.mark.parametrize("name", FLOWS)
def test_density_in_one_dimension_integrates_to_one(name):
    flow = FlowPrior(make(name, 1))().flow
    total, error = integral(FlowDistribution(flow))
    assert abs(total - 1) < error
    total, error = integral(WithoutJacobian(flow))
    assert abs(total - 1) > error


@pytest.mark.parametrize("name", FLOWS)
def test_density_kept_from_a_draw_is_the_density_there(name):
    flow = make(name, 2, 3)
    head = ConditionalFlow(flow)
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    distribution = head(features)
    with global_stream(new_generator(1)):
        draw = distribution.expand((6, 4)).rsample()
        wide = distribution.expand((6, 4))
        again = wide.rsample((5,))
    assert draw.shape == (6, 4, 2) and again.shape == (5, 6, 4, 2)
    kept = wide.log_prob(again)
    assert kept is wide.log_prob(again)
    found = wide.flow.log_prob(again)
    torch.testing.assert_close(kept, found, rtol=0, atol=1e-9)
    leaves = [features, *flow.parameters()]
    gradients = (torch.autograd.grad(d.sum(), leaves, retain_graph=True, allow_unused=True) for d in (kept, found))
    for mine, expected in zip(*gradients, strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-7)
    elsewhere = wide.log_prob(again.detach() + 0.1)
    assert not torch.allclose(elsewhere, kept)


def test_draws_follow_the_density(limit):
    distribution = FlowPrior(make("spline", 1))()
    with global_stream(new_generator(2)):
        draws = distribution.sample((20_000,)).squeeze(1)
    grid = torch.linspace(-30, 30, 40_001, dtype=torch.float64)
    mass = distribution.log_prob(grid.unsqueeze(1)).exp().detach() * (grid[1] - grid[0])
    mean = (mass * grid).sum()
    variance = (mass * (grid - mean).square()).sum()
    fourth = (mass * (grid - mean).pow(4)).sum()
    z_mean = (draws.mean() - mean) / (variance / len(draws)).sqrt()
    z_variance = ((draws - mean).square().mean() - variance) / ((fourth - variance.square()) / len(draws)).sqrt()
    assert max(abs(float(z_mean)), abs(float(z_variance))) < limit(2)


def test_mean_code_of_a_flow_is_that_of_draws(limit):
    with global_stream(new_generator(3)):
        vae = flow_vae(data_dim=6, hidden=(8,), latent_dim=2).double()
    x = torch.zeros(1, 6, dtype=torch.float64)
    with global_stream(new_generator(4)), torch.no_grad():
        draws = vae.encoder(x).sample((20_000,))[:, 0]
    few = vae.encode(x, num_samples=5_000, seed=5)[0]
    z = (few - draws.mean(0)) / (draws.std(0) * math.sqrt(1 / 5_000 + 1 / 20_000))
    assert float(z.abs().max()) < limit(2)


def test_objective_is_computed_from_draws_where_there_is_no_closed_form():
    with global_stream(new_generator(6)):
        vae = flow_vae(data_dim=6, hidden=(8,), latent_dim=2).double()
    x = torch.ones(3, 6, dtype=torch.float64)
    with global_stream(new_generator(7)):
        loss = ELBO(4).loss(vae.model, vae.guide, x)
    with global_stream(new_generator(7)), torch.no_grad():
        posterior = vae.encoder(x).expand((4, 3))
        z = posterior.rsample()
        log_weight = vae.likelihood(vae.decoder(z), 1).log_prob(x) + vae.prior().log_prob(z) - posterior.log_prob(z)
    assert abs(loss + float(log_weight.mean(0).sum())) < 1e-9


@pytest.mark.calibration
def test_importing_flows_leaves_validation_as_it_was():
    script = (
        "import torch; before = torch.distributions.Distribution._validate_args; import bayeskit.models.vae; "
        "assert torch.distributions.Distribution._validate_args is before is True"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", ["prior_transforms", "posterior_transforms"])
def test_more_transforms_than_memory(name):
    with pytest.raises(SettingsError, match=f"{name}=.* this machine has"):
        flow_vae(data_dim=6, hidden=(8,), latent_dim=2, **{name: 10**13})
