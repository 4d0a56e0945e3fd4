"""Compiled code is kept on disk for the next process, and never taken for another density's."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache
from torch._subclasses.fake_tensor import FakeTensorMode

import bayeskit as bk

# The compiler's own deprecations are not ours; that it gave up would be.
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error::bayeskit.errors.CompilationWarning"),
]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.setattr("bayeskit._compiler.engine.row_source", lambda *_: None)  # have all compiled by inductor
    with fresh_inductor_cache():
        counters.clear()
        yield


def generator(seed):
    return torch.Generator().manual_seed(seed)


def model(x, y, scale):
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(3), scale).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ slope, 1.5), obs=y)


def of_data_alone(seed, size=6):
    """Differ in a tensor and in no number of the formula."""
    y = torch.randn(size, generator=generator(seed), dtype=torch.float64)
    return bk.Target.from_functions(
        lambda u: -u.square().sum(-1),
        lambda u: -(u.sum(-1, keepdim=True) - y).square().sum(-1),
        dim=3,
        compile=True,
    )


def from_pyro(seed, size=6):
    x, y = (torch.randn(shape, generator=generator(seed), dtype=torch.float64) for shape in ((size, 3), (size,)))
    return bk.Target.from_pyro(model, x, y, 1.0 + seed, compile=True)


def from_functions(seed, size=6):
    y = torch.randn(size, generator=generator(seed), dtype=torch.float64)
    return bk.Target.from_functions(
        lambda u: torch.distributions.Normal(0.0, 1.0 + seed).log_prob(u).sum(-1),
        lambda u: -(u.sum(-1, keepdim=True) - y).square().sum(-1) - 0.1 * seed * u.square().sum(-1),
        dim=3,
        compile=True,
    )


def assert_right(target):
    u = torch.randn(4, 3, generator=generator(99), dtype=torch.float64)
    found = target.evaluator(4)(u, torch.full((4,), 0.5, dtype=torch.float64))
    log_prior, log_likelihood = target.evaluate(u, compiled=False)
    leaf = u.clone().requires_grad_(True)
    prior, likelihood = target.evaluate(leaf, compiled=False)
    (gradient,) = torch.autograd.grad((prior + 0.5 * likelihood).sum(), leaf)
    pairs = ((found.log_prior, log_prior), (found.log_likelihood, log_likelihood), (found.gradient, gradient))
    for one, other in pairs:  # a few roundings of sums of about ten terms
        assert float((one - other).abs().max()) <= 1e-13 * max(1.0, float(other.abs().max()))


def hits():
    return counters["inductor"]["fxgraph_cache_hit"]


def misses():
    return counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.calibration
@pytest.mark.parametrize("make", [from_pyro, from_functions])
def test_other_numbers_of_the_same_shape_get_their_own_answers(make):
    assert_right(make(0))
    assert hits() == 0
    assert_right(make(0))  # a target that has never been compiled
    assert hits() == 1
    assert_right(make(1))


@pytest.mark.calibration
def test_other_data_share_the_code_and_not_the_answer_and_another_shape_is_compiled_anew():
    for seed in range(3):
        assert_right(of_data_alone(seed))
    assert (hits(), misses()) == (2, 1)
    assert_right(of_data_alone(0, size=7))
    assert (hits(), misses()) == (2, 2)


@pytest.mark.calibration
def test_no_size_becomes_a_symbol(monkeypatch):
    sizes, from_tensor = [], FakeTensorMode.from_tensor

    def recorded(self, *tensors, **how):
        fake = from_tensor(self, *tensors, **how)
        sizes.extend(fake.shape)
        return fake

    monkeypatch.setattr(FakeTensorMode, "from_tensor", recorded)
    assert_right(from_pyro(0))
    assert sizes and all(type(size) is int for size in sizes)


@pytest.mark.calibration
def test_another_formula_is_compiled_anew():
    def target(sign):
        return bk.Target.from_functions(
            lambda u: -u.square().sum(-1), lambda u: sign * u.cos().sum(-1), dim=3, compile=True
        )

    assert_right(target(1.0))
    assert_right(target(-1.0))
    assert (hits(), misses()) == (0, 2)
