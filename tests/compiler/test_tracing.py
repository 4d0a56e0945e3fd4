"""Graphs are those of torch's own tracer, which does far more than note operations."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import bayeskit as bk
from bayeskit import exact
from bayeskit._compiler.tracing import traced
from bayeskit._core.evaluation import with_gradient

U = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)


def operations(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def check(function, *arguments):
    """Compare operations, what is known of their results, and answers at other places, with those of make_fx."""
    found, expected = traced(function, *arguments), make_fx(lambda *x: tuple(function(*x)))(*arguments)
    assert operations(found) == operations(expected)
    pairs = zip(*([n for n in g.graph.nodes if n.op == "call_function"] for g in (found, expected)), strict=True)
    for one, other in pairs:
        known = other.meta.get("tensor_meta")  # the memory format is not looked for
        assert one.meta.get("tensor_meta") == (known and known._replace(memory_format=None))
    elsewhere = [1.5 * x for x in arguments]
    for one, other in zip(found(*elsewhere), expected(*elsewhere), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    return found


@pytest.mark.calibration
@pytest.mark.parametrize("name", sorted(exact.CASES))
def test_densities_with_gradients(name):
    engine = exact.get(name).target()._engine
    u = torch.full((3, engine._dim), 0.1, dtype=engine._dtype)
    check(with_gradient(engine._joint), u, torch.ones_like(u[:, 0]))


def test_results_in_lists_and_tuples():
    def parts(u):
        value, place = u.max(0)
        first, *_, last = u.split([1, 1, 1])
        return value, place, first, last, torch.var_mean(u, 0)[1]

    assert operations(check(parts, U)).count(operator.getitem) == 7


def test_what_is_changed_in_place():
    data = torch.ones(3, dtype=torch.float64)

    def filled(u):
        x = torch.tensor([0.0, 0.0, 5.0], dtype=torch.float64)
        x[1:] += u[:2]
        total = torch.tensor(1.0)
        total.add_(u[0])
        return x.mul_(data), total

    check(filled, U)
    assert (data == 1).all()


def test_numbers_of_the_model_may_be_looked_at_and_those_of_arguments_may_not():
    data = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def of_the_model(u):
        scale = 2 * torch.tensor(3.0)
        total = torch.zeros(2)
        total[1] += data.sum()
        return u * float(scale + 1), (u if bool(scale > 5) else -u), u[: int(total[1])], u * float(data[1])

    def of_an_argument(u):
        return (u if float(u.sum()) > 0 else -u,)

    def of_chance(u):
        return (u * float(torch.rand(())),)

    def of_a_part(u):
        x = torch.zeros(2, 3, dtype=torch.float64)
        x[0] = u
        return (u * float(x[:, 0].sum()),)

    def of_the_whole(u):
        x = torch.zeros(3, dtype=torch.float64)
        part = x[1:]
        x += u
        return (u * float(part[0]),)

    expected = (7 * U, U, U, 2 * U)
    for found, value in zip(traced(of_the_model, U)(U), expected, strict=True):
        assert torch.equal(found, value)
    for function in (of_an_argument, of_chance, of_a_part, of_the_whole):
        with torch.random.fork_rng(), pytest.raises(RuntimeError, match="value of a tensor that is not known yet"):
            traced(function, U)


def test_a_generator_is_refused():
    generator = torch.Generator()
    with pytest.raises(NotImplementedError, match="a graph cannot hold a Generator"):
        traced(lambda u: (u + torch.randn(3, generator=generator),), U)


def test_parameters_are_read_and_want_no_gradient():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    graph = traced(lambda u: ((u * weight).sum(), weight.exp() * u), U)
    assert len(list(graph.buffers())) == 1 and not list(graph.parameters())
    with torch.no_grad():
        weight.fill_(2.0)
    assert torch.equal(graph(U)[0], 2 * U.sum()) and not graph(U)[0].requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its decompositions
def test_forward_derivatives_in_a_model_do_not_crash_the_process():
    """They start from zeros without memory, which torch cannot multiply while a mode of Python watches."""

    def log_likelihood(u):
        def curvature(x):
            return torch.func.hessian(lambda x: (x**4).sum())(x).sum()

        return -0.5 * (torch.func.vmap(curvature)(u) - 3).square()

    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), log_likelihood, 2)
    u = torch.tensor([[0.5, -1.0], [2.0, 0.1]], dtype=torch.float64)
    gradient = target.evaluator(2)(u, torch.ones(2, dtype=torch.float64)).gradient
    curvature = 12 * u.square().sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, -u - (curvature - 3) * 24 * u)
