"""Differential equations inside Pyro models: density, gradient, draws and evidence against closed forms."""

import math
import os
import threading
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, pyro_method

import bayeskit as bk
from bayeskit._compiler import native_library as native_library
from bayeskit._compiler.graph_passes import trace_density
from bayeskit._compiler.native_evaluator import NativeEvaluator
from bayeskit.errors import CompilationWarning, ModelError

DOUBLE = torch.float64
SHIFT = int(os.environ.get("BAYESKIT_SEED_SHIFT", "0"))
TIMES = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=DOUBLE)
DATA = torch.tensor([0.62, 0.35, 0.15], dtype=DOUBLE)
LOG_EVIDENCE, MEAN, DEVIATION = 1.6324255707, 0.987916, 0.137163  # of decay, which is a linear regression


def decay(times, y, rtol=1e-9):
    start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    path = bk.ode.solve(lambda t, z, _: -z, start.reshape(1), times, rtol=rtol, atol=rtol)
    pyro.sample("y", dist.Normal(path[1:, 0], 0.1).to_event(1), obs=y)


def growth(times, y):
    start = pyro.sample("start", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    path = bk.ode.solve(lambda t, z, _: z**2, start.reshape(1), times)
    pyro.sample("y", dist.Normal(path[1:, 0], 0.1).to_event(1), obs=y)


def patients(times, y):
    """Eliminate two compartments' content in each of several patients, with a rate that ``f`` has from outside."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    exchange = pyro.sample("exchange", dist.LogNormal(torch.zeros((), dtype=y.dtype), 0.3))
    with pyro.plate("patients", len(y)):
        rate = pyro.sample("rate", dist.LogNormal(mean, 0.3))

    def slope(t, amount, rate):
        flow = exchange * (amount[0] - amount[1])
        return torch.stack([-rate[0] * amount[0] - flow, flow])

    first = torch.tensor([1.0, 0.0], dtype=y.dtype).expand(len(y), 2)
    path = bk.ode.solve(slope, first, times, rate.unsqueeze(-1), rtol=1e-9, atol=1e-12)
    pyro.sample("y", dist.Normal(path[:, 1:, 0], 0.1).to_event(2), obs=y)


def patients_exactly(times, y):
    mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    exchange = pyro.sample("exchange", dist.LogNormal(torch.zeros((), dtype=y.dtype), 0.3))
    with pyro.plate("patients", len(y)):
        rate = pyro.sample("rate", dist.LogNormal(mean, 0.3))
    flow = exchange * torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=y.dtype)
    matrix = flow - rate[:, None, None] * torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=y.dtype)
    path = torch.linalg.matrix_exp(matrix[:, None] * times[1:, None, None])[..., 0, 0]
    pyro.sample("y", dist.Normal(path, 0.1).to_event(2), obs=y)


def analytic(u):
    """Return the log density of decay and its derivative."""
    mean = torch.exp(-TIMES[1:]) * u
    value = -0.5 * (u[:, 0] ** 2 + ((DATA - mean) ** 2).sum(-1) / 0.01) - 2 * math.log(2 * math.pi) - 3 * math.log(0.1)
    return value, -u + ((DATA - mean) * torch.exp(-TIMES[1:])).sum(-1, keepdim=True) / 0.01


@pytest.mark.parametrize("compile", [False, "auto", True])
def test_density_and_gradient_are_those_of_the_closed_form(compile):
    target = bk.Target.from_pyro(decay, TIMES, DATA, compile=compile)
    assert not target.loops
    u = torch.linspace(0.3, 2, 7, dtype=DOUBLE).unsqueeze(-1)
    value, gradient = target.value_and_grad(u)
    right_value, right_gradient = analytic(u)
    assert (value - right_value).abs().max() < 1e-6 and (gradient - right_gradient).abs().max() < 1e-4
    assert (target.log_density(u) - right_value).abs().max() < 1e-6
    if compile is True:
        assert isinstance(target.evaluator(7), NativeEvaluator)


def test_the_graph_has_two_nodes_whose_shapes_are_known_without_running_them():
    target = bk.Target.from_pyro(decay, TIMES, DATA)
    graph = trace_density(target.evaluator(3, 1), 3, 1, DOUBLE, torch.device("cpu"))
    for operation in (torch.ops.bayeskit.ode.default, torch.ops.bayeskit.ode_gradient.default):
        (node,) = graph.graph.find_nodes(op="call_function", target=operation)
        tensors, *others = node.args
        given = [torch.ones(x.meta["tensor_meta"].shape, dtype=DOUBLE) for x in tensors]
        given[0] = TIMES
        found = torch.library.opcheck(operation, (given, *others), test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.calibration
def test_without_a_compiler_a_warning_and_the_same_numbers(monkeypatch):
    monkeypatch.setattr(native_library, "compiler", lambda: None)
    with pytest.warns(CompilationWarning) as told:
        target = bk.Target.from_pyro(decay, TIMES, DATA, compile=True)
        u = torch.linspace(0.3, 2, 3, dtype=DOUBLE).unsqueeze(-1)
        value, gradient = target.value_and_grad(u)
    assert any("differential equations are solved in torch" in str(x.message) for x in told)
    right_value, right_gradient = analytic(u)
    assert (value - right_value).abs().max() < 1e-6 and (gradient - right_gradient).abs().max() < 1e-4


@pytest.mark.calibration
def test_the_evidence_is_that_of_the_closed_form():
    target = bk.Target.from_pyro(decay, TIMES, DATA)
    grid = torch.linspace(-7, 7, 14_001, dtype=DOUBLE)
    by_quadrature = torch.logsumexp(target.log_density(grid.unsqueeze(-1)), 0) + math.log(1e-3)
    assert abs(by_quadrature - LOG_EVIDENCE) < 1e-6
    draws = bk.sample(target, seed=5 + SHIFT, progress=False)
    found = bk.evidence.bridge_sampling(target, draws, seed=6 + SHIFT)
    assert abs(found.log_evidence - LOG_EVIDENCE) < 4.5 * found.standard_error and found.standard_error < 0.05
    start, count = draws["start"], 1000  # far fewer than independent draws would be
    assert abs(start.mean() - MEAN) < 4.5 * DEVIATION / math.sqrt(count)
    assert abs(start.std() - DEVIATION) < 4.5 * DEVIATION / math.sqrt(2 * count)


@pytest.mark.calibration
@pytest.mark.parametrize("compile", [False, True])
def test_failures_are_counted(compile):
    target = bk.Target.from_pyro(growth, TIMES[:3], DATA[:2], compile=compile)
    u = target.sample_prior(50, seed=SHIFT)
    target.value_and_grad(u)
    counted = bk.ode.count_failures(target, u)
    assert counted == (50, int(target.log_density(u).isinf().sum())) and 0 < counted.num_failures < 50
    with pytest.raises(ModelError, match="no differential equation"):
        bk.ode.count_failures(bk.exact.eight_schools().target(), torch.zeros(10, dtype=DOUBLE))


@pytest.mark.parametrize("compile", [False, True])
def test_a_chain_that_blows_up_has_density_zero(compile):
    times, y = TIMES[:3], DATA[:2]
    target = bk.Target.from_pyro(growth, times, y, compile=compile)
    u = torch.tensor([[0.5], [1.5], [0.2], [3.0]], dtype=DOUBLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, _ = target.value_and_grad(u)
        assert torch.equal(target.log_density(u).isinf(), value.isinf())
    assert value[1] == value[3] == -math.inf
    alone, _ = target.value_and_grad(u[[0, 2, 0, 2]])
    assert torch.equal(value[[0, 2]], alone[:2])


def test_an_evidence_counts_chains_that_blow_up_as_zero():
    times, y = TIMES[:3], DATA[:2]
    target = bk.Target.from_pyro(growth, times, y)
    grid = torch.linspace(-7, 0.9999, 80_000, dtype=DOUBLE)
    right = torch.logsumexp(target.log_density(grid.unsqueeze(-1)), 0) + math.log(7.9999 / 79_999)
    found = bk.evidence.naive_monte_carlo(target, num_draws=4000, seed=1 + SHIFT)
    assert abs(found.log_evidence - right) < 4.5 * found.standard_error


@pytest.mark.parametrize("compile", [False, True])
def test_plates_of_equations_and_rates_from_outside(compile):
    y = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.5, 0.3]], dtype=DOUBLE)
    target = bk.Target.from_pyro(patients, TIMES, y, compile=compile)
    right = bk.Target.from_pyro(patients_exactly, TIMES, y, compile=False)
    u = torch.linspace(-0.5, 0.5, 12, dtype=DOUBLE).reshape(3, 4)
    (value, gradient), (right_value, right_gradient) = target.value_and_grad(u), right.value_and_grad(u)
    assert (value - right_value).abs().max() < 1e-6
    assert (gradient - right_gradient).abs().max() < 1e-5


def test_a_network_inside_a_module_of_pyro_has_gradients():
    class Hidden(PyroModule):
        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()

        @pyro_method
        def model(self, y):
            start = pyro.sample("start", dist.Normal(torch.zeros_like(y[:2]), 1.0).to_event(1))
            path = bk.ode.solve(lambda t, z, _: self.slope(z), start.expand(2, 3, 2), TIMES)
            pyro.sample("y", dist.Normal(path[0, 0, 1:, 0], 0.1).to_event(1), obs=y)

    hidden = Hidden()
    pyro.poutine.trace(hidden.model).get_trace(DATA).log_prob_sum().backward()
    assert all(bool((x.grad != 0).any()) for x in hidden.parameters())


def test_threads_share_a_target():
    target = bk.Target.from_pyro(decay, TIMES, DATA)
    u = torch.linspace(0.3, 2, 5, dtype=DOUBLE).unsqueeze(-1)
    right, found = target.value_and_grad(u), [None] * 4

    def work(n):
        found[n] = [target.value_and_grad(u) for _ in range(20)][-1]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, right, strict=True))


@pytest.mark.parametrize("compile", [False, True])
def test_times_may_be_made_inside_of_the_model(compile):
    def inside(y):
        decay(torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=y.dtype) + torch.zeros(4, dtype=y.dtype), y)

    assert torch.equal(TIMES, torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=DOUBLE))
    target = bk.Target.from_pyro(inside, DATA, compile=compile)
    u = torch.linspace(0.3, 2, 3, dtype=DOUBLE).unsqueeze(-1)
    value, gradient = bk.Target.from_pyro(decay, TIMES, DATA, compile=compile).value_and_grad(u)
    found = target.value_and_grad(u)
    assert not target.loops and torch.equal(found[0], value) and torch.equal(found[1], gradient)


def test_a_sampled_time_is_refused_with_its_remedy():
    def model(y):
        end = pyro.sample("end", dist.LogNormal(torch.zeros((), dtype=y.dtype), 1.0))
        path = bk.ode.solve(lambda t, z, _: -z, torch.ones_like(y[:1]), torch.stack([torch.zeros_like(end), end]))
        pyro.sample("y", dist.Normal(path[1, 0], 0.1), obs=y[0])

    with pytest.raises(ModelError, match="shifts or scales t"):
        bk.Target.from_pyro(model, DATA).value_and_grad(torch.zeros(2, 1, dtype=DOUBLE))


def test_a_site_in_the_right_hand_side_is_refused():
    def model(y):
        def slope(t, z, _):
            return -z * pyro.sample("rate", dist.LogNormal(torch.zeros((), dtype=y.dtype), 1.0))

        path = bk.ode.solve(slope, torch.ones_like(y[:1]), TIMES)
        pyro.sample("y", dist.Normal(path[1:, 0], 0.1).to_event(1), obs=y)

    with pytest.raises(ModelError, match="'rate' is in the right-hand side"):
        bk.Target.from_pyro(model, DATA)
