"""Models that observe nothing: their likelihood is one, and their posterior is their prior."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataWarning, ModelError, UnknownNameError

F64 = torch.float64


def funnel():
    scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(0.0, (scale / 2).exp()))


def weighted():
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    pyro.factor("weight", -0.5 * 3 * x.square())


def counts(x, y=None):
    level = pyro.sample("level", dist.Normal(0.0, 0.5))
    with pyro.plate("row", len(x)):
        rate = pyro.deterministic("rate", (level + x).exp())
        pyro.sample("y", dist.Poisson(rate), obs=y)


def test_the_density_is_that_of_the_prior():
    target = bk.Target.from_pyro(funnel)
    u = torch.randn(50, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    log_prior, log_likelihood = target.evaluate(u)
    normal = -0.5 * u.square() - 0.5 * math.log(2 * math.pi)
    scaled = -0.5 * (u[:, 1] * (-u[:, 0] / 2).exp()).square() - 0.5 * math.log(2 * math.pi) - u[:, 0] / 2
    torch.testing.assert_close(log_prior, normal[:, 0] + scaled, rtol=0, atol=1e-12)
    assert (log_likelihood == 0).all() and target.has_constant_likelihood
    value, slope = target.value_and_grad(u)
    squared = u[:, 1].square() * (-u[:, 0]).exp()
    expected = torch.stack([-u[:, 0] + squared / 2 - 0.5, -u[:, 1] * (-u[:, 0]).exp()], 1)
    torch.testing.assert_close(value, log_prior, rtol=0, atol=1e-12)
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)


def test_draws_are_those_of_the_prior(limit):
    draws = bk.sample(funnel, num_samples=2000, progress=False)
    error = draws.summary()
    # The variance of x is the mean of exp(scale).
    for name, mean, sd in (("scale", 0.0, 1.0), ("x", 0.0, math.exp(0.25))):
        assert abs(error.loc[name, "mean"] - mean) < limit(2) * error.loc[name, "mcse_mean"]
        assert abs(draws[name].std() - sd) < 0.15 * sd  # x has heavy tails, so that no standard error is finite enough
    assert list(draws.to_datasets()) == ["posterior", "sample_stats", "log_prior"]


def test_the_evidence_is_what_the_factors_say(limit):
    z = bk.evidence.compare(bk.Target.from_pyro(funnel), methods=["bridge_sampling", "smc"], progress=False)
    assert z["smc"].log_evidence == 0.0
    assert abs(z["bridge_sampling"].log_evidence) < limit() * z["bridge_sampling"].standard_error
    z = bk.evidence.compare(bk.Target.from_pyro(weighted), methods=["bridge_sampling"], progress=False)[
        "bridge_sampling"
    ]
    assert abs(z.log_evidence + math.log(2.0)) < limit() * z.standard_error  # a normal density of precision 4


def test_what_needs_data_says_so():
    draws = bk.sample(funnel, num_samples=50, num_warmup=50, progress=False)
    with pytest.raises(ModelError, match="no observed site, so there are no data to draw"):
        draws.predictive()
    assert draws.predictive(redraw=["x"]).posterior_predictive.keys() == {"x"}
    for call in (draws.loo, lambda: draws.target.pointwise_log_likelihood(draws.unconstrained)):
        with pytest.raises(ModelError, match="no observed site"):
            call()


def test_data_that_are_not_observed_are_named():
    def forgotten(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([3]).to_event(1))

    with pytest.warns(DataWarning, match=r"its posterior is its prior; if 'y' are data, pass them as obs="):
        bk.Target.from_pyro(forgotten, torch.zeros(3))


@pytest.mark.parametrize("given", [(), (None,)])
@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist])
def test_prior_predictive_draws_before_the_data_are_those_with_data(given, form):
    x = form(np.linspace(-1.0, 1.0, 5))
    before = bk.prior_predictive(counts, x, *given, num_draws=200, seed=3)
    after = bk.prior_predictive(counts, x, np.ones(5), num_draws=200, seed=3)
    assert before.posterior_predictive.keys() == {"y"}
    assert torch.equal(before["level"], after["level"])
    assert torch.equal(before.posterior_predictive["y"], after.posterior_predictive["y"])
    datasets = before.to_datasets()
    assert sorted(datasets) == ["prior", "prior_predictive"]
    assert datasets["prior_predictive"]["y"].dims == ("chain", "draw", "row")


def test_which_sites_are_data_can_be_said():
    x = torch.zeros(3, dtype=F64)
    latent = bk.prior_predictive(funnel_of, x, num_draws=10, sites=())
    assert latent["x"].shape == (1, 10, 3) and not latent.posterior_predictive
    assert bk.prior_predictive(funnel_of, x, num_draws=10).posterior_predictive["x"].shape == (1, 10, 3)
    assert bk.prior_predictive(funnel, num_draws=10, sites=["x"]).posterior_predictive["x"].shape == (1, 10)
    assert bk.prior_predictive(funnel, num_draws=10)["x"].shape == (1, 10)
    with pytest.raises(UnknownNameError, match="no site is called 'z'"):
        bk.prior_predictive(funnel, sites=["z"])


def funnel_of(x):
    scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(x)):
        pyro.sample("x", dist.Normal(x, (scale / 2).exp()))


def test_a_value_outside_of_the_support_of_another_site_is_a_dependence():
    def model(x):
        top = pyro.sample("top", dist.Uniform(0.0, 10.0))
        low = pyro.sample("low", dist.Uniform(0.0, top))
        pyro.sample("y", dist.Normal(low + x, 1.0).to_event(1))

    assert bk.prior_predictive(model, torch.zeros(2), num_draws=5).posterior_predictive.keys() == {"y"}
