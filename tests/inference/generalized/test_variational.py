"""Generalized variational inference: three choices, each against its exact optimum between normal laws."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy.integrate import quad
from scipy.stats import norm
from torch.distributions import kl_divergence

import bayeskit as bk
from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.inference.generalized.variational import (
    GVI,
    Alpha,
    KullbackLeibler,
    NormalLaw,
    RenyiDivergence,
    ReverseKullbackLeibler,
    SquaredWasserstein,
)
from bayeskit.inference.objectives import ELBO

X = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
PRECISE = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 200}
WEIGHT, PRIOR_SD = 0.5, 1.0  # the Gibbs posterior is N(1.4, 0.4)
ALL = [
    KullbackLeibler(),
    KullbackLeibler(weight=2.5),
    ReverseKullbackLeibler(weight=0.7),
    RenyiDivergence(0.5),
    RenyiDivergence(0.2, weight=5.0),
    RenyiDivergence(1.5),
    Alpha(0.5),
    Alpha(2.0, weight=0.5),
    SquaredWasserstein(weight=0.3),
]


class Nodes(dist.Normal):
    """A normal law whose draws are one standard deviation away, left and right: two integrate squares exactly."""

    def rsample(self, sample_shape=()):
        sign = torch.ones(self.batch_shape, dtype=self.loc.dtype)
        sign.view(-1)[1::2] = -1
        return self.loc + self.scale * sign

    def expand(self, batch_shape, _instance=None):
        return Nodes(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


class Guide(torch.nn.Module):
    def __init__(self, mean=0.5, log_sd=-0.5, law=Nodes):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.tensor(mean, dtype=torch.float64))
        self.log_sd = torch.nn.Parameter(torch.tensor(log_sd, dtype=torch.float64))
        self.law = law

    def forward(self):
        return pyro.sample("theta", self.law(self.mean, self.log_sd.exp()))


def gibbs():
    return GibbsPosterior(dist.Normal(0.0, PRIOR_SD), losses.HalfSquared(), X, weight=WEIGHT)


def divergence_by_quadrature(divergence, mean, sd):
    """Integrate the definition, between N(mean, sd^2) and N(0, PRIOR_SD^2); Wasserstein's by quantiles."""
    q, p = norm(mean, sd), norm(0, PRIOR_SD)

    def ratio(t, power):
        return math.exp(power * q.logpdf(t) + (1 - power) * p.logpdf(t))

    match divergence:
        case KullbackLeibler():
            value = quad(lambda t: q.pdf(t) * (q.logpdf(t) - p.logpdf(t)), -15, 15, **PRECISE)[0]
        case ReverseKullbackLeibler():
            value = quad(lambda t: p.pdf(t) * (p.logpdf(t) - q.logpdf(t)), -15, 15, **PRECISE)[0]
        case RenyiDivergence(alpha=alpha):
            value = math.log(quad(ratio, -30, 30, args=(alpha,), **PRECISE)[0]) / (alpha - 1)
        case Alpha(alpha=alpha):
            value = (quad(ratio, -30, 30, args=(alpha,), **PRECISE)[0] - 1) / (alpha * (alpha - 1))
        case SquaredWasserstein():
            value = quad(lambda t: norm.pdf(t) * (mean + sd * t - PRIOR_SD * t) ** 2, -15, 15, **PRECISE)[0]
    return divergence.weight * value


def exact_objective(divergence, mean, sd):
    expected = WEIGHT / 2 * float(((X - mean) ** 2).sum() + len(X) * sd**2)
    return expected + divergence_by_quadrature(divergence, mean, sd)


def slopes(divergence, mean, log_sd, step=1e-4):
    """Differentiate the exact objective, to the fourth power of the step."""

    def at(a, b):
        return exact_objective(divergence, mean + a, math.exp(log_sd + b))

    return np.array([(8 * (at(*d) - at(*-d)) - (at(*2 * d) - at(*-2 * d))) / (12 * step) for d in step * np.eye(2)])


def normal_law(mean, sd):
    return NormalLaw(torch.tensor([mean], dtype=torch.float64), torch.tensor([[sd]], dtype=torch.float64))


@pytest.mark.parametrize("divergence", ALL)
def test_closed_forms_against_the_definition_by_quadrature(divergence):
    found = float(divergence.between(normal_law(0.7, 0.6), normal_law(0.0, PRIOR_SD)))
    assert found == pytest.approx(divergence_by_quadrature(divergence, 0.7, 0.6), abs=1e-8)
    assert float(divergence.between(normal_law(0.0, PRIOR_SD), normal_law(0.0, PRIOR_SD))) == pytest.approx(
        0, abs=1e-12
    )


def random_laws():
    generator = np.random.default_rng(3)
    factors = [np.linalg.cholesky(a @ a.T + np.eye(3)) for a in generator.standard_normal((2, 3, 3))]
    return [NormalLaw(torch.tensor(generator.standard_normal(3)), torch.tensor(f)) for f in factors]


def test_several_dimensions():
    q, p = random_laws()
    first, second = (dist.MultivariateNormal(g.mean, scale_tril=g.scale_tril) for g in (q, p))
    exact = float(kl_divergence(first, second))
    assert float(KullbackLeibler().between(q, p)) == pytest.approx(exact, abs=1e-12)
    assert float(ReverseKullbackLeibler().between(p, q)) == pytest.approx(exact, abs=1e-12)
    # Renyi's of order a and 1 - a are multiples of one another, with the arguments exchanged; at one it is KL's.
    assert float(RenyiDivergence(0.3).between(q, p)) == pytest.approx(
        float(RenyiDivergence(0.7).between(p, q)) * 0.3 / 0.7, abs=1e-12
    )
    around = [float(RenyiDivergence(1 + e).between(q, p)) for e in (-1e-4, 1e-4)]
    assert sum(around) / 2 == pytest.approx(exact, abs=1e-6) and around[0] < exact < around[1]
    assert float(RenyiDivergence(1.0).between(q, p)) == float(KullbackLeibler().between(q, p))
    # The distance of Wasserstein by roots of the covariances themselves.
    values, vectors = np.linalg.eigh(q.covariance.numpy())
    root = vectors * np.sqrt(values) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ p.covariance.numpy() @ root)).sum()
    traces = float(q.covariance.trace() + p.covariance.trace())
    exact = float((q.mean - p.mean).square().sum()) + traces - 2 * cross
    assert float(SquaredWasserstein().between(q, p)) == pytest.approx(exact, abs=1e-12)


def test_a_guide_too_wide_for_its_order_is_infinitely_far():
    assert math.isinf(float(RenyiDivergence(2.0).between(normal_law(0.0, 1.5), normal_law(0.0, 1.0))))
    assert math.isinf(float(Alpha(2.0).between(normal_law(0.0, 1.5), normal_law(0.0, 1.0))))


@pytest.mark.parametrize("divergence", ALL)
def test_estimates_by_draws(divergence, limit):
    if isinstance(divergence, SquaredWasserstein):
        pytest.raises(GuideError, divergence.of_draws, torch.zeros(3), None)
        return
    q, p = dist.Normal(torch.tensor(0.3, dtype=torch.float64), 0.8), dist.Normal(0.0, 1.0)
    generator = np.random.default_rng(0)
    draws = torch.tensor(0.3 + 0.8 * generator.standard_normal((200_000, 20)))
    ratio = q.log_prob(draws) - p.log_prob(draws)
    values = divergence.of_draws(ratio, None)  # twenty estimates; the bias of a log of a mean is far below their error
    exact = float(divergence.between(normal_law(0.3, 0.8), normal_law(0.0, 1.0)))
    z = (values.mean() - exact) / (values.std() / math.sqrt(len(values)))
    assert abs(float(z)) < 1.6 * limit(len(ALL))  # twenty estimates: Student's t rather than normal


def optimum(objective, posterior, guide):
    """Minimise a deterministic objective."""
    module = objective(posterior, guide)
    search = torch.optim.LBFGS(module.parameters(), max_iter=300, tolerance_grad=1e-12, tolerance_change=1e-15,
                               line_search_fn="strong_wolfe")  # fmt: skip

    def closure():
        search.zero_grad()
        loss = module()
        loss.backward()
        return loss

    search.step(closure)
    return float(guide.mean.detach()), float(guide.log_sd.detach().exp())


@pytest.mark.parametrize("divergence", ALL)
def test_optimum_of_squared_loss(divergence):
    mean, sd = optimum(GVI(divergence, num_particles=2), gibbs(), Guide())
    found = GVI(divergence, num_particles=2).loss(gibbs(), Guide(mean, math.log(sd)))
    assert found == pytest.approx(exact_objective(divergence, mean, sd), abs=1e-8)
    assert np.abs(slopes(divergence, mean, math.log(sd))).max() < 1e-7
    around = [(mean + a, math.log(sd) + b) for a, b in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01))]
    assert all(exact_objective(divergence, m, math.exp(s)) > found for m, s in around)


def test_kullback_and_leibler_give_the_gibbs_posterior_and_a_weight_the_tempered_one():
    mean, sd = optimum(GVI(num_particles=2), gibbs(), Guide())
    assert (mean, sd**2) == pytest.approx((1.4, 0.4), abs=1e-7)
    rate = WEIGHT / 2.5
    mean, sd = optimum(GVI(KullbackLeibler(weight=2.5), num_particles=2), gibbs(), Guide())
    assert (mean, sd**2) == pytest.approx((7 * rate / (1 + 3 * rate), 1 / (1 + 3 * rate)), abs=1e-7)


class WrongRenyi(RenyiDivergence):
    """With half of the guide's own volume."""

    def between(self, guide, prior):
        return super().between(guide, prior) + guide.log_determinant / 4


def test_mutation_half_a_volume_moves_the_optimum():
    mean, sd = optimum(GVI(WrongRenyi(0.5), num_particles=2), gibbs(), Guide())
    assert np.abs(slopes(RenyiDivergence(0.5), mean, math.log(sd))).max() > 0.1


def gradients(objective, guide, count):
    module, found = objective(gibbs(), guide), []
    for _ in range(count):
        module.zero_grad()
        module().backward()
        found.append([float(p.grad) for p in guide.parameters()])
    return np.array(found)


@pytest.mark.parametrize("divergence", [KullbackLeibler(), RenyiDivergence(0.5)])
def test_gradients_of_ordinary_draws(divergence, limit):
    mean, log_sd = 0.9, -0.8

    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = gradients(GVI(divergence, num_particles=64), Guide(mean, log_sd, dist.Normal), 100)
    z = (found.mean(0) - slopes(divergence, mean, log_sd)) / (found.std(0) / math.sqrt(len(found)))
    assert np.abs(z).max() < limit(4)


def two_sites():
    scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
    return pyro.sample("place", dist.Normal(0.5, 2.0)) + 0.3 * scale


def test_automatic_guides_and_independent_sites_have_the_closed_form():
    posterior = GibbsPosterior(two_sites, losses.HalfSquared(), X, weight=WEIGHT)
    full, factorised = AutoMultivariateNormal(posterior, init_scale=0.6), AutoNormal(posterior, init_scale=0.6)
    for guide in (full, factorised):
        guide()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            loss = GVI(RenyiDivergence(0.5), num_particles=20_000).loss(posterior, guide)
            torch.manual_seed(2)
            near = GVI(KullbackLeibler(), num_particles=20_000).loss(posterior, guide)
        q, p = (
            centre_of(guide),
            NormalLaw(torch.tensor([0.0, 0.5]).double(), torch.diag(torch.tensor([1.0, 2.0]).double())),
        )
        gap = float(KullbackLeibler().between(q, p) - RenyiDivergence(0.5).between(q, p))
        assert near - loss == pytest.approx(gap, abs=1e-5)  # the same draws: what is left is single precision


def centre_of(guide):
    if isinstance(guide, AutoMultivariateNormal):
        law = guide.get_posterior()
        return NormalLaw(law.loc.detach().double(), law.scale_tril.detach().double())
    values = {name: (guide.locs.__getattr__(name), guide.scales.__getattr__(name)) for name in ("scale", "place")}
    loc, scale = (torch.stack([v[i].detach().double().reshape(()) for v in values.values()]) for i in (0, 1))
    return NormalLaw(loc, torch.diag(scale))


def test_a_transformed_parameter_is_estimated_by_draws():
    """An automatic guide of a positive parameter is no normal law; with Kullback and Leibler's this is the ELBO."""
    posterior = GibbsPosterior(dist.Gamma(torch.tensor(2.0).double(), 1.0), losses.HalfSquared(), X, weight=WEIGHT)
    guide, found = AutoNormal(posterior, init_scale=0.3), []
    guide()
    for objective in (
        GVI(num_particles=50),
        ELBO(num_particles=50),
        GVI(RenyiDivergence(1.001), 50),
        GVI(RenyiDivergence(0.999), 50),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            found.append(objective.loss(posterior, guide))
    assert found[0] == pytest.approx(found[1], abs=1e-6)  # parameters in single precision
    assert sum(found[2:]) / 2 == pytest.approx(found[0], abs=1e-4) and found[3] < found[0] < found[2]


def chain():
    first = pyro.sample("first", dist.Normal(0.0, 1.0))
    return pyro.sample("second", dist.Normal(first, 1.0))


def chain_guide():
    like = torch.zeros((), dtype=torch.float64)
    pyro.sample("first", dist.Normal(like + 0.2, 0.7))
    pyro.sample("second", dist.Normal(like + 0.4, 0.6))


def test_chains_of_sites_are_estimated_by_draws(limit):
    posterior = GibbsPosterior(chain, losses.HalfSquared(), X, weight=WEIGHT)
    expected = WEIGHT / 2 * float(((X - 0.4) ** 2).sum() + 3 * 0.36)
    guide = NormalLaw(torch.tensor([0.2, 0.4]).double(), torch.diag(torch.tensor([0.7, 0.6]).double()))
    prior = NormalLaw(torch.zeros(2).double(), torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double())
    for divergence in (KullbackLeibler(), RenyiDivergence(0.5), Alpha(0.5)):
        with torch.random.fork_rng():
            torch.manual_seed(4)
            found = np.array([GVI(divergence, num_particles=4000).loss(posterior, chain_guide) for _ in range(20)])
        exact = expected + float(divergence.between(guide, prior))
        z = (found.mean() - exact) / (found.std(ddof=1) / math.sqrt(len(found)))
        assert abs(z) < 1.6 * limit(4)
    # As independent sites the same laws would be nearer: what a closed form for each site by itself would say.
    wrong = NormalLaw(torch.zeros(2).double(), torch.eye(2).double())
    assert abs(float(RenyiDivergence(0.5).between(guide, wrong) - RenyiDivergence(0.5).between(guide, prior))) > 0.02
    with pytest.raises(GuideError, match="by draws"):
        GVI(SquaredWasserstein()).loss(posterior, chain_guide)
    with pytest.raises(SettingsError, match="raise num_particles"):
        GVI(RenyiDivergence(0.5), num_particles=1).loss(posterior, chain_guide)


def test_bk_fit_and_svi_take_it(limit):
    posterior = gibbs()
    guide = Guide(law=dist.Normal)
    bk.fit(posterior, guide, GVI(num_particles=64), None, num_steps=400, seed=0, progress=False,
           optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
           schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 400))  # fmt: skip
    # As many draws as in the fifty steps over which the falling rate averages, at the optimum N(1.4, 0.4).
    error = limit(2) / math.sqrt(50 * 64)
    assert abs(float(guide.mean.detach()) - 1.4) < error * math.sqrt(0.4)
    assert abs(float(guide.log_sd.detach()) - 0.5 * math.log(0.4)) < error / math.sqrt(2)
    auto = AutoNormal(posterior)
    svi = pyro.infer.SVI(
        posterior, auto, pyro.optim.Adam({"lr": 0.05}), loss=GVI(RenyiDivergence(0.5), num_particles=4)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert all(math.isfinite(svi.step()) for _ in range(5))


def test_minibatches_scale_the_loss_and_not_the_divergence():
    data = torch.cat([X, X])
    posterior = GibbsPosterior(dist.Normal(0.0, PRIOR_SD), losses.HalfSquared(), data, weight=WEIGHT)
    whole = GVI(RenyiDivergence(0.5), num_particles=2).loss(posterior, Guide())
    part = GVI(RenyiDivergence(0.5), num_particles=2).loss(posterior, lambda *_: Guide()(), X)
    assert part == pytest.approx(whole, abs=1e-12)


def test_bad_settings():
    with pytest.raises(SettingsError, match="write Renyi"):
        GVI(RenyiDivergence)
    for bad in (
        lambda: RenyiDivergence(-0.5),
        lambda: Alpha(1.0),
        lambda: KullbackLeibler(weight=0.0),
        lambda: Alpha("one"),
    ):
        with pytest.raises(SettingsError):
            bad()
