"""Pima and Neal's funnel: densities written a second time, evidences integrated a second way."""

import math

import numpy as np
import pyro
import pytest
import torch
from scipy import stats
from scipy.integrate import quad

from bayeskit import exact
from bayeskit.errors import DataError, SettingsError
from bayeskit.exact import neals_funnel, pima


def log_joint(case, sites):
    """Log prior plus log likelihood of the Pyro model at a batch of values."""

    def one(values):
        conditioned = pyro.poutine.condition(case.model, data=values)
        return pyro.poutine.trace(conditioned).get_trace(*case.args).log_prob_sum()

    with pyro.validation_enabled(False):
        return torch.func.vmap(one, chunk_size=4096)(sites)


# ---------------------------------------------------------------------------------------------------------
# Pima


def pima_density(case, b):
    design, response, sd = (argument.numpy() for argument in case.args)
    logits = b @ design.T
    likelihood = -np.logaddexp(0, -(2 * response - 1) * logits).sum(-1)
    return likelihood + stats.norm.logpdf(b, 0, sd).sum(-1)


@pytest.mark.parametrize("model", ["m1", "m2"])
def test_pima_is_the_model_defined(model):
    case = pima(model)
    b = np.random.default_rng(0).standard_normal((20, case.args[0].shape[1]))
    np.testing.assert_allclose(log_joint(case, {"b": torch.tensor(b)}), pima_density(case, b), rtol=1e-11)


def test_pima_data_are_the_known_ones():
    first, second = (pima(model).args for model in ("m1", "m2"))
    assert first[0].shape == (532, 5) and second[0].shape == (532, 6)
    assert second[0][:, :5].equal(first[0]) and second[1].equal(first[1])
    assert set(first[1].tolist()) == {0.0, 1.0} and int(first[1].sum()) == 177
    covariates = second[0][:, 1:]
    torch.testing.assert_close(covariates.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(covariates.std(0), torch.ones(5, dtype=torch.float64), atol=1e-12, rtol=0)


def hermite(case, num_nodes, change=0.0):
    """Product Gauss-Hermite about the stated moments over the Pyro density, with its evidence, mean and covariance."""
    mean, covariance = case.posterior_mean["b"], case.posterior_covariance["b"]
    factor = torch.linalg.cholesky(covariance)
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    log_weights = np.log(weights / math.sqrt(2 * math.pi))
    grid, log_weight = np.zeros((1, 0)), np.zeros(1)
    for _ in range(len(mean)):
        grid = np.hstack([grid.repeat(num_nodes, 0), np.tile(nodes, len(grid))[:, None]])
        log_weight = (log_weight[:, None] + log_weights).ravel()
        # What is left out weighs less than the tolerance below.
        grid, log_weight = grid[log_weight > -24], log_weight[log_weight > -24]
    z = torch.tensor(grid)
    b = mean + z @ factor.T
    normal = -0.5 * z.square().sum(-1) - 0.5 * len(mean) * math.log(2 * math.pi) - factor.diagonal().log().sum()
    log_mass = log_joint(case, {"b": b}) - normal + torch.tensor(log_weight) + change
    total = log_mass.logsumexp(0)
    mass = (log_mass - total).exp()
    centre = mass @ b
    return float(total), centre, ((b - centre).T * mass) @ (b - centre)


@pytest.mark.parametrize("model", ["m1", "m2"])
def test_pima_evidence_and_moments_by_quadrature_over_the_pyro_density(model):
    """In other coordinates than those of the stated answer: about the mean, scaled by the covariance."""
    case = pima(model)
    log_evidence, mean, covariance = hermite(case, 6)
    assert case.log_evidence == pytest.approx(log_evidence, abs=5e-6)
    torch.testing.assert_close(case.posterior_mean["b"], mean, atol=2e-6, rtol=0)
    torch.testing.assert_close(case.posterior_covariance["b"], covariance, atol=2e-6, rtol=0)
    published, error = {"m1": (-257.23232, 0.00030), "m2": (-259.85755, 0.00032)}[model]
    assert abs(case.log_evidence - published) < 3 * error


def test_a_dropped_constant_of_pima_is_caught():
    case = pima("m1")
    log_evidence, _, _ = hermite(case, 5, change=2.5 * math.log(2 * math.pi))
    assert abs(log_evidence - case.log_evidence) > 1


def test_pima_by_importance_sampling(limit):
    """From a Student-t fitted to the stated moments, over the density written with SciPy."""
    case, df = pima("m1"), 12.0
    mean, covariance = case.posterior_mean["b"].numpy(), case.posterior_covariance["b"].numpy()
    proposal = stats.multivariate_t(mean, covariance * (df - 2) / df, df)
    b = proposal.rvs(6400, random_state=1)
    log_weights = pima_density(case, b) - proposal.logpdf(b)
    weights = np.exp(log_weights - case.log_evidence)
    assert abs(weights.mean() - 1) < limit() * weights.std() / 80
    assert weights.std() < 0.5


# ---------------------------------------------------------------------------------------------------------
# Neal's funnel


def test_the_funnel_is_the_model_defined():
    case = neals_funnel()
    generator = np.random.default_rng(0)
    v, x = generator.normal(0, 3, 20), generator.standard_normal((20, 9))
    expected = stats.norm.logpdf(v, 0, 3) + stats.norm.logpdf(x, 0, np.exp(v / 2)[:, None]).sum(-1)
    expected += stats.norm.logpdf(2.0, x[:, 0], 0.5)
    np.testing.assert_allclose(log_joint(case, {"v": torch.tensor(v), "x": torch.tensor(x)}), expected, rtol=1e-11)


SETTINGS = ({}, {"dim": 3, "measured": -0.7, "noise_sd": 1.3, "scale_sd": 1.0}, {"dim": 2, "noise_sd": 0.05})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_funnel_by_adaptive_quadrature(settings):
    case = neals_funnel(**settings)
    y, noise, scale = (float(argument) for argument in case.args[1:])

    def integral(function):
        def integrand(v):
            return function(v) * stats.norm.pdf(v, 0, scale) * stats.norm.pdf(y, 0, math.sqrt(math.exp(v) + noise**2))

        points = [-3.0, 0.0, 1.0, 2.0, 5.0]
        return quad(integrand, -13 * scale, 13 * scale, epsabs=0, epsrel=1e-11, limit=500, points=points)[0]

    evidence = integral(lambda v: 1.0)
    assert case.log_evidence == pytest.approx(math.log(evidence), abs=1e-9)
    moments = {
        "v": integral(lambda v: v),
        "v2": integral(lambda v: v * v),
        "x": integral(lambda v: y * math.exp(v) / (math.exp(v) + noise**2)),
        "x2": integral(
            lambda v: (
                math.exp(v) * noise**2 / (math.exp(v) + noise**2) + (y * math.exp(v) / (math.exp(v) + noise**2)) ** 2
            )
        ),
        "free": integral(math.exp),
    }
    moments = {name: value / evidence for name, value in moments.items()}
    mean, covariance = case.posterior_mean, case.posterior_covariance
    assert float(mean["v"]) == pytest.approx(moments["v"], rel=1e-8)
    assert float(covariance["v"]) == pytest.approx(moments["v2"] - moments["v"] ** 2, rel=1e-8)
    assert float(mean["x"][0]) == pytest.approx(moments["x"], rel=1e-8)
    assert float(covariance["x"][0, 0]) == pytest.approx(moments["x2"] - moments["x"] ** 2, rel=1e-8)
    if case.args[0].numel() > 1:
        assert float(mean["x"][1]) == 0
        assert float(covariance["x"][1, 1]) == pytest.approx(moments["free"], rel=1e-8)


@pytest.mark.parametrize(
    ("measured", "noise", "scale"),
    [(1000.0, 0.5, 0.3), (100.0, 0.5, 0.3), (1e4, 1e-3, 0.05), (3000.0, 100.0, 2.0), (1e6, 0.5, 3.0), (2.0, 1e-6, 3.0)],
)
def test_the_funnel_where_the_measurement_is_far_from_the_prior(measured, noise, scale):
    """Against a much finer grid, over all variances between nothing and the squared measurement."""
    case = neals_funnel(3, measured=measured, noise_sd=noise, scale_sd=scale)
    v = np.linspace(-15 * scale - 1, max(15 * scale, 2 * math.log(measured)) + 2 * scale**2 + 1, 100_001)
    log_mass = stats.norm.logpdf(v, 0, scale) + stats.norm.logpdf(measured, 0, np.sqrt(np.exp(v) + noise**2))
    mass = np.exp(log_mass - log_mass.max())
    assert case.log_evidence == pytest.approx(log_mass.max() + math.log(mass.sum() * (v[1] - v[0])), abs=1e-6)
    assert float(case.posterior_mean["v"]) == pytest.approx(mass @ v / mass.sum(), abs=1e-7)
    if (measured, scale) == (1000.0, 0.3):
        assert case.log_evidence == pytest.approx(-509.21008209, abs=1e-8)


def test_the_funnel_on_a_grid_over_the_pyro_density():
    """In two dimensions, where the grid is of the model itself; a dropped constant would show."""
    case = neals_funnel(2)
    v, x = torch.linspace(-20, 20, 401, dtype=torch.float64), torch.linspace(-4, 8, 601, dtype=torch.float64)
    a, b = (axis.reshape(-1) for axis in torch.meshgrid(v, x, indexing="ij"))
    # Below v = -6 the coordinate is narrower than the grid; the likelihood leaves 1e-4 of the mass there.
    inside = a > -5.99
    log_mass = log_joint(case, {"v": a[inside], "x": b[inside].unsqueeze(-1)}) + math.log(0.1 * 0.02)
    missing = quad(lambda v: stats.norm.pdf(v, 0, 3) * stats.norm.pdf(2, 0, math.sqrt(math.exp(v) + 0.25)), -40, -5.95)
    total = float(log_mass.exp().sum()) + missing[0]
    assert case.log_evidence == pytest.approx(math.log(total), abs=1e-6)


@pytest.mark.parametrize(
    ("build", "settings", "error", "word"),
    [
        (pima, {"model": "m3"}, SettingsError, "m1"),
        (pima, {"model": ["m1"]}, SettingsError, "m1"),
        (pima, {"model": None}, SettingsError, "m1"),
        (neals_funnel, {"dim": 1}, SettingsError, "dim"),
        (neals_funnel, {"dim": "a"}, SettingsError, "dim"),
        (neals_funnel, {"dim": None}, SettingsError, "dim"),
        (neals_funnel, {"dim": math.nan}, SettingsError, "dim"),
        (neals_funnel, {"dim": math.inf}, SettingsError, "dim"),
        (neals_funnel, {"measured": 1e200}, DataError, "measured"),
        (neals_funnel, {"measured": None}, DataError, "measured"),
        (neals_funnel, {"measured": "a"}, DataError, "measured"),
        (neals_funnel, {"measured": 1e140, "scale_sd": 20.0}, SettingsError, "measured"),
        (neals_funnel, {"noise_sd": 1e-200}, DataError, "noise_sd"),
        (neals_funnel, {"scale_sd": None}, SettingsError, "scale_sd"),
        (neals_funnel, {"dim": 2.5}, SettingsError, "dim"),
        (neals_funnel, {"noise_sd": 0.0}, SettingsError, "noise_sd"),
        (neals_funnel, {"scale_sd": 30.0}, SettingsError, "scale_sd"),
        (neals_funnel, {"measured": math.nan}, DataError, "measured"),
    ],
)
def test_unusable_settings_are_named(build, settings, error, word):
    with pytest.raises(error, match=word):
        build(**settings)


@pytest.mark.parametrize("name", [name for name in exact.CASES if name not in exact.EASY])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_hard_case_makes_a_target(name, dtype):
    target = exact.get(name).target(dtype=dtype)
    u = target.sample_prior(10, seed=0)
    assert u.dtype == dtype and bool(target.log_density(u).isfinite().all())
