"""Graphs that torch's interpreter has taken over do what they did."""

import gc
import weakref
from functools import partial

import pytest
import torch
from target_models import CONTINUOUS
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit import Target
from bayeskit._compiler.interpreter import interpreted


@pytest.mark.calibration
@pytest.mark.parametrize("name", CONTINUOUS)
def test_results_are_the_same_bits_call_after_call(name):
    case = CONTINUOUS[name]
    target = Target.from_pyro(case.model, *case.args, **case.kwargs)
    graph = target._engine._trace(3)
    beta = torch.tensor([1.0, 0.4, 0.0], dtype=target.dtype)
    call = interpreted(graph, torch.zeros(3, target.dim, dtype=target.dtype), beta)
    assert call is not graph
    for seed in range(4):  # torch would rearrange what it has seen often enough
        u = 0.3 * torch.randn(3, target.dim, generator=torch.Generator().manual_seed(seed), dtype=target.dtype)
        for one, other in zip(call(u, beta), graph(u, beta), strict=True):
            assert one.equal(other)


def test_what_is_more_than_operations_on_tensors_stays_a_graph():
    u = torch.ones(2)
    graph = make_fx(lambda u: (u + 1,))(u)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        node.target = lambda *args: torch.add(*args)
    graph.recompile()
    assert interpreted(graph, u) is graph


def test_an_answer_that_differs_is_not_taken():
    u, generator = torch.ones(2), torch.Generator().manual_seed(0)
    graph = make_fx(lambda u: (u + 1,))(u)
    forward = graph.forward
    graph.forward = lambda u: (forward(u)[0] + torch.rand(2, generator=generator),)  # another number each time
    assert interpreted(graph, u) is graph


def product(data, u):
    return (u * data,)


def test_settings_of_torch_are_given_back_and_constants_let_go():
    data = torch.arange(3.0)
    u = torch.ones(3)
    graph = make_fx(partial(product, data))(u)
    call = interpreted(graph, u)
    before = torch._C._get_graph_executor_optimize()
    assert torch.equal(call(u)[0], data)
    with pytest.raises(RuntimeError):
        call(torch.ones(4))  # does not fit the data
    assert torch._C._get_graph_executor_optimize() == before
    held = weakref.ref(data)
    del data, graph, call
    gc.collect()
    assert held() is None
