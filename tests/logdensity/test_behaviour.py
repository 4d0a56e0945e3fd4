import math
import sys
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from target_checks import F64, assert_close, by_hand, normal, points
from target_globals import torch_globals
from target_models import ALL, CONTINUOUS, PARALLEL, Case, mixture, plate

from bayeskit import Target, sample
from bayeskit.errors import (
    BayeskitError,
    ModelError,
    SettingsError,
    ShapeError,
    SlowModelWarning,
)

Y = normal(5, seed=3)


def observe(mean, y=Y):
    pyro.sample("y", dist.Normal(mean, 1.0).expand(y.shape).to_event(y.dim()), obs=y)


def simple(y):
    observe(pyro.sample("mean", dist.Normal(0.0, 1.0)), y)


# -- dtype, beta, globals ---------------------------------------------------------------------------------


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_the_data(dtype):
    x, y = normal(5, 2, seed=4).to(dtype), Y.to(dtype)

    class Callable:
        def __init__(self):
            self.data = {"x": x, "y": [y]}

        def __call__(self):
            plate(self.data["x"], self.data["y"][0])

    def binary():  # float covariates in the closure, whole numbers observed
        weights = pyro.sample("weights", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Bernoulli(logits=x @ weights).to_event(1), obs=(y > 0).to(dtype))

    for target in (
        Target.from_pyro(plate, x, y),
        Target.from_pyro(lambda: plate(x, y)),
        Target.from_pyro(Callable()),
        Target.from_pyro(binary),
        Target.from_pyro(pyro.infer.config_enumerate(binary)),
    ):
        assert target.dtype == dtype
        u = target.sample_prior(3)
        value, gradient = target.value_and_grad(u.double())
        results = [u, value, gradient, target.log_density(u), *target.constrain(u).values()]
        assert {r.dtype for r in results} == {dtype}


def test_single_precision_is_near_double_precision():
    case = CONTINUOUS["hierarchical"]
    target = Target.from_pyro(case.model, *case.args)
    single = Target.from_pyro(case.model, case.args[0].float(), case.args[1])
    u = points(target)
    # About 20 terms near 10 in size, each with a few roundings of 6e-8.
    torch.testing.assert_close(single.log_density(u).double(), target.log_density(u), rtol=1e-5, atol=1e-4)


def test_beta_broadcasts():
    target = Target.from_pyro(simple, Y)
    u = normal(2, 3, 1, seed=5)
    log_prior, log_likelihood = target.evaluate(u)
    rows = torch.tensor([[0.0], [0.4]], dtype=F64)
    columns = torch.tensor([0.0, 0.3, 1.0], dtype=F64)
    for beta in (0.7, rows, columns, rows + columns, torch.tensor(0.2)):
        expected = log_prior + torch.as_tensor(beta, dtype=F64) * log_likelihood
        assert_close(target.log_density(u, beta), expected)
        assert_close(target.value_and_grad(u, beta)[0], expected)
    for call in (target.log_density, target.value_and_grad):
        with pytest.raises(ShapeError, match=r"beta has shape \(2,\), which does not broadcast to \(2, 3\)"):
            call(u, torch.ones(2))


def test_no_likelihood_at_beta_zero_is_the_prior():
    def bounded(y):
        high = pyro.sample("high", dist.Exponential(1.0))
        pyro.sample("y", dist.Uniform(0.0, high), obs=y)

    target = Target.from_pyro(bounded, torch.tensor(2.0, dtype=F64))
    u = torch.tensor([[0.0], [1.0]], dtype=F64)  # the observation 2 lies above exp(0) and below exp(1)
    assert target.log_likelihood(u)[0] == -math.inf
    prior = u[:, 0] - u[:, 0].exp()
    for beta, expected in ((0.0, prior), (0.5, torch.stack([prior[0] - math.inf, prior[1] - 0.5]))):
        value, gradient = target.value_and_grad(u, beta)
        assert_close(value, expected)
        assert_close(target.log_density(u, beta), expected)
        assert_close(gradient[:, 0], 1 - u[:, 0].exp() - beta)


def test_globals_survive_every_call_and_every_error():
    # The folder's fixture looks after each test; this one looks after each call.
    broken = torch.tensor([math.nan], dtype=F64)
    case = ALL["mixture"]
    before = torch_globals()
    target = Target.from_pyro(case.model, *case.args)
    u = target.sample_prior(3)
    values = target.constrain(u)
    calls = [
        lambda: target.log_prior(u),
        lambda: target.log_likelihood(u),
        lambda: target.value_and_grad(u),
        lambda: target.pointwise_log_likelihood(u),
        lambda: target.constrain(u, deterministic=True),
        lambda: target.unconstrain(values),
        lambda: target.sample_prior(2, seed=4),
        lambda: target.fingerprint(),
        lambda: target.log_density(u[:, :2]),
        lambda: target.unconstrain({}),
        lambda: Target.from_pyro(simple, broken),
        lambda: Target.from_pyro(lambda: 1 / 0),
        lambda: Target.from_pyro(CONTINUOUS["module"].model, *CONTINUOUS["module"].args).value_and_grad(
            torch.zeros(1, 4)
        ),
        lambda: Target.from_pyro(CONTINUOUS["parameters"].model, Y).constrain(torch.zeros(1, 1)),
    ]
    for call in calls:
        try:
            call()
        except (BayeskitError, ZeroDivisionError):
            pass
        assert torch_globals() == before


def interrupted_at(line, call):
    """Raise KeyboardInterrupt at a line of what enters and leaves plates; tell whether it was reached."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(("indep_messenger.py", "subsample_messenger.py", "runtime.py")):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.calibration
def test_a_model_that_is_interrupted_leaves_no_plate_behind():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=F64), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.ones(3, dtype=F64)
    before, reached = torch_globals(), 0
    for line in range(1, 400, 3):
        reached += interrupted_at(line, lambda: Target.from_pyro(model, y))
        after = torch_globals()
        assert after["plates"] == before["plates"] == [] and after["handlers"] == 0, line
    assert reached > 50
    Target.from_pyro(model, y)


@pytest.mark.parametrize("enabled", [True, False])
def test_validation_stays_as_the_user_set_it(enabled):
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(enabled)  # torch's switch alone, not Pyro's
    try:
        Target.from_pyro(simple, Y).value_and_grad(torch.zeros(1, 1))
        assert torch.distributions.Distribution._validate_args is enabled
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


def test_traced_constants_do_not_follow_the_default_dtype():
    case = CONTINUOUS["gaussian_process"]
    target = Target.from_pyro(case.model, *case.args, compile=False)
    u = points(target)
    first = target.value_and_grad(u)[0]
    torch.set_default_dtype(F64)
    try:
        second = target.value_and_grad(u)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first, second)


def test_parameters_are_constants():
    def model(y):
        observe(pyro.sample("mean", dist.Normal(pyro.param("centre", lambda: torch.randn(())), 1.0)), y)

    with pyro.get_param_store().scope(), torch.random.fork_rng():
        fresh = Target.from_pyro(model, Y)
        u = points(fresh)
        assert torch.equal(fresh.log_density(u), fresh.log_density(u))  # though its start is random
        pyro.param("centre", torch.tensor(3.0))
        trained = Target.from_pyro(model, Y)
        assert_close(trained.log_prior(u), dist.Normal(3.0, 1.0).log_prob(u[:, 0]))
        assert list(pyro.get_param_store()) == ["centre"]


# -- missing data -----------------------------------------------------------------------------------------

HOLES = Y.clone()
HOLES[1] = HOLES[4] = math.nan


def holes(y, how):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    seen = ~y.isnan()
    with pyro.plate("data", len(y)):
        if how == "handler":
            with poutine.mask(mask=seen):
                pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        elif how == "distribution":
            pyro.sample("y", dist.Normal(mean, 1.0).mask(seen), obs=y)
        else:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y, obs_mask=seen)


@pytest.mark.parametrize("how", ["handler", "distribution", "argument"])
def test_masked_missing_data_are_as_if_dropped(how):
    target = Target.from_pyro(holes, HOLES, how)
    without = Target.from_pyro(simple, HOLES[~HOLES.isnan()])
    u = points(target)
    assert_close(target.log_likelihood(u), without.log_likelihood(u[:, :1]))
    gradient = target.value_and_grad(u)[1]
    from_hidden = (u[:, 1:] - u[:, :1]).sum(-1, keepdim=True)  # no columns unless the sites have coordinates
    assert_close(gradient[:, :1], without.value_and_grad(u[:, :1])[1] + from_hidden)
    if how == "argument":
        # Every element, seen or not, keeps its own normal prior, so that the prior stays proper.
        expected = dist.Normal(u[:, :1], 1.0).log_prob(u[:, 1:]).sum(-1) + without.log_prior(u[:, :1])
        assert_close(target.log_prior(u), expected)


# -- fallback and prior draws -----------------------------------------------------------------------------


def branching(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    observe(mean if mean > 0 else 2 * mean, y)


def test_control_flow_falls_back_to_a_loop_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target = Target.from_pyro(branching, Y)
        u = torch.tensor([[0.7], [-0.4]], dtype=F64)
        value, gradient = target.value_and_grad(u.reshape(2, 1, 1), 0.5)
        log_prior, log_likelihood = target.evaluate(u)
        target.sample_prior(3)
        assert_close(target.constrain(u)["mean"], u[:, 0])
        assert_close(target.unconstrain({"mean": u[:, 0]}), u)
        assert target.log_density(u[:0]).shape == (0,)
    assert [w.category for w in caught] == [SlowModelWarning]
    assert caught[0].filename == __file__ and "torch.where" in str(caught[0].message)
    expected = [by_hand(target, Case(branching, (Y,)), v) for v in u]
    assert_close(log_prior, torch.stack([e[0] for e in expected]))
    assert_close(log_likelihood, torch.stack([e[1] for e in expected]))
    assert value.shape == (2, 1) and gradient.shape == (2, 1, 1)
    assert_close(value[:, 0], log_prior + 0.5 * log_likelihood)
    slope = torch.tensor([1.0, 2.0], dtype=F64)
    mean = slope * u[:, 0]
    assert_close(gradient[:, 0, 0], -u[:, 0] + 0.5 * slope * (Y.unsqueeze(0) - mean.unsqueeze(1)).sum(-1))


def test_sites_that_come_and_go_are_refused():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        if mean > 0:
            pyro.sample("extra", dist.Normal(0.0, 1.0))
        observe(mean, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowModelWarning)
        with pytest.raises(ModelError, match="'extra' appeared only in some runs"):
            target = Target.from_pyro(model, Y)
            target.log_density(torch.tensor([[1.0] * target.dim, [-1.0] * target.dim], dtype=F64))
        with pytest.raises(ModelError, match="'extra' appeared only in some runs"):
            target = Target.from_pyro(model, Y)
            target.sample_prior(50)


def z_score(draws, mean, variance):
    return ((draws.mean(0) - mean) / (variance / len(draws)) ** 0.5).abs().max()


Z_LIMIT = 5.0  # two-sided normal tail 6e-7 an entry, at most a dozen entries a test


def chain(y, step):
    first = pyro.sample("first", dist.Normal(1.0, 2.0))
    second = pyro.sample("second", step(first))
    observe(second, y)


@pytest.mark.long
@pytest.mark.parametrize(
    "step, shift, variance",
    [
        (lambda a: dist.Normal(a, 0.5), 0.0, 0.25),
        (lambda a: dist.Logistic(a, 0.5), 0.0, 0.25 * math.pi**2 / 3),
        (lambda a: dist.Gumbel(a, 0.5), 0.5 * 0.5772156649015329, 0.25 * math.pi**2 / 6),
        (lambda a: dist.Laplace(a, 0.5), 0.0, 0.5),
        (lambda a: dist.StudentT(6.0, a, 0.5), 0.0, 0.375),  # not batched: a run of the model for each draw
        (lambda a: dist.Uniform(a - 1, a + 1), 0.0, 1 / 3),
    ],
)
def test_prior_draws_of_dependent_sites(step, shift, variance):
    target = Target.from_pyro(chain, Y, step)
    values = target.constrain(target.sample_prior(4000, seed=3))
    first, noise = values["first"], values["second"] - values["first"] - shift
    assert z_score(first, 1.0, 4.0) < Z_LIMIT
    assert z_score(noise, 0.0, variance) < Z_LIMIT
    product = (first - 1.0) * noise  # independent, so mean zero
    assert z_score(product, 0.0, 4.0 * variance) < Z_LIMIT
    assert len(torch.unique(noise)) == len(noise)
    square = noise**2
    assert z_score(square, variance, square.var()) < Z_LIMIT


def switching(y, loop):
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])), infer=PARALLEL)
    mean = pyro.sample("mean", dist.Normal(3.0 * z, 1.0))
    rate = pyro.sample("rate", dist.Exponential(mean.abs() + 1.0))
    if loop:
        pyro.factor("gate", torch.tensor(0.0) if rate > 0 else torch.tensor(-1.0))
    observe(rate, y)


@pytest.mark.calibration
@pytest.mark.parametrize("loop", [False, True])
def test_prior_draws_below_a_discrete_site(loop):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowModelWarning)
        target = Target.from_pyro(switching, Y, loop)
    assert target.loops is loop
    draws = target.sample_prior(1500, seed=3)
    values = target.constrain(draws)
    mean = values["mean"]
    assert z_score(mean, 3.3, 1.0 + 9 * 0.49) < Z_LIMIT
    unit = values["rate"] * (mean.abs() + 1.0)
    assert z_score(unit, 1.0, 1.0) < Z_LIMIT
    assert z_score((mean - 3.3) * (unit - 1.0), 0.0, 1.0 + 9 * 0.49) < Z_LIMIT


def test_prior_draws_follow_the_seed():
    target = Target.from_pyro(mixture, Y)
    draws = target.sample_prior(5, seed=1)
    assert torch.equal(draws, target.sample_prior(5, seed=1))
    assert not torch.equal(draws, target.sample_prior(5, seed=2))
    generator = torch.Generator().manual_seed(3)
    assert not torch.equal(target.sample_prior(5, seed=generator), target.sample_prior(5, seed=generator))
    with pytest.raises(SettingsError, match="num_draws must be at least 1"):
        target.sample_prior(0)


def test_targets_from_functions():
    target = Target.from_functions(
        lambda u: dist.Normal(0.0, 1.0).log_prob(u).sum(-1),
        lambda u: -(u - 1.0).square().sum(-1),
        dim=2,
        sample_prior=lambda n, g: torch.randn(n, 2, generator=g, dtype=F64),
        compile=False,
    )
    u = normal(2, 3, 2, seed=6)
    value, gradient = target.value_and_grad(u, 0.3)
    assert_close(value, target.log_density(u, 0.3))
    assert_close(gradient, -u - 0.6 * (u - 1.0))
    assert torch.equal(target.unconstrain(target.constrain(u)), u)
    assert torch.equal(target.sample_prior(3, seed=1), target.sample_prior(3, seed=1))
    assert target.log_density(u[:, :0]).shape == (2, 0)


def test_fingerprint_knows_the_data():
    first, again, other = (Target.from_pyro(simple, y).fingerprint() for y in (Y, Y.clone(), Y + 0.1))
    assert first == again != other


# -- plates read by their indices -------------------------------------------------------------------------


def test_data_indexed_by_a_plate_are_traced_and_compiled():
    """``obs=y[indices]``, Pyro's own way to write it, with the plate as a block or as a loop."""

    def block(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)) as indices:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[indices])

    def loop(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", len(y)):
            pyro.sample(f"y_{i}", dist.Normal(mean, 1.0), obs=y[i])

    u = normal(3, 1, seed=8)
    expected = by_hand_of_normal(u)
    for model in (block, loop):
        for compile in (False, True):
            value, _ = Target.from_pyro(model, Y, compile=compile).value_and_grad(u)  # a warning would be an error
            assert_close(value, expected)


def by_hand_of_normal(u):
    """Log density of a standard normal mean and of the observations given it."""
    residuals = (Y - u).square().sum(-1) + u.square().sum(-1)
    return -0.5 * residuals - 0.5 * (len(Y) + 1) * math.log(2 * math.pi)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_double_precision_of_a_prior_alone_is_followed(shape):
    def model():
        m = pyro.sample("m", dist.Normal(torch.zeros(shape, dtype=torch.float64), 1.0).to_event(len(shape)))
        pyro.factor("f", -0.5 * (m - 1).square().sum())

    target = Target.from_pyro(model)
    u = torch.zeros(3, target.dim, dtype=target.dtype)
    assert target.log_prior(u).dtype == target.log_likelihood(u).dtype == target.dtype == torch.float64
    assert sample(target, 2, 20, 20, progress=False).unconstrained.dtype == torch.float64
