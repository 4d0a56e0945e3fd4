"""Rates over sites: categories of the Gamma distribution, their derivative by its shape, invariant sites."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import special
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import _site_rates as discrete_gamma
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites

LIKE = torch.zeros((), dtype=torch.float64)
SHAPES = [0.02, 0.1, 0.5, 1.0, 3.0, 30.0, 399.0, 401.0, 1e4]


def means(shape: float, number: int) -> np.ndarray:
    """Means of the categories, from SciPy's incomplete Gamma functions."""
    bounds = special.gammaincinv(shape, np.arange(1, number) / number)
    return number * np.diff(np.concatenate([[0.0], special.gammainc(shape + 1.0, bounds), [1.0]]))


def medians(shape: float, number: int) -> np.ndarray:
    middles = special.gammaincinv(shape, (np.arange(number) + 0.5) / number)
    return middles / middles.mean()


def rates(shape, number: int = 4, median: bool = False) -> torch.Tensor:
    return GammaRates(shape, number, median).categories(LIKE).rates


def slopes(shape: float, number: int, median: bool) -> np.ndarray:
    """Derivatives of the rates by the shape."""
    leaf = torch.tensor(shape, dtype=torch.float64, requires_grad=True)
    found = rates(leaf, number, median)
    return np.array([torch.autograd.grad(rate, leaf, retain_graph=True)[0].item() for rate in found])


def differences(expected, shape: float, number: int) -> np.ndarray:
    """Central differences of the sixth order."""
    step = 0.01 * shape
    taken = [expected(shape + k * step, number) - expected(shape - k * step, number) for k in (1, 2, 3)]
    return (45 * taken[0] - 9 * taken[1] + taken[2]) / (60 * step)


def test_published_rates():
    # Yang's example: shape 1/2, four categories.
    assert rates(0.5).tolist() == pytest.approx([0.0334, 0.2519, 0.8203, 2.8944], abs=5e-5)
    assert rates(0.5, median=True).tolist() == pytest.approx([0.0291, 0.2807, 0.9248, 2.7654], abs=5e-5)


@pytest.mark.parametrize("number", [1, 2, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rates_equal_incomplete_gamma_functions(shape, number):
    for median, expected in ((False, means), (True, medians)):
        found = rates(shape, number, median).numpy()
        np.testing.assert_allclose(found, expected(shape, number), rtol=1e-10, atol=1e-14)
        assert found.mean() == pytest.approx(1.0, abs=1e-14)


def test_numbers_equal_rates_with_derivatives():
    shape = torch.tensor([2e-4, 0.003, *SHAPES, 1e5, 9e5], dtype=torch.float64)
    found = GammaRates(shape, 4).category_numbers(LIKE).rates
    np.testing.assert_allclose(found, rates(shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [2, 4, 16])
@pytest.mark.parametrize("shape", SHAPES[1:-1])
def test_derivative_by_the_shape(shape, number):
    for median, expected in ((False, means), (True, medians)):
        found, reference = slopes(shape, number, median), differences(expected, shape, number)
        # SciPy's own rounding, divided by the step, limits the comparison for the largest shapes.
        rounding = 1e-13 / (0.01 * shape)
        assert np.abs(found - reference).max() < 1e-9 * np.abs(reference).max() + rounding


def test_derivative_where_it_is_known():
    # One is the shape of the exponential distribution; the derivative of its median by the shape, log-scaled, follows
    # from -(dP/da) / p with dP/da by quadrature.
    grid, width = np.polynomial.legendre.leggauss(200)
    x = np.log(2.0)
    v = 0.5 * x**0.25 * (grid + 1.0)  # x = v^4 takes the singularity of the logarithm away
    integrand = 4 * v**3 * np.exp(-(v**4)) * (4 * np.log(v) - special.digamma(1.0))
    expected = -(0.5 * x**0.25 * width * integrand).sum() / np.exp(-x) / x
    shape = torch.ones(1, dtype=torch.float64, requires_grad=True)
    logs = discrete_gamma.log_quantiles(shape, torch.tensor([0.5], dtype=torch.float64))
    assert torch.autograd.grad(logs.sum(), shape)[0].item() == pytest.approx(expected, rel=1e-11)


def test_second_derivative_by_the_shape():
    def largest(shape):
        return GammaRates().with_parameters({"shape": shape}).categories(LIKE).rates[3]

    step = 1e-3
    bend = grad(grad(largest))(torch.tensor(0.7, dtype=torch.float64)).item()
    expected = (slopes(0.7 + step, 4, False) - slopes(0.7 - step, 4, False))[3] / (2 * step)
    assert bend == pytest.approx(expected, rel=1e-5)


def test_mutation_a_dropped_newton_step_is_caught(monkeypatch):
    # Without a step that sees the shape, quantiles would seem to stay where they are.
    original = discrete_gamma._newton_step

    def blind(logs, *rest):
        return original(logs, *(tensor.detach() for tensor in rest))

    monkeypatch.setattr(discrete_gamma, "_newton_step", blind)
    reference = differences(means, 0.5, 4)
    assert np.abs(slopes(0.5, 4, False) - reference).max() > 1e-3 * np.abs(reference).max()


def test_extreme_shapes_stay_finite():
    shapes = torch.tensor([1e-8, 1e-3, 1e6, 1e12], dtype=torch.float64, requires_grad=True)
    found = rates(shapes)
    assert found.isfinite().all() and (found >= 0).all()
    (slope,) = torch.autograd.grad((found * torch.arange(4.0)).sum(), shapes)
    assert slope.isfinite().all()
    # All sites alike for a large shape; all change in one category for a small one.
    torch.testing.assert_close(found[3].detach(), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0].detach(), torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64))


def test_batches_transforms_and_tracing():
    shapes = torch.tensor([[0.2, 1.0], [5.0, 500.0]], dtype=torch.float64)
    found = rates(shapes)
    assert found.shape == (2, 2, 4)
    for i in range(2):
        torch.testing.assert_close(found[i, 1], rates(shapes[i, 1]), rtol=1e-14, atol=0)

    def value(shape):
        return GammaRates().with_parameters({"shape": shape}).categories(LIKE).rates[3]

    flat = shapes.reshape(-1)
    mapped = vmap(grad(value))(flat)
    for shape, slope in zip(flat.tolist(), mapped.tolist(), strict=True):
        assert slope == pytest.approx(slopes(shape, 4, False)[3], rel=1e-11)
    traced = make_fx(vmap(grad(value)))(flat)
    torch.testing.assert_close(traced(flat.flip(0)), mapped.flip(0), rtol=1e-12, atol=0)
    assert GammaRates(0.5).categories(torch.zeros(())).rates.dtype == torch.float32


@pytest.mark.parametrize("others", [None, GammaRates(0.5), GammaRates(0.5, 6, median=True)])
def test_invariant_sites_keep_the_mean_rate_at_one(others):
    proportion = torch.tensor([0.1, 0.7], dtype=torch.float64)
    rates, weights, invariant = InvariantSites(proportion, others).categories(LIKE)
    torch.testing.assert_close((rates * weights).sum(-1), torch.ones(2, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(weights.sum(-1) + invariant, torch.ones(2, dtype=torch.float64), rtol=1e-14, atol=0)
    assert invariant.tolist() == [0.1, 0.7]
    assert InvariantSites(proportion, others).batch_shape == (2,)


def test_priors_and_values_reach_the_other_sites():
    both = InvariantSites(others=GammaRates())
    priors = both.priors(LIKE)
    assert priors.keys() == {"proportion", "shape"}
    assert priors["shape"].mean.item() == 1.0 and priors["proportion"].mean.item() == 0.5
    given = both.with_parameters({"proportion": torch.tensor(0.2), "shape": torch.tensor(0.5)})
    assert given.priors(LIKE) == {}
    fixed = InvariantSites(0.2, GammaRates(0.5)).categories(torch.zeros(()))
    assert torch.equal(given.categories(torch.zeros(())).rates, fixed.rates)
    assert both.others.shape is None  # what it was made from stays as it was


BAD = [
    (lambda: GammaRates(shape=0.0), "GammaRates, shape.*above 0"),
    (lambda: GammaRates(shape=dist.Normal(0.0, 1.0)), "GammaRates, shape.*allows -1"),
    (lambda: GammaRates(0.5, num_categories=0), "num_categories"),
    (lambda: GammaRates(0.5, num_categories=2.5), "num_categories"),
    (lambda: InvariantSites(1.0), "InvariantSites, proportion.*between 0 and 1"),
    (lambda: InvariantSites(dist.Exponential(1.0)), "proportion.*allows 2"),
    (lambda: InvariantSites(0.5, InvariantSites(0.5)), "one proportion only"),
    (lambda: InvariantSites().categories(LIKE), "InvariantSites, proportion.*no value"),
    (lambda: InvariantSites(0.5, GammaRates()).categories(LIKE), "GammaRates, shape.*no value"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_input_is_named(make, message):
    with pytest.raises(SettingsError, match=message):
        make()
