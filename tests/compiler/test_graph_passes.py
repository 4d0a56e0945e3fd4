"""Vectors put into a tensor that all rows of a batch share: compiled code must not give all rows those of the last."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._compiler import graph_passes as graph_passes
from bayeskit._compiler.compilation import compile_graph
from bayeskit._compiler.graph_passes import trace_call
from bayeskit._core.evaluation import Evaluation
from bayeskit.errors import CompilationWarning

FLOAT = torch.float64
PLACES = torch.tensor([0, 2, 3, 5, 7])
X = torch.linspace(-1, 1, 9, dtype=FLOAT)


def zeros():
    return torch.zeros(9, dtype=FLOAT)


OPERATIONS = {
    "index_put": lambda z: zeros().index_put((PLACES,), z[:5]),
    "index_put, accumulated": lambda z: zeros().index_put((PLACES,), z[:5], accumulate=True),
    "scatter": lambda z: zeros().scatter(0, PLACES, z[:5]),
    "scatter_add": lambda z: zeros().scatter_add(0, PLACES, z[:5]),
    "index_add": lambda z: zeros().index_add(0, PLACES, z[:5]),
    "index_copy": lambda z: zeros().index_copy(0, PLACES, z[:5]),
    "select_scatter": lambda z: zeros().select_scatter(z[0], 0, 3),
    "slice_scatter": lambda z: zeros().slice_scatter(z[:3], 0, 2, 5),
    "masked_fill": lambda z: zeros().masked_fill(z[0] > 0, 2.0),
}


def evaluation(put):
    """Return a function in which what was put is kept for long enough to become an array of its own."""

    def evaluate(u, beta):
        whole = torch.func.vmap(put)(u)
        rate = (whole + u[:, 5:6] * X).exp()
        factor = torch.linalg.cholesky_ex(torch.eye(9, dtype=FLOAT) + rate.unsqueeze(-1) * rate.unsqueeze(-2))[0]
        first = torch.linalg.solve_triangular(factor, whole.unsqueeze(-1), upper=False).squeeze(-1)
        right = ((-whole).exp() * first).unsqueeze(-1)
        second = torch.linalg.solve_triangular(factor, right, upper=False).squeeze(-1)
        return Evaluation(first.sum(-1), second.sum(-1), rate.sum(-1) * beta, whole)

    return evaluate


def compiled_and_called(put):
    evaluate, generator = evaluation(put), torch.Generator().manual_seed(0)
    u, beta = torch.randn(4, 6, generator=generator, dtype=FLOAT), torch.ones(4, dtype=FLOAT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilationWarning)
        found = compile_graph(trace_call(evaluate, u, beta), u, beta)
    assert not isinstance(found, torch.fx.GraphModule)
    return zip(found(u, beta), evaluate(u, beta), strict=True)


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_row_has_what_was_put_into_it(name):
    for found, expected in compiled_and_called(OPERATIONS[name]):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_mutation_without_the_copy_rows_share_memory(monkeypatch):
    """If this fails, the compiler keeps rows apart by itself, and the copy is not needed any more."""
    monkeypatch.setattr(graph_passes, "_own_rows", lambda graph: None)
    with pytest.raises(CompilationWarning, match=r"differs from torch by .* its operations are .*index_put"):
        compiled_and_called(OPERATIONS["index_put"])


def test_a_graph_whose_code_differs_runs_in_torch(monkeypatch):
    monkeypatch.setattr(graph_passes, "_own_rows", lambda graph: None)
    evaluate = evaluation(OPERATIONS["index_put"])
    u, beta = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=FLOAT), torch.ones(4, dtype=FLOAT)
    with pytest.warns(CompilationWarning, match="runs uncompiled"):
        found = compile_graph(trace_call(evaluate, u, beta), u, beta)
    for a, b in zip(found(u, beta), evaluate(u, beta), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_model_that_fills_places_is_right_when_compiled():
    def model(y):
        size = pyro.sample("size", dist.HalfNormal(1.0))
        covariance = size**2 * (torch.eye(5, dtype=FLOAT) + 0.5)
        field = pyro.sample("field", dist.MultivariateNormal(zeros()[:5], covariance_matrix=covariance))
        whole = zeros().index_put((PLACES,), field)
        root = torch.linalg.cholesky(torch.eye(9, dtype=FLOAT) + whole[:, None] * whole)
        pyro.sample("y", dist.MultivariateNormal(whole, scale_tril=root), obs=y)

    target = bk.Target.from_pyro(model, X)
    u = 0.5 * torch.randn(4, target.dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    value, gradient = target.value_and_grad(u)
    found = target.evaluator(4, 10**6)(u, torch.ones(4, dtype=FLOAT))
    torch.testing.assert_close(found.log_density, value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-10, atol=1e-10)
