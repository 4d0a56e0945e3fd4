"""Every public algorithm gives the numbers of the host on a device.

The device is a simulated one, which refuses tensors of the host and counts looks, and CUDA's where there is one. The
cases are the examples of the docstrings.
"""

import dataclasses
import inspect
import sys
from functools import lru_cache
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helper modules, which pytest's importlib mode puts on no path
from device_examples import SHORTER, differences, elsewhere, numbers, prints, public, run_example
from host_streams import HOST, HostStreams
from simulated_device import NAME, simulated_device, transfers

import bayeskit as bk
from bayeskit import exact
from bayeskit._core import randomness as randomness
from bayeskit.inference import evidence
from bayeskit.inference.samplers import _nuts as nuts
from bayeskit.inference.samplers import sample_ladder

pytestmark = pytest.mark.compiler  # the device is compiled

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@pytest.fixture(scope="module")
def simulated():
    return simulated_device()


@pytest.fixture(params=[NAME, CUDA])
def device(request, simulated, monkeypatch):
    """A device that draws the numbers of the host."""
    monkeypatch.setitem(nuts.LEAVES_PER_LOOK, request.param, 1)  # as on the host: dead chains draw no numbers
    if request.param == NAME:  # whose streams are the host's
        monkeypatch.setattr(randomness, "_host_generator", lambda generator: generator)
        yield simulated
        return
    with HostStreams() as streams:
        monkeypatch.setattr(randomness, "_host_generator", streams.of)
        yield torch.device(request.param, 0)


def test_tensors_of_the_host_do_not_mix_with_those_of_the_device(simulated):
    x = torch.arange(3.0, device=simulated)
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3).add_(x),
        lambda: torch.cat([x[:1], torch.ones(())[None]]),
        lambda: torch.where(x > 1, x, torch.ones(3)),
        lambda: torch.randn(3, device=simulated, generator=torch.Generator()),
        lambda: torch.randn(3, generator=torch.Generator(simulated)),
        lambda: torch.ones(3).exponential_(generator=torch.Generator(simulated)),
        lambda: x.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (2 * x + torch.tensor(1.0)).tolist() == [1.0, 3.0, 5.0]  # numbers of the host are allowed, as by CUDA
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]  # and so are indices


def test_looks_and_copies_are_counted(simulated):
    x = torch.arange(3.0, device=simulated)
    looks = (
        lambda: float(x[0]),
        lambda: bool((x > 0).any()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.equal(x, x),
    )
    for look in looks:
        with transfers() as count:
            look()
        assert (count.reads, count.writes) == (1, 0)
    for move in (lambda: torch.ones(2).to(simulated), lambda: torch.tensor([0.5], device=simulated)):
        with transfers() as count:
            move()
        assert (count.reads, count.writes) == (0, 1)
    with transfers() as count:
        (x.exp() @ x).sqrt().clone().mul_(2)
    assert (count.reads, count.writes) == (0, 0) and count.operations > 3


def test_the_device_computes_the_numbers_of_the_host(simulated):
    def computed(place):
        generator = torch.Generator(place).manual_seed(1)
        x = torch.randn(4, 4, generator=generator, device=place, dtype=torch.float64).requires_grad_()
        torch.linalg.cholesky(x @ x.mT + torch.eye(4, device=place)).logsumexp(-1).sum().backward()
        return x.grad.cpu()

    assert torch.equal(computed("cpu"), computed(simulated))


def test_streams_of_the_host_replace_those_of_the_device(simulated):
    def drawn(place):
        noise = torch.Generator(place).manual_seed(3)
        shape = torch.full((4,), 0.5, device=place)
        return [
            torch.randn(3, generator=noise, device=place),
            torch.empty(3, device=place).exponential_(generator=noise),
            torch.multinomial(shape, 2, generator=noise),
            torch.distributions.Gamma(shape, 1.0).sample(),
            torch.rand_like(shape),
            torch.rand(3, generator=noise.manual_seed(4), device=place),
        ]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        expected = drawn(HOST)
    with torch.random.fork_rng(devices=[]), HostStreams() as streams:
        torch.manual_seed(1)
        found = drawn(simulated)
        generator = torch.Generator(simulated).manual_seed(2)
        before = generator.get_state()
        torch.randn(3, generator=generator, device=simulated)
        assert torch.equal(generator.get_state(), before)
        assert not torch.equal(streams.of(generator).get_state(), before)
    assert all(x.device == simulated for x in found) and not differences({"": expected}, {"": found})


# -- examples of docstrings ---------------------------------------------------------------------

# Thermodynamic integration adds temperatures until it is accurate, and Chib's method takes conditional distributions.
METHODS = [name for name in evidence.METHODS if name not in ("thermodynamic_integration", "chib")]
REHEARSED = {f"{function.__module__}.{function.__qualname__}" for function in map(evidence.__dict__.get, METHODS)}
EXAMPLES = [name for name in public() if name not in elsewhere() and name not in REHEARSED]
# On a device they draw from two streams. Their examples compare with the exact answer.
OWN_STREAMS = ("annealed_importance_sampling", "bidirectional_annealing", "exchange_posterior", "log_normaliser")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_the_numbers_of_the_host(name, device):
    shorter = SHORTER.get(name.removeprefix("bayeskit."))
    with transfers() as count, torch.random.fork_rng(devices=[]):
        problems, found = run_example(name, device, shorter)
    assert not problems, problems
    assert count.operations or device.type != NAME, f"{name} computed nothing on the device; say why in ELSEWHERE"
    assert (shorter is None and prints(name)) or any(numbers(found, "")), f"{name} shows no number"
    if not name.endswith(OWN_STREAMS):
        with torch.random.fork_rng(devices=[]):
            problems, expected = run_example(name, HOST, shorter)
        assert not problems, problems
        assert not (wrong := differences(expected, found)), wrong


def test_each_reason_holds_for_something_that_is_there():
    assert elsewhere().keys() <= public().keys()
    assert all(f"bayeskit.{name}" in EXAMPLES for name in SHORTER)
    sources = {name: inspect.getsource(public()[f"bayeskit.{name}"]) for name in SHORTER}
    assert not [(name, text) for name, texts in SHORTER.items() for text in texts if text not in sources[name]]


def test_a_constant_left_on_the_host_is_seen(device, monkeypatch):
    from bayeskit.inference.generalized.losses import Absolute

    original = Absolute.pointwise
    monkeypatch.setattr(
        Absolute, "pointwise", lambda self, *given: original(self, *given) * torch.ones(1, dtype=torch.float64)
    )
    problems, _ = run_example("bayeskit.inference.generalized._minimizer.minimize", device)
    assert "two devices" in problems


def test_a_number_that_differs_is_seen(device, monkeypatch):
    name = "bayeskit.inference.samplers._stochastic_gradient.sample_stochastic_gradient"
    shorter = SHORTER[name.removeprefix("bayeskit.")]
    _, expected = run_example(name, HOST, shorter)
    _, found = run_example(name, device, shorter)
    assert not differences(expected, found)
    _, other = run_example(name, device, {**shorter, "1e-3": "1.00001e-3"})
    assert any("unconstrained" in one for one in differences(expected, other))


def test_an_amortised_posterior_gives_the_numbers_of_the_host(device):
    def model(x, y):
        mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("groups", len(y)):
            effect = pyro.sample("effect", dist.Normal(mean * x, 0.5))
            pyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    x, y = torch.linspace(0.5, 2.0, 4, dtype=torch.float64), torch.linspace(-1.0, 2.0, 4, dtype=torch.float64)
    settings = {"sizes": (2, 4), "num_steps": 4, "batch_size": 8, "progress": False}
    here = bk.amortize(model, (x, y), **settings)
    there = bk.amortize(model, (x.to(device), y.to(device)), **settings)
    # Adam magnifies the rounding of single precision, so that the trained networks are only alike.
    assert torch.allclose(here.training.losses, there.training.losses, rtol=1e-2)
    there.network.load_state_dict({name: value.to(device) for name, value in here.network.state_dict().items()})
    assert not differences(
        here.sample(x, y, num_draws=8, check=False).values(),
        there.sample(x.to(device), y.to(device), num_draws=8, check=False).values(),
    )
    # By importance sampling, however poor the networks are.
    expected = here._by_importance(here.target(x, y), 400, 0)
    found = there._by_importance(there.target(x.to(device), y.to(device)), 400, 0)
    assert not differences({"evidence": expected.evidence}, {"evidence": found.evidence})
    assert found.draws.unconstrained.device == device


# -- estimators of the evidence -----------------------------------------------------------------

BUDGET = evidence.Budget(
    *(4, 30, 20),
    num_reference_temperatures=2,
    num_particles=8,
    num_replicates=4,
    num_live=20,
)
LONG = ("generalised_stepping_stone", "nested_sampling", "smc", "adaptive_smc", "prequential")


def case_of(method):
    if "laplus" in method:
        return "three_taxon_tree"  # of positive coordinates
    return "beta_binomial" if method in LONG else "linreg10"


@lru_cache
def runs(name, place):
    """A target on a device, and draws and a ladder of the host, moved there."""
    case = exact.get(name)
    target = bk.Target.from_pyro(case.model, *(x.to(place) for x in case.args), compile=False)
    if place == HOST:
        draws = bk.sample(target, 4, 40, 50, seed=1, progress=False)
        return target, draws, sample_ladder(target, 4, 4, 30, 20, seed=1, progress=False)
    _, draws, ladder = runs(name, HOST)
    return (
        target,
        moved(draws, target),
        dataclasses.replace(ladder, beta=ladder.beta.to(place), draws=moved(ladder.draws, target)),
    )


def moved(draws, target):
    fields = ("unconstrained", "log_prior", "log_likelihood", "beta")
    parts = {name: getattr(draws, name).to(target.device) for name in fields}
    stats = {name: x.to(target.device) for name, x in draws.sample_stats.items()}
    return dataclasses.replace(draws, target=target, sample_stats=stats, **parts)


@pytest.mark.parametrize("method", METHODS)
def test_an_estimator_gives_the_number_of_the_host(method, device):
    def estimate(place):
        target, draws, ladder = runs(case_of(method), place)
        table = evidence.compare(target, [method], seed=1, budget=BUDGET, draws=draws, ladder=ladder, progress=False)
        assert not table.refused
        return (table.scores or table.results)[method]

    with transfers() as count:
        found = estimate(device)
    assert count.operations or device.type != NAME
    assert not differences({method: estimate(HOST)}, {method: found})
