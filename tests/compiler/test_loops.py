"""Steps that are not affine are one operation of a graph: as a plain loop, with its derivatives, in Python and C++."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import t
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import bayeskit as bk
from bayeskit._compiler import loop_operations as loop_operations
from bayeskit._compiler import loops as loops
from bayeskit._compiler import native_library as native_library
from bayeskit._compiler import native_source as native_source
from bayeskit._compiler import recurrence as recurrence
from bayeskit._compiler import tracing as tracing
from bayeskit._compiler.engine import Engine
from bayeskit.errors import CompilationWarning

F64 = torch.float64
Y = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=F64)
POINTS = torch.tensor([0.3, 0.6, -0.4], dtype=F64) + 0.1 * torch.randn(
    4, 3, generator=torch.Generator().manual_seed(1), dtype=F64
)
FAILURE_RATE = 1e-5
LOOP, GRADIENT = torch.ops.bayeskit.loop.default, torch.ops.bayeskit.loop_gradient.default


def logistic(p, y):
    return (lambda x, v: (p[1] * x * (1 - x) + 0.01 * v,) * 2), p[0], y


def dicts_and_integers(p, y):
    def step(s, v):
        a = torch.tanh(s["a"] * p[0] + v["u"])
        b = s["b"] * a + p[2] * v["w"].sum()
        return {"a": a, "b": b, "n": s["n"] + 1}, {"x": a * b, "none": None, "k": 1.5, "n": s["n"] * 2}

    start = {"a": p[0], "b": 0 * p[1] + torch.ones(2, dtype=p.dtype), "n": torch.tensor(0)}
    return step, start, {"u": y, "w": torch.stack([y, y * y], -1)}


def forward_algorithm(p, y):
    transitions = torch.log_softmax(torch.stack([p, p.flip(0), p * p]), -1)

    def step(a, v):
        return torch.logsumexp(a[:, None] + transitions, 0) - 0.5 * (v - torch.arange(3, dtype=p.dtype)) ** 2, None

    return step, torch.zeros(3, dtype=p.dtype) - 1, y


def kalman_filter(p, y):
    turn = 0.5 * torch.stack([torch.stack([p[0], p[1]]), torch.stack([-p[1], p[0]])])
    noise = torch.eye(2, dtype=p.dtype) * (p[2].square() + 0.1)

    def step(state, v):
        mean, covariance = state
        mean, covariance = turn @ mean, turn @ covariance @ turn.T + noise
        spread = covariance[0, 0] + 1
        gain, off = covariance[:, 0] / spread, v - mean[0]
        return (mean + gain * off, covariance - torch.outer(gain, covariance[0])), -0.5 * (
            off * off / spread + spread.log()
        )

    return step, (torch.zeros(2, dtype=p.dtype), torch.eye(2, dtype=p.dtype)), y


def many_states(p, y):
    """More than for which matrices of slopes are made."""
    weights = torch.outer(torch.linspace(-1, 1, 17, dtype=p.dtype), torch.ones(17, dtype=p.dtype)) * p[0] + p[1]
    return (lambda h, v: (torch.tanh(0.1 * weights @ h + v),) * 2), p[2] + torch.zeros(17, dtype=p.dtype), y


def factorised(p, y):
    """What is not written as C++."""

    def step(x, v):
        factor = torch.linalg.cholesky(x + (1 + v * v) * torch.eye(2, dtype=p.dtype))
        return 0.1 * p[0] ** 2 * factor @ factor.T + p[1] ** 2, factor.diagonal()

    return step, torch.eye(2, dtype=p.dtype), y


def loops_in_a_loop(p, y):
    def step(x, row):
        last, _ = bk.scan(lambda z, v: (torch.sin(z * p[0]) + v * p[1], None), x, row)
        return last, last * p[2]

    return step, p[0], y.reshape(-1, 4)


def augmented(p, y):
    def step(x, v):
        x = x * x
        x += v * p[0]
        return x.tanh(), x

    return step, p[0], y


def clamped(p, y):
    return (lambda x, v: ((torch.where(x > 0, p[0] * x, p[1] * x) + v).clamp(-1, 1),) * 2), p[2], y


def exchanged(p, y):
    """Two states that begin as the same tensor, which the step uses, too."""
    return (lambda s, v: ((s[1], s[0] * p[0] + (v * s[1] * p[1]).sigmoid()), s[0])), (p[1], p[1]), y


def forgetful(p, y):
    return (lambda s, v: (v * p[0], s.exp())), p[1], y


def growing(p, y):
    return (lambda s, _: (s * p[0] / (1 + s.square()), s)), p[0], y


ALL = [
    *(logistic, dicts_and_integers, forward_algorithm, kalman_filter, many_states, factorised, loops_in_a_loop),
    *(augmented, clamped, exchanged, forgetful, growing),
]
WRITTEN = [make for make in ALL if make not in (factorised, loops_in_a_loop)]


def total(tree):
    return sum(leaf.to(POINTS).square().sum() for leaf in tree_leaves(tree) if leaf is not None)


def ours(make, y=Y):
    return lambda p: total(bk.scan(*make(p, y)))


def plain(make, y=Y):
    def value(p):
        step, state, inputs = make(p, y)
        return total(recurrence._one_by_one(step, state, inputs, len(tree_leaves(inputs)[0])))

    return value


def chains(value):
    """Return values and gradients as a target has them: gradients outside of the batch."""

    def both(p):
        gradient, value_of = torch.func.grad_and_value(lambda p: torch.func.vmap(value)(p).sum())(p)
        return value_of, gradient

    return both


def assert_close(found, exact, tolerance=1e-11):
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)


# Which torch's own forward derivatives raise.
@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", ALL)
def test_gradients_and_curvature_are_those_of_a_plain_loop(make):
    few, short = POINTS[:2], Y[:8]
    found, exact = ours(make, short), plain(make, short)
    assert_close(chains(found)(few), chains(exact)(few))
    assert_close(torch.func.vmap(torch.func.grad(found))(few), chains(exact)(few)[1])
    curvature = torch.func.vmap(torch.func.jacrev(torch.func.grad(exact)))(few)
    in_reverse = torch.func.vmap(torch.func.jacrev(torch.func.grad(found)))
    assert_close(in_reverse(few), curvature, 1e-10)
    assert_close(torch.func.vmap(torch.func.hessian(found))(few), curvature, 1e-10)
    if make in (dicts_and_integers, many_states):
        assert_close(make_fx(in_reverse)(few)(few), curvature, 1e-10)


def traced(function):
    graph = tracing.traced(function, POINTS)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def of_kind(graph, operation):
    return [node for node in graph.graph.nodes if node.target is operation]


@pytest.mark.calibration
@pytest.mark.parametrize("order", [chains, lambda value: torch.func.vmap(torch.func.grad_and_value(value))])
@pytest.mark.parametrize("make", ALL)
def test_a_graph_has_one_loop_and_one_way_back(make, order):
    graph = traced(order(ours(make)))
    assert len(of_kind(graph, LOOP)) == len(of_kind(graph, GRADIENT)) == 1
    elsewhere = POINTS + 0.05
    assert_close(graph(elsewhere), order(plain(make))(elsewhere))


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize("make", WRITTEN)
def test_compiled_loops_are_those_in_python(make, monkeypatch):
    loaded = []
    right = native_library.library_of
    monkeypatch.setattr(loop_operations, "library_of", lambda source: loaded.append(right(source)) or loaded[-1])
    graph = traced(chains(ours(make)))
    exact = graph(POINTS)
    loop_operations.run_natively(graph)
    assert_close(graph(POINTS), exact)
    assert len(loaded) == 2 and None not in loaded


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize("make", [logistic, many_states, kalman_filter])
def test_batches_within_batches(make):
    def value(p):
        other = torch.stack([p[1], p[0], p[2]])
        return torch.func.vmap(ours(make))(torch.stack([p, other, p * p])).sum()

    def exact(p):
        return sum(plain(make)(q) for q in (p, torch.stack([p[1], p[0], p[2]]), p * p))

    for order in (chains, lambda value: torch.func.vmap(torch.func.grad_and_value(value))):
        graph = traced(order(value))
        assert_close(graph(POINTS), order(exact)(POINTS))
        loop_operations.run_natively(graph)
        assert_close(graph(POINTS), order(exact)(POINTS))


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize("make", WRITTEN)
def test_single_precision(make):
    points, y = POINTS.float(), Y.float()
    graph = traced_single(make, points, y)
    exact = chains(plain(make))(POINTS)
    for native in (False, True):
        if native:
            loop_operations.run_natively(graph)
        value, gradient = graph(points)
        assert gradient.dtype == torch.float32
        scale = float(exact[1].abs().max())
        torch.testing.assert_close(gradient.double(), exact[1], rtol=1e-3, atol=1e-4 * scale)


def traced_single(make, points, y):
    def value(p):
        leaves = tree_leaves(bk.scan(*make(p, y)))
        return sum(leaf.to(torch.float32).square().sum() for leaf in leaves if leaf is not None)

    return make_fx(chains(value))(points)


def test_the_graph_does_not_grow_with_the_length():
    def nodes(length):
        return len(traced(chains(ours(logistic, Y.repeat(length)[: 7 * length]))).graph.nodes)

    assert nodes(2) == nodes(40) < 100


def test_a_step_that_does_otherwise_later_is_unrolled():
    """What Python decides at each time is not seen in one run of the step."""
    factors = torch.linspace(0.5, 1, len(Y), dtype=F64)
    numbers = factors.tolist() * 3  # outside of what is traced, where torch 2.6 cannot read it

    def make(p, y):
        at = iter(numbers)
        return (lambda x, v: (torch.sin(x * p[0]) * next(at) + v,) * 2), p[1], y

    def fixed(p, y):
        return (lambda x, v: (torch.sin(x * p[0]) * v[1] + v[0],) * 2), p[1], (y, factors)

    def value(p):
        return total(bk.scan(*make(p, Y)))

    graph = traced(chains(value))
    assert not of_kind(graph, LOOP)
    # Two runs before the loop itself have taken two of the factors.
    shifted = torch.cat([factors[2:], factors[:2]])

    def exact(p):
        step = lambda x, v: (torch.sin(x * p[0]) * v[1] + v[0],) * 2  # noqa: E731
        return total(recurrence._one_by_one(step, p[1], (Y, shifted), len(Y)))

    assert_close(graph(POINTS), chains(exact)(POINTS))


def read_input(p, v):
    return p * (2.0 if float(v) > 0 else 1.0)


def own_transform(p, v):
    return torch.func.grad(lambda z: (z * p).sin())(v)


def without_gradient(p, v):
    with torch.no_grad():
        w = p * 2
    return w * p * v


def assigned(p, v):
    x = torch.stack([p, v])
    x[0] = p * p
    return x.sum()


@pytest.mark.parametrize("change", [read_input, own_transform, without_gradient, assigned])
def test_what_a_tape_cannot_hold_is_unrolled(change):
    def make(p, y):
        return (lambda x, v: (torch.sin(change(x * p[0], v)),) * 2), p[1], y[:7]

    assert_close(chains(ours(make))(POINTS), chains(plain(make, Y[:7]))(POINTS))
    if change is not read_input:  # which cannot be traced, but where a model is
        assert not of_kind(traced(chains(ours(make))), LOOP)


def test_random_numbers_in_a_step_differ_from_time_to_time():
    def noise(p):
        return bk.scan(lambda x, _: (x.sin() + torch.rand(()), x), p, length=5)[1]

    with torch.random.fork_rng():
        paths = torch.func.vmap(noise, randomness="different")(POINTS[:, 0])
    steps = paths[:, 1:] - paths[:, :-1].sin()
    assert steps.flatten().unique().numel() == steps.numel()


def population(y):
    growth = pyro.sample("growth", dist.Normal(0.5, 0.5))
    _, size = bk.scan(lambda n, _: (n * (growth * (1 - n)).exp(), n), 0.1 + 0 * growth, length=len(y))
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.Normal(size, 0.2), obs=y)


COUNTS = torch.tensor([0.15, 0.1, 0.4, 0.3, 0.5, 0.8, 0.7, 1.1], dtype=F64)


def other_population(y):
    growth = pyro.sample("growth", dist.Normal(0.5, 0.5))
    _, size = bk.scan(lambda n, _: (n * (growth * (1 - n * n)).exp(), n), 0.1 + 0 * growth, length=len(y))
    with pyro.plate("years", len(y)):
        pyro.sample("y", dist.Normal(size, 0.2), obs=y)


def exact_mean():
    grid = torch.linspace(-2, 3, 4001, dtype=F64)
    n, log_density = torch.full_like(grid, 0.1), dist.Normal(0.5, 0.5).log_prob(grid)
    for y in COUNTS:
        log_density = log_density + dist.Normal(n, 0.2).log_prob(y)
        n = n * (grid * (1 - n)).exp()
    weights = log_density.softmax(0)
    return float((weights * grid).sum())


@pytest.mark.calibration
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_a_population_is_sampled(compile):
    target = bk.Target.from_pyro(population, COUNTS, compile=compile)
    assert not target.loops
    means = bk.sample(target, 32, 50, 50, seed=1, progress=False).values()["growth"].mean(1)
    z = (float(means.mean()) - exact_mean()) / (float(means.std()) / 32**0.5)
    assert abs(z) < t.isf(FAILURE_RATE / 2, 31)


def test_targets_with_loops_travel_and_are_told_apart():
    target = bk.Target.from_pyro(population, COUNTS)
    u = torch.tensor([[0.2], [0.7]], dtype=F64)
    value, gradient = target.value_and_grad(u)
    again = pickle.loads(pickle.dumps(target))
    assert_close(again.value_and_grad(u), (value, gradient), 0)
    assert again.fingerprint() == target.fingerprint()
    assert target.fingerprint() != bk.Target.from_pyro(other_population, COUNTS).fingerprint()


def test_costs_tell_what_is_made_again_in_python():
    costs = [bk.Target.from_pyro(population, COUNTS.repeat(k)).cost for k in (1, 10, 19)]
    few, more, most = (cost.num_repeated for cost in costs)
    # The way back takes a logarithmic number of rounds, which the loop itself outweighs.
    assert few > 0 and 72 <= more - few and abs((most - more) - (more - few)) < 0.2 * (more - few)
    assert costs[0].num_nodes == costs[2].num_nodes


def test_a_loop_that_does_not_compile_runs_in_python(monkeypatch):
    graph = traced(chains(ours(logistic, Y[:19])))
    exact = graph(POINTS)
    loop_operations.run_natively(graph)

    def fails(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(native_library, "load_library", fails)
    native_library.library_of.cache_clear()
    with pytest.warns(CompilationWarning, match="could not be compiled"):
        assert_close(graph(POINTS), exact, 0)
    native_library.library_of.cache_clear()


@pytest.mark.calibration
@pytest.mark.compiler
def test_an_engine_compiles_its_loops(monkeypatch):
    called = []
    right = native_library.call_library
    monkeypatch.setattr("bayeskit._compiler.engine.row_source", lambda *_: None)  # have the rest compiled by inductor
    monkeypatch.setattr(loop_operations, "call_library", lambda *a: called.append(1) or right(*a))

    def joint(u):
        values = torch.func.vmap(ours(logistic, Y))(u)
        return -u.square().sum(-1), values

    engine = Engine(joint, 3, F64, torch.device("cpu"))
    beta = torch.ones(4, dtype=F64)
    exact = engine.evaluator(4, 1, False)(POINTS, beta)
    assert not called
    assert_close(tuple(engine.evaluator(4, 1, True)(POINTS, beta)), tuple(exact))
    assert called


def test_states_of_the_wrong_time_are_noticed(monkeypatch):
    """A mutation: slopes at the states after each step instead of before."""
    monkeypatch.setattr(loops, "_before", lambda first, found: list(found))
    with pytest.raises(AssertionError):
        test_gradients_and_curvature_are_those_of_a_plain_loop(logistic)


@pytest.mark.compiler
def test_compiled_code_that_goes_back_from_a_wrong_time_is_noticed(monkeypatch):
    """A mutation: the state of two steps before."""
    right = native_source.gradient_source
    monkeypatch.setattr(loops, "gradient_source", lambda *a: right(*a).replace("(t - 1)", "(t > 1 ? t - 2 : 0)"))
    with pytest.raises(AssertionError):
        test_compiled_loops_are_those_in_python(logistic, monkeypatch)
