"""Laplus, where the posterior is what stands for it, and importance sampling from it where it is not."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binom

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.evidence import (
    beta_prime_laplus,
    gamma_laplus,
    gamma_laplus_importance_sampling,
    lognormal_laplus,
)
from bayeskit.inference.evidence._laplus import BetaPrime, DefensiveGamma, PositiveDensity
from bayeskit.inference.evidence._modes import find_mode

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
    assert gamma_laplus_importance_sampling(target, num_draws=500, tail_share=0).standard_error < 1e-6
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
    target = bk.Target.from_pyro(counted, COUNTS, compile=False)
    z = gamma_laplus_importance_sampling(target, num_draws=500, tail_share=0)
    assert abs(z.log_evidence - counts_evidence()) < 1e-5
    assert z.standard_error < 1e-5 and z.trusted


def alone(prior, offset=0.0):
    """A posterior that is its prior, whose evidence is one but for the offset."""

    def model():
        x = pyro.sample("x", prior)
        pyro.factor("likelihood", 0 * x.sum() + offset)

    return bk.Target.from_pyro(model, compile=False)


def variance(y):
    x = pyro.sample("x", dist.InverseGamma(torch.tensor(2.0, dtype=DOUBLE), 2.0))
    pyro.sample("y", dist.Normal(torch.zeros_like(y), x.sqrt()).to_event(1), obs=y)


def variance_evidence(y):
    """Of a Student-t distribution, correlated by the common variance."""
    t = dist.MultivariateStudentT(torch.tensor(4.0, dtype=DOUBLE), torch.zeros_like(y), torch.eye(len(y), dtype=DOUBLE))
    return float(t.log_prob(y))


def heavy_cases():
    y, zero = torch.tensor([0.5, -1.2, 0.3, 1.8, -0.7], dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)
    return {
        "variance": (bk.Target.from_pyro(variance, y, compile=False), variance_evidence(y)),
        "lognormal": (alone(dist.LogNormal(zero, 1.0).to_event(1)), 0.0),
        "inverse gamma": (alone(dist.InverseGamma(zero + 3.0, 2.0).to_event(1)), 0.0),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", heavy_cases())
def test_errors_are_right_where_tails_are_heavier_than_those_of_gamma_distributions(name, limit, calibrated):
    target, wanted = heavy_cases()[name]
    mode = PositiveDensity(target).mode()
    found = [gamma_laplus_importance_sampling(target, 2000, mode=mode, seed=seed) for seed in range(40)]
    z = torch.tensor([(one.log_evidence - wanted) / one.standard_error for one in found])
    # Once in a few hundred runs no draw reaches the largest weights, and the warning of it is right.
    assert sum(one.trusted for one in found) >= binom.ppf(1e-5, 40, 0.99)
    assert calibrated(z) and float(z.abs().max()) < limit(40 * 3)


@pytest.mark.calibration
def test_gamma_distributions_alone_do_not_trust_themselves_there():
    """What their draws have not reached is found along the coordinates."""
    for name in ("variance", "lognormal", "inverse gamma"):
        target, _ = heavy_cases()[name]
        for seed in range(2):
            z = gamma_laplus_importance_sampling(target, tail_share=0, seed=seed)
            assert not z.trusted and z.diagnostics["beyond_reach"] > 0.05


@pytest.mark.parametrize("tail_share", [0, 0.3, 0.9])
def test_the_proposal_is_normalised_and_draws_from_its_density(tail_share, limit):
    proposal = DefensiveGamma(torch.distributions.Gamma(SHAPES[:2], RATES[:2]), tail_share)
    u = torch.linspace(-40, 40, 801, dtype=DOUBLE)
    x = torch.stack(torch.meshgrid(u, u, indexing="ij"), -1).exp()
    mass = (proposal.log_prob(x) + x.log().sum(-1)).exp() * 0.1**2
    assert abs(float(mass.sum()) - 1) < 2e-4
    draws = proposal.sample(4000, torch.Generator().manual_seed(0))
    # Regions whose edges are those of cells of the grid.
    for inside in (lambda x: (x.log() > 1.05).any(-1), lambda x: (x.log() < -1.65).all(-1)):
        share, hits = float(mass[inside(x)].sum()), inside(draws).double()
        assert abs(float(hits.mean()) - share) < limit(6) * float(hits.std()) / 4000**0.5 + 2e-4


def test_another_mode_along_a_coordinate_is_noticed():
    """Most of the mass lies far from the mode that the higher, narrower peak has."""
    narrow, wide = (dist.Gamma(torch.tensor(a, dtype=DOUBLE), b) for a, b in ((20.0, 20.0), (400.0, 40.0)))

    def model():
        x = pyro.sample("x", dist.Exponential(torch.ones((), dtype=DOUBLE)))
        pyro.factor("likelihood", torch.logaddexp(narrow.log_prob(x), wide.log_prob(x)) - math.log(2.0) + x)

    target = bk.Target.from_pyro(model, compile=False)
    assert not any(gamma_laplus_importance_sampling(target, seed=seed).trusted for seed in range(3))


def test_another_mode_off_all_coordinate_axes_is_noticed():
    """Half of the mass lies where both coordinates are ten times as large."""
    parts = [dist.Gamma(torch.full((2,), a, dtype=DOUBLE), b).to_event(1) for a, b in ((100.0, 100.0), (400.0, 40.0))]

    def model():
        x = pyro.sample("x", dist.Exponential(torch.full((2,), 0.1, dtype=DOUBLE)).to_event(1))
        of_both = torch.logaddexp(*(part.log_prob(x) for part in parts))
        pyro.factor("likelihood", of_both + 0.1 * x.sum(-1))

    for seed in range(3):
        z = gamma_laplus_importance_sampling(bk.Target.from_pyro(model, compile=False), seed=seed)
        assert any("a mode with a mass of" in warning for warning in z.warnings), z.warnings


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("prior", "size", "off"),
    [
        (dist.HalfNormal, (1.0,), 0.15),
        (dist.HalfNormal, (100.0,), 0.15),
        (dist.HalfCauchy, (1.0,), 0.15),
        (dist.Gamma, (0.3, 1.0), 0.005),
        (dist.Gamma, (3.0, 1e8), 0.005),
        (dist.Gamma, (3.0, 1e-6), 0.005),
        (dist.Exponential, (10.0,), 0.005),
        (dist.Exponential, (1e-6,), 0.005),
    ],
    ids=str,
)
def test_modes_at_zero_and_far_from_one(prior, size, off, dtype, limit):
    """A curved density without slope at zero is matched at the mode of its logarithm."""
    target = alone(prior(*(torch.full((2,), value, dtype=dtype) for value in size)).to_event(1))
    mode = PositiveDensity(target).mode()
    assert abs(gamma_laplus(target, mode=mode).log_evidence) < 2 * off
    z = gamma_laplus_importance_sampling(target, 2000, mode=mode)
    assert z.trusted and abs(z.log_evidence) < limit(16) * z.standard_error


def test_curvature_that_is_no_more_than_rounding_is_none():
    """In single precision a gradient over a coordinate of .03 has steps that look like a mode inside."""

    def model(scale):
        pyro.factor("likelihood", 0 * pyro.sample("x", dist.HalfNormal(scale).to_event(1)).sum())

    target = bk.Target.from_pyro(model, torch.full((2,), 100.0), compile=False)
    assert target.dtype == torch.float32
    mode = PositiveDensity(target).mode()
    mode = mode._replace(position=torch.full((2,), 0.03), second=torch.full((2,), -0.007))
    assert abs(gamma_laplus(target, mode=mode).log_evidence) < 0.3


def test_what_has_no_such_distribution_says_so():
    """Beyond the smallest coordinate that is looked at, nothing is known."""
    target = alone(dist.Gamma(torch.tensor(3.0, dtype=DOUBLE), 1e12))
    for estimator in (gamma_laplus, lognormal_laplus, gamma_laplus_importance_sampling):
        z = estimator(target)
        assert math.isnan(z.log_evidence) and not z.trusted and any("rescale it" in text for text in z.warnings)


@pytest.mark.calibration
@pytest.mark.parametrize(
    "estimator", [gamma_laplus, beta_prime_laplus, lognormal_laplus, gamma_laplus_importance_sampling]
)
def test_a_mode_of_another_target_is_refused(estimator):
    one = torch.ones((), dtype=DOUBLE)
    target, wider = alone(dist.Gamma(3 * one, one)), alone(dist.Gamma(3 * one, one).expand([3]).to_event(1))
    fresh, again = (alone(dist.Gamma(3 * one, one)) for _ in range(2))  # of which no search knows anything yet
    mode = PositiveDensity(target).mode()
    for other, given, error in (
        (wider, mode, ShapeError),
        (alone(dist.Gamma(3 * one, one), offset=-50.0), mode, SettingsError),
        (target, find_mode(target), SettingsError),
    ):
        with pytest.raises(error, match="mode"):
            estimator(other, mode=given)
    own, searched = estimator(fresh, mode=mode), estimator(again)
    assert own.log_evidence == searched.log_evidence
    assert own.num_evaluations == searched.num_evaluations + 1  # of the look at the mode


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan, "a"])
def test_a_share_of_the_draws_is_below_one(share):
    with pytest.raises(SettingsError, match="tail_share"):
        gamma_laplus_importance_sampling(exact.get("three_taxon_tree").target(), tail_share=share)


@pytest.mark.calibration
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
    assert math.isfinite(z.log_evidence) or any("no distribution of this family" in warning for warning in z.warnings)


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


@pytest.mark.calibration
def test_same_seed_same_result_and_no_global_is_touched():
    target = exact.get("three_taxon_tree").target()
    first, again, other = (gamma_laplus_importance_sampling(target, 200, seed=s).log_evidence for s in (0, 0, 1))
    assert first == again != other
