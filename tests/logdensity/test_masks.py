"""Masks: padding in sites that are summed out, and priors that a mask leaves out."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO

import bayeskit as bk
from bayeskit.errors import SettingsError
from bayeskit.exact import enumerate_latents
from bayeskit.inference.evidence._judging._improper_priors import improper
from bayeskit.inference.generalized import Flat
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.samplers import MinibatchTarget
from bayeskit.inference.samplers._sampling import prior_variance
from bayeskit.inference.samplers._starts import starting_points

F64 = torch.float64
ENUMERATED = {"enumerate": "parallel"}
Y = torch.tensor([[0.3, 0.1, -0.2], [0.5, 0.0, 0.0]], dtype=F64)
LENGTHS = torch.tensor([3, 1])


def padded(y, stay):
    """Two hidden Markov chains, one of which ends early."""
    with pyro.plate("sequences", 2):
        z = torch.zeros((), dtype=F64)
        for t in range(3):
            with poutine.mask(mask=t < LENGTHS):
                z = pyro.sample(f"z{t}", dist.Bernoulli(torch.where(z > 0, stay, 1 - stay)), infer=ENUMERATED)
                pyro.sample(f"y{t}", dist.Normal(2 * z - 1, 1.0), obs=y[:, t])


def label_alone(y, stay):
    """The mask is around the label only: its datum is seen."""
    for mask in (torch.tensor([True, False]), False):
        with pyro.plate(f"data {mask}", 2):
            with poutine.mask(mask=mask):
                z = pyro.sample(f"z {mask}", dist.Bernoulli(stay), infer=ENUMERATED)
            pyro.sample(f"y {mask}", dist.Normal(2 * z - 1, 1.0), obs=y[:, 0])


@pytest.mark.parametrize("inner", [padded, label_alone])
@pytest.mark.parametrize("stay", [0.5, 0.8])
def test_masked_sites_that_are_summed_out_integrate_to_one(inner, stay):
    """As by enumeration of every assignment, and in Pyro."""
    stay = torch.tensor(stay, dtype=F64)

    def model(y):
        share = pyro.sample("share", dist.Beta(torch.tensor(2.0, dtype=F64), 2.0))
        inner(y, share)

    target = bk.Target.from_pyro(model, Y)
    u = target.unconstrain({"share": stay.reshape(1)})
    assert abs(float(target.log_likelihood(u)) - enumerate_latents(inner, Y, stay).log_evidence) < 1e-10
    guided = -TraceEnum_ELBO(max_plate_nesting=1).loss(model, lambda y: pyro.sample("share", dist.Delta(stay)), Y)
    prior = float(dist.Beta(torch.tensor(2.0, dtype=F64), 2.0).log_prob(stay))
    assert abs(float(target.log_likelihood(u)) + prior - guided) < 1e-5
    ours = -ELBO(max_plate_nesting=1).loss(model, lambda y: pyro.sample("share", dist.Delta(stay)), Y)
    assert abs(ours - guided) < 1e-5


def half_masked():
    a = pyro.sample(
        "a", dist.Normal(torch.full((2,), 1e4, dtype=F64), 1.0).mask(torch.tensor([True, False])).to_event(1)
    )
    pyro.sample("y", dist.Normal(a[0], 1.0), obs=torch.tensor(1e4, dtype=F64))


def label_without_prior():
    a = pyro.sample("b", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    z = pyro.sample("a", dist.Bernoulli(torch.tensor(0.3, dtype=F64)).mask(False), infer=ENUMERATED)
    pyro.sample("y", dist.Normal(a + z, 1.0), obs=torch.tensor(0.4, dtype=F64))


def flat():
    a = pyro.sample("a", Flat())
    pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.4, dtype=F64))


@pytest.mark.parametrize("model", [half_masked, label_without_prior, flat])
def test_a_prior_that_does_not_integrate_to_one_is_not_drawn_from(model):
    target = bk.Target.from_pyro(model)
    assert not target.can_sample_prior and "'a' is improper" in improper(target)
    with pytest.raises(SettingsError, match="site 'a' is improper and cannot be drawn from"):
        target.sample_prior(3)


def flat_beside_proper():
    """Nothing has a density but where the proper site draws."""
    a = pyro.sample("a", Flat())
    b = pyro.sample("b", dist.Normal(torch.tensor(1e4, dtype=F64), 1.0))
    pyro.sample("y", dist.Normal(a, (b - 9000).sqrt()), obs=torch.tensor(0.4, dtype=F64))


@pytest.mark.parametrize(("model", "site"), [(half_masked, 0), (flat_beside_proper, 1)])
def test_chains_start_where_improper_sites_draw_all_the_same(model, site):
    target = bk.Target.from_pyro(model)
    generator = torch.Generator().manual_seed(0)
    start = starting_points(target, 4, torch.ones(4, dtype=F64), generator)
    assert float((start[:, site] - 1e4).abs().max()) < 10
    variance = prior_variance(target, 0)
    assert 0.2 < float(variance[site]) < 5


def test_minibatches_keep_to_it_too():
    def model(y):
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0).mask(False))
        with pyro.plate("data", len(y)) as rows:
            pyro.sample("y", dist.Normal(a, 1.0), obs=y[rows])

    y = torch.linspace(-1, 1, 20, dtype=F64)
    minibatched = MinibatchTarget.from_pyro(model, y, batch_size=5)
    whole = minibatched.full_target()
    assert not whole.can_sample_prior and "'a' is improper" in improper(whole)
    for each in (whole, minibatched):
        with pytest.raises(SettingsError, match="'a' is improper"):
            each.sample_prior(3)
