import math

import numpy as np
import pyro
import pytest
import torch
from scipy.integrate import quad
from scipy.special import gammaln
from scipy.stats import norm

from bayeskit.errors import SettingsError
from bayeskit.exact._several_modes import eggbox, gaussian_shells, spike_and_slab

CASES = {
    "shells2": (gaussian_shells, -1.745642),
    "shells10": (lambda: gaussian_shells(10), -14.590491),
    "eggbox": (eggbox, 235.855940),
    "spike_and_slab": (spike_and_slab, 4.615120),
}


@pytest.mark.parametrize("name", CASES)
def test_evidence_is_the_published_one(name):
    build, published = CASES[name]
    assert build().log_evidence == pytest.approx(published, abs=6e-7)


def log_joint(case, x, model=None):
    """Log prior plus log likelihood of the Pyro model at each row of ``x``, of which any may be mutated."""

    def one(row):
        conditioned = pyro.poutine.condition(model or case.model, data={"x": row})
        return pyro.poutine.trace(conditioned).get_trace(*case.args).log_prob_sum()

    with pyro.validation_enabled(False):
        return torch.func.vmap(one)(torch.as_tensor(x))


def shells_likelihood(x, radius=2.0, width=0.1, offset=3.5):
    first, second = (np.linalg.norm(x - s * offset * np.eye(x.shape[1])[0], axis=1) for s in (1, -1))
    return np.logaddexp(norm.logpdf(first, radius, width), norm.logpdf(second, radius, width))


LIKELIHOODS = {
    "shells2": (12.0, -6.0, shells_likelihood),
    "shells10": (12.0, -6.0, shells_likelihood),
    "eggbox": (10 * math.pi, 0.0, lambda x: (2 + np.cos(x[:, 0] / 2) * np.cos(x[:, 1] / 2)) ** 5),
    "spike_and_slab": (
        1.0,
        -0.5,
        lambda x: np.logaddexp(math.log(100) + norm.logpdf(x, 0, 0.01).sum(1), norm.logpdf(x, 0, 0.1).sum(1)),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_pyro_model_is_the_one_defined(name):
    case = CASES[name][0]()
    edge, low, log_likelihood = LIKELIHOODS[name]
    dim = case.posterior_mean["x"].numel()
    x = low + edge * np.random.default_rng(0).random((50, dim))
    expected = log_likelihood(x) - dim * math.log(edge)
    np.testing.assert_allclose(log_joint(case, x).numpy(), expected, rtol=1e-10, atol=1e-9)


def grid(case, num_nodes, low, edge, model=None):
    """Integrate the Pyro density of two coordinates with the midpoint rule: evidence, mean and covariance."""
    axis = low + edge * (np.arange(num_nodes) + 0.5) / num_nodes
    x = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    log_mass = log_joint(case, x, model).numpy() + 2 * math.log(edge / num_nodes)
    peak = log_mass.max()
    mass = np.exp(log_mass - peak)
    total = mass.sum()
    mean = mass @ x / total
    return peak + math.log(total), mean, (mass[:, None] * (x - mean)).T @ (x - mean) / total


GRIDS = {"shells2": (800, -6.0, 12.0), "eggbox": (1000, 0.0, 10 * math.pi)}


@pytest.mark.parametrize("name", GRIDS)
def test_evidence_and_moments_agree_with_a_grid_over_the_pyro_density(name):
    case = CASES[name][0]()
    num_nodes, low, edge = GRIDS[name]
    log_evidence, mean, covariance = grid(case, num_nodes, low, edge)
    # Half peaks on the edge give the rule an error in the square of its step; two grids make it the fourth power.
    covariance += (covariance - grid(case, num_nodes // 2, low, edge)[2]) / 3
    assert case.log_evidence == pytest.approx(log_evidence, abs=1e-7)
    np.testing.assert_allclose(case.posterior_mean["x"], mean, atol=1e-6)
    np.testing.assert_allclose(case.posterior_covariance["x"], covariance, rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize("name", GRIDS)
def test_a_mutated_model_is_caught(name):
    """The mutation: the constant of the prior is dropped."""
    case = CASES[name][0]()

    def mutant(*args):
        case.model(*args)
        pyro.factor("dropped_constant", torch.tensor(2 * math.log(GRIDS[name][2]), dtype=torch.float64))

    assert abs(grid(case, *GRIDS[name], model=mutant)[0] - case.log_evidence) > 1e-3


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_shells_agree_with_an_integral_over_the_radius(dim):
    """Inside a cube so large that nothing sticks out, a shell is its surface times a moment of the radius."""
    case = gaussian_shells(dim, half_width=8.0)
    moment = quad(lambda r: r ** (dim - 1) * norm.pdf(r, 2.0, 0.1), 1.0, 3.0, epsabs=0, epsrel=1e-12)[0]
    second = quad(lambda r: r ** (dim + 1) * norm.pdf(r, 2.0, 0.1), 1.0, 3.0, epsabs=0, epsrel=1e-12)[0]
    log_area = math.log(2) + dim / 2 * math.log(math.pi) - gammaln(dim / 2)
    assert case.log_evidence == pytest.approx(math.log(2 * moment) + log_area - dim * math.log(16), abs=1e-10)
    variance = second / moment / dim
    expected = [3.5**2 + variance] + [variance] * (dim - 1)
    np.testing.assert_allclose(case.posterior_covariance["x"].diagonal(), expected, rtol=1e-9)


def test_what_sticks_out_of_the_cube_is_left_out():
    """A cube that cuts through the shells, against a grid."""
    case = gaussian_shells(2, half_width=5.55)
    log_evidence, _, covariance = grid(case, 1200, -5.55, 11.1)
    whole = gaussian_shells(2, half_width=8.0).log_evidence + 2 * math.log(16 / 11.1)
    assert case.log_evidence == pytest.approx(log_evidence, abs=2e-5)
    assert abs(case.log_evidence - whole) > 1e-3
    np.testing.assert_allclose(case.posterior_covariance["x"], covariance, rtol=1e-4, atol=1e-4)


def test_spike_and_slab_agrees_with_one_dimensional_integrals():
    case = spike_and_slab(3, spike_sd=0.05, slab_sd=0.4, spike_height=2.0, edge=1.2)

    def moment(sd, power):
        return quad(lambda x: x**power * norm.pdf(x, 0, sd), -0.6, 0.6, points=[0.0], epsabs=0, epsrel=1e-12)[0]

    terms = [2.0 * moment(0.05, 0) ** 3, moment(0.4, 0) ** 3]
    assert case.log_evidence == pytest.approx(math.log(sum(terms)) - 3 * math.log(1.2), abs=1e-10)
    variance = sum(t * moment(s, 2) / moment(s, 0) for t, s in zip(terms, (0.05, 0.4), strict=True)) / sum(terms)
    torch.testing.assert_close(case.posterior_covariance["x"], variance * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("build", "settings", "word"),
    [
        (gaussian_shells, {"dim": 1}, "dim"),
        (gaussian_shells, {"dim": 2.5}, "dim"),
        (gaussian_shells, {"width": 0.0}, "width"),
        (gaussian_shells, {"width": 0.5}, "thin shell"),
        (gaussian_shells, {"half_width": 5.0}, "stick out"),
        (eggbox, {"num_nodes": 4}, "num_nodes"),
        (eggbox, {"num_nodes": 8}, "larger num_nodes"),
        (spike_and_slab, {"dim": 0}, "dim"),
        (spike_and_slab, {"spike_sd": -1.0}, "spike_sd"),
        (spike_and_slab, {"edge": math.inf}, "edge"),
    ],
)
def test_unusable_settings_are_named(build, settings, word):
    with pytest.raises(SettingsError, match=word):
        build(**settings)


@pytest.mark.parametrize("name", CASES)
def test_a_case_makes_a_target(name):
    case = CASES[name][0]()
    target = case.target()
    assert target.dim == case.posterior_mean["x"].numel()
    assert bool(target.log_density(target.sample_prior(10, seed=0)).isfinite().all())
