"""Samplers follow the device of the data, and their inner loops wait for nothing that is on it."""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bayeskit as bk
from bayeskit import exact
from bayeskit.inference import evidence
from bayeskit.inference.samplers import (
    HMC,
    NUTS,
    SGHMC,
    SGLD,
    Adaptation,
    Chains,
    ConstrainedSlice,
    Epochs,
    IndependentRows,
    Metric,
    MinibatchTarget,
    Polynomial,
    PreconditionedSGLD,
    RunSettings,
    sample_ladder,
)
from bayeskit.inference.samplers._chains import PriorDraws, Tempering, TemperingState
from bayeskit.inference.samplers._nested import TICKS_BETWEEN_CHECKS
from bayeskit.inference.samplers._nuts import LEAVES_PER_LOOK_ELSEWHERE
from bayeskit.inference.samplers._populations import PopulationMoves, ResampleMove, SMCState
from bayeskit.inference.samplers._smc import AdaptiveTempering, Stage, TemperedPopulations
from bayeskit.inference.samplers._stochastic_gradient import settled

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.calibration
@pytest.mark.parametrize("device", DEVICES)
def test_draws_stay_on_their_device(device, limit):
    case = exact.get("linreg10")
    draws = bk.sample(case.target(device=device), 32, 200, 300, seed=1, progress=False)
    assert draws.unconstrained.device.type == device
    z = evidence.bridge_sampling(draws.target, draws, seed=1)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


@pytest.mark.calibration
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exchange", [False, True])
def test_ladders_stay_on_their_device(device, exchange, limit):
    case = exact.get("beta_binomial")
    ladder = sample_ladder(case.target(device=device), 12, 8, 100, 300, seed=1, exchange=exchange, progress=False)
    assert ladder.log_likelihood.device.type == device
    z = evidence.stepping_stone(ladder.draws.target, ladder)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


# -- what passes between host and device --------------------------------------------------------
#
# Torch's "meta" device stands for any device. Its tensors have shapes but no values, so that nothing can look at
# one unnoticed: what is not counted below raises, and so does mixing it with a vector of the host.

DEVICE = torch.device("meta")
F64 = torch.float64
ATEN = torch.ops.aten


class _DeviceGenerator(torch.Generator):
    """A source of random numbers that says it is on the device."""

    device = DEVICE


class _Transfers(TorchDispatchMode):
    """Count looks at the device's values, each answered by ``answer``, and copies to it."""

    def __init__(self, count: Counter, answer: Callable[[], float]) -> None:
        super().__init__()
        self.count, self.answer = count, answer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "generator" in kwargs:
            kwargs["generator"] = None  # there is nothing to draw
        if function is ATEN.exponential_.default:
            return args[0]
        if function is ATEN._local_scalar_dense.default and args[0].is_meta:
            self.count["reads"] += 1
            return self.answer()
        if function is ATEN._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.count["reads"] += 1
            return torch.full(args[0].shape, self.answer(), dtype=args[0].dtype)
        result = function(*args, **kwargs)
        if function in (ATEN._to_copy.default, ATEN.copy_.default) and result.is_meta:
            source = args[1] if function is ATEN.copy_.default else args[0]
            self.count["writes"] += not source.is_meta
        return result


class _Creations(TorchFunctionMode):
    """Count tensors that are made of the host's numbers and put on the device."""

    def __init__(self, count: Counter) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            self.count["writes"] += result.is_meta and not isinstance(args[-1], torch.Tensor)
        return result


@contextmanager
def transfers(*answers: float):
    """Count ``reads`` and ``writes``; looks are told ``answers`` in turn, the last of them for ever."""
    stream = itertools.chain(answers[:-1], itertools.repeat(answers[-1] if answers else 1.0))
    count = Counter(reads=0, writes=0)
    with _Creations(count), _Transfers(count, lambda: next(stream)):
        yield count


def zeros(*shape, dtype=F64):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def counted(kernel, target, state, *answers, generator=None):
    """Step once and return reads, writes and the new state."""
    generator = generator or _DeviceGenerator()
    with transfers(*answers) as count:
        state, _ = kernel.step(target, state, generator=generator)
    return count["reads"], count["writes"], state


@pytest.fixture(scope="module")
def target():
    target = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1),
        lambda u: -0.5 * (u - 1).square().sum(-1),
        3,
        lambda n, g: torch.randn(n, 3, generator=g, dtype=F64, device=g.device),
        device=DEVICE,
        compile=False,
    )
    for n in (12, 16, 32, 64, 96):  # traced now: a trace is made once, and may look at what it likes
        with transfers():
            target.evaluator(n)(zeros(n, 3), zeros(n))
    return target


def metrics():
    return [
        Metric(torch.ones(3, dtype=F64, device=DEVICE), False),
        Metric(torch.eye(3, dtype=F64, device=DEVICE), True),
    ]


def test_what_should_be_counted_is():
    x = zeros(4)
    for look in (lambda: float(x[0]), lambda: bool((x > 0).any()), lambda: x.tolist(), lambda: x.cpu()):
        with transfers() as count:
            look()
        assert count == {"reads": 1, "writes": 0}
    for copy in (
        lambda: torch.tensor(0.5, device=DEVICE),
        lambda: torch.as_tensor(0.5, device=DEVICE),
        lambda: torch.tensor([0.5, 0.5]).to(x),
        lambda: x[:2].copy_(torch.ones(2)),
        lambda: x.new_tensor([1.0]),
    ):
        with transfers() as count:
            copy()
        assert count == {"reads": 0, "writes": 1}
    for unknown in (lambda: x.nonzero(), lambda: x[x > 0], lambda: torch.equal(x, x), lambda: x + torch.ones(4)):
        with transfers(), pytest.raises((NotImplementedError, RuntimeError)):
            unknown()
    with transfers() as count:
        int(torch.zeros((), dtype=torch.int64)) + x.new_full((4,), 0.5)  # a counter of the host, a number in a call
    assert count == {"reads": 0, "writes": 0}


def test_a_kernel_that_looks_is_noticed(target):
    class Looking(HMC):
        def step(self, target, state, *, generator):
            state, info = super().step(target, state, generator=generator)
            return (state, info) if bool(info.diverging.any()) else (state, info)

    with transfers():
        state = Looking().init(target, zeros(16, 3))
    assert counted(Looking(), target, state)[:2] == (1, 0)


@pytest.mark.parametrize("metric", metrics(), ids=["diagonal", "dense"])
@pytest.mark.parametrize("num_steps", [2, 20])
def test_hmc_looks_at_nothing_however_many_leapfrogs(target, metric, num_steps):
    kernel = HMC(zeros(16), metric, num_steps=num_steps, beta=zeros(16))
    with transfers():
        state = kernel.init(target, zeros(16, 3))
    for _ in range(2):
        reads, writes, state = counted(kernel, target, state)
        assert (reads, writes) == (0, 0)


def looks_of_a_full_tree(max_depth):
    """One at the end of each doubling, whether any chain goes on, and within long ones one every eight leaves."""
    return sum(1 + (2**depth - 1) // LEAVES_PER_LOOK_ELSEWHERE for depth in range(max_depth))


@pytest.mark.calibration
@pytest.mark.parametrize("metric", metrics(), ids=["diagonal", "dense"])
@pytest.mark.parametrize("max_depth", [3, 5])
def test_nuts_looks_only_to_see_whether_any_tree_still_grows(target, metric, max_depth):
    """How many leaves there will be depends on the chains, so the loop over them has to ask."""
    kernel = NUTS(zeros(16), metric, max_depth, beta=zeros(16))
    with transfers():
        state = kernel.init(target, zeros(16, 3))
    growing, turned = 1.0, 0.0
    assert counted(kernel, target, state, growing)[:2] == (looks_of_a_full_tree(max_depth), 0)
    assert counted(kernel, target, state, turned)[:2] == (1, 0)
    assert counted(kernel, target, state, growing, turned)[:2] == (2, 0)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("kernel", "reads"),
    [(HMC(0.1, num_steps=2), 1), (NUTS(0.1, max_depth=2), looks_of_a_full_tree(2))],
    ids=["HMC", "NUTS"],
)
@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_warm_up_looks_once_at_most(target, kernel, reads, metric):
    """HMC's number of leapfrogs is a loop of the host; else a kernel is made anew at each step without a look.

    The ends of windows, where metrics are learnt, look at the gradients so far, from which follows whether to compile,
    and whether the metric was far off, in coordinates and, where it is dense, in directions.
    """
    adaptation = Adaptation(kernel, 20, metric=metric)
    ends = adaptation._windows()[1]
    with transfers(1.0, 0.0):
        state = adaptation.init(target, zeros(16, 3), generator=_DeviceGenerator())
    for i in range(20):
        *found, state = counted(adaptation, target, state, *[1.0] * (reads + 1), 0.0)
        assert found == [reads + (i + 1 in [*ends, 20]) + (i + 1 in ends) * (1 + (metric == "dense")), 0]


@pytest.mark.calibration
def test_exchanges_look_at_nothing(target, monkeypatch):
    """The looks of a warm-up are those of its steps and windows; prior draws come from the host a block at a time."""
    block = 16
    monkeypatch.setattr("bayeskit.inference.samplers._chains.BLOCK", block)
    beta, place = zeros(12), zeros(4, 4, dtype=torch.int64)
    chains = Chains(target, Adaptation(HMC(beta=beta), 20, num_groups=3, metric="diagonal"), RunSettings(12, 20, 60))
    tempering = Tempering(chains, PriorDraws(target, 4, seed=0))
    ends = chains.adaptation._windows()[1]
    with transfers(1.0, 0.0):
        adapting = chains.adaptation.init(target, zeros(12, 3), generator=_DeviceGenerator())
    state = TemperingState(adapting, place, place, place[0])
    for i in range(2 * block + 1):
        with transfers(1.0, 1.0, 0.0) as count:
            state, _ = tempering.advance(state, i, _DeviceGenerator())
        # Whether chains stand still is asked at the end of the warm-up; after it the kernel is tuned a last time.
        reads = (i <= 20) + 2 * (i + 1 in [*ends, 20])
        assert count == {"reads": reads, "writes": int(i % block == 0)}


@pytest.mark.parametrize(("num_steps", "num_moves"), [(1, 1), (3, 5)])
def test_a_frozen_stage_looks_at_nothing(target, num_steps, num_moves):
    state = SMCState(zeros(4, 16, 3), *[zeros(4, 16)] * 3, zeros(4, 16, dtype=torch.int64), zeros(), zeros())
    for metric in metrics():
        stage = Stage(0.5, 1.0, num_steps, num_moves, metric)
        assert counted(stage, target, state)[:2] == (0, 0)


@pytest.mark.calibration
def test_a_pilot_looks_twice_a_stage_and_once_a_move(target):
    """Whether it is the last stage; at the step size; then at step size and acceptance, and whether it moves again."""
    particles = SMCState(
        zeros(1, 32, 3), *[zeros(1, 32)] * 3, zeros(1, 32, dtype=torch.int64), beta=zeros(1, 1), undefined_share=zeros()
    )
    for max_moves in (1, 6):
        steps = ResampleMove(0.9, move_below=1.0, moves=PopulationMoves(max_moves=max_moves))
        with transfers(0.0, 0.5) as count:
            pilot = AdaptiveTempering(target, 32, 1, steps, 0)
            pilot.advance(TemperedPopulations(particles, zeros(1)), 0, _DeviceGenerator())
        assert count == {"reads": 2 + max_moves, "writes": 0}


def test_slices_look_every_fourth_evaluation(target, monkeypatch):
    """Each chain shrinks its bracket until it finds a point, and only their values tell when all have."""
    evaluate, calls = ConstrainedSlice._evaluate, []
    monkeypatch.setattr(ConstrainedSlice, "_evaluate", lambda *x: (calls.append(1), evaluate(*x))[1])
    for metric in metrics():
        kernel = ConstrainedSlice(zeros(), zeros(), metric, zeros(50, 3), num_steps=4)
        with transfers():
            state = kernel.init(target, zeros(16, 3), generator=_DeviceGenerator())
        calls.clear()
        unfinished, done = 1.0, 0.0
        assert counted(kernel, target, state, unfinished, unfinished, done)[:2] == (3, 0)
        assert len(calls) == 3 * TICKS_BETWEEN_CHECKS


STOCHASTIC_GRADIENT = [
    SGLD(0.01),
    SGLD(torch.full((6,), 0.01)),
    SGLD(Polynomial(0.01)),
    SGLD(0.01, Metric.diagonal(torch.ones(1))),
    PreconditionedSGLD(0.01),
    SGHMC(0.01),
    SGHMC(0.01, gradient_noise=torch.ones(1)),
    SGHMC(torch.full((6,), 0.01), metric=Metric.dense(torch.eye(1))),
]


def minibatches(order):
    y = zeros(40)
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (y[rows] - u[0]).square(),
        1,
        40,
        batch_size=20,
        device=DEVICE,
        row_order=order,
        compile=False,
    )


@pytest.mark.calibration
@pytest.mark.parametrize("order", [Epochs(), IndependentRows()], ids=["epochs", "independent"])
@pytest.mark.parametrize("kernel", STOCHASTIC_GRADIENT, ids=lambda k: type(k).__name__)
def test_stochastic_gradients_look_at_nothing(kernel, order):
    """Nor do they copy: settings given as tensors of the host go to the device once, before the first step."""
    target = minibatches(order)
    with transfers():
        kernel = settled(kernel, zeros())
    with transfers(0.0):  # there is no gradient noise to warn of
        state = kernel.init(target, zeros(6, 1), generator=_DeviceGenerator())
    for _ in range(5):  # more than two epochs
        *found, state = counted(kernel, target, state)
        assert found == [0, 0]


def test_a_setting_left_on_the_host_would_be_copied_at_each_step():
    target = minibatches(IndependentRows())
    kernel = SGHMC(0.01, gradient_noise=torch.ones(1))
    with transfers(0.0):
        state = kernel.init(target, zeros(6, 1), generator=_DeviceGenerator())
    assert counted(kernel, target, state)[:2] == (0, 1)
