"""Laplus, where the posterior is what stands for it, and importance sampling from it where it is not."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import SettingsError
from bayeskit.inference.evidence import (
    beta_prime_laplus,
    gamma_laplus,
    gamma_laplus_importance_sampling,
    lognormal_laplus,
)
from bayeskit.inference.evidence.laplus.families import BetaPrime
from bayeskit.inference.evidence.laplus.positive import PositiveDensity

DOUBLE = torch.float64
COUNTS = torch.tensor([3.0, 0.0, 7.0], dtype=DOUBLE)
SHAPES, RATES = torch.tensor([2.0, 1.0, 1.5], dtype=DOUBLE), torch.tensor([1.0, 0.5, 2.0], dtype=DOUBLE)


def counted(count):
    """The second rate has its mode at zero."""
    rate = pyro.sample("rate", dist.Gamma(SHAPES, RATES).to_event(1))
    pyro.sample("count", dist.Poisson(rate).to_event(1), obs=count)


def counts_evidence():
    return float(dist.GammaPoisson(SHAPES, RATES).log_prob(COUNTS).sum())


def ratios():
    a, b = torch.tensor([3.0, 5.0], dtype=DOUBLE), torch.tensor([4.0, 2.5], dtype=DOUBLE)
    x = pyro.sample("x", dist.Exponential(torch.ones(2, dtype=DOUBLE)).to_event(1))
    pyro.factor("likelihood", (x + (a - 1) * x.log() - (a + b) * x.log1p()).sum())


def ratios_evidence():
    return sum(math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b) for a, b in ((3.0, 4.0), (5.0, 2.5)))


def logarithms(y):
    x = pyro.sample("x", dist.LogNormal(torch.zeros(3, dtype=DOUBLE), 1.5).to_event(1))
    pyro.sample("y", dist.Normal(x.log(), 0.5).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("estimator", "model", "args", "wanted"),
    [
        (gamma_laplus, counted, (COUNTS,), counts_evidence()),
        (beta_prime_laplus, ratios, (), ratios_evidence()),
        (
            lognormal_laplus,
            logarithms,
            (COUNTS,),
            float(dist.Normal(0.0, 2.5**0.5).log_prob(COUNTS).sum()),
        ),
    ],
)
def test_exact_where_the_posterior_is_such_a_product(estimator, model, args, wanted):
    z = estimator(bk.Target.from_pyro(model, *args, compile=False))
    assert abs(z.log_evidence - wanted) < 1e-6
    assert math.isnan(z.standard_error) and not z.trusted
    assert "gamma_laplus_importance_sampling" in z.warnings[0]


def test_a_density_without_its_jacobian_is_noticed(monkeypatch):
    def without(self, x):
        return self.target.log_density(x.log())

    monkeypatch.setattr(PositiveDensity, "log_density", without)
    target = bk.Target.from_pyro(counted, COUNTS, compile=False)
    z = gamma_laplus_importance_sampling(target)
    assert abs(z.log_evidence - counts_evidence()) > 0.1


def test_gradients_are_those_of_the_positive_coordinates():
    density = PositiveDensity(bk.Target.from_pyro(counted, COUNTS, compile=False))
    x = torch.tensor([[0.7, 0.1, 3.0], [2.0, 1.5, 0.4]], dtype=DOUBLE)
    value, gradient = density.value_and_gradient(x)
    assert torch.allclose(value, density.log_density(x), atol=1e-12, rtol=0)
    assert torch.allclose(gradient, (SHAPES + COUNTS - 1) / x - RATES - 1, atol=1e-10, rtol=0)


def poled(count):
    rate = pyro.sample("rate", dist.Gamma(torch.tensor([0.3, 2.0], dtype=DOUBLE), 2.0).to_event(1))
    pyro.sample("count", dist.Poisson(rate).to_event(1), obs=count)


def test_a_pole_at_zero_keeps_its_power():
    """The posterior of the first rate is gamma with shape .3: its density is infinite at zero, the evidence is not."""
    count = torch.tensor([0.0, 3.0], dtype=DOUBLE)
    target = bk.Target.from_pyro(poled, count, compile=False)
    shapes = torch.tensor([0.3, 2.0], dtype=DOUBLE)
    wanted = float(dist.GammaPoisson(shapes, torch.full_like(shapes, 2.0)).log_prob(count).sum())
    assert abs(gamma_laplus(target).log_evidence - wanted) < 1e-6
    assert gamma_laplus_importance_sampling(target, num_draws=500).standard_error < 1e-6
    assert abs(lognormal_laplus(target).log_evidence - wanted) < 1.5


def test_a_finite_density_at_zero_is_exponential_there():
    """Exact where it is exponential, and blind to what bends it later: no pole is made up for that."""

    def curved(weight):
        x = pyro.sample("x", dist.Exponential(torch.tensor([3.0], dtype=DOUBLE)).to_event(1))
        pyro.factor("likelihood", (weight * x.square()).sum())

    for weight in (0.0, -1.0):
        z = gamma_laplus(bk.Target.from_pyro(curved, torch.tensor(weight, dtype=DOUBLE), compile=False))
        assert abs(z.log_evidence) < 1e-6


def test_importance_sampling_of_gamma_posteriors_has_equal_weights():
    z = gamma_laplus_importance_sampling(bk.Target.from_pyro(counted, COUNTS, compile=False), num_draws=500)
    assert abs(z.log_evidence - counts_evidence()) < 1e-5
    assert z.standard_error < 1e-5 and z.trusted


def test_importance_sampling_of_a_tree(limit):
    case = exact.get("three_taxon_tree")
    z = gamma_laplus_importance_sampling(case.target(), seed=3)
    assert z.trusted and z.standard_error < 0.02
    assert abs(z.log_evidence - case.log_evidence) < limit(1) * z.standard_error
    assert abs(gamma_laplus(case.target()).log_evidence - case.log_evidence) < 1.0


def test_the_beta_prime_distribution_is_the_ratio_of_gammas():
    a, b = torch.tensor(2.5, dtype=DOUBLE), torch.tensor(1.7, dtype=DOUBLE)
    x = torch.linspace(0.01, 9.0, 50, dtype=DOUBLE)
    by_beta = dist.Beta(a, b).log_prob(x / (1 + x)) - 2 * x.log1p()
    assert torch.allclose(BetaPrime(a, b).log_prob(x), by_beta, atol=1e-12, rtol=0)


def test_tails_too_heavy_for_a_beta_prime_say_so():
    def heavy(location):
        x = pyro.sample("x", dist.LogNormal(location, 6.0))
        pyro.factor("likelihood", 0.0 * x)

    z = beta_prime_laplus(bk.Target.from_pyro(heavy, torch.zeros((), dtype=DOUBLE), compile=False))
    assert not z.trusted
    assert math.isfinite(z.log_evidence) or any("no such distribution" in warning for warning in z.warnings)


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0),
        dist.Uniform(torch.zeros((), dtype=DOUBLE), 1.0),
        dist.Pareto(torch.ones((), dtype=DOUBLE), 2.0),
        dist.Dirichlet(torch.ones(3, dtype=DOUBLE)),
    ],
    ids=["real", "interval", "half space", "simplex"],
)
def test_sites_that_are_not_positive_are_refused(fn):
    def model():
        x = pyro.sample("x", fn)
        pyro.sample("rate", dist.Gamma(torch.ones((), dtype=DOUBLE), 1.0))
        pyro.factor("likelihood", -x.sum())

    with pytest.raises(SettingsError, match="site 'x'.*laplace_importance_sampling"):
        gamma_laplus(bk.Target.from_pyro(model, compile=False))


def test_same_seed_same_result_and_no_global_is_touched():
    target = exact.get("three_taxon_tree").target()
    first, again, other = (gamma_laplus_importance_sampling(target, 200, seed=s).log_evidence for s in (0, 0, 1))
    assert first == again != other
