"""Random walks, maps and correlations against pseudo-inverses, differences and closed forms."""

import math

import pytest
import torch
from scipy.special import gamma, kv
from scipy.stats import multivariate_normal

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.latent_gaussian import (
    AreaGraph,
    bym2,
    icar,
    matern_32,
    matern_52,
    random_walk,
    scottish_lip_cancer,
    squared_exponential,
)

FLOAT = torch.float64
#: A ring of four with a chord, a pair, and an island.
EDGES = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (4, 5)]


def scale(value):
    return torch.tensor(value, dtype=FLOAT)


@pytest.mark.parametrize("order", [1, 2])
def test_walks_have_independent_differences_and_no_constant_or_slope(order):
    size, sd = 9, 0.7
    covariance = random_walk(order, size, scale(sd), ridge=1e-12).covariance_matrix
    differences = torch.eye(size, dtype=FLOAT).diff(n=order, dim=0)
    of_differences = differences @ covariance @ differences.mT
    increments = of_differences[0, 0]
    assert torch.allclose(of_differences, increments * torch.eye(size - order, dtype=FLOAT), atol=1e-10)
    time = torch.linspace(-1, 1, size, dtype=FLOAT)
    for null in (time.new_ones(size), time)[:order]:
        assert float((covariance @ null).abs().max()) < 1e-10
    precision = torch.linalg.pinv(differences.mT @ differences, rtol=1e-10)
    size_of = precision.diagonal().log().mean().exp()
    assert torch.allclose(covariance, sd**2 * precision / size_of, atol=1e-10)
    assert math.isclose(float(increments), sd**2 / float(size_of), rel_tol=1e-8)


def test_each_component_of_a_map_is_a_scaled_pseudo_inverse():
    graph = AreaGraph(7, EDGES)
    assert graph.components.tolist() == [0, 0, 0, 0, 1, 1, 2]
    for areas in ([0, 1, 2, 3], [4, 5]):
        block = torch.linalg.pinv(graph.precision[areas][:, areas], rtol=1e-10)
        found = graph.covariance[areas][:, areas]
        assert torch.allclose(found, block / block.diagonal().log().mean().exp(), atol=1e-12)
        assert abs(float(found.diagonal().log().mean())) < 1e-12
        assert float(found.sum(0).abs().max()) < 1e-12
    assert graph.covariance[6, 6] == 1 and graph.covariance.sum(0)[6] == 1
    assert torch.allclose(graph.eigenvalues, torch.linalg.eigvalsh(graph.covariance), atol=1e-12)


def test_a_walk_is_a_map_whose_areas_stand_in_a_row():
    row = AreaGraph(8, [(i + 1, i) for i in range(7)])
    walk, areas = random_walk(1, 8, scale(1.3)), icar(row, scale(1.3))
    assert torch.allclose(walk.covariance_matrix, areas.covariance_matrix, atol=1e-12)


def test_pairs_in_either_order_or_both_are_one_edge():
    both = AreaGraph(7, EDGES + [(j, i) for i, j in EDGES])
    assert torch.equal(both.edges, AreaGraph(7, torch.tensor(EDGES)).edges)
    assert AreaGraph(3, []).covariance.tolist() == torch.eye(3).tolist()


def test_densities_are_those_of_scipy():
    graph, z = AreaGraph(7, EDGES), torch.linspace(-1, 1.5, 7, dtype=FLOAT)
    mixed = 0.49 * ((1 - 0.3) * torch.eye(7, dtype=FLOAT) + 0.3 * graph.covariance)
    exact = multivariate_normal(cov=mixed.numpy()).logpdf(z.numpy())
    assert math.isclose(float(bym2(graph, scale(0.7), 0.3, ridge=0.0).log_prob(z)), exact, rel_tol=1e-12)
    # Rounding of the covariance counts relative to the ridge. On vectors that sum to zero in each component,
    # the ridge leaves the intrinsic density in the limit.
    z = z - torch.cat([z[:4].mean().expand(4), z[4:6].mean().expand(2), z[6:] * 0])
    intrinsic = multivariate_normal(cov=0.49 * graph.covariance.numpy(), allow_singular=True).logpdf(z.numpy())
    ridge = 1e-9
    of_sums = 2 * -0.5 * math.log(2 * math.pi * 0.49 * ridge)
    assert math.isclose(float(icar(graph, scale(0.7), ridge).log_prob(z)), intrinsic + of_sums, abs_tol=1e-5)


@pytest.mark.parametrize(("kernel", "nu"), [(matern_32, 1.5), (matern_52, 2.5)])
def test_matern_correlations_are_bessel_functions(kernel, nu):
    r = torch.linspace(0.05, 4, 20, dtype=FLOAT)
    u = math.sqrt(2 * nu) * r.numpy()
    exact = 2 ** (1 - nu) / gamma(nu) * u**nu * kv(nu, u)
    assert torch.allclose(kernel(r), torch.from_numpy(exact), atol=1e-14)
    assert kernel(torch.zeros(1)) == 1


def test_the_squared_exponential_is_the_limit_of_smooth_correlations():
    r, nu = torch.linspace(0.05, 2, 10, dtype=FLOAT), 120.0
    u = math.sqrt(2 * nu) * r.numpy()
    smooth = 2 ** (1 - nu) / gamma(nu) * u**nu * kv(nu, u)
    assert torch.allclose(squared_exponential(r), torch.from_numpy(smooth), atol=0.5 / nu)


def test_the_map_of_scotland_is_that_of_its_description():
    data = scottish_lip_cancer()
    graph = AreaGraph(56, data.edges)
    assert graph.components.bincount().tolist() == [53, 1, 1, 1]
    assert [i for i in range(56) if graph.precision[i, i] == 0] == [5, 7, 10]
    assert int(data.counts.sum()) == 536 and len(graph.edges) == len(data.edges) == 117
    assert graph.precision[28, 28] == 11


@pytest.mark.parametrize(
    ("edges", "error", "message"),
    [
        ([(0, 1), (1, 4)], DataError, r"edge 1, \(1, 4\), names no area: the 4 areas are counted from 0 to 3"),
        ([(-1, 2)], DataError, "edge 0"),
        ([(2, 2)], DataError, "edge 0 joins area 2 with itself"),
        ([(1e300, 1)], DataError, "edge 0"),
        ([(0.5, 1)], DataError, "not whole"),
        ([(0.0, math.nan)], DataError, "not whole"),
        ([(0, 1, 2)], ShapeError, "pairs of areas"),
    ],
)
def test_edges_that_are_none_are_named(edges, error, message):
    with pytest.raises(error, match=message):
        AreaGraph(4, edges)


@pytest.mark.parametrize(("order", "size"), [(0, 5), (3, 5), (1, 1), (2, 2)])
def test_walks_of_other_orders_or_without_steps_are_refused(order, size):
    with pytest.raises(SettingsError, match="order|size"):
        random_walk(order, size, scale(1.0))


def test_a_whole_number_is_the_same_scale_as_the_real_one():
    """In whole numbers the covariances would be cut off."""
    graph = AreaGraph(3, [(0, 1), (1, 2)])
    for field in (lambda s: random_walk(1, 3, s), lambda s: icar(graph, s), lambda s: bym2(graph, s, 0.5)):
        expected = field(2.0).covariance_matrix
        assert torch.equal(field(2).covariance_matrix, expected)
        assert torch.equal(field(torch.tensor(2)).covariance_matrix, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_walk(1, 3, 0),
        lambda: random_walk(2, 4, scale(math.nan)),
        lambda: random_walk(1, 3, scale(1.0), ridge=-1.0),
        lambda: icar(AreaGraph(2, [(0, 1)]), -0.0),
        lambda: bym2(AreaGraph(2, [(0, 1)]), scale(1.0), 2.0),
    ],
)
def test_a_covariance_that_is_not_positive_definite_is_named_with_what_makes_it_so(make):
    with pytest.raises(SettingsError, match="not positive definite; give a scale that is positive"):
        make()
