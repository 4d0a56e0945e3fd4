"""Sums over rows that share their parameters, against the sum of the log probability of each row."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from target_models import CONTINUOUS

from bayeskit import Target
from bayeskit._core.randomness import new_generator
from bayeskit._logdensity.pyro_density import SubsampledDensity
from bayeskit._logdensity.sufficient_statistics import originals_kept, sum_of_log_prob

DOUBLE = torch.float64
N = 40


def drawn(fn, shape, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fn.sample(shape)


def scalar(x):
    return torch.tensor(x, dtype=DOUBLE)


FAMILIES = {
    "normal": lambda: dist.Normal(scalar(0.3), scalar(1.7)),
    "log_normal": lambda: dist.LogNormal(scalar(0.3), scalar(0.7)),
    "exponential": lambda: dist.Exponential(scalar(1.4)),
    "gamma": lambda: dist.Gamma(scalar(1.4), scalar(0.3)),
    "poisson": lambda: dist.Poisson(scalar(2.3)),
    "bernoulli": lambda: dist.Bernoulli(scalar(0.3)),
    "bernoulli_logits": lambda: dist.Bernoulli(logits=scalar(0.3)),
    "binomial": lambda: dist.Binomial(7, scalar(0.3)),
    "binomial_logits": lambda: dist.Binomial(7, logits=scalar(0.3)),
    "categorical": lambda: dist.Categorical(torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)),
    "categorical_logits": lambda: dist.Categorical(logits=torch.tensor([0.2, -0.5, 0.3], dtype=DOUBLE)),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wrapped", ["plate", "event", "plain"])
def test_the_sum_is_that_of_the_rows(name, wrapped):
    fn = FAMILIES[name]()
    value = drawn(fn, (N,))
    each = fn.log_prob(value)
    with originals_kept():
        used = {"plate": lambda: fn.expand([N]), "event": lambda: fn.expand([N]).to_event(1), "plain": lambda: fn}
        total = sum_of_log_prob(used[wrapped](), value)
    assert total.dtype == DOUBLE and total.shape == (1,)
    assert math.isclose(float(total), float(each.sum()), rel_tol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_groups_are_summed_by_group(name):
    fn = FAMILIES[name]()
    groups = 3
    parameter = "loc" if "normal" in name else "concentration" if name == "gamma" else "rate"
    if not hasattr(fn, parameter):
        parameter = "logits" if "logits" in vars(fn) else "probs"
    one = getattr(fn, parameter)
    steps = torch.tensor([0.5, 1.0, 1.5], dtype=DOUBLE).reshape(groups, 1, *[1] * one.dim())
    others = {"normal": ["scale"], "log_normal": ["scale"], "gamma": ["rate"], "binomial": ["total_count"]}
    rest = {key: getattr(fn, key) for key in others.get(name.removesuffix("_logits"), [])}
    fn = type(fn)(**{parameter: one * steps}, **rest)
    value = drawn(fn, (N,)).squeeze(-1).mT
    assert value.shape == (groups, N)
    with originals_kept():
        total = sum_of_log_prob(fn.expand([groups, N]), value)
    each = fn.expand([groups, N]).log_prob(value)
    torch.testing.assert_close(total, each.sum(-1, keepdim=True), rtol=1e-12, atol=0)


def test_binomial_rows_may_have_numbers_of_trials_of_their_own():
    trials = torch.arange(1.0, N + 1, dtype=DOUBLE)
    rows = dist.Binomial(trials, scalar(0.3))
    value = drawn(rows, ())

    def model(value):
        p = pyro.sample("p", dist.Beta(scalar(2.0), scalar(2.0)))
        with pyro.plate("rows", N):
            pyro.sample("y", dist.Binomial(trials, p), obs=value)

    check(model, value)


def check(model, *args, summed=None):
    """Compare a target with the sum of its rows, and say whether it reads them in each call."""
    target = Target.from_pyro(model, *args)
    u = torch.randn(5, target.dim, generator=torch.Generator().manual_seed(1), dtype=DOUBLE).to(target.dtype)
    rows = sum(x.reshape(len(x), -1).sum(1) for x in target.pointwise_log_likelihood(u).values())
    tolerance = 1e-11 if target.dtype == DOUBLE else 1e-5
    torch.testing.assert_close(target.log_likelihood(u), rows, rtol=tolerance, atol=tolerance)

    def density(u):
        return sum(x.sum() for x in target.density.pointwise(u).values())

    by_rows = torch.func.vmap(torch.func.grad(density))(u)
    evaluate = target.evaluator(len(u))
    zero = torch.zeros(len(u), dtype=target.dtype)
    gradient = evaluate(u, zero + 1).gradient - evaluate(u, zero).gradient
    torch.testing.assert_close(gradient, by_rows, rtol=1e3 * tolerance, atol=1e3 * tolerance)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.hessian(lambda u: target.density.joint(u)[1]))(u),
        torch.func.vmap(torch.func.hessian(density))(u),
        rtol=1e3 * tolerance,
        atol=1e3 * tolerance,
    )
    if summed is not None:
        largest = max(n.meta["tensor_meta"].shape.numel() for n in target._engine._trace(1).graph.nodes if is_one(n))
        assert (largest < len(args[0])) == summed
    return target


def is_one(node):
    return node.op == "call_function" and hasattr(node.meta.get("tensor_meta"), "shape")


Y = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) + 3


def normal_model(y, scale=None, mask=None, subsample=None, loc=None):
    mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.0), 3.0))
    sd = pyro.sample("sd", dist.LogNormal(y.new_tensor(0.0), 1.0))
    with pyro.plate("rows", len(y)):
        with poutine.scale(scale=1.0 if scale is None else scale), poutine.mask(mask=True if mask is None else mask):
            pyro.sample("y", dist.Normal(mean if loc is None else mean * loc, sd), obs=y)


def test_an_evaluation_does_not_read_rows_that_share_their_parameters():
    check(normal_model, Y, summed=True)


def test_a_number_that_scales_the_rows_scales_their_sum():
    check(normal_model, Y, 0.3, summed=True)


@pytest.mark.parametrize(
    "arguments",
    [{"scale": torch.linspace(0.1, 1, N, dtype=DOUBLE)}, {"mask": Y > 3}, {"loc": Y.abs()}],
    ids=["weights", "mask", "parameters of rows"],
)
def test_rows_that_differ_are_read(arguments):
    check(lambda y: normal_model(y, **arguments), Y, summed=False)


def test_equal_values_of_a_parameter_are_not_taken_for_one_parameter():
    check(lambda y: normal_model(y, loc=torch.ones(N, dtype=DOUBLE)), Y, summed=False)


def test_data_that_depend_on_parameters_are_read():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(scalar(0.0), 3.0))
        with pyro.plate("rows", N):
            pyro.sample("y", dist.Normal(scalar(0.0), 1.0), obs=y - mean)

    check(model, Y, summed=False)


def test_columns_of_a_table_are_data():
    def model(table):
        mean = pyro.sample("mean", dist.Normal(scalar(0.0), 3.0))
        with pyro.plate("rows", N):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=table[:, 1])

    check(model, torch.stack([Y, 2 * Y], 1), summed=True)


def test_a_subclass_keeps_its_density():
    class Doubled(dist.Normal):
        def log_prob(self, value):
            return 2 * super().log_prob(value)

    assert sum_of_log_prob(Doubled(scalar(0.0), scalar(1.0)), Y) is None


@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 2, 10, dtype=DOUBLE)])
def test_a_minibatch_is_the_sum_of_its_rows(weights):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_tensor(0.0), 3.0))
        with pyro.plate("rows", len(y), subsample_size=10) as rows:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])

    density = SubsampledDensity(model, (Y,), {}, None, None, new_generator(0))
    rows = torch.arange(5, 15)
    found = density.joint(torch.ones(1, dtype=DOUBLE), rows, weights)[1]
    each = dist.Normal(scalar(1.0), 1.0).log_prob(Y[rows])
    expected = (each * (N / 10 if weights is None else weights)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_rows_in_single_precision_lose_no_digits():
    """The error of a log likelihood of many rows far from zero is at most that of the sum over rows."""
    y64 = 1000 + torch.randn(20_000, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
    y = y64.float()
    at = torch.linspace(999.98, 1000.02, 9)
    exact = dist.Normal(at.double(), 1.0).log_prob(y.double().unsqueeze(-1)).sum(0)
    by_rows = dist.Normal(at, 1.0).log_prob(y.unsqueeze(-1)).sum(0).double()
    found = torch.stack([sum_of_log_prob(dist.Normal(x, torch.tensor(1.0)), y)[0] for x in at]).double()
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert float((found - exact).abs().max()) <= max(float((by_rows - exact).abs().max()), float(rounding))


def test_infinite_data_are_impossible():
    y = torch.tensor([1.0, math.inf], dtype=DOUBLE)
    assert float(sum_of_log_prob(dist.Normal(scalar(0.0), scalar(1.0)), y)) == -math.inf


def test_an_impossible_category_that_does_not_occur_is_no_error():
    fn = dist.Categorical(logits=torch.tensor([0.0, -math.inf, 1.0], dtype=DOUBLE))
    seen = torch.tensor([0, 2, 2, 0])
    assert math.isclose(float(sum_of_log_prob(fn, seen)), float(fn.log_prob(seen).sum()), rel_tol=1e-14)
    assert float(sum_of_log_prob(fn, torch.tensor([0, 1]))) <= -1e300


def test_rows_of_zeros_of_a_gamma_of_shape_one():
    fn = dist.Gamma(scalar(1.0), scalar(2.0))
    y = torch.tensor([0.0, 1.0], dtype=DOUBLE)
    assert math.isclose(float(sum_of_log_prob(fn, y)), float(fn.log_prob(y).sum()), rel_tol=1e-14)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_log_likelihoods_of_models_are_sums_of_their_rows(name):
    case = CONTINUOUS[name]
    target = Target.from_pyro(case.model, *case.args, **case.kwargs)
    u = 0.5 * torch.randn(3, target.dim, generator=torch.Generator().manual_seed(2), dtype=target.dtype)
    rows = sum(x.reshape(len(x), -1).sum(1) for x in target.pointwise_log_likelihood(u).values())
    torch.testing.assert_close(target.log_likelihood(u), rows, rtol=1e-6, atol=1e-6)
