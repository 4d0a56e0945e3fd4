"""Small densities as C++ over rows: what the graph says, for any number of rows, and only where that is so."""

import ctypes
import math
from functools import lru_cache
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._compiler import engine as _engine
from bayeskit._compiler import native_library as native_library
from bayeskit._compiler.factorisations import fail_apart
from bayeskit._compiler.native_evaluator import NativeEvaluator
from bayeskit._compiler.native_library import library_of, space_of_loop
from bayeskit._compiler.native_source import row_source
from bayeskit._compiler.tracing import traced
from bayeskit.errors import CompilationWarning

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    """Let an engine interpret and compile the same graph: tracing takes most of the time."""
    monkeypatch.setattr(_engine.Engine, "_trace", lru_cache(_engine.Engine._trace))


def compiled_together(sources):
    """Compile several sources in one call of the compiler; return the library of each by its text."""
    texts = list(dict.fromkeys(source.text for source in sources))
    included = dict.fromkeys(line for text in texts for line in text.splitlines() if line.startswith("#include"))
    parts = []
    for k, text in enumerate(texts):
        own = [line for line in text.splitlines() if line not in included]
        parts += [f"namespace part{k} {{", *(line.replace("int loop(", f"int loop_{k}(") for line in own), "}"]
    library = library_of("\n".join([*included, *parts, ""]))
    return {text: SimpleNamespace(loop=library[f"loop_{k}"], space=space_of_loop(text)) for k, text in enumerate(texts)}


def assert_close(found, expected, dtype):
    near = 200 * torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype and a.shape == b.shape
        # Of sums whose terms are larger than they are.
        assert bool((a - b).abs().le(near * (1 + b.abs().max())).all())


def of_schools(dtype=torch.float64):
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=dtype)
    error = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=dtype)

    def model():
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(y.new_tensor(5.0)))
        with pyro.plate("schools", 8):
            effect = pyro.sample("effect", dist.Normal(mean, spread))
            pyro.sample("y", dist.Normal(effect, error), obs=y)

    return bk.Target.from_pyro(model, compile=True)


def is_native(target):
    return bool(target._engine._row_source())


@pytest.mark.calibration
def test_exact_cases_have_the_values_and_gradients_of_their_graphs(monkeypatch):
    names = [case.name if isinstance(case, exact.ExactCase) else case for case in exact.CASES]
    names.remove("gaussian_shells_10")  # the graph of gaussian_shells_2
    engines = {name: exact.get(name).target()._engine for name in names}
    libraries = compiled_together([source for engine in engines.values() if (source := engine._row_source())])
    assert len(libraries) > len(names) / 2
    monkeypatch.setattr(
        _engine, "over_rows", lambda source, *how: NativeEvaluator(libraries[source.text], source.data, *how)
    )
    for name, engine in engines.items():
        print(name)  # of the case that fails
        generator = torch.Generator().manual_seed(1)
        u = 0.5 * torch.randn(7, engine._dim, generator=generator, dtype=torch.float64)
        beta = torch.linspace(0, 1, 7, dtype=torch.float64)
        graph = engine.evaluator(7, 1, False)
        assert_close(engine.evaluator(7, 1, True)(u, beta), graph(u, beta), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hierarchy_is_native_for_any_number_of_rows(dtype):
    target = of_schools(dtype)
    assert is_native(target)
    for rows in (1, 4, 33):
        u = torch.randn(rows, target.dim, generator=torch.Generator().manual_seed(rows)).to(dtype)
        beta = torch.ones(rows, dtype=dtype)
        found = target._engine.evaluator(rows, 1, True)(u, beta)
        assert_close(found, target._engine.evaluator(rows, 1, False)(u, beta), dtype)
        alone = [target._engine.evaluator(1, 1, True)(u[i : i + 1], beta[:1]) for i in range(rows)]
        for column, parts in zip(found, zip(*alone, strict=True), strict=True):
            assert torch.equal(column, torch.cat(parts))  # a row does not hear of the others


def test_infinite_and_missing_numbers_are_those_of_the_graph():
    target = of_schools()
    u = torch.zeros(4, 10, dtype=torch.float64)
    u[0, 1], u[1, 1], u[2, 3], u[3, 0] = 800.0, -800.0, math.inf, math.nan
    beta = torch.ones(4, dtype=torch.float64)
    found, expected = (target._engine.evaluator(4, 1, compile)(u, beta) for compile in (True, False))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def test_what_is_not_known_goes_to_inductor():
    """A Bessel function is none of C++."""
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: torch.special.i0e(u).log().sum(-1), 1, compile=True
    )
    assert not is_native(target)
    u, beta = torch.tensor([[0.3], [-0.7]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert_close(target._engine.evaluator(2, 1, True)(u, beta), target._engine.evaluator(2, 1, False)(u, beta), u.dtype)


def test_code_that_says_something_else_than_the_graph_is_not_used(monkeypatch):
    def wrongly(*arguments):
        source = row_source(*arguments)
        return source._replace(text=source.text.replace(" - ", " + "))

    monkeypatch.setattr(_engine, "row_source", wrongly)
    target = of_schools()
    u, beta = torch.full((2, 10), 0.2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    wrong = _engine.over_rows(target._engine._row_source(), 10, u.dtype)(u, beta)
    right = target._engine.evaluator(2, 1, False)(u, beta)
    assert not wrong[0].allclose(right.log_prior)
    with pytest.warns(CompilationWarning, match=r"differs from torch by [0-9.]+, .* its operations are .*\bexp\b"):
        found = target._engine.evaluator(2, 1, True)(u, beta)
    assert_close(found, right, torch.float64)


def test_a_plan_of_half_a_second_is_enough_for_small_densities():
    target = of_schools()
    engine = target._engine
    calls = int(engine._row_seconds() / engine.cost.seconds(4))
    assert not engine._pays(4, calls) and engine._pays(4, calls + 2)
    assert engine.cost.compile_seconds > 3 * engine._row_seconds() > 3 * _engine.ROW_SECONDS


def test_large_densities_are_no_rows():
    y = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: -0.5 * (u - y).square().sum(-1), 1, compile="auto"
    )
    assert not is_native(target)


def walk(x, y, scale, noise):
    """Log density of a random walk seen with noise, all of its times at once."""
    before = torch.cat([torch.zeros_like(x[..., :1]), x[..., :-1]], -1)
    return dist.Normal(before, scale).log_prob(x).sum(-1), dist.Normal(x, noise).log_prob(y).sum(-1)


@pytest.mark.calibration
@pytest.mark.parametrize("times", [10, 80])
def test_a_loop_in_python_becomes_one_function(times):
    """A site for each time, and hundreds of operations that a compiler of tensors would look at in pairs."""
    y = torch.randn(times, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def model():
        x = y.new_zeros(())
        for t in range(times):
            x = pyro.sample(f"x{t}", dist.Normal(x, 0.7))
            pyro.sample(f"y{t}", dist.Normal(x, 1.3), obs=y[t])

    target = bk.Target.from_pyro(model)
    engine = target._engine
    assert is_native(target) and engine._stays_in_python() == (times > 10)
    u = torch.randn(3, times, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([1.0, 0.3, 0.0], dtype=torch.float64)
    log_prior, log_likelihood = walk(u, y, 0.7, 1.3)
    log_density = log_prior + beta * log_likelihood
    (gradient,) = torch.autograd.grad(log_density.sum(), u)
    expected = (log_prior.detach(), log_likelihood.detach(), log_density.detach(), gradient)
    for compile in (False, True):
        assert_close(engine.evaluator(3, 1, compile)(u.detach(), beta), expected, torch.float64)
    assert engine._pays(3, 500) == (times > 10)


def _changed_alone(x):
    y = x.exp()
    z = y.add_(1)
    return ((y * z).sum(-1),)


def _changed_behind_a_view(x):
    y = x.exp()
    y[..., 0].mul_(3)
    return ((y * x).sum(-1),)


def _changed_under_a_view(x):
    y = x.exp()
    view = y[..., 1]
    y.mul_(2)
    return (view * x[..., 0],)


@pytest.mark.parametrize("function", [_changed_alone, _changed_behind_a_view, _changed_under_a_view])
def test_what_is_changed_in_place_is_changed_under_all_its_names(function):
    x = torch.randn(1, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    source = row_source(traced(lambda x, one: (*function(x), one, one, x), x, one), (x, one), _engine.RESULTS)
    assert source
    found = _engine.over_rows(source, x.shape[1], x.dtype)(x, one)
    torch.testing.assert_close(found[0], function(x)[0], rtol=1e-14, atol=0)


def matrices(x):
    """Two positive definite matrices of the first six numbers, ``(1, 2, 3, 3)``."""
    a = x[:, :12].reshape(-1, 2, 2, 3)
    return a.mT @ a + torch.eye(3, dtype=x.dtype)


def triangle(x, **how):
    a, b = matrices(x), x.reshape(-1, 2, 3, 3)
    return torch.linalg.solve_triangular(a, b if how.get("left", True) else b.mT, **how)


PLACES = torch.tensor([[4, 1, 4, 0, 2]])
WRITTEN = {
    "digamma": lambda x: torch.digamma(3 * x),
    "digamma of large numbers": lambda x: torch.digamma((5 * x).exp()),
    "cumsum": lambda x: x.reshape(-1, 6, 3).cumsum(1),
    "cumprod": lambda x: x.cumprod(-1),
    "all": lambda x: (x.reshape(-1, 6, 3) > -0.5).all(-1),
    "any": lambda x: (x.reshape(-1, 3, 6) > 1.0).any(1),
    "all of many": lambda x: torch.stack([(x < bound).repeat(1, 40).all() for bound in (1.0, 9.0)]),
    "tril": lambda x: x.reshape(-1, 3, 6).tril(1),
    "triu": lambda x: x.reshape(-1, 3, 6).triu(),
    "index": lambda x: x[:, PLACES[0]],
    "index_select": lambda x: x.index_select(1, PLACES[0]),
    "gather": lambda x: x.gather(1, PLACES),
    "index_put": lambda x: x.index_put((torch.tensor([0]), torch.tensor([3])), x[0, :1].exp()),
    "index_put of a sum": lambda x: x.index_put((torch.zeros(5, dtype=torch.int64), PLACES[0]), x[0, :5].exp(), True),
    "scatter_add": lambda x: x.scatter_add(1, PLACES, x.exp()),
    "index_add": lambda x: x.index_add(1, PLACES[0], x[:, 3:8].exp()),
    "cholesky": lambda x: torch.linalg.cholesky(matrices(x)),
    "cholesky of some": lambda x: torch.linalg.cholesky_ex(matrices(x) - 2.4 * torch.eye(3, dtype=x.dtype))[1],
    "solve lower": lambda x: triangle(x, upper=False),
    "solve upper": lambda x: triangle(x, upper=True),
    "solve from the right": lambda x: triangle(x, upper=True, left=False),
    "solve with ones": lambda x: triangle(x, upper=False, unitriangular=True),
    "solve several": lambda x: torch.linalg.solve_triangular(matrices(x)[:, :1], x.reshape(-1, 2, 3, 3), upper=False),
}


def test_operations_are_those_of_torch():
    x = torch.randn(1, 18, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)

    def written(operation):
        expected = operation(x).to(x.dtype)
        assert expected.dtype == x.dtype and expected.numel() > 1
        # All of its numbers, one after the other in the place of a vector's.
        width = expected.numel()
        padded = torch.cat([x, x.new_zeros(1, max(0, width - 18))], 1)

        def result(y, one):
            found = operation(y[:, :18]).to(y.dtype).reshape(1, -1)
            return one, one, one, torch.cat([found, y[:, width:]], 1)

        graph = traced(result, padded, one)
        fail_apart(graph)
        return expected, padded, row_source(graph, (padded, one), _engine.RESULTS)

    cases = {name: written(operation) for name, operation in WRITTEN.items()}
    assert all(source for *_, source in cases.values()), cases
    libraries = compiled_together([source for *_, source in cases.values()])
    for name, (expected, padded, source) in cases.items():
        evaluator = NativeEvaluator(libraries[source.text], source.data, padded.shape[1], x.dtype)
        found = evaluator(padded, one).gradient[0, : expected.numel()]
        assert torch.allclose(found, expected.reshape(-1), rtol=1e-12, atol=1e-12), name


def test_digamma_is_exact_at_its_ends_and_on_both_sides():
    at = torch.tensor([[0.0, -0.0, math.inf, -2.0, math.nan, 1.0, 1e-300, 1e300, -0.5, -7.25, 9.999999, 10.0]]).double()
    one = torch.ones(1, dtype=torch.float64)
    source = row_source(traced(lambda x, one: (one, one, one, torch.digamma(x)), at, one), (at, one), _engine.RESULTS)
    found = _engine.over_rows(source, at.shape[1], at.dtype)(at, one).gradient
    torch.testing.assert_close(found, torch.digamma(at), rtol=4e-15, atol=1e-15, equal_nan=True)
    assert abs(float(found[0, 5]) + 0.5772156649015329) < 1e-15  # Euler's constant


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loops_are_called_from_the_rows(dtype):
    """A conditional variance that follows the square of what was seen, and its gradient, which goes back in time."""
    y = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(dtype)

    def model():
        weight = pyro.sample("weight", dist.Beta(y.new_tensor(2.0), y.new_tensor(2.0)))
        memory = pyro.sample("memory", dist.Beta(y.new_tensor(2.0), y.new_tensor(2.0)))
        squares = y[:-1].square()
        _, variance = bk.scan(lambda v, s: 2 * (0.1 + weight * s + memory * v,), y.new_ones(()), squares)
        with pyro.plate("times", 39):
            pyro.sample("y", dist.Normal(0.0, variance.sqrt()), obs=y[1:])

    target = bk.Target.from_pyro(model, compile=True)
    assert target._engine.cost.num_repeated and "static int loop" in target._engine._row_source().text
    u = torch.randn(5, 2, generator=torch.Generator().manual_seed(2)).to(dtype)
    beta = torch.linspace(0, 1, 5, dtype=dtype)
    found, expected = (target._engine.evaluator(5, 1, compile)(u, beta) for compile in (True, False))
    assert_close(found, expected, dtype)


def test_a_factor_that_does_not_exist_is_that_rows_alone():
    matrix = torch.tensor([[1.0, 0.4], [0.4, 1.0]], dtype=torch.float64)

    def log_likelihood(u):
        changed = matrix - torch.diag_embed(u)
        return torch.linalg.cholesky(changed).diagonal(dim1=-2, dim2=-1).log().sum(-1)

    target = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), log_likelihood, 2, compile=True)
    assert is_native(target)
    u = torch.tensor([[0.1, 0.2], [3.0, 0.2], [-1.0, 0.5]], dtype=torch.float64)
    found, graph = (target._engine.evaluator(3, 1, c)(u, torch.ones(3).double()) for c in (True, False))
    assert found.log_density[1].isnan() and bool(found.log_density[[0, 2]].isfinite().all())
    assert_close(tuple(x[[0, 2]] for x in found), tuple(x[[0, 2]] for x in graph), torch.float64)


DESIGN = torch.randn(40, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
GROUPS = torch.arange(40).mul(7).remainder(5)
LARGE = {
    "one loop": lambda x: (x[:, :40] * 2 - 1).exp().log1p(),
    "a sum and what is made of it": lambda x: x / (x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True),
    "columns": lambda x: (x[:, :40, None] * DESIGN).sum((1, 2), keepdim=True),
    "a product with a design": lambda x: torch.tanh(x[:, :3] @ DESIGN.mT),
    "a product over a design": lambda x: torch.tanh(x[:, :40]) @ DESIGN,
    "products of products": lambda x: (x[:, :3] @ DESIGN.mT).sigmoid() @ DESIGN,
    "neighbours": lambda x: (x[:, 1:] * 2) - (x[:, :-1] * 2).square(),
    "the other way round": lambda x: (x * 2) - (x * 2).flip(-1).square(),
    "groups": lambda x: x[:, GROUPS] * x[:, 10:50],
    "sums of groups": lambda x: x.new_zeros(1, 5).index_add(1, GROUPS, x[:, :40].square()),
    "several tensors in one": lambda x: torch.cat([x.square(), x[:, :30].exp(), x[:, 5:7]], -1).cumsum(-1),
    "the largest": lambda x: x.reshape(-1, 3, 32).amax(-1) - x.reshape(-1, 32, 3).amin(1),
    "logarithms of sums": lambda x: x.reshape(-1, 32, 3).logsumexp(-1) + x.reshape(-1, 3, 32).logsumexp(1),
    "shares": lambda x: x.reshape(-1, 32, 3).log_softmax(-1) * x.reshape(-1, 32, 3).softmax(1),
    "long and wide": lambda x: (x[:, :80, None] * x[:, None, 10:90]).sin().sum(1),
    "choices": lambda x: torch.where(x > 0.1, x.exp(), torch.where(x < -1, -1.0, x)),
    "counts": lambda x: x * (x > 0).sum(-1, keepdim=True),
    "a transposed matrix": lambda x: (x.reshape(-1, 32, 3).mT * x.reshape(-1, 3, 32)).reshape(1, -1),
    "running products": lambda x: (1 + 0.1 * x.reshape(-1, 3, 32)).cumprod(1).flip(-1),
    "part of a part": lambda x: (x.reshape(-1, 4, 24)[:, ::2, ::2] + x.reshape(-1, 4, 24)[:, 1::2, 1::2]).exp(),
    "one number": lambda x: x[:, :1].expand(1, 50) * x[:, 1:51],
}


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_numbers_are_arrays_and_loops(dtype):
    x = torch.randn(1, 96, generator=torch.Generator().manual_seed(4)).to(dtype)
    one = torch.ones(1, dtype=dtype)

    def graph_of(operation):
        def function(x):
            if dtype == torch.float64:
                return operation(x)
            return operation(x.double()).float()  # the design stays double

        def both(x, one):
            def total(x):
                found = function(x)
                return (found * torch.linspace(0.5, 1.5, found.numel(), dtype=dtype).reshape(found.shape)).sum()

            found = function(x)
            return found.mean().reshape(1), one, found.flatten()[-1:].clone(), torch.func.grad(total)(x)

        return traced(both, x, one)

    graphs = {name: graph_of(operation) for name, operation in LARGE.items()}
    sources = {name: row_source(graph, (x, one), _engine.RESULTS) for name, graph in graphs.items()}
    for name, source in sources.items():
        assert "for (int64_t i = 0" in source.text and source.text.count("\n") < 3000, name
    libraries = compiled_together(sources.values())
    for name, source in sources.items():
        found = NativeEvaluator(libraries[source.text], source.data, 96, dtype)(x, one)
        near = 100 * torch.finfo(dtype).eps
        for a, b in zip(found, graphs[name](x, one), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape, name
            assert torch.allclose(a, b, rtol=near, atol=near * float(b.abs().max())), name


def test_data_are_not_in_the_code_which_others_of_their_shape_share():
    def target_of(seed):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 2), (30,)))

        def model():
            slopes = pyro.sample("slopes", dist.Normal(x.new_zeros(2), 2.0).to_event(1))
            states, _ = bk.scan(lambda s, v: 2 * (0.5 * s + v,), y.new_zeros(()), y)
            pyro.sample("y", dist.Normal(x @ slopes + states, 1.0).to_event(1), obs=y)

        return bk.Target.from_pyro(model, compile=True)

    one, other = target_of(1), target_of(2)
    assert one._engine._row_source().text == other._engine._row_source().text
    u, beta = torch.tensor([[0.3, -0.4], [1.0, 2.0]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for target in (one, other, one):
        found, graph = (target._engine.evaluator(2, 1, compile)(u, beta) for compile in (True, False))
        assert_close(found, graph, torch.float64)


@pytest.mark.compiler
@pytest.mark.parametrize("real", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", native_library.VECTOR_FUNCTIONS.split())
def test_functions_of_many_numbers_are_those_of_one(name, real):
    kind = {torch.float64: "double", torch.float32: "float"}[real]
    apply = f'extern "C" void apply({kind}* x, {kind}* y, int64_t n)'
    body = f"{{ for (int64_t i = 0; i < n; ++i) y[i] = simd::{name}(x[i]); }}"
    lines = [native_library._VECTORS, "#include <cmath>", "#include <cstdint>", native_library._vector_functions()]
    library = library_of("\n".join([*lines, apply, body, ""]))
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(10_000, generator=generator, dtype=torch.float64)
    x = (numbers * torch.exp(5 * torch.randn(10_000, generator=generator, dtype=torch.float64))).clamp(-80, 80)
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-30, 5e-39, -1.0, 1.0, 88.8, -104.0])
    x = torch.cat([x, ends.double()]).to(real)
    if name.startswith("log"):
        x = x.abs() if name == "log" else torch.where(x < -1, -1 / x, x)
    found = torch.empty_like(x)
    library.apply(*(ctypes.c_void_p(each.data_ptr()) for each in (x, found)), ctypes.c_int64(len(x)))
    expected = getattr(torch, name)(x.double()).to(real)
    resolution = 4 * torch.finfo(real).eps
    torch.testing.assert_close(found, expected, rtol=resolution, atol=resolution * 1e-30, equal_nan=True)


def test_sums_of_many_terms_in_single_precision_are_right_to_their_last_digits():
    """Thousands of terms added one after the other in single precision have an error of many units."""
    y = torch.linspace(-2, 3, 6000, dtype=torch.float64)
    x = torch.sin(7 * y)

    def model(x, y):
        slope = pyro.sample("slope", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(slope * x, 1.1), obs=y)

    single, double = (bk.Target.from_pyro(model, x.to(dtype), y.to(dtype)) for dtype in (torch.float32, torch.float64))
    u = torch.linspace(-1, 1, 40, dtype=torch.float32).unsqueeze(1)
    evaluate = single.evaluator(len(u), 100_000)
    assert isinstance(evaluate, NativeEvaluator)
    found = evaluate(u, torch.ones(len(u))).log_likelihood.double()
    expected = double.evaluate(u.double())[1]
    assert float(((found - expected) / expected).abs().max()) < 2 * torch.finfo(torch.float32).eps
