"""Marginal targets as targets: samplers, estimators, storage, and what they refuse."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from hierarchies import COUNTS, FLOAT, HEIGHTS, counted, gradient_error, marginal, normal_means, points

import bayeskit as bk
from bayeskit.errors import DrawsError, ModelError, SettingsError, UnknownNameError
from bayeskit.inference.marginal import MarginalTarget


@pytest.mark.calibration
def test_values_do_not_depend_on_what_was_evaluated_before():
    target = marginal(counted, ["effect"], COUNTS)
    again = pickle.loads(pickle.dumps(bk.Target.without_graphs(target)))
    u = points(target, 4)
    target.value_and_grad(3 * u)
    first, second = target.value_and_grad(u), again.value_and_grad(u)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert target.fingerprint() == again.fingerprint()


@pytest.mark.long
def test_the_marginal_of_eight_schools_has_its_posterior_and_evidence(limit):
    case = bk.exact.get("eight_schools")
    target = bk.marginalize(case.target(), ["eta"])
    settings = {"num_chains": 4, "num_warmup": 50, "num_samples": 100, "seed": 0, "progress": False}
    draws = bk.sample(target, initial=target.sample_prior(4, seed=1), **settings)
    evidence = bk.evidence.bridge_sampling(target, draws)
    assert abs(evidence.log_evidence - case.log_evidence) < limit(4) * evidence.standard_error
    whole = target.with_latents(draws)
    table = whole.summary()
    for row, name in (("mu", "mu"), ("tau", "tau"), ("eta[0]", "eta")):
        exact = float(case.posterior_mean[name].reshape(-1)[0])
        assert abs(table.loc[row, "mean"] - exact) < limit(4) * 1.5 * table.loc[row, "mcse_mean"]
    assert set(whole.values()) == {"mu", "tau", "eta", "theta"}
    assert set(draws.values()) == {"mu", "tau"}  # theta depends on eta


def mixed(y):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        effect = pyro.sample("effect", dist.Normal(level, 1.0))
        pyro.sample("y", dist.Normal(effect + side, 1.0), obs=y)


@pytest.mark.parametrize(
    ("sites", "error", "message"),
    [
        (["efect"], UnknownNameError, "did you mean 'effect'"),
        ([], SettingsError, "sites is empty"),
        (["level", "effect"], SettingsError, "no target is left"),
        (["side"], SettingsError, "'side' is discrete and summed out already"),
        (["y"], SettingsError, "'y' is observed"),
        (["level"], ModelError, "prior of site 'effect' depends on the sites to be integrated out"),
    ],
)
def test_sites_that_cannot_be_integrated_out_are_refused(sites, error, message):
    target = bk.Target.from_pyro(mixed, HEIGHTS)
    with pytest.raises(error, match=message):
        bk.marginalize(target, sites)


@pytest.mark.calibration
def test_discrete_sites_may_remain_summed_out():
    target = marginal(mixed, ["effect"], HEIGHTS)
    assert isinstance(target, MarginalTarget) and [site.name for site in target.sites] == ["level"]
    assert gradient_error(target, torch.tensor([[0.2], [-0.4]], dtype=FLOAT)) < 1e-8


def test_functions_loops_and_methods_are_refused(normal_normal):
    with pytest.raises(ModelError, match=r"only a target of a Pyro model.*from_pyro"):
        bk.marginalize(normal_normal, ["u"])
    with pytest.raises(SettingsError, match="method must be 'laplace'"):
        bk.marginalize(bk.Target.from_pyro(normal_means, HEIGHTS), ["effect"], method="exact")

    def branching(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(effect if level > 0 else -effect, 1.0), obs=y[0])

    with pytest.warns(bk.errors.SlowModelWarning):
        target = bk.Target.from_pyro(branching, HEIGHTS)
    with pytest.raises(ModelError, match="cannot be batched"):
        bk.marginalize(target, ["effect"])


def test_draws_that_do_not_fit_are_refused():
    target = marginal(normal_means, ["effect"], HEIGHTS)
    zeros = torch.zeros(1, 2, dtype=FLOAT)
    with pytest.raises(DrawsError, match="dimension 3, and this target 2"):
        target.with_latents(bk.Draws(torch.zeros(1, 2, 3, dtype=FLOAT), zeros, zeros, torch.ones(1, dtype=FLOAT)))
    with pytest.raises(DrawsError, match="tempered"):
        target.with_latents(bk.Draws(torch.zeros(1, 2, 2, dtype=FLOAT), zeros, zeros, zeros[:, 0]))
    with pytest.raises(ModelError, match="with_latents"):
        target.pointwise_log_likelihood(torch.zeros(1, 2, dtype=FLOAT))
