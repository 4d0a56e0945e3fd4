"""Held-out log likelihood by importance sampling, against exact values of linear and discrete models."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from pyro import poutine

from bayeskit._core.randomness import new_generator
from bayeskit._core.statistics import independent_log_mean_exp_error, pareto_shape
from bayeskit.errors import DataError, GuideError, ModelError, SettingsError
from bayeskit.inference.held_out import annealed_importance_sampling, importance_sampling, mutual_information
from bayeskit.inference.held_out._importance import HeldOut, _Weights
from bayeskit.inference.objectives._drawing import Particles
from bayeskit.models.vae import LinearVAE

DOUBLE = torch.float64
X = torch.linspace(-2.0, 2.5, 40, dtype=DOUBLE)


def model(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def guide(x):
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(0.4 * x, 0.9))


def exact(x):
    return dist.Normal(torch.zeros((), dtype=x.dtype), 2**0.5).log_prob(x)


def z_scores(result, log_likelihood):
    return (result.log_likelihood - log_likelihood) / result.pointwise_standard_error


@pytest.fixture(scope="module")
def linear_vae():
    generator = new_generator(0, stream="data")
    x = torch.randn(30, 6, generator=generator, dtype=DOUBLE) @ torch.randn(6, 6, generator=generator, dtype=DOUBLE)
    vae = LinearVAE.maximum_likelihood(x, latent_dim=3)
    with torch.no_grad():  # a guide that is not the posterior
        vae.encoder.mean.weight *= 0.9
        vae.encoder.log_scale += 0.2
    return vae, x


@pytest.mark.parametrize("which", ["model", "guide"])
@pytest.mark.parametrize("estimate", [importance_sampling, mutual_information, annealed_importance_sampling])
def test_scaled_latent_variables_are_refused(which, estimate):
    """A term of half a log density has no weight."""
    half = {"model": model, "guide": guide} | {which: poutine.scale({"model": model, "guide": guide}[which], scale=0.5)}
    with pytest.raises(ModelError, match=f"site 'z' of the {which} is scaled"):
        estimate(half["model"], half["guide"], X)


@pytest.mark.parametrize("settings", [{}, {"batch_size": 7, "chunk_size": 300}, {"chunk_size": 3000}])
def test_agrees_with_the_exact_likelihood_of_a_linear_vae(linear_vae, settings, limit):
    vae, x = linear_vae
    result = importance_sampling(vae.model, vae.guide, x, num_draws=3000, seed=1, **settings)
    log_likelihood = vae.log_likelihood(x).detach()
    assert result.log_likelihood.shape == result.pareto_k.shape == (30,)
    assert float(z_scores(result, log_likelihood).abs().max()) < limit(30)
    assert abs(result.mean - float(log_likelihood.mean())) < limit() * result.standard_error
    assert result.trusted
    assert result.standard_error < 0.01


def test_a_weight_with_the_wrong_sign_of_the_guide_is_noticed(linear_vae, monkeypatch, limit):
    vae, x = linear_vae
    monkeypatch.setattr(Particles, "log_weight", property(lambda self: self.log_model + self.log_guide_total))
    result = importance_sampling(vae.model, vae.guide, x, num_draws=3000, seed=1)
    assert float(z_scores(result, vae.log_likelihood(x).detach()).abs().max()) > limit(30)


@pytest.mark.calibration
def test_standard_errors_are_those_of_replicates():
    x = torch.full((4000,), 1.5, dtype=DOUBLE)
    result = importance_sampling(model, guide, x, num_draws=100, seed=3, batch_size=1000)
    spread = float(result.log_likelihood.std())
    # The sample deviation of 4,000 estimates has a relative error of about 1 / sqrt(8000); five of these.
    assert abs(float(result.pointwise_standard_error.square().mean().sqrt()) / spread - 1) < 5 / math.sqrt(8000)
    bias = float((result.log_likelihood - exact(x)).mean())
    assert abs(bias + 0.5 * spread**2) < 5 * spread / math.sqrt(4000)


def test_equal_weights_have_no_error_but_rounding():
    def posterior(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))

    result = importance_sampling(model, posterior, X, num_draws=200)
    assert float((result.log_likelihood - exact(X)).abs().max()) < 1e-10
    assert float(result.pointwise_standard_error.max()) < 1e-7
    assert result.trusted


@pytest.mark.parametrize("chunk", [1, 17, 60, 1000])
def test_sums_over_chunks_are_those_of_all_weights(chunk):
    log_weight = 3 * torch.randn(1000, 5, generator=new_generator(0, stream="weights"), dtype=DOUBLE) - 700
    weights = _Weights(1000)
    for part in log_weight.split(chunk):
        weights.add(part)
    assert torch.allclose(weights.log_mean(), log_weight.logsumexp(0) - math.log(1000), rtol=1e-13)
    error = independent_log_mean_exp_error(log_weight.T.unsqueeze(1))
    assert torch.allclose(weights.error(), error, rtol=1e-10)
    assert weights.pareto_k().tolist() == [pareto_shape(column) for column in log_weight.T]


def test_a_guide_too_narrow_is_not_trusted():
    def narrow(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.2))

    result = importance_sampling(model, narrow, X, num_draws=2000)
    assert float(result.pareto_k.mean()) > 0.7
    assert not result.trusted
    share = 100 * float((result.pareto_k > 0.7).double().mean())
    assert f"{share:.1f} % of the data" in result.warnings[0]
    assert "NOT TRUSTED" in str(result)


def test_discrete_guides_are_fine(limit):
    def coin_model(x):
        with pyro.plate("data", len(x)):
            b = pyro.sample("b", dist.Bernoulli(torch.tensor(0.3, dtype=DOUBLE)))
            pyro.sample("x", dist.Normal(2.5 * b - 1.0, 1.0), obs=x)

    def coin_guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("b", dist.Bernoulli(torch.full_like(x, 0.6)))

    result = importance_sampling(coin_model, coin_guide, X, num_draws=2000)
    of_b = [
        math.log(p) + dist.Normal(torch.tensor(m, dtype=DOUBLE), 1.0).log_prob(X) for p, m in ((0.7, -1), (0.3, 1.5))
    ]
    log_likelihood = torch.logaddexp(*of_b)
    assert float(z_scores(result, log_likelihood).abs().max()) < limit(len(X))


def test_single_precision_and_seeds():
    x = X.float()
    first, again, other = (importance_sampling(model, guide, x, num_draws=50, seed=s) for s in (0, 0, 1))
    assert first.log_likelihood.dtype == DOUBLE
    assert torch.equal(first.log_likelihood, again.log_likelihood)
    assert not torch.equal(first.log_likelihood, other.log_likelihood)


def test_several_arguments_are_sliced_together(limit):
    def shifted_model(x, shift, scale):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(shift, 1.0))
            pyro.sample("x", dist.Normal(z, scale), obs=x)

    def shifted_guide(x, shift, scale):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(0.5 * (x + shift), 0.9))

    arguments = X, X.flip(0) ** 2, torch.tensor(1.0, dtype=DOUBLE)
    result = importance_sampling(shifted_model, shifted_guide, *arguments, num_draws=1000, batch_size=9)
    assert float(z_scores(result, exact(X - arguments[1])).abs().max()) < limit(len(X))


def test_weights_that_are_nan_count_as_zero():
    def lost(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            pyro.factor("gap", torch.where(z > 2.7, torch.nan, 0.0))

    def with_gap(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x)
            pyro.factor("gap", torch.where(z > 2.7, -1e9, 0.0))

    result, truth = (importance_sampling(m, guide, X, num_draws=400, seed=3) for m in (lost, with_gap))
    assert any("NaN" in warning for warning in result.warnings)
    assert torch.equal(result.log_likelihood, truth.log_likelihood)


def test_table_plot_and_error_of_one_draw():
    result = importance_sampling(model, guide, X, num_draws=200)
    table = result.to_pandas()
    assert list(table.columns) == ["log_likelihood", "standard_error", "pareto_k"]
    assert len(table) == len(X)
    assert result.total == pytest.approx(len(X) * result.mean)
    axes = result.plot(Figure().subplots())
    assert axes.get_ylabel() == "log likelihood (nats)"
    single = importance_sampling(model, guide, X, num_draws=1)
    assert bool(single.pointwise_standard_error.isnan().all())
    assert not single.trusted
    assert HeldOut("m", torch.zeros(3), torch.ones(3), 5).plot(Figure().subplots()).lines


@pytest.mark.parametrize("setting", ["num_draws", "chunk_size", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_nothing_to_draw_is_refused(setting, value):
    with pytest.raises(SettingsError, match=setting):
        importance_sampling(model, guide, X, **{setting: value})


def test_models_and_guides_that_do_not_fit_are_refused():
    def empty(x):
        pass

    def no_plate(x):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0).expand([len(x)]).to_event(1), obs=x)

    def no_plate_guide(x):
        pyro.sample("z", dist.Normal(0.0, 1.0))

    def random_minibatch(x):
        with pyro.plate("data", len(x), subsample_size=3) as index:
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[index])

    def minibatch_guide(x):
        with pyro.plate("data", len(x), subsample_size=3):
            pyro.sample("z", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))

    with pytest.raises(GuideError, match="'z'"):
        importance_sampling(model, empty, X)
    with pytest.raises(ModelError, match="no plate"):
        importance_sampling(no_plate, no_plate_guide, X)
    with pytest.raises(ModelError, match="3 of 40"):
        importance_sampling(random_minibatch, minibatch_guide, X)
    with pytest.raises(DataError, match="batch_size"):
        importance_sampling(lambda: model(X), lambda: guide(X), batch_size=5)
