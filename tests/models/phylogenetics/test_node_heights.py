"""Ratio coordinates of node heights."""

import pickle

import pytest
import torch
from torch.distributions import biject_to

from bayeskit.models.phylogenetics import DatedTopology
from bayeskit.models.phylogenetics._node_heights import NodeHeights, RatioTransform

TREES = {
    "three": DatedTopology.of("((A,B),C);"),
    "balanced": DatedTopology.of("(((A,B),(C,D)),((E,F),G));"),
    "caterpillar": DatedTopology.of(
        "(((((A,B),C),D),E),F);", dates=dict(zip("ABCDEF", [5, 3, 4.5, 1, 2, 6], strict=True))
    ),
    "dated": DatedTopology.of(
        "(((A,B),(C,D)),((E,F),G));", tip_heights=dict(zip("ABCDEFG", [0, 3, 0, 1.5, 2, 0.3, 7], strict=True))
    ),
}


@pytest.fixture(params=TREES)
def dated(request):
    return TREES[request.param]


def points(dated, count=20):
    generator = torch.Generator().manual_seed(1)
    return 2.0 * torch.randn(count, dated.num_taxa - 1, generator=generator, dtype=torch.float64)


def test_the_map_goes_to_heights_and_back(dated):
    transform, x = RatioTransform(dated), points(dated)
    y = transform(x)
    assert biject_to(NodeHeights(dated)) == transform
    assert transform.codomain.check(y).all()
    torch.testing.assert_close(transform.inv(y), x, rtol=1e-9, atol=1e-9)


def test_ratios_by_hand(dated):
    x = points(dated, 1)[0]
    y = RatioTransform(dated)(x).tolist()
    for node, height in enumerate(y):
        bound = float(dated.lower_bounds[node])
        if node == dated.num_taxa - 2:
            expected = bound + float(x[node].exp())
        else:
            above = y[int(dated.parents[dated.num_taxa + node])]
            expected = bound + float(x[node].sigmoid()) * (above - bound)
        assert height == pytest.approx(expected, rel=1e-13)


def test_jacobian_against_autograd(dated):
    transform, x = RatioTransform(dated), points(dated)
    matrices = torch.func.vmap(torch.func.jacrev(transform))(x)
    torch.testing.assert_close(
        transform.log_abs_det_jacobian(x, transform(x)), torch.linalg.slogdet(matrices)[1], rtol=1e-11, atol=1e-11
    )


def test_batches_and_dtypes(dated):
    transform, x = RatioTransform(dated), points(dated, 6)
    assert torch.equal(transform(x.reshape(2, 3, -1)).reshape(6, -1), transform(x))
    assert transform(x.float()).dtype == torch.float32
    torch.testing.assert_close(torch.func.vmap(transform)(x), transform(x), rtol=1e-14, atol=0)


def test_far_coordinates_stay_finite(dated):
    transform = RatioTransform(dated)
    for size in (-800.0, 800.0):
        assert transform(torch.full((dated.num_taxa - 1,), size, dtype=torch.float64)).isfinite().all()


def test_support():
    check = NodeHeights(TREES["caterpillar"]).check
    good = torch.tensor([3.5, 4.0, 5.5, 6.0, 7.0], dtype=torch.float64)
    assert check(good)
    for place, height in ((0, 2.9), (1, 3.4), (4, 5.9), (4, float("inf")), (2, float("nan"))):
        bad = good.clone()
        bad[place] = height
        assert not check(bad)


def test_pickling_keeps_the_map(dated):
    transform, x = RatioTransform(dated), points(dated)
    assert torch.equal(pickle.loads(pickle.dumps(transform))(x), transform(x))
