"""Annealed importance sampling, against exact likelihoods."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.held_out import annealed_importance_sampling as package_level
from bayeskit.inference.held_out import importance_sampling, sigmoid_schedule
from bayeskit.inference.held_out._annealing import AnnealingPath, annealed_importance_sampling
from bayeskit.inference.held_out._importance import already_validated
from bayeskit.inference.objectives._latent_density import LatentDensity
from bayeskit.inference.samplers import HMC
from bayeskit.models.vae import LinearVAE

DOUBLE = torch.float64
X = torch.full((500,), 1.0, dtype=DOUBLE)


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
        pyro.sample("x", dist.Normal(z, 0.5), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.4 * x, 0.9))


def count_model(x):
    with pyro.plate("data", len(x)):
        rate = pyro.sample("rate", dist.Gamma(torch.tensor(3.0, dtype=DOUBLE), 0.5))
        pyro.sample("x", dist.Poisson(rate), obs=x)


def count_guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("rate", dist.LogNormal(torch.full_like(x, 1.5), 0.6))


CASES = {
    "normal": (model, guide, X, float(dist.Normal(0.0, 1.25**0.5).log_prob(torch.tensor(1.0, dtype=DOUBLE)))),
    "gamma": (
        count_model,
        count_guide,
        4 * X,
        float(dist.NegativeBinomial(torch.tensor(3.0, dtype=DOUBLE), 1 / 1.5).log_prob(torch.tensor(4.0))),
    ),
}


def relative_bias(case, **settings):
    """Return the z-score of the mean of ``exp(estimate) / exp(truth)`` over replicates of one datum."""
    of_model, of_guide, x, log_likelihood = CASES[case]
    result = annealed_importance_sampling(of_model, of_guide, x, **settings)
    ratio = (result.log_likelihood - log_likelihood).exp()
    return float((ratio.mean() - 1) / (ratio.std() / math.sqrt(len(x))))


SMALL = {"num_temperatures": 8, "num_chains": 4, "batch_size": 500}


@pytest.mark.calibration
@pytest.mark.parametrize("initial", ["guide", "prior"])
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_of_the_likelihood_is_unbiased(case, initial, limit):
    assert abs(relative_bias(case, initial=initial, **SMALL)) < limit()


def test_a_schedule_that_ends_too_early_is_noticed(monkeypatch, limit):
    module = annealed_importance_sampling.__globals__
    monkeypatch.setitem(module, "sigmoid_schedule", lambda count: 0.8 * sigmoid_schedule(count))
    assert abs(relative_bias("normal", initial="prior", **SMALL)) > limit()


def test_weights_that_depend_on_the_move_are_noticed(monkeypatch, limit):
    original = AnnealingPath._step

    def stale(self, position, beta, step_size):
        moved, rest, rate = original(self, position, beta, step_size)
        return moved, rest + 0.5 * (moved - position).square().sum(-1), rate

    monkeypatch.setattr(AnnealingPath, "_step", stale)
    assert abs(relative_bias("normal", initial="prior", **SMALL)) > limit()


@pytest.mark.calibration
def test_agrees_with_the_exact_likelihood_of_a_linear_vae_and_beats_importance_sampling(limit):
    generator = new_generator(0, stream="data")
    x = torch.randn(200, 8, generator=generator, dtype=DOUBLE) @ torch.randn(8, 8, generator=generator, dtype=DOUBLE)
    vae, x = LinearVAE.maximum_likelihood(x, latent_dim=4), x[:12]
    with torch.no_grad():
        vae.encoder.mean.weight *= 0.8
        vae.encoder.log_scale += 0.7
    result = annealed_importance_sampling(vae.model, vae.guide, x, num_temperatures=60, num_chains=40, batch_size=5)
    log_likelihood = vae.log_likelihood(x).detach()
    z = (result.log_likelihood - log_likelihood) / result.pointwise_standard_error
    assert float(z.abs().max()) < limit(len(x))
    assert result.trusted
    assert result.pareto_k is None
    plain = importance_sampling(vae.model, vae.guide, x, num_draws=40)
    assert result.standard_error < plain.standard_error / 3


def test_every_datum_has_its_own_step_size():
    width = torch.tensor([0.02, 0.02, 1.0], dtype=DOUBLE)

    def wide_and_narrow(x):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z, width), obs=x)

    def posterior(x):
        with pyro.plate("data", 3):
            pyro.sample("z", dist.Normal(x / (1 + width**2), width / (1 + width**2).sqrt()))

    x = torch.tensor([0.5, -0.5, 0.0], dtype=DOUBLE)
    generator = new_generator(0, stream="test")
    with global_stream(generator):
        density = LatentDensity.from_pyro(wide_and_narrow, posterior, (x,), num_particles=32, initial="guide")
    path = AnnealingPath(density, HMC(step_size=0.1, num_steps=5), generator)
    with already_validated():
        step_sizes = path.pilot(sigmoid_schedule(100), 0.8)
    assert step_sizes.shape == (100, 3)
    last = step_sizes[-1]
    assert float(last[2] / last[:2].max()) > 10


def test_many_chains_show_the_tail_of_their_weights():
    result = annealed_importance_sampling(model, guide, X[:5], num_temperatures=5, num_chains=200)
    assert result.pareto_k.shape == (5,)
    assert package_level is annealed_importance_sampling


def test_chains_that_disagree_are_not_trusted():
    def far(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x + 30.0, 0.5))

    result = annealed_importance_sampling(model, far, X[:5], num_temperatures=2, num_chains=4)
    assert not result.trusted
    assert "disagree" in result.warnings[0]


@pytest.mark.calibration
@pytest.mark.parametrize(("scale", "trusted"), [(0.2, False), (0.9, True)])
def test_a_narrow_guide_whose_few_chains_understate_their_errors_is_noticed(scale, trusted, limit):
    def narrow(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.4 * x, scale))

    result = annealed_importance_sampling(model, narrow, X, num_temperatures=20, num_chains=16)
    z = (result.log_likelihood - CASES["normal"][3]) / result.pointwise_standard_error
    # The variance of a t statistic of 16 values, with the error of its mean square, is what right errors have.
    assert (float(z.square().mean()) < 15 / 13 + limit() * math.sqrt(3.4 / len(X))) == trusted
    assert result.trusted == trusted


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_temperatures", 0),
        ("num_chains", 1),
        ("num_chains", 2.5),
        ("batch_size", 0),
        ("target_acceptance", 1.0),
        ("initial", "posterior"),
    ],
)
def test_settings_outside_their_domain_are_refused(setting, value):
    with pytest.raises(SettingsError, match=setting):
        annealed_importance_sampling(model, guide, X[:3], **{setting: value})


def test_discrete_latent_sites_and_misfits_are_refused():
    def coin_model(x):
        with pyro.plate("data", len(x)):
            b = pyro.sample("b", dist.Bernoulli(torch.tensor(0.3, dtype=DOUBLE)))
            pyro.sample("x", dist.Normal(b, 1.0), obs=x)

    def coin_guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("b", dist.Bernoulli(torch.full_like(x, 0.5)))

    with pytest.raises(GuideError, match="'b' is discrete"):
        annealed_importance_sampling(coin_model, coin_guide, X[:3])
    with pytest.raises(GuideError, match="'z'"):
        annealed_importance_sampling(model, lambda x: None, X[:3])
