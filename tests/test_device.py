"""Every public algorithm runs on a device: a simulated one, which refuses tensors of the host and counts looks.

The cases are the examples of the docstrings, whose printed numbers are those of the host.
"""

import dataclasses
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # helper modules, which pytest's importlib mode puts on no path
from device_examples import ELSEWHERE, SHORTER, differences, public, run_example
from simulated_device import NAME, simulated_device, transfers

import bayeskit as bk
from bayeskit import exact
from bayeskit.inference import evidence
from bayeskit.inference.samplers import nuts, sample_ladder

pytestmark = [
    pytest.mark.compiler,  # the device is compiled
    pytest.mark.filterwarnings("ignore"),  # runs are short
]


def is_elsewhere(name):
    """Whether a reason is given why an object runs on no device."""
    return any(
        name.startswith(f"bayeskit.{word}") if word.endswith(".") else name.endswith(f".{word}")
        for words in ELSEWHERE.values()
        for word in words.split()
    )


HOST = torch.device("cpu")
SHORT = {f"bayeskit.inference.{name}": changes for name, changes in SHORTER.items()}
ON_DEVICES = [name for name in public() if name not in SHORT and not is_elsewhere(name)]


@pytest.fixture(scope="module")
def device():
    return simulated_device()


def test_tensors_of_the_host_do_not_mix_with_those_of_the_device(device):
    x = torch.arange(3.0, device=device)
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.ones(3).add_(x),
        lambda: torch.cat([x[:1], torch.ones(())[None]]),
        lambda: torch.where(x > 1, x, torch.ones(3)),
        lambda: torch.randn(3, device=device, generator=torch.Generator()),
        lambda: x.numpy(),
    ):
        with pytest.raises((RuntimeError, TypeError)):
            wrong()
    assert (2 * x + torch.tensor(1.0)).tolist() == [1.0, 3.0, 5.0]  # numbers of the host are allowed, as by CUDA
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]  # and so are indices


def test_looks_and_copies_are_counted(device):
    x = torch.arange(3.0, device=device)
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
    for move in (lambda: torch.ones(2).to(device), lambda: torch.tensor([0.5], device=device)):
        with transfers() as count:
            move()
        assert (count.reads, count.writes) == (0, 1)
    with transfers() as count:
        (x.exp() @ x).sqrt().clone().mul_(2)
    assert (count.reads, count.writes) == (0, 0) and count.operations > 3


def test_the_device_computes_the_numbers_of_the_host(device):
    def numbers(place):
        generator = torch.Generator(place).manual_seed(1)
        x = torch.randn(4, 4, generator=generator, device=place, dtype=torch.float64).requires_grad_()
        torch.linalg.cholesky(x @ x.mT + torch.eye(4, device=place)).logsumexp(-1).sum().backward()
        return x.grad.cpu()

    assert torch.equal(numbers("cpu"), numbers(device))


@pytest.mark.parametrize("name", ON_DEVICES)
def test_an_example_runs_on_the_device(name, device):
    with transfers() as count, torch.random.fork_rng(devices=[]):
        problems, _ = run_example(name, device)
    assert not problems, problems
    assert count.operations, f"{name} computed nothing on the device; say why in ELSEWHERE"


@pytest.mark.parametrize("name", SHORT)
def test_a_shorter_run_gives_the_numbers_of_the_host(name, device, monkeypatch):
    monkeypatch.setitem(nuts.LEAVES_PER_LOOK, NAME, 1)  # as on the host: dead chains draw no numbers
    with transfers() as count, torch.random.fork_rng(devices=[]):
        problems, found = run_example(name, device, SHORT[name])
    assert not problems and count.operations, problems
    with torch.random.fork_rng(devices=[]):
        problems, expected = run_example(name, HOST, SHORT[name])
    assert not problems, problems
    assert not (wrong := differences(expected, found)), wrong


BUDGET = evidence.Budget(
    *(4, 30, 20),
    num_reference_temperatures=2,
    num_particles=8,
    num_replicates=4,
    num_live=20,
)
# Thermodynamic integration adds temperatures until it is accurate, which takes long; it sums what path sampling sums.
METHODS = [name for name in evidence.METHODS if name not in ("thermodynamic_integration", "chib")]


def case_of(method):
    if "laplus" in method:
        return "three_taxon_tree"  # of positive coordinates
    return "beta_binomial" if method == "prequential" else "linreg10"


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


# Their chains begin alike and are apart after some steps, by rounding.
OWN_CHAINS = ("nested_sampling", "smc", "adaptive_smc", "prequential")


@pytest.mark.parametrize("method", METHODS)
def test_an_estimator_gives_the_number_of_the_host(method, device, monkeypatch, limit):
    monkeypatch.setitem(nuts.LEAVES_PER_LOOK, NAME, 1)

    def numbers(place):
        target, draws, ladder = runs(case_of(method), place)
        table = evidence.compare(target, [method], seed=1, budget=BUDGET, draws=draws, ladder=ladder, progress=False)
        assert not table.refused
        found = table.scores[method] if table.scores else table.results[method]
        return found.predictive_score if table.scores else found.log_evidence, found.standard_error

    with transfers() as count:
        found, error = numbers(device)
    expected, other_error = numbers(HOST)
    assert count.operations
    if method in OWN_CHAINS:  # errors of four replicates
        assert abs(found - expected) < limit(dof=3) * (error**2 + other_error**2) ** 0.5
    else:
        assert found == pytest.approx(expected, rel=1e-6)


def test_nothing_is_left_out_without_need():
    """Each reason holds for something that is there."""
    for word in [word for words in ELSEWHERE.values() for word in words.split()]:
        assert any(
            name.startswith(f"bayeskit.{word}") if word.endswith(".") else name.endswith(f".{word}")
            for name in public()
        ), word


def test_a_constant_left_on_the_host_is_seen(device, monkeypatch):
    from bayeskit.inference.generalized.losses import Absolute

    original = Absolute.pointwise
    monkeypatch.setattr(
        Absolute, "pointwise", lambda self, *given: original(self, *given) * torch.ones(1, dtype=torch.float64)
    )
    problems, _ = run_example("bayeskit.inference.generalized.minimizer.minimize", device)
    assert "two devices" in problems
