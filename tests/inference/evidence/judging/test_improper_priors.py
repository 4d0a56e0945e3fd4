"""Improper priors named before anything is computed, and proper ones left in peace."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import constraints

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.evidence._judging._improper_priors import improper
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses

F64 = torch.float64


def nothing(u):
    return torch.zeros_like(u[..., 0])


def half_flat():
    a = pyro.sample("a", Flat((), constraints.positive))
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    pyro.sample("y", dist.Normal(a + b, 1.0), obs=torch.tensor(0.3, dtype=F64))


def partly_masked():
    a = pyro.sample("a", dist.Normal(torch.zeros(2, dtype=F64), 1.0).mask(torch.tensor([True, False])).to_event(1))
    pyro.sample("y", dist.Normal(a.sum(), 1.0), obs=torch.tensor(0.3, dtype=F64))


def left_out():
    with poutine.mask(mask=False):
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    pyro.sample("y", dist.Normal(a, 1.0), obs=torch.tensor(0.3, dtype=F64))


@pytest.mark.parametrize("model", [half_flat, partly_masked, left_out])
def test_improper_sites_are_named_before_anything_is_computed(model):
    assert "site 'a' is improper" in improper(bk.Target.from_pyro(model))


@pytest.mark.parametrize("model", [half_flat, partly_masked, left_out])
def test_improper_sites_are_not_drawn_from(model):
    """Draws of a site whose density is another would give an evidence of neither."""
    target = bk.Target.from_pyro(model)
    assert not target.can_sample_prior
    with pytest.raises(SettingsError, match="site 'a' is improper and cannot be drawn from"):
        target.sample_prior(3, seed=0)
    for method in (evidence.naive_monte_carlo, evidence.nested_sampling, evidence.smc):
        with pytest.raises(SettingsError, match="site 'a' is improper, so no marginal likelihood exists"):
            method(target)


@pytest.mark.parametrize("support", [constraints.real, constraints.positive])
def test_a_loss_posterior_names_its_improper_prior(support):
    data = torch.tensor([0.3, 1.1], dtype=F64)
    for flat in (Flat((), support), dist.ImproperUniform(support, (), ())):
        assert "site 'mean' is improper" in improper(GibbsPosterior(flat, losses.HalfSquared(), data, name="mean"))
    proper = dist.Exponential(torch.ones((), dtype=F64))
    assert improper(GibbsPosterior(proper, losses.HalfSquared(), data)) is None


def padded(observed):
    """What a tensor masks is padding, here because it is observed: it integrates to one."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=torch.zeros(2, dtype=F64), obs_mask=observed)


def bounded():
    """Densities of one, which integrate to one."""
    a = pyro.sample("a", dist.Uniform(torch.zeros(2, dtype=F64), 1.0).to_event(1))
    b = pyro.sample("b", dist.Beta(torch.ones((), dtype=F64), 1.0))
    pyro.sample("y", dist.Normal(a.sum() + b, 1.0), obs=torch.tensor(0.3, dtype=F64))


def test_proper_priors_are_not_called_improper():
    for name in exact.CASES:
        assert improper(exact.get(name).target()) is None
    for observed in ([True, True], [True, False]):
        assert improper(bk.Target.from_pyro(padded, torch.tensor(observed))) is None
    assert improper(bk.Target.from_pyro(bounded)) is None
    assert improper(bk.Target.from_functions(nothing, nothing, 2)) is None  # nothing is known of functions


def test_comparisons_of_improper_models_are_refused():
    target = GibbsPosterior(Flat(()), losses.HalfSquared(), torch.tensor([0.3, 1.1], dtype=F64), name="mu")
    with pytest.raises(SettingsError, match="'mu' is improper"):
        evidence.compare(target, ["laplace_importance_sampling", "bridge_sampling"], progress=False)


def test_a_prior_of_functions_without_end_is_refused():
    """Nothing is known of a function by its name, so it is looked at."""
    target = bk.Target.from_functions(
        lambda u: 0 * u[..., 0],
        lambda u: -0.5 * u.square().sum(-1),
        2,
        sample_prior=lambda n, generator: torch.randn(n, 2, generator=generator, dtype=F64),
    )
    with pytest.raises(SettingsError, match=r"improper along u\[0\]"):
        evidence.compare(target, ["laplace_importance_sampling"], progress=False)
