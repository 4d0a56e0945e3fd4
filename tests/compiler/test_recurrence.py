"""Recurrences by ``bk.scan`` are those of a Python loop, and affine ones take few operations."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import bayeskit as bk
from bayeskit._compiler import affine_recurrence as affine_recurrence
from bayeskit._compiler import recurrence as recurrence
from bayeskit.errors import ModelError, SettingsError, ShapeError, SlowModelWarning

F64 = torch.float64
Y = torch.randn(37, generator=torch.Generator().manual_seed(0), dtype=F64)
PARAMETERS = torch.tensor([0.3, 0.6, -0.4], dtype=F64)


def garch(parameters, y):
    base, shock, memory = parameters.square().unbind(-1)

    def step(variance, y):
        variance = base + shock * y.square() + memory * variance
        return variance, variance.sqrt()

    return step, y[0].square() + base, y


def moving_average(parameters, y):
    def step(error, now):
        error = now[0] - parameters[0] * now[1] - parameters[1] * error
        return error, {"error": error, "twice": 2 * error}

    return step, parameters[2], (y[1:], y[:-1])


def trend(parameters, y):
    """Holt's method: two states, a matrix that is not diagonal."""

    def step(state, y):
        level, slope = state["level"], state["slope"]
        new = (1 - parameters[0]) * (level + slope) + parameters[0] * y
        return {"level": new, "slope": slope + parameters[1] * (new - level - slope)}, level + slope

    return step, {"level": parameters[2], "slope": 0 * parameters[2]}, y


def rotation(parameters, y):
    turn = torch.stack([parameters[:2], torch.stack([-parameters[1], parameters[0]])])

    def step(x, y):
        x = turn @ x + torch.stack([y, torch.ones_like(y)])
        return x, x.sum()

    return step, torch.stack([parameters[2], parameters[0]]), y


def logistic_map(parameters, y):
    def step(x, y):
        x = parameters[1] * x * (1 - x) + 0.01 * y
        return x, x.exp()

    return step, parameters[0], y


def threshold(parameters, y):
    def step(x, y):
        x = torch.where(x > 0, parameters[0] * x, parameters[1] * x) + y
        return x, x

    return step, parameters[2], y


AFFINE = [garch, moving_average, trend, rotation]
OTHERS = [logistic_map, threshold]


def total(tree):
    return sum(leaf.double().square().sum() for leaf in torch.utils._pytree.tree_leaves(tree))


@pytest.mark.parametrize("length", [1, 2, 7, 36])
@pytest.mark.parametrize("make", AFFINE + OTHERS)
def test_values_and_gradients_are_those_of_a_loop(make, length):
    def both(parameters, run):
        step, state, inputs = make(parameters, Y[: length + (make is moving_average)])
        return total(run(step, state, inputs))

    leaf = PARAMETERS.clone().requires_grad_()
    found, exact = both(leaf, bk.scan), both(leaf, lambda *a: recurrence._one_by_one(*a, length))
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)
    one, other = (torch.autograd.grad(value, leaf)[0] for value in (found, exact))
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", AFFINE + OTHERS)
def test_affine_steps_are_recognised(make, monkeypatch):
    called = []
    right = recurrence._all_at_once
    monkeypatch.setattr(recurrence, "_all_at_once", lambda *a: called.append(1) or right(*a))
    bk.scan(*make(PARAMETERS, Y))
    assert bool(called) == (make in AFFINE)


@pytest.mark.calibration
@pytest.mark.parametrize("make", AFFINE + OTHERS)
def test_batches_gradients_and_traces(make):
    def value(parameters):
        return total(bk.scan(*make(parameters, Y[:9])))

    points = PARAMETERS + 0.1 * torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    exact = torch.stack([value(p) for p in points])
    torch.testing.assert_close(torch.func.vmap(value)(points), exact)
    slope = torch.func.vmap(torch.func.grad(value))
    traced = make_fx(slope)(points)
    torch.testing.assert_close(traced(points + 0.01), slope(points + 0.01))
    h = 1e-6
    for i in range(3):
        shift = h * torch.eye(3, dtype=F64)[i]
        numeric = (torch.func.vmap(value)(points + shift) - torch.func.vmap(value)(points - shift)) / (2 * h)
        torch.testing.assert_close(slope(points)[:, i], numeric, rtol=1e-6, atol=1e-6)


def test_a_model_with_a_scan_has_few_operations():
    def model(y):
        parameters = pyro.sample("parameters", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        _, deviation = bk.scan(*garch(parameters, y))
        with pyro.plate("times", len(y)):
            pyro.sample("y", dist.Normal(0.0, deviation), obs=y)

    long = torch.randn(1000, generator=torch.Generator().manual_seed(2), dtype=F64)
    target = bk.Target.from_pyro(model, long, compile=False)
    assert not target.loops and target.cost.num_nodes < 1000
    u = torch.stack([PARAMETERS, -PARAMETERS])
    step, state, inputs = garch(PARAMETERS, long)
    _, deviation = recurrence._one_by_one(step, state, inputs, len(long))
    exact = dist.Normal(0.0, deviation).log_prob(long).sum()
    assert float(target.log_likelihood(u)[0]) == pytest.approx(float(exact), rel=1e-12)


def branching(x, y):
    return (0.5 * x + y if x > 0.2 else x - y), None


def assigning(x, y):
    new = torch.zeros(2, dtype=F64)
    new[0] = x[0] * x[0] + y
    return new, None


def assigning_through_a_view(x, y):
    new = torch.zeros(2, dtype=F64)
    new.view(-1).copy_(x * x + y)
    return new, None


NOT_AFFINE = {
    "branch": (branching, torch.tensor(0.3, dtype=F64)),
    "branch with output": (lambda x, y: (branching(x, y)[0], x), torch.tensor(0.3, dtype=F64)),
    "number": (lambda x, y: (0.5 * x + float(x) ** 2 / 10, None), torch.tensor(1.0, dtype=F64)),
    "item": (lambda x, y: (0.5 * x + y * x.item(), None), torch.tensor(1.0, dtype=F64)),
    "data": (lambda x, y: (0.5 * x.data + y, None), torch.tensor(1.0, dtype=F64)),
    "detached": (lambda x, y: (0.5 * x.detach() + y, None), torch.tensor(1.0, dtype=F64)),
    "rounded": (lambda x, y: (torch.div(x, 2, rounding_mode="floor") + y, x), torch.tensor(1.0, dtype=F64)),
    "keyword": (lambda x, y: (torch.div(x, other=2.0) + y, x), torch.tensor(1.0, dtype=F64)),
    "keyword state": (lambda x, y: (torch.mul(y, other=x) + torch.pow(y, exponent=x), x), torch.tensor(1.0, dtype=F64)),
    "assignment": (assigning, torch.tensor([0.3, 0.1], dtype=F64)),
    "view": (assigning_through_a_view, torch.tensor([0.3, 0.1], dtype=F64)),
    "index": (lambda x, y: (torch.arange(3.0, dtype=F64)[x.long() % 3] + y.abs(), None), torch.tensor(1.0, dtype=F64)),
    "condition": (lambda x, y: (x.where(x > 0, -x) + y, None), torch.tensor(1.0, dtype=F64)),
    "denominator": (lambda x, y: (y / (2 + x * x), None), torch.tensor(1.0, dtype=F64)),
    "square": (lambda x, y: (x * x + y, None), torch.tensor(0.1, dtype=F64)),
    "in place": (lambda x, y: (x.clone().mul_(x).add_(y), None), torch.tensor(0.1, dtype=F64)),
    "mixed": (lambda x, y: ((0.5 * x[0] + y, x[1] + 1), None), (torch.tensor(1.0, dtype=F64), torch.tensor(0))),
    "precisions": (
        lambda x, y: ((0.5 * x[0] + y, 0.5 * x[1]), None),
        (torch.tensor(1.0, dtype=F64), torch.tensor(1.0)),
    ),
    "number as output": (lambda x, y: (0.5 * x + y, {"x": x, "k": 1.0}), torch.tensor(1.0, dtype=F64)),
}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_what_only_seems_affine_runs_in_a_loop(name):
    step, state = NOT_AFFINE[name]
    found = bk.scan(step, state, Y[:9].abs())
    exact = recurrence._one_by_one(step, state, Y[:9].abs(), 9)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)


def test_a_branch_on_the_state_in_a_model_is_right():
    start = torch.tensor(1.0, dtype=F64)

    def model(y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        last, _ = bk.scan(lambda x, v: (0.5 * x + b if x > 0.8 else x - v * b, None), start, y)
        pyro.sample("z", dist.Normal(last, 1.0), obs=y[0])

    with pytest.warns(SlowModelWarning):
        target = bk.Target.from_pyro(model, Y[:9])
    for b in (0.3, 1.2):
        x = start
        for v in Y[:9]:
            x = 0.5 * x + b if x > 0.8 else x - v * b
        exact = dist.Normal(x, 1.0).log_prob(Y[0])
        assert float(target.log_likelihood(torch.tensor([b], dtype=F64))) == pytest.approx(float(exact), rel=1e-12)


def test_growing_states_stay_exact():
    """A root outside of the unit circle, over as many steps as a number can hold."""
    grow = torch.tensor(2.0, dtype=F64)
    last, path = bk.scan(lambda x, _: (grow * x, x), torch.tensor(1.0, dtype=F64), length=1000)
    assert float(last) == 2.0**1000 and path.tolist() == [2.0**t for t in range(1000)]


def test_single_precision_stays():
    last, outputs = bk.scan(*garch(PARAMETERS.float(), Y.float()))
    assert last.dtype == outputs.dtype == torch.float32


def test_no_outputs_and_no_times():
    state = torch.tensor(1.0, dtype=F64)
    assert bk.scan(lambda x, _: (0.5 * x, None), state, length=3) == (torch.tensor(0.125, dtype=F64), None)
    last, outputs = bk.scan(lambda x, y: (x + y, {"x": x, "none": None}), state, torch.zeros(0, dtype=F64))
    assert last is state and outputs["x"].shape == (0,) and outputs["none"] is None


def test_a_step_may_branch_on_its_inputs():
    def step(x, y):
        return (0.5 * x + 1 if float(y) > 0 else 0.25 * x), x

    found = bk.scan(step, torch.tensor(1.0, dtype=F64), Y)
    exact = recurrence._one_by_one(step, torch.tensor(1.0, dtype=F64), Y, len(Y))
    torch.testing.assert_close(found, exact)


def test_scans_within_scans():
    def step(x, row):
        inner, _ = bk.scan(lambda z, y: (0.5 * z + y, None), x, row)
        return inner, inner

    rows = Y[:36].reshape(6, 6)
    found = bk.scan(step, torch.tensor(0.0, dtype=F64), rows)
    exact = recurrence._one_by_one(step, torch.tensor(0.0, dtype=F64), rows, 6)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: bk.scan(lambda x, y: (x, y), torch.zeros(()), (torch.zeros(3), torch.zeros(4))), ShapeError, "differ"),
        (lambda: bk.scan(lambda x, y: (x, y), torch.zeros(()), torch.zeros(3), length=4), ShapeError, "differ"),
        (lambda: bk.scan(lambda x, y: (x, y), torch.zeros(()), torch.zeros(())), ShapeError, "no time dimension"),
        (lambda: bk.scan(lambda x, y: (x, y), torch.zeros(())), SettingsError, "length="),
        (lambda: bk.scan(lambda x, y: x, torch.zeros(()), torch.zeros(3)), ShapeError, "return .state, None"),
        (
            lambda: bk.scan(lambda x, y: (x[None], y), torch.zeros(()), torch.zeros(3)),
            ShapeError,
            "part 0 of the state",
        ),
        (lambda: bk.scan(lambda x, y: (x.double(), y), torch.zeros(()), torch.zeros(3)), ShapeError, "float64"),
        (lambda: bk.scan(lambda x, y: ((x, x), y), torch.zeros(()), torch.zeros(3)), ShapeError, "structure"),
        (lambda: bk.scan(lambda x, y: (x, y), "start", torch.zeros(3)), ShapeError, "torch.as_tensor"),
        (lambda: bk.scan(sampling, torch.zeros(()), torch.zeros(3)), ModelError, "site 'z' is in the step.*plate"),
    ],
)
def test_what_is_wrong_is_said(call, error, match):
    with pytest.raises(error, match=match):
        call()


def sampling(x, y):
    return x + pyro.sample("z", dist.Normal(0.0, 1.0)), y


def test_a_wrong_order_of_products_is_noticed(monkeypatch):
    """A mutation: the earlier matrix applied last."""
    right = affine_recurrence.prefix
    monkeypatch.setattr(affine_recurrence, "prefix", lambda a, b, x: right(a.mT, b, x))
    with pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_a_loop(rotation, 7)


def test_a_state_without_a_tensor():
    with pytest.raises(ShapeError, match="holds no tensor"):
        bk.scan(lambda state, _: (state, state), [[]], length=2)
