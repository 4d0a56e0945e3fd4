"""How far a target's bijection stretches space, against the derivatives of what it maps to."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from target_checks import assert_close, finite_differences, log_jacobian, normal, points
from target_models import ALL
from torch.func import vmap

from bayeskit import Target
from bayeskit.errors import ModelError, ShapeError, SlowModelWarning
from bayeskit.inference.samplers import MinibatchTarget
from bayeskit.inference.samplers._weighted_data import WeightedData


@pytest.fixture(scope="module", params=ALL)
def target(request):
    case = ALL[request.param]
    return Target.from_pyro(case.model, *case.args, compile=False, **case.kwargs)


@pytest.mark.calibration
def test_jacobian_is_that_of_constrain(target):
    u = points(target)
    found = target.log_jacobian(u)
    assert_close(found, torch.stack([log_jacobian(target, row) for row in u]))
    assert_close(target.log_jacobian(u[0]), found[0])
    assert_close(target.log_jacobian(u.reshape(2, 2, -1)), found.reshape(2, 2))
    assert target.log_jacobian(u[:0]).shape == (0,)


def test_gradient_of_the_jacobian(target):
    u = points(target).requires_grad_(True)
    found = target.log_jacobian(u)
    if found.requires_grad:
        (gradient,) = torch.autograd.grad(found.sum(), u)
        numeric = finite_differences(target.log_jacobian, u.detach(), step=1e-3)
        torch.testing.assert_close(gradient, numeric, rtol=1e-7, atol=1e-7)


def looping(y):
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)))
    if scale > 0:
        pyro.sample("y", dist.Normal(0.0, scale).expand([len(y)]).to_event(1), obs=y)


def test_jacobian_in_a_loop():
    with pytest.warns(SlowModelWarning):
        target = Target.from_pyro(looping, normal(3))
    u = normal(2, 3, 1)
    assert_close(target.log_jacobian(u), u.squeeze(-1))  # the scale is an exponential


def test_jacobian_of_masked_entries_counts():
    """The prior of entries that a mask hides is kept, and so is their Jacobian."""

    def model(y):
        with pyro.plate("rows", 3), pyro.poutine.mask(mask=torch.tensor([True, False, True])):
            x = pyro.sample("x", dist.Exponential(torch.ones(3, dtype=torch.float64)))
            pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    target = Target.from_pyro(model, normal(3), compile=False)
    u = normal(4, 3)
    assert_close(target.log_jacobian(u), u.sum(-1))
    assert_close(target.log_prior(u) - target.log_jacobian(u), -u.exp().sum(-1))


def test_functions_have_none():
    target = Target.from_functions(lambda u: -u.sum(-1), lambda u: u.sum(-1), dim=2)
    for shape in ((2,), (5, 2), (100, 3, 2), (0, 2)):
        u = torch.ones(shape, dtype=torch.float64)
        assert torch.equal(target.log_jacobian(u), torch.zeros(shape[:-1], dtype=torch.float64))


def positive(y):
    scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=y)


def test_jacobian_of_weighted_data_is_that_of_the_unknowns():
    target = Target.from_pyro(positive, normal(3), compile=False)
    joint = WeightedData(target).weighted.joint
    u = normal(5, joint.dim)
    assert_close(joint.log_jacobian(u), u[:, 0])


def test_minibatches_of_functions_and_modules_have_none():
    y = normal(6)
    functions = MinibatchTarget.from_functions(
        lambda u: -u.square().sum(), lambda u, rows: -(y[rows] - u[0]).square(), 2, 6, batch_size=2
    )
    with torch.random.fork_rng(devices=[]):
        linear = torch.nn.Linear(1, 1).double()
    module = MinibatchTarget.from_module(
        linear,
        lambda output, y: -(output.squeeze(-1) - y).square(),
        (y.unsqueeze(-1), y),
        batch_size=2,
    )
    for target in (functions, module):
        u = normal(4, 2)
        assert torch.equal(target.full_target().log_jacobian(u), u.new_zeros(4))


@pytest.mark.parametrize("fixed", [False, True])
def test_jacobian_of_minibatches_is_that_of_the_unknowns(fixed):
    """Whatever the rows, and where the model itself says how many."""

    def model(y, batch_size):
        scale = pyro.sample("scale", dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)))
        with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
            pyro.sample("y", dist.Normal(0.0, scale), obs=y[rows])

    minibatches = MinibatchTarget.from_pyro(model, normal(8), 3 if fixed else None, batch_size=None if fixed else 3)
    u = normal(4, 1)
    targets = [minibatches.on_rows(torch.tensor([7, 0, 2])), *([] if fixed else [minibatches.full_target()])]
    for target in targets:
        assert_close(target.log_jacobian(u), u.squeeze(-1))


def test_jacobian_in_single_precision_and_many_vectors():
    def model(y):
        p = pyro.sample("p", dist.Beta(2.0, 3.0))
        pyro.sample("y", dist.Bernoulli(p).expand([len(y)]).to_event(1), obs=y)

    target = Target.from_pyro(model, torch.tensor([1.0, 0.0, 1.0]), compile=False)
    u = normal(200, 1).float()
    expected = vmap(lambda v: torch.nn.functional.logsigmoid(v) + torch.nn.functional.logsigmoid(-v))(u.squeeze(-1))
    assert target.log_jacobian(u).dtype == torch.float32
    torch.testing.assert_close(target.log_jacobian(u), expected, rtol=1e-5, atol=1e-5)
    assert math.isclose(float(target.log_jacobian(torch.zeros(1))), -2 * math.log(2), rel_tol=1e-6)


def test_bad_input_is_refused():
    target = Target.from_functions(lambda u: -u.sum(-1), lambda u: u.sum(-1), dim=2)
    with pytest.raises(ShapeError, match="last dimension"):
        target.log_jacobian(torch.zeros(3))

    class Unknown:
        """A density that does not tell its Jacobian."""

    target.density = Unknown()
    with pytest.raises(ModelError, match="Unknown"):
        target.log_jacobian(torch.zeros(2))
