"""Held-out log likelihood by estimators of evidence, against the exact likelihood of a linear VAE."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import DataError, GuideError, UnknownNameError
from bayeskit.inference.evidence import Budget
from bayeskit.inference.held_out import by_evidence
from bayeskit.models.vae import LinearVAE

DOUBLE = torch.float64
BUDGET = Budget(num_chains=16, num_warmup=150, num_samples=200, ladder_chains=16, ladder_samples=200)


@pytest.fixture(scope="module")
def linear_vae():
    x = torch.randn(40, 4, generator=new_generator(0, stream="data"), dtype=DOUBLE)
    return LinearVAE.maximum_likelihood(x, latent_dim=2), x[:3]


def z_scores(result, log_likelihood):
    return (result.log_likelihood - log_likelihood) / result.pointwise_standard_error


@pytest.mark.calibration
@pytest.mark.parametrize("method", ["bridge_sampling", "laplace_importance_sampling"])
def test_agrees_with_the_exact_likelihood_of_a_linear_vae(linear_vae, method, limit):
    vae, x = linear_vae
    result = by_evidence(vae.model, vae.guide, x, method=method, budget=BUDGET, progress=False)
    assert result.method == method
    assert result.trusted
    assert float(z_scores(result, vae.log_likelihood(x).detach()).abs().max()) < limit(len(x))
    assert all(p.requires_grad and p.grad is None for p in vae.parameters())


@pytest.mark.calibration
def test_a_wrong_scale_of_the_likelihood_is_noticed(linear_vae, limit):
    vae, x = linear_vae
    log_likelihood = vae.log_likelihood(x).detach()
    with torch.no_grad():
        vae.likelihood.log_scale += 0.1
    result = by_evidence(vae.model, vae.guide, x, budget=BUDGET, progress=False)
    with torch.no_grad():
        vae.likelihood.log_scale -= 0.1
    assert float(z_scores(result, log_likelihood).abs().max()) > limit(len(x))


@pytest.mark.calibration
def test_parameters_of_functions_are_fixed_meanwhile(limit):
    scale = torch.tensor(0.0, dtype=DOUBLE, requires_grad=True)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), scale.exp()))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.7))

    x = torch.tensor([0.3, -1.0], dtype=DOUBLE)
    result = by_evidence(model, guide, x, budget=BUDGET, progress=False)
    exact = dist.Normal(torch.zeros((), dtype=DOUBLE), 2**0.5).log_prob(x)
    assert float(z_scores(result, exact).abs().max()) < limit(2)
    assert scale.requires_grad


@pytest.mark.calibration
def test_what_cannot_be_taken_apart_is_refused(linear_vae):
    vae, x = linear_vae
    with pytest.raises(DataError, match="leading dimension"):
        by_evidence(lambda: vae.model(x), lambda: vae.guide(x))
    with pytest.raises(UnknownNameError, match="bridge_sampling"):
        by_evidence(vae.model, vae.guide, x, method="bridge_samplin")
    with pytest.raises(GuideError, match="'z'"):
        by_evidence(vae.model, lambda x: None, x)
    assert all(p.requires_grad for p in vae.parameters())
