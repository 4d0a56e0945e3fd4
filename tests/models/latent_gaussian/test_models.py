"""Models with latent Gaussian fields against closed forms, quadrature and published posteriors."""

import math
import os

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, multivariate_t, nbinom, norm, poisson

import bayeskit as bk
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.latent_gaussian import (
    AreaGraph,
    BinomialLikelihood,
    DiseaseMap,
    GaussianProcessModel,
    NegativeBinomialLikelihood,
    NormalLikelihood,
    PoissonLikelihood,
    RandomEffects,
    RandomWalkModel,
    bym2,
    matern_32,
    matern_52,
    random_walk,
    scottish_lip_cancer,
    squared_exponential,
)

FLOAT = torch.float64
SEED = 5 + int(os.environ.get("BAYESKIT_SEED_SHIFT", "0"))
PLACES = torch.tensor([0.0, 0.4, 0.9, 1.3, 2.2, 2.5, 3.1], dtype=FLOAT)
HEIGHTS = torch.tensor([0.3, 0.9, 1.4, 0.8, -0.7, -0.9, 0.1], dtype=FLOAT)
ONE = torch.eye(7, dtype=FLOAT)
COUNTS = torch.tensor([1.0, 4, 6, 3, 0, 0, 2], dtype=FLOAT)


def rows(target, count=4):
    return 0.5 * torch.randn(count, target.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


def parts(target, u, *names):
    """Return the values of sites at rows of unconstrained vectors."""
    values = target.constrain(u)
    return [values[name] for name in names]


@pytest.mark.calibration
@pytest.mark.parametrize("kernel", [squared_exponential, matern_32, matern_52])
def test_a_process_with_normal_observations_has_its_marginal_likelihood(kernel):
    model = GaussianProcessModel(PLACES, HEIGHTS, NormalLikelihood(), kernel=kernel, jitter=1e-4)
    target = bk.marginalize(bk.Target.from_pyro(model), ["field"])
    u = rows(target)
    columns = parts(target, u, "intercept", "scale", "length", "noise")
    r = (PLACES[:, None] - PLACES).abs()
    for i, (intercept, scale, length, noise) in enumerate(zip(*columns, strict=True)):
        k = scale**2 * (kernel(r / length) + 1e-4 * ONE) + noise**2 * ONE
        exact = multivariate_normal(cov=k.numpy()).logpdf((HEIGHTS - intercept).numpy())
        assert math.isclose(float(target.log_likelihood(u)[i]), exact, rel_tol=1e-8, abs_tol=1e-8)


@pytest.mark.calibration
@pytest.mark.parametrize("order", [1, 2])
def test_a_walk_with_normal_observations_has_its_marginal_likelihood(order):
    model = RandomWalkModel(HEIGHTS, order, NormalLikelihood())
    target = bk.marginalize(bk.Target.from_pyro(model), ["field"])
    u = rows(target)
    intercept, scale, noise = parts(target, u, "intercept", "scale", "noise")
    slope = parts(target, u, "coefficients")[0][:, 0] if order == 2 else torch.zeros(4)
    for i in range(4):
        mean = intercept[i] + slope[i] * torch.linspace(-1, 1, 7, dtype=FLOAT)
        k = random_walk(order, 7, scale[i]).covariance_matrix + noise[i] ** 2 * ONE
        exact = multivariate_normal(cov=k.numpy()).logpdf((HEIGHTS - mean).numpy())
        assert math.isclose(float(target.log_likelihood(u)[i]), exact, rel_tol=1e-8, abs_tol=1e-8)


def test_effects_with_normal_observations_have_their_marginal_likelihood():
    groups = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    model = RandomEffects(groups, HEIGHTS, NormalLikelihood(), PLACES)
    target = bk.marginalize(bk.Target.from_pyro(model), ["effect"])
    u = rows(target)
    same = (groups[:, None] == groups).double()
    columns = parts(target, u, "intercept", "coefficients", "scale", "noise")
    for i, (intercept, coefficients, scale, noise) in enumerate(zip(*columns, strict=True)):
        mean = intercept + coefficients[0] * PLACES
        k = scale**2 * same + noise**2 * ONE
        exact = multivariate_normal(cov=k.numpy()).logpdf((HEIGHTS - mean).numpy())
        assert math.isclose(float(target.log_likelihood(u)[i]), exact, rel_tol=1e-8, abs_tol=1e-8)


def test_a_disease_map_is_the_density_that_its_documentation_gives():
    expected = torch.tensor([1.0, 2, 3, 2, 1.5, 0.7, 1], dtype=FLOAT)
    model = DiseaseMap(COUNTS, expected, [(0, 1), (1, 2), (2, 3), (4, 5)], PLACES)
    target = bk.Target.from_pyro(model)
    u = rows(target)
    names = ("intercept", "coefficients", "scale", "proportion", "field")
    columns = parts(target, u, *names)
    log_prior, log_likelihood = target.log_prior(u), target.log_likelihood(u)
    for i, (intercept, coefficients, scale, proportion, field) in enumerate(zip(*columns, strict=True)):
        rate = expected * (intercept + coefficients[0] * PLACES + field).exp()
        exact = poisson(rate.numpy()).logpmf(COUNTS.numpy()).sum()
        assert math.isclose(float(log_likelihood[i]), exact, rel_tol=1e-10)
        prior = norm(0, 10).logpdf(float(intercept)) + norm(0, 10).logpdf(float(coefficients[0]))
        prior += float(dist.Exponential(-math.log(0.01)).log_prob(scale) + model.proportion.log_prob(proportion))
        prior += float(bym2(model.graph, scale, proportion).log_prob(field))
        jacobian = float(scale.log() + proportion.log() + (1 - proportion).log())
        assert math.isclose(float(log_prior[i]), prior + jacobian, rel_tol=1e-7)


@pytest.mark.parametrize(
    ("likelihood", "exact"),
    [
        (PoissonLikelihood(0.3), lambda eta, y: poisson(math.exp(eta + 0.3)).pmf(y)),
        (BinomialLikelihood(9), lambda eta, y: math.comb(9, y) * math.exp(y * eta) / (1 + math.exp(eta)) ** 9),
        (
            NegativeBinomialLikelihood(dist.Delta(torch.tensor(0.5, dtype=FLOAT)), 0.3),
            lambda eta, y: nbinom(2, 1 / (1 + 0.5 * math.exp(eta + 0.3))).pmf(y),
        ),
    ],
)
def test_likelihoods_are_those_of_scipy(likelihood, exact):
    eta, y = torch.tensor([-1.3, 0.2, 2.0], dtype=FLOAT), torch.tensor([0.0, 2, 7], dtype=FLOAT)
    logs = [math.log(exact(float(e), int(k))) for e, k in zip(eta, y, strict=True)]
    assert torch.allclose(likelihood(eta).log_prob(y), torch.tensor(logs, dtype=FLOAT), rtol=1e-10)


def test_rates_that_nearly_vanish_keep_the_curvature_of_their_density():
    eta = torch.tensor(-40.0, dtype=FLOAT, requires_grad=True)
    (slope,) = torch.autograd.grad(PoissonLikelihood()(eta).log_prob(torch.tensor(3.0)), eta, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, eta)
    assert math.isclose(float(curvature), -math.exp(-40), rel_tol=1e-12)


def test_effects_of_counts_integrate_to_their_likelihood():
    y = torch.tensor([2.0, 0, 5], dtype=FLOAT)
    model = RandomEffects(torch.arange(3), y, PoissonLikelihood())
    target = bk.marginalize(bk.Target.from_pyro(model), ["effect"])
    u = torch.tensor([[0.4, math.log(0.8)]], dtype=FLOAT)
    exact = sum(
        math.log(quad(lambda z, k=k: norm.pdf(z, 0, 0.8) * poisson.pmf(k, math.exp(0.4 + z)), -8, 8)[0])
        for k in (2, 0, 5)
    )
    # Laplace's approximation errs by about 0.01 nats a group; one without a determinant, by 0.3 and more.
    assert abs(float(target.log_likelihood(u)[0]) - exact) < 0.03


@pytest.mark.calibration
@pytest.mark.parametrize(
    "model",
    [
        GaussianProcessModel(PLACES, COUNTS, PoissonLikelihood()),
        GaussianProcessModel(torch.stack([PLACES, PLACES.sin()], 1), COUNTS, NegativeBinomialLikelihood()),
        RandomWalkModel(COUNTS, 1, BinomialLikelihood(8)),
        RandomWalkModel(COUNTS, 2, lambda eta: dist.Poisson(eta.exp())),
        DiseaseMap(COUNTS, COUNTS + 1, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_fields_of_all_models_are_integrated_out(model):
    target = bk.marginalize(bk.Target.from_pyro(model), ["field"])
    u = torch.zeros(3, target.dim, dtype=FLOAT)
    assert target.log_density(u).isfinite().all() and target.num_failures == 0
    assert "field" not in {site.name for site in target.sites}


def published(counts, expected, x, inverse, connected):
    """Sample the map of the GeoBUGS manual: an intrinsic autoregression, zero on islands, of gamma precision."""
    intercept = pyro.sample("alpha0", dist.Normal(0.0, 1000.0))
    slope = pyro.sample("alpha1", dist.Normal(0.0, math.sqrt(1e5)))
    tau = pyro.sample("tau", dist.Gamma(0.5, 0.0005))
    covariance = (inverse + 1e-6 * torch.eye(len(inverse))) / tau
    field = pyro.sample("b", dist.MultivariateNormal(torch.zeros(len(inverse)), covariance_matrix=covariance))
    whole = torch.zeros(56).index_put((connected,), field)
    with pyro.plate("areas", 56):
        pyro.sample("y", PoissonLikelihood(expected.log())(intercept + slope * x + whole), obs=counts)


def posterior(target, functions, num_draws=1000):
    """Return means, standard deviations and errors of the means, by importance sampling around the mode."""

    def below(x):
        value, gradient = target.value_and_grad(torch.as_tensor(x, dtype=FLOAT).unsqueeze(0))
        return -float(value[0]), -gradient[0].numpy()

    best = minimize(below, np.zeros(target.dim), jac=True, method="BFGS")
    mode, step = torch.from_numpy(best.x), 1e-4 * torch.eye(target.dim, dtype=FLOAT)
    slopes = target.value_and_grad(torch.cat([mode + step, mode - step]))[1]
    up, down = slopes.split(target.dim)
    curvature = (down - up) / 2e-4
    root = torch.linalg.cholesky(torch.linalg.inv(0.5 * (curvature + curvature.mT)))
    law = multivariate_t(shape=np.eye(target.dim), df=5)
    x = law.rvs(num_draws, random_state=SEED)
    u = mode + 1.1 * torch.from_numpy(x) @ root.mT
    weights = (target.log_density(u) - torch.from_numpy(law.logpdf(x))).softmax(0)
    found = {}
    for name, values in functions(target.constrain(u)).items():
        mean = weights @ values
        spread = (weights @ (values - mean).square()).sqrt()
        found[name] = (float(mean), float(spread), float((weights * (values - mean)).norm()))
    return found


@pytest.mark.calibration
def test_scotland_has_the_posterior_of_the_geobugs_manual(limit):
    """The manual prints 20,000 draws of OpenBUGS, with their Monte Carlo errors."""
    data = scottish_lip_cancer()
    graph = AreaGraph(56, data.edges)
    (connected,) = torch.where(graph.precision.diagonal() > 0)
    inverse = torch.linalg.pinv(graph.precision[connected][:, connected], rtol=1e-10)
    model = bk.Target.from_pyro(
        published, data.counts, data.expected, data.outdoor_work / 10, inverse=inverse, connected=connected
    )
    target = bk.marginalize(model, ["b"])
    found = posterior(target, lambda v: {"alpha0": v["alpha0"], "alpha1": v["alpha1"], "sigma": v["tau"].rsqrt()})
    manual = {
        "alpha0": (-0.3006, 0.1155, 0.002089),
        "alpha1": (0.4474, 0.1204, 0.002487),
        "sigma": (0.6664, 0.1198, 0.002071),
    }
    for name, (mean, spread, error) in manual.items():
        # Laplace's approximation moves means by a few hundredths of a standard deviation.
        assert abs(found[name][0] - mean) < limit(6) * math.hypot(found[name][2], error) + 0.05 * spread
        assert abs(found[name][1] / spread - 1) < 0.1


@pytest.mark.long
def test_scotland_has_the_posterior_of_r_inla(limit):
    """Values of R-INLA 25.10 stand in the tests of INLA.jl, for standardised work and the same priors.

    Its graph is made from polygons, and may have a few other borders.
    """
    data = scottish_lip_cancer()
    x = (data.outdoor_work - data.outdoor_work.mean()) / data.outdoor_work.std()
    model = DiseaseMap(
        data.counts, data.expected, data.edges, x, intercept_scale=1000.0, coefficient_scale=math.sqrt(1000)
    )
    target = bk.marginalize(bk.Target.from_pyro(model), ["field"])
    found = posterior(
        target,
        lambda v: {
            "intercept": v["intercept"],
            "work": v["coefficients"][:, 0],
        },
    )
    for name, mean in {"intercept": 0.07776, "work": 0.31818}.items():
        assert abs(found[name][0] - mean) < limit(2) * found[name][2] + 0.2 * found[name][1]


def test_bad_data_are_named():
    edges, pois = [(0, 1), (1, 2)], PoissonLikelihood()
    bad = [
        (lambda: DiseaseMap([1.0, -1, 0], [1.0, 1, 1], edges), DataError, "counts must be whole numbers, not negative"),
        (lambda: DiseaseMap([1.5, 1, 0], [1.0, 1, 1], edges), DataError, "counts must be whole numbers"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 0, 1], edges), DataError, "expected cases must be positive"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1], edges), ShapeError, r"expected has shape \(2,\); give \(3,\)"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1, 1], [(0, 3)]), DataError, "names no area"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1, 1], AreaGraph(4, edges)), ShapeError, "the graph has 4 areas"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1, 1], []), SettingsError, "at least one edge"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1, 1], edges, [1.0, 2]), ShapeError, "covariates has shape"),
        (lambda: DiseaseMap([1.0, 1, 0], [1.0, 1, 1], edges, [1.0, 2, math.nan]), DataError, "1 of 3 .* covariates"),
        (lambda: GaussianProcessModel([0.0, 0, 0], [1.0, 1, 1], pois), DataError, "all places of x are the same"),
        (lambda: GaussianProcessModel([0.0, 1], [1.0, 1, 1], pois), ShapeError, "x has shape"),
        (lambda: GaussianProcessModel(PLACES, COUNTS, PoissonLikelihood), SettingsError, "likelihood is"),
        (lambda: GaussianProcessModel(PLACES, COUNTS, pois, jitter=-1.0), SettingsError, "jitter"),
        (lambda: RandomWalkModel(COUNTS, 3, pois), SettingsError, "order must be 1 or 2"),
        (lambda: RandomWalkModel(COUNTS[:2], 2, pois), SettingsError, "size"),
        (lambda: RandomWalkModel(COUNTS / 0, 2, pois), DataError, "7 of 7 values of y are not finite"),
        (lambda: RandomEffects([0, -1, 1], [1.0, 1, 1], pois), DataError, "groups must be whole numbers"),
        (lambda: RandomEffects([0, 1], [1.0, 1, 1], pois), ShapeError, "groups has shape"),
        (lambda: RandomEffects([0, 1], [1.0, 1], pois, intercept_scale=0.0), SettingsError, "intercept_scale"),
    ]
    for make, error, message in bad:
        with pytest.raises(error, match=message):
            make()


def test_negative_counts_are_outside_of_a_count_likelihood():
    with pytest.raises(bk.errors.BayeskitError, match="'y'"):
        bk.Target.from_pyro(RandomWalkModel(COUNTS - 1, 1, PoissonLikelihood()))
