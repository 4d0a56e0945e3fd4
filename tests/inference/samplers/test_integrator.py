"""The integrator: the same path in C++ over rows as in operations of torch, and the error of a known order."""

import math

import pytest
import torch

import bayeskit as bk
from bayeskit._compiler.native_evaluator import NativeEvaluator
from bayeskit.errors import ShapeError
from bayeskit.inference.samplers import HMC, Metric
from bayeskit.inference.samplers._hmc import integrate

KICKS = [1.0, 1.0, 0.6, 0.5]


def quartic(dtype=torch.float64, wall=math.inf):
    """Three correlated coordinates with heavy shoulders; no density where the sum is beyond the wall."""

    def log_likelihood(u):
        inside = -0.25 * (u - 0.3).pow(4).sum(-1) - u[..., 0] * u[..., 1]
        return torch.where(u.sum(-1) > wall, -math.inf, inside)

    like = torch.zeros(1, 3, dtype=dtype)
    return bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), log_likelihood, 3, dtype=like.dtype, compile=True
    )


def metrics(dtype):
    generator = torch.Generator().manual_seed(3)
    variances = 0.2 + torch.rand(6, 3, generator=generator).to(dtype)
    factors = torch.randn(6, 3, 3, generator=generator).to(dtype)
    matrices = factors @ factors.mT + torch.eye(3, dtype=dtype)
    return {
        "diagonal": Metric.diagonal(variances[0]),
        "diagonal of two groups": Metric.diagonal(variances[:2]),
        "diagonal of each": Metric.diagonal(variances),
        "dense": Metric.dense(matrices[0]),
        "dense of three groups": Metric.dense(matrices[:3]),
        "low rank": Metric.low_rank(variances[0], torch.eye(3, dtype=dtype)[:, :1], torch.full((1,), 2.0, dtype=dtype)),
    }


def start(dtype):
    generator = torch.Generator().manual_seed(5)
    q, p = (torch.randn(6, 3, generator=generator).to(dtype) for _ in range(2))
    return q, p, torch.linspace(0.05, 0.2, 6, dtype=dtype), torch.linspace(0, 1, 6, dtype=dtype)


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(metrics(torch.float64)))
def test_the_path_is_that_of_the_graph(name, dtype):
    target, metric = quartic(dtype), metrics(dtype)[name]
    compiled, graph = (target._engine.evaluator(6, 1, compile) for compile in (True, False))
    assert isinstance(compiled, NativeEvaluator) and not isinstance(graph, NativeEvaluator)
    q, p, step, beta = start(dtype)
    before = q.clone(), p.clone()
    found, expected = (integrate(by, metric, q, p, step, beta, 0.5, KICKS) for by in (compiled, graph))
    assert torch.equal(q, before[0]) and torch.equal(p, before[1])
    near = 500 * torch.finfo(dtype).eps
    for a, b in zip((*found[:2], *found[2], found[3]), (*expected[:2], *expected[2], expected[3]), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=near, atol=near)


@pytest.mark.compiler
def test_long_paths_are_several_calls_with_the_same_bits(monkeypatch):
    target, metric = quartic(), metrics(torch.float64)["dense"]
    evaluate = target._engine.evaluator(6, 1, True)
    whole = integrate(evaluate, metric, *start(torch.float64), 1.0, KICKS)
    monkeypatch.setattr("bayeskit._compiler.native_evaluator.MAX_EVALUATIONS", 7)
    parts = integrate(evaluate, metric, *start(torch.float64), 1.0, KICKS)
    for a, b in zip((*whole[:2], *whole[2], whole[3]), (*parts[:2], *parts[2], parts[3]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.compiler
def test_walls_and_what_is_not_a_number_are_seen_on_the_way():
    target, metric = quartic(wall=1.0), metrics(torch.float64)["diagonal"]
    q = torch.zeros(3, 3, dtype=torch.float64)
    q[2] = math.nan
    p = torch.tensor([[40.0, 0, 0], [0.1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    step, beta = torch.full((3,), 0.1, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for compile in (True, False):
        *_, lowest = integrate(target._engine.evaluator(3, 1, compile), metric, q, p, step, beta, 1.0, KICKS)
        assert lowest[0] == -math.inf and -math.inf < lowest[1] < 0 and lowest[2].isnan()


@pytest.mark.compiler
def test_a_step_in_compiled_rows_is_the_step_in_the_graph():
    """The walls are met, too."""
    q, *_ = start(torch.float64)
    q = 0.2 * q - 0.3
    kernel, ends = HMC(step_size=0.4, num_steps=5), []
    for compile in (True, False):
        target = quartic(wall=1.0)
        target.compile = compile
        state, generator = kernel.init(target, q), torch.Generator().manual_seed(2)
        turned = 0
        for _ in range(6):
            state, info = kernel.step(target, state, generator=generator)
            turned += int(info.num_steps[0] > 7)
        assert turned
        ends.append(state.position)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_compiled_paths_turn_round_as_those_of_the_graph(kind, monkeypatch):
    """Chains inside, at a wall, outside, and where the density is no number; in one call and in several."""
    target, metric = quartic(wall=1.0), metrics(torch.float64)[kind]
    q, p, step, beta = start(torch.float64)
    q = 0.2 * q - 0.3
    q[1], q[2, 0] = torch.tensor([1.5, 0.0, 0.0]), math.nan
    p[1] = torch.tensor([-0.4, 0.0, 0.0])  # in, and out again
    kernel = HMC(step_size=0.4, beta=beta)
    found = []
    for compile, most in ((False, 2000), (True, 2000), (True, 7)):
        monkeypatch.setattr("bayeskit._compiler.native_evaluator.MAX_EVALUATIONS", most)
        target.compile = compile
        state = kernel.init(target, q)
        assert float(state.log_density[1]) == -math.inf
        evaluate = target._engine.evaluator(len(q), 1, compile)
        end = kernel._bouncing(state, 5 * p, 0.4 + 0 * step.unsqueeze(-1), metric, evaluate, 6)
        found.append((*end[:2], *end[2], end[3]))
    assert 0.2 < float((found[0][-1] < 1).double().mean()) < 1
    for graph, one, several in zip(*found, strict=True):
        torch.testing.assert_close(graph, one, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert torch.equal(one.nan_to_num(nan=7.0), several.nan_to_num(nan=7.0))


def test_halving_the_step_divides_the_error_of_the_energy_by_four():
    target, metric = quartic(), Metric.diagonal(torch.ones(3, dtype=torch.float64))
    evaluate = target._engine.evaluator(6, 1, False)
    q, p, _, _ = start(torch.float64)
    beta = torch.ones(6, dtype=torch.float64)
    errors = []
    for halvings in (0, 1):
        count = 8 << halvings
        step = torch.full((6,), 0.08 / (1 << halvings), dtype=torch.float64)
        here = evaluate(q, beta)
        kicked = p + 0.5 * step[:, None] * here.gradient
        _, end, there, _ = integrate(evaluate, metric, q, kicked, step, beta, 1.0, [1.0] * (count - 1) + [0.5])
        errors.append((end.square() - p.square()).sum(-1) / 2 - there.log_density + here.log_density)
    assert bool(((errors[0] / errors[1] - 4).abs() < 0.5).all())  # a leapfrog path is of second order


@pytest.mark.compiler
def test_a_metric_that_does_not_fit_reaches_no_memory_of_others():
    """The C++ would read beyond the end of what is too short, or of numbers of half the size."""
    target = quartic()
    evaluate = target._engine.evaluator(6, 1, True)
    q, p, step, beta = start(torch.float64)
    found = evaluate(q.float(), beta)
    torch.testing.assert_close(found.gradient, evaluate(q.float().double(), beta).gradient)
    with pytest.raises(ShapeError, match=r"\(n, 3\) and \(n,\), not \(6, 2\) and \(6,\)"):
        evaluate(q[:, :2], beta)
    for metric in (Metric.diagonal(torch.ones(2).double()), Metric.diagonal(torch.ones(4, 3).double())):
        with pytest.raises(RuntimeError):  # torch's own
            integrate(evaluate, metric, q, p, step, beta, 1.0, KICKS)
    single = integrate(evaluate, Metric.diagonal(torch.full((3,), 0.25)), q, p, step, beta, 1.0, KICKS)
    double = integrate(evaluate, Metric.diagonal(torch.full((3,), 0.25).double()), q, p, step, beta, 1.0, KICKS)
    torch.testing.assert_close(single[0], double[0], rtol=1e-12, atol=1e-12)
