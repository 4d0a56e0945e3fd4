"""What a gradient costs is counted without tracing it."""

import pytest
import torch
from target_models import CONTINUOUS

from bayeskit import Target, _cost, _evaluation

# Tracing rewrites the others: constant masks become positions, and a factorisation that fails becomes NaN.
PLAIN = [name for name in CONTINUOUS if name not in ("hierarchical", "gaussian_process")]


def built(name):
    case = CONTINUOUS[name]
    return Target.from_pyro(case.model, *case.args, **case.kwargs)


def traced(target):
    return _evaluation.cost(target._engine._trace(1))


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
    monkeypatch.setattr(_cost._Recorder, "behind", lambda self, _: (len(self._sources), sum(self._bytes)))
    assert all(built(name).cost != traced(built(name)) for name in PLAIN[:3])


def test_operations_below_a_gradient_are_seen():
    # The square of five numbers, its sum, and backwards: one to start with, expanded, the power, and two products.
    x = torch.ones(5, dtype=torch.float64)
    values, _ = _cost.recorded(lambda x: (x.square().sum(),), x)
    both, _ = _cost.recorded(lambda x: (torch.func.grad(lambda y: y.square().sum())(x),), x)
    assert values == 2 < both


def test_random_numbers_and_changes_in_place_count_although_nothing_is_made_of_them():
    generator = torch.Generator().manual_seed(0)

    def changes(x):
        noise = torch.zeros(5)
        noise.add_(1.0)
        torch.rand(5, generator=generator)
        return (x + 1,)

    # zeros, add_, rand, and the sum
    assert _cost.recorded(changes, torch.zeros(5))[0] == 4
