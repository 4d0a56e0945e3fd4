"""Solutions of differential equations against closed forms, and their gradients against steps that are unrolled."""

import math
import warnings

import pytest
import torch

import bayeskit as bk
from bayeskit.errors import (
    AccuracyWarning,
    CompilationWarning,
    DataError,
    DataWarning,
    ModelError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)
from bayeskit.ode import _operations as operations
from bayeskit.ode import _solving as solving
from bayeskit.ode._methods import METHODS, step

DOUBLE = torch.float64
METHOD_NAMES = ["dopri5", "rodas5"]
TIGHT = {"rtol": 1e-11, "atol": 1e-13}

#: By mpmath: Taylor series of 24 terms with 30 digits, at times 1, 10, 20 and .4, 4, 40.
LYNX_AND_HARE = [
    [49.246848884989380511, 7.2594825891551843168],
    [32.254926019739512607, 6.0042433593921075169],
    [30.60193759463760696, 6.0423755995973011994],
]
ROBERTSON = [
    [0.98517211386098986242, 0.000033863953789749041364, 0.014794022185220388544],
    [0.90551867858425391188, 0.00002240475687560200911, 0.094458916658870486115],
    [0.71582706871940509047, 9.1855347645577639038e-6, 0.28416374574583035176],
]


def predator_and_prey(t, y, rates):
    hare, lynx = y[0], y[1]
    return torch.stack([(rates[0] - rates[1] * lynx) * hare, (rates[3] * hare - rates[2]) * lynx])


def robertson(t, y, rates):
    slow, fast, middle = rates[0] * y[0], rates[2] * y[1] ** 2, rates[1] * y[1] * y[2]
    return torch.stack([middle - slow, slow - middle - fast, fast])


def forced(t, y, rates):
    return -rates["decay"] * (y - torch.cos(rates["frequency"] * t))


def without_gradients(t, y, rates):
    with torch.no_grad():
        return predator_and_prey(t, y, rates)


def tensor(values):
    return torch.tensor(values, dtype=DOUBLE)


def chains(size):
    """Return initial states, times and rates of predators and prey, spread over their posterior."""
    spread = torch.linspace(-1, 1, size, dtype=DOUBLE).unsqueeze(-1)
    return (
        tensor([34.0, 6.0]) * (1 + 0.2 * spread),
        torch.arange(6, dtype=DOUBLE),
        tensor([0.55, 0.028, 0.8, 0.024]) * (1 + 0.1 * spread.flip(0)),
    )


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(solving, "has_compiler", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompilationWarning)
        yield


# -- solutions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_linear_systems_are_matrix_exponentials(method):
    matrices = tensor(
        [[[-1.0, 2.0, 0.0], [-2.0, -1.0, 0.5], [0.0, 0.3, -0.2]], [[0.1, 1, 0], [-1, 0.1, 0], [0, 0, -3]]]
    )
    start, times = tensor([[1.0, 0.0, 2.0], [0.5, -1.0, 1.0]]), tensor([0.3, 0.8, 2.0, 5.0])
    path = bk.ode.solve(lambda t, y, a: a @ y, start, times, matrices, method=method, **TIGHT)
    growth = torch.linalg.matrix_exp(matrices.unsqueeze(1) * (times - times[0])[:, None, None])
    assert (path - (growth @ start[:, None, :, None]).squeeze(-1)).abs().max() < 1e-9


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_predator_and_prey_has_the_numbers_of_long_taylor_series(method):
    expected = tensor(LYNX_AND_HARE)
    start, times = tensor([34.0, 6.0]), tensor([0.0, 1.0, 10.0, 20.0])
    path = bk.ode.solve(predator_and_prey, start, times, tensor([0.55, 0.028, 0.8, 0.024]), method=method, **TIGHT)
    assert ((path[1:] - expected) / expected).abs().max() < 1e-9


def test_a_stiff_reaction_has_the_numbers_of_long_taylor_series():
    expected = tensor(ROBERTSON)
    start, times = tensor([1.0, 0.0, 0.0]), tensor([0.0, 0.4, 4.0, 40.0])
    settings = {"method": "rodas5", "rtol": 1e-11, "atol": 1e-16}
    path = bk.ode.solve(robertson, start, times, tensor([0.04, 1e4, 3e7]), **settings)
    assert ((path[1:] - expected) / expected).abs().max() < 1e-9


@pytest.mark.parametrize(("method", "decay"), [("dopri5", 10.0), ("rodas5", 10.0), ("rodas5", 1e6)])
def test_a_slow_solution_of_a_fast_equation_is_followed(method, decay):
    def f(t, y, rate):  # Prothero and Robinson (1974): the solution is cos(t) for any rate
        return -rate * (y - torch.cos(t)) - torch.sin(t)

    times = torch.linspace(0, 3, 7, dtype=DOUBLE)
    path = bk.ode.solve(f, torch.ones(1, dtype=DOUBLE), times, tensor(decay), method=method, **TIGHT)
    assert (path[:, 0] - torch.cos(times)).abs().max() < 1e-9


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_error_falls_with_the_fifth_power_of_the_step(method):
    errors = []
    slope = lambda t, y, k: (torch.stack([y[1], -y[0] * (1 + k * torch.cos(t) * y[0])]),)  # noqa: E731
    start, k = tensor([1.0, 0.3]), tensor(0.4)
    exact = bk.ode.solve(lambda *x: slope(*x)[0], start, tensor([0.0, 1.0]), k, rtol=1e-13, atol=1e-14)[-1]
    for count in (16, 32):
        y, h = start, tensor(1.0 / count)
        for n in range(count):
            y = step(METHODS[method], slope, n * h, h, y, k)[0]
        errors.append(float((y - exact).abs().max()))
    assert 4.5 < math.log2(errors[0] / errors[1]) < 5.8


@pytest.mark.calibration
@pytest.mark.parametrize("rtol", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_errors_at_the_times_are_near_the_tolerance(method, rtol):
    start, times, rates = chains(4)
    settings = {"method": method, "atol": 1e-3 * rtol}
    path = bk.ode.solve(predator_and_prey, start, times, rates, rtol=rtol, **settings)
    exact = bk.ode.solve(predator_and_prey, start, times, rates, rtol=1e-12, **settings)
    error = ((path - exact) / exact).abs().max()
    assert 0 < error < 50 * rtol


# -- chains -------------------------------------------------------------------------------------


@pytest.mark.calibration
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_chains_are_independent_to_the_bit(method, compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    start, times, rates = chains(3)

    def solved(start, rates):
        start, rates = start.clone().requires_grad_(), rates.clone().requires_grad_()
        path = bk.ode.solve(predator_and_prey, start, times[:3], rates, method=method)
        return path.detach(), *torch.autograd.grad(path.log().sum(), [start, rates])

    whole = solved(start, rates)
    with_others = solved(torch.cat([start[:1], 10 * start[1:]]), torch.cat([rates[:1], 0.1 * rates[1:]]))
    for one, other in zip(whole, with_others, strict=True):
        assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])
    if compiled:
        for one, alone in zip(whole, solved(start[:1], rates[:1]), strict=True):
            assert torch.equal(one[:1], alone)


@pytest.mark.calibration
@pytest.mark.parametrize("compiled", [True, False])
def test_a_chain_that_blows_up_leaves_the_others_as_they_are(compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    times = tensor([0.0, 0.5, 1.0])

    def solved(start):
        start = start.clone().requires_grad_()
        path = bk.ode.solve(lambda t, y, p: y**2, start, times)
        return path.detach(), torch.autograd.grad(path.sum(), start)[0]

    start = tensor([[0.5], [2.0], [0.9]])  # y / (1 - y t) is infinite at t = 1 / 2
    with pytest.warns(AccuracyWarning, match="1 of 3 chains have no solution, the first at index 1") as told:
        path, gradient = solved(start)
    said = [str(x.message) for x in told if x.category is AccuracyWarning]
    assert len(said) == 1 and 'method="rodas5"' in said[0]
    assert path[1].isnan().all() and gradient[1].isnan().all()
    fine = [0, 2]
    right_path, right_gradient = solved(start[fine])
    assert torch.equal(path[fine], right_path) and torch.equal(gradient[fine], right_gradient)
    assert (right_path - start[fine].unsqueeze(1) / (1 - start[fine].unsqueeze(1) * times[:, None])).abs().max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_failed_chain_that_is_not_used_leaves_the_gradient_of_shared_parameters(method, compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    rate, start, times = tensor([1.0]).requires_grad_(), tensor([[0.5], [2.0]]), tensor([0.0, 1.0])
    with pytest.warns(AccuracyWarning, match="1 of 2"):
        path = bk.ode.solve(lambda t, y, rate: rate * y**2, start, times, rate, method=method)
    (gradient,) = torch.autograd.grad(path[0, -1].sum(), rate, retain_graph=True)  # of y / (1 - rate y)
    assert abs(gradient - 1) < 1e-4
    assert torch.autograd.grad(path.sum(), rate)[0].isnan().all()


def levels(*starts, method):
    """Fill a tank that leaks by Torricelli's law: the slope is infinite by the level at level zero."""
    start = tensor(starts).unsqueeze(-1)
    return bk.ode.solve(lambda t, level, _: 2 - level.sqrt(), start, tensor([0.0, 1.0, 5.0]), method=method)


@pytest.mark.calibration
@pytest.mark.parametrize("compiled", [True, False])
def test_an_infinite_derivative_is_a_failure_of_the_implicit_method(compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    root = levels(0.0, method="dopri5")[0, :, 0].sqrt()
    assert (-2 * (root + 2 * (1 - root / 2).log()) - tensor([0.0, 1.0, 5.0])).abs().max() < 1e-5
    with pytest.warns(AccuracyWarning, match="1 of 2 chains .* a derivative of it is not finite"):
        path = levels(0.0, 1.0, method="rodas5")
    assert path[0].isnan().all() and torch.equal(path[1:], levels(1.0, method="rodas5"))
    with pytest.warns(AccuracyWarning, match="a derivative of it"):  # by time
        path = bk.ode.solve(lambda t, y, _: t.sqrt() - y, tensor([1.0]), tensor([0.0, 1.0]), method="rodas5")
    assert path.isnan().all()


@pytest.mark.calibration
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_late_times_do_not_round_the_steps(method, compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    start, times = torch.ones(1), torch.tensor([0.0, 1.0, 10.0])
    path, late = (
        bk.ode.solve(lambda t, y, _: -y / 2, start, first + times, method=method)[:, 0] for first in (0.0, 20_000.0)
    )
    assert torch.equal(path, late) and (path * torch.exp(times / 2) - 1).abs().max() < 1e-4
    apart = bk.ode.solve(lambda t, y, _: 0.5 * y.flip(0), torch.ones(2), torch.tensor([0.0, 20.0]), method=method)
    assert (apart[1] / math.exp(10.0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_units_of_the_state_do_not_matter(method, compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")
    matrix, times = tensor([[-1.0, 0.5], [0.3, -2.0]]), tensor([0.0, 2.0, 5.0])
    start = tensor([1.0, 0.0])
    path, small = (
        bk.ode.solve(lambda t, y, a: a @ y, unit * start, times, matrix, method=method) for unit in (1.0, 2.0**-60)
    )
    assert torch.equal(path * 2.0**-60, small)
    assert (path / (torch.linalg.matrix_exp(matrix * times[:, None, None]) @ start) - 1)[1:].abs().max() < 1e-6


@pytest.mark.calibration
@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("compiled", [True, False])
def test_states_that_start_at_zero_are_accurate(method, compiled, request):
    if not compiled:
        request.getfixturevalue("without_compiler")

    def passing(t, y, _):  # from compartment to compartment: a Poisson distribution
        return torch.cat([-y[:1], y[:-1] - y[1:]])

    start, number = torch.eye(10, dtype=DOUBLE)[0], torch.arange(10, dtype=DOUBLE)
    path = bk.ode.solve(passing, start, tensor([0.0, 1.0, 3.0]), method=method)
    exact = torch.distributions.Poisson(tensor([[1.0], [3.0]])).log_prob(number).exp()
    assert (path[1:] / exact - 1).abs().max() < 1e-5
    path = bk.ode.solve(
        lambda t, y, _: torch.stack([t**6, 0 * t]), torch.zeros(2, dtype=DOUBLE), tensor([0.0, 1.0, 2.0])
    )
    assert (path[1:, 0] - tensor([1.0, 128.0]) / 7).abs().max() < 1e-5 and (path[:, 1] == 0).all()


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["solve", "inv", "cholesky"])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_matrices_are_factorised_inside_and_fail_apart(method, name):
    def slope(t, y, a):
        if name == "cholesky":
            return torch.cholesky_solve(-y.unsqueeze(-1), torch.linalg.cholesky(a)).squeeze(-1)
        return torch.linalg.solve(a, -y) if name == "solve" else -torch.linalg.inv(a) @ y

    singular, mass, start, times = (
        torch.zeros(2, 2),
        tensor([[2.0, 1.0], [1.0, 3.0]]),
        tensor([1.0, 2.0]),
        tensor([0.0, 1.0]),
    )
    exact = torch.linalg.matrix_exp(-torch.linalg.inv(mass)) @ start
    masses = torch.stack([singular.to(mass), mass]).requires_grad_()
    with pytest.warns(AccuracyWarning, match="1 of 2 chains have no solution, the first at index 0"):
        path = bk.ode.solve(slope, start.expand(2, 2), times, masses, method=method)
    assert path[0].isnan().all() and (path[1, 1] - exact).abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(path[1, 1].sum(), masses)
    again = mass.clone().requires_grad_()
    (right,) = torch.autograd.grad((torch.linalg.matrix_exp(-torch.linalg.inv(again)) @ start).sum(), again)
    right = right if name != "cholesky" else (right + right.mT) / 2
    assert (gradient[1] - right).abs().max() < 1e-5 and (gradient[0] == 0).all()


def test_a_rejected_step_is_not_tried_again_for_ever(without_compiler, monkeypatch):
    noted, run = [], operations._Integration.run
    monkeypatch.setattr(operations._Integration, "run", lambda self, _=None: run(self, noted.append))
    with pytest.warns(AccuracyWarning, match="1 of 1"):
        bk.ode.solve(lambda t, y, _: y**2, tensor([2.0]), tensor([0.0, 1.0]))
    assert 100 < len(noted) < 1000  # up to the last step that time resolves, and not max_steps


def test_numbers_among_the_parameters_have_the_dtype_of_the_state():
    path = bk.ode.solve(
        lambda t, y, rates: -rates[0] * rates[1] * y, tensor([1.0]), tensor([0.0, 1.0]), [0.1, 2], **TIGHT
    )
    assert abs(path[-1, 0] - math.exp(-0.2)) < 1e-11


def test_a_vector_of_the_length_of_batch_and_state_is_pointed_out():
    start, times, rates = torch.ones(2, 2, dtype=DOUBLE), tensor([0.0, 1.0]), tensor([1.0, 2.0])
    with pytest.warns(DataWarning, match="each chain gets one number"):
        path = bk.ode.solve(lambda t, y, rate: -rate * y, start, times, rates)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(path, bk.ode.solve(lambda t, y, rate: -rate * y, start, times, rates.unsqueeze(-1)))
        bk.ode.solve(lambda t, y, rate: -rate * y, start[:, :1], times, rates)


def test_a_chain_that_takes_too_many_steps_is_nan():
    start, times, rates = chains(2)
    with pytest.warns(AccuracyWarning, match="2 of 2"):
        path = bk.ode.solve(predator_and_prey, start, times, rates, max_steps=5)
    assert path.isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bk.ode.solve(predator_and_prey, start, times, rates, max_steps=500)


# -- gradients ----------------------------------------------------------------------------------


CASES = {
    "predators": (predator_and_prey, lambda: chains(2)),
    "forced": (
        forced,
        lambda: (
            tensor([[1.0, 0.2], [0.4, -0.3]]),
            tensor([0.0, 0.7, 1.5]),
            {"decay": tensor([[3.0, 1.0], [2.0, 0.5]]), "frequency": tensor(2.0)},
        ),
    ),
}


def unrolled(method, f, start, times, params, taken):
    """Return the solution of one chain by the steps ``taken``, through which torch differentiates."""
    y, found = start, [start]
    for t, h, landed in taken:
        y = step(METHODS[method], lambda t, y, *_: (f(t, y, params),), t, h, y)[0]
        if landed:
            found.append(y)
    return torch.stack(found)


@pytest.mark.calibration
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_gradient_is_that_of_the_steps(method, name, monkeypatch):
    f, make = CASES[name]
    start, times, params = make()
    start = start.requires_grad_()
    many = params if isinstance(params, dict) else {"": params}
    leaves = [start, *(x.requires_grad_() for x in many.values())]
    path = bk.ode.solve(f, start, times, params, method=method)
    weight = torch.linspace(-1, 2, path.numel(), dtype=DOUBLE).reshape(path.shape)
    gradients = torch.autograd.grad((path * weight).sum(), leaves)

    # The steps of each chain, noted by the steps in torch, are those of the C++.
    noted = []
    run = operations._Integration.run
    monkeypatch.setattr(operations._Integration, "run", lambda self, _=None: run(self, noted.append))
    monkeypatch.setattr(solving, "has_compiler", lambda: False)
    with pytest.warns(CompilationWarning):
        bk.ode.solve(f, start.detach(), times, params, method=method)
    again = []
    for b in range(len(start)):
        taken = [(x.t[b], x.h[b], x.landed[b] >= 0) for x in noted if x.accepted[b]]
        own = {k: x[b] if x.dim() else x for k, x in many.items()}
        again.append(unrolled(method, f, start[b], times, own if isinstance(params, dict) else own[""], taken))
    expected = torch.autograd.grad((torch.stack(again) * weight).sum(), leaves)
    for one, other in zip(gradients, expected, strict=True):
        assert ((one - other) / other.abs().max()).abs().max() < 1e-10


@pytest.mark.calibration
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_gradient_is_near_differences(method):
    start, times, rates = chains(1)

    def total(rates):
        path = bk.ode.solve(predator_and_prey, start[0], times, rates[0], method=method, **TIGHT)
        return path.log().sum()

    rates.requires_grad_()
    (gradient,) = torch.autograd.grad(total(rates), rates)
    for k in range(4):
        shift = torch.zeros_like(rates)
        shift[0, k] = 1e-5 * rates[0, k]
        slope = (total(rates + shift) - total(rates - shift)) / (2 * shift[0, k])
        assert abs(slope - gradient[0, k]) < 1e-5 * abs(slope)


@pytest.mark.calibration
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_steps_in_torch_are_those_of_the_compiled_code(method, monkeypatch):
    found = []
    for compiler in (True, False):
        monkeypatch.setattr(solving, "has_compiler", lambda compiler=compiler: compiler)
        start, times, rates = (x.requires_grad_() for x in chains(3))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            path = bk.ode.solve(predator_and_prey, start, times.detach(), rates, method=method)
        assert any(issubclass(x.category, CompilationWarning) for x in told) != compiler
        found.append((path.detach(), *torch.autograd.grad(path.log().sum(), [start, rates])))
    for one, other in zip(*found, strict=True):
        assert ((one - other) / other.abs().max()).abs().max() < 1e-9


def test_tensors_used_from_outside_have_gradients():
    start, times, _ = chains(2)
    net = torch.nn.Sequential(torch.nn.Linear(2, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-0.4, 0.5, parameter.numel(), dtype=DOUBLE).sin().reshape(parameter.shape))
    start = start / 34
    path = bk.ode.solve(lambda t, y, p: net(y), start, times, **TIGHT)
    gradients = torch.autograd.grad(path[:, -1].sum(), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        with torch.no_grad():
            before = parameter.clone()
            ends = []
            for sign in (1, -1):
                parameter.copy_(before + sign * 1e-5)
                ends.append(bk.ode.solve(lambda t, y, p: net(y), start, times, **TIGHT)[:, -1].sum())
            parameter.copy_(before)
        assert abs((ends[0] - ends[1]) / 2e-5 - gradient.sum()) < 1e-5 * (1 + abs(gradient.sum()))


def test_transforms_of_torch_batch_and_differentiate():
    start, times, rates = chains(3)

    def total(start, rates):
        return bk.ode.solve(predator_and_prey, start, times, rates).log().sum()

    batched = torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))(start, rates)
    shared = torch.func.vmap(torch.func.grad(total, argnums=1), in_dims=(0, None))(start, rates[0])
    for b in range(3):
        alone = torch.func.grad(total, argnums=(0, 1))(start[b], rates[b])
        assert all(torch.equal(x[b], y) for x, y in zip(batched, alone, strict=True))
        assert torch.equal(shared[b], torch.func.grad(total, argnums=1)(start[b], rates[0]))
    twice = torch.func.vmap(lambda rates: bk.ode.solve(predator_and_prey, start, times, rates.expand(3, 4)))(rates)
    assert torch.equal(twice[1], bk.ode.solve(predator_and_prey, start, times, rates[1].expand(3, 4)))


def test_single_precision_stays_single():
    start, times, rates = (x.float() for x in chains(2))
    exact = bk.ode.solve(predator_and_prey, *(x.double() for x in (start, times, rates)))
    path = bk.ode.solve(predator_and_prey, start, times, rates.requires_grad_(), rtol=1e-5)
    assert path.dtype == torch.float32 and ((path - exact) / exact).abs().max() < 1e-3
    assert torch.autograd.grad(path.sum(), rates)[0].dtype == torch.float32


# -- shapes and bad input -----------------------------------------------------------------------


def test_shapes():
    start, times, rates = chains(3)
    assert bk.ode.solve(predator_and_prey, start, times, rates).shape == (3, 6, 2)
    assert bk.ode.solve(predator_and_prey, start, times, rates[0]).shape == (3, 6, 2)
    assert bk.ode.solve(predator_and_prey, start[0], times, rates[0]).shape == (6, 2)
    assert torch.equal(bk.ode.solve(predator_and_prey, start, times[:1], rates), start.unsqueeze(1))
    grid = bk.ode.solve(predator_and_prey, start.expand(2, 3, 2), times, rates.expand(2, 3, 4))
    assert torch.equal(grid, bk.ode.solve(predator_and_prey, start, times, rates).expand(2, 3, 6, 2))
    twice = bk.ode.solve(predator_and_prey, start, times[[0, 0, 1, 1, 2]], rates)
    assert torch.equal(twice, bk.ode.solve(predator_and_prey, start, times[:3], rates)[:, [0, 0, 1, 1, 2]])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"times": tensor([0.0, 2.0, 1.0])}, DataError, r"times\[2\] = 1 is before times\[1\] = 2"),
        ({"times": tensor([0.0, math.nan])}, DataError, r"times\[1\] is nan"),
        ({"times": tensor([])}, ShapeError, "at least one time"),
        (
            {"times": tensor([0.0, 1.0]).requires_grad_()},
            ModelError,
            "times of a differential equation have no gradient",
        ),
        ({"y0": torch.ones(2, dtype=torch.int64)}, ShapeError, "y0 must be"),
        ({"y0": torch.ones(())}, ShapeError, "y0 must be"),
        ({"y0": torch.ones(0, 2)}, ShapeError, "y0 must be"),
        ({"method": "euler"}, UnknownNameError, "dopri5"),
        ({"rtol": 0.0}, SettingsError, "rtol"),
        ({"max_steps": 0}, SettingsError, "max_steps"),
        ({"f": lambda t, y, p: y[0]}, ShapeError, "f must return a tensor of the shape and dtype of y"),
        ({"f": lambda t, y, p: y if y[0] > 0 else -y}, ModelError, "torch.where"),
        ({"f": lambda t, y, p: y[:, 0]}, ModelError, "write f for one chain"),
        ({"f": lambda t, y, p: y * torch.rand(2)}, ModelError, "random"),
        ({"f": lambda t, y, p: p["rate"] * y}, ModelError, "f raises IndexError"),
        ({"f": lambda t, y, p: {}["rate"] * y}, ModelError, "f raises KeyError"),
        ({"f": lambda t, y, p: float("a") * y}, ModelError, "f raises ValueError"),
        ({"f": lambda t, y, p: y.rate}, ModelError, "f raises AttributeError"),
        ({"params": (tensor(1.0), None)}, DataError, "one is of type NoneType"),
        ({"params": "a"}, DataError, "one is of type str"),
        ({"f": without_gradients}, ModelError, "switches gradients off"),
    ],
)
def test_bad_input(change, error, words):
    start, times, rates = chains(2)
    given = {"f": predator_and_prey, "y0": start, "times": times, "params": rates} | change
    with pytest.raises(error, match=words):
        bk.ode.solve(**given)


def test_derivatives_that_are_not_available_are_named():
    start, times, rates = chains(1)

    def total(rates):
        return bk.ode.solve(predator_and_prey, start, times, rates).sum()

    with pytest.raises(ModelError, match="no second derivatives"):
        torch.func.grad(lambda rates: torch.func.grad(total)(rates).sum())(rates)
    with pytest.raises(ModelError, match="no forward derivative"):
        torch.func.jvp(total, (rates,), (rates,))
