"""What a gradient costs is counted without tracing it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from target_models import CONTINUOUS

from bayeskit import Target
from bayeskit._compiler import cost as cost
from bayeskit._compiler.cost import Cost
from bayeskit._compiler.graph_passes import trace_density
from bayeskit._core.evaluation import with_gradient

# Tracing rewrites the others: constant masks become positions, and a factorisation that fails becomes NaN.
PLAIN = [name for name in CONTINUOUS if name not in ("hierarchical", "gaussian_process")]


def built(name):
    case = CONTINUOUS[name]
    return Target.from_pyro(case.model, *case.args, **case.kwargs)


def traced(target):
    """Trace without folding constants, which the count includes: what they cost is paid once."""
    graph = trace_density(with_gradient(target._joint_of_batch), 1, target.dim, target.dtype, target.device)
    return Cost.of_graph(graph)


@pytest.mark.calibration
@pytest.mark.parametrize("name", CONTINUOUS)
def test_folding_constants_leaves_the_results_and_removes_operations(name):
    target = built(name)
    whole = trace_density(with_gradient(target._joint_of_batch), 2, target.dim, target.dtype, target.device)
    folded = target._engine._trace(2)
    u = 0.3 * torch.randn(2, target.dim, generator=torch.Generator().manual_seed(0), dtype=target.dtype)
    beta = torch.tensor([1.0, 0.4], dtype=target.dtype)
    for _ in range(2):  # constants must not change from call to call
        for one, other in zip(whole(u, beta), folded(u, beta), strict=True):
            assert one.equal(other)
    assert Cost.of_graph(folded).num_nodes < Cost.of_graph(whole).num_nodes


def test_constants_that_are_changed_in_place_are_made_anew():
    start = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def joint(u):
        total = torch.zeros_like(start)
        total.view(2).add_(3 * start)  # through a view
        return -(u * total).square().sum(-1), u.sum(-1)

    target = Target.from_functions(lambda u: joint(u)[0], lambda u: joint(u)[1], 2, dtype=torch.float64)
    graph = target._engine._trace(1)
    u, beta = torch.tensor([[0.5, 0.25]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    first = [value.clone() for value in graph(u, beta)]
    assert float(first[0]) == -(1.5**2 + 1.5**2)
    assert all(one.equal(other) for one, other in zip(first, graph(u, beta), strict=True))


@pytest.mark.calibration
@pytest.mark.parametrize("name", PLAIN)
def test_the_count_is_that_of_a_traced_graph(name):
    target = built(name)
    assert target.cost == traced(target)


@pytest.mark.parametrize("name", ["hierarchical", "gaussian_process"])
def test_rewriting_a_graph_changes_little(name):
    target = built(name)
    assert abs(target.cost.num_nodes - traced(target).num_nodes) <= 6  # nodes that the rewriting adds or removes
    assert 0.9 < target.cost.num_bytes / traced(target).num_bytes < 1.1


def test_mutation_dead_code_is_counted(monkeypatch):
    monkeypatch.setattr(cost._Recorder, "behind", lambda self, _: (len(self._sources), sum(self._bytes), 0))
    assert all(built(name).cost != traced(built(name)) for name in PLAIN[:3])


def test_operations_below_a_gradient_are_seen():
    # The square of five numbers, its sum, and backwards: one to start with, expanded, the power, and two products.
    x = torch.ones(5, dtype=torch.float64)
    values = Cost.of_call(lambda x: (x.square().sum(),), x)
    both = Cost.of_call(lambda x: (torch.func.grad(lambda y: y.square().sum())(x),), x)
    assert values.num_nodes == 2 < both.num_nodes


def test_random_numbers_and_changes_in_place_count_although_nothing_is_made_of_them():
    generator = torch.Generator().manual_seed(0)

    def changes(x):
        noise = torch.zeros(5)
        noise.add_(1.0)
        torch.rand(5, generator=generator)
        return (x + 1,)

    # zeros, add_, rand, and the sum
    assert Cost.of_call(changes, torch.zeros(5)).num_nodes == 4


def linear(dim, num_data):
    """A regression whose matrix of data is used transposed, for the value and for the gradient."""
    x = torch.randn(num_data, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model(x):
        b = pyro.sample("b", dist.Normal(x.new_zeros(dim), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(b @ x.mT, 1.0).to_event(1), obs=x[:, 0])

    return Target.from_pyro(model, x)


def test_views_of_data_are_no_intermediates():
    target = linear(300, 2000)
    data_bytes = 2000 * 300 * 8
    assert target.cost.data_bytes >= data_bytes > target.cost.num_bytes
    assert target.cost == traced(target)
    assert target.cost.chunk_size(64) == 64


def test_many_vectors_do_not_read_much_data_again_and_again():
    """A graph compiled for two vectors serves more of them only where reading the data is the smaller part."""
    for dim, num_data, served in ((5, 20, True), (300, 2000, False)):
        target = linear(dim, num_data)
        assert (2 * target.cost.num_bytes >= target.cost.data_bytes) == served
        target._engine._calls[2, True] = target._engine._trace(2)  # as if compiled
        assert (target._engine.compiled(40) is not None) == served
        assert target._engine.compiled(2) is not None
