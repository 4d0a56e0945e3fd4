"""What a run hears while its density is being compiled, and what compiling may not change."""

import os
import signal
import threading
import time
import warnings
from contextlib import suppress

import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._compiler import cost as cost
from bayeskit._compiler import inductor as inductor
from bayeskit._compiler import native_library as native_library
from bayeskit.errors import BudgetError, CompilationWarning, SamplingWarning
from bayeskit.inference.samplers import (
    HMC,
    NUTS,
    Chains,
    Control,
    sample_ladder,
    sample_nested,
    sample_smc,
    sample_with_pyro,
)
from bayeskit.inference.samplers._driver import drive

# A thread that is told to end in the callback of a weak reference loses what it was told, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SMALL = {"num_chains": 3, "num_warmup": 30, "num_samples": 20, "seed": 5, "progress": False}


@pytest.fixture(autouse=True)
def no_density_is_small(monkeypatch):
    """Have all compiled by inductor, also those that C++ over rows would serve."""
    monkeypatch.setattr("bayeskit._compiler.engine.row_source", lambda *_: None)
    monkeypatch.setattr(native_library, "compiler", lambda: "g++")  # most compilers here are only pretended


def compiling(name="beta_binomial"):
    target = exact.get(name).target()
    target.compile = True
    return target


class Hanging:
    """A compiler that waits until it is let go, and does then what ``compile`` does."""

    def __init__(self, compile, on_start):
        self.compile, self.on_start, self.calls, self.released = compile, on_start, 0, threading.Event()

    def __call__(self, graph, examples, options):
        self.calls += 1
        self.on_start()
        self.released.wait()
        return self.compile(graph, examples, options)


@pytest.fixture
def hang(monkeypatch):
    """Let the compiler hang, and call a function when it starts."""
    made = []
    monkeypatch.setattr(inductor, "_FAREWELL_SECONDS", 0.05)  # it would be waited for in vain

    def make(on_start=lambda: None):
        made.append(Hanging(lambda graph, examples, options: graph, on_start))
        monkeypatch.setattr(torch._inductor, "compile", made[-1])
        return made[-1]

    yield make
    for hanging in made:
        hanging.released.set()
    if inductor._latest is not None:
        inductor._latest.join()
    inductor._latest = None


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_does_not_wait_for_the_compiler(hang, tmp_path):
    hanging, before, filters = hang(ctrl_c), signal.getsignal(signal.SIGINT), list(warnings.filters)
    with pytest.raises(KeyboardInterrupt):
        bk.sample(compiling(), **SMALL, checkpoint=tmp_path / "state")
    assert not hanging.released.is_set() and hanging.calls == 1
    assert signal.getsignal(signal.SIGINT) is before and warnings.filters == filters


def test_ctrl_c_outside_a_run_does_not_wait_either(hang):
    hang(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        compiling().evaluator(3)


def test_a_compilation_that_was_given_up_is_not_taken_for_a_compiled_graph(hang, monkeypatch):
    target = compiling()
    hanging = hang(ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        target.evaluator(3)
    assert target._engine.compiled(3) is None
    hanging.released.set()
    second = hang()
    second.released.set()
    target.evaluator(3)
    assert second.calls == 1 and target._engine.compiled(3) is not None


def test_a_time_budget_does_not_wait_for_the_compiler(hang, tmp_path):
    for checkpoint in (None, tmp_path / "state"):
        hang()
        with pytest.raises(BudgetError, match=r"being compiled, before .* to return or keep; give more time, or set"):
            bk.sample(compiling(), **SMALL, time_budget=0.2, checkpoint=checkpoint)
        assert not list(tmp_path.iterdir())


def test_a_time_budget_that_ends_while_a_resumed_run_compiles_leaves_the_checkpoint(hang, tmp_path):
    settings = SMALL | {"checkpoint": tmp_path / "state"}
    hang().released.set()
    whole = bk.sample(compiling(), **settings)
    hanging = hang()
    with pytest.raises(BudgetError, match=r"compiled, before the run resumed; its checkpoint.*more time(\n|$)"):
        bk.sample(compiling(), **settings, time_budget=0.2)
    hanging.released.set()
    hang().released.set()
    assert torch.equal(bk.sample(compiling(), **settings).unconstrained, whole.unconstrained)


@pytest.mark.parametrize("ended", ["by Ctrl-C", "before", "while it compiles"])
def test_the_last_move_of_smc_does_not_wait_for_the_compiler(hang, tmp_path, monkeypatch, ended):
    """A run that is complete but for it, and resumed by a process that has compiled nothing."""
    now = [0.0]

    def pass_time():
        now[0] += 100.0

    settings = {"num_particles": 16, "num_replicates": 4, "num_pilot_particles": 64, "ess_threshold": 0.5}
    settings |= {"checkpoint": tmp_path / "state", "progress": False}
    hang().released.set()
    used = compiling()
    whole = sample_smc(used, **settings)
    reason = "interrupted" if ended == "by Ctrl-C" else "time budget"
    hanging = hang(ctrl_c if ended == "by Ctrl-C" else pass_time)
    monkeypatch.setattr(inductor, "MAX_COMPILE_SECONDS", 10.0)  # a run that waits fails soon
    with monkeypatch.context() as patch, pytest.warns(SamplingWarning, match=r"after (\d+) of \1 stages; the same"):
        if ended == "while it compiles":
            patch.setattr("bayeskit._core.progress.time.monotonic", lambda: now[0])
        budget = {"by Ctrl-C": None, "before": 1e-6, "while it compiles": 50.0}[ended]
        cut = sample_smc(compiling(), **settings, time_budget=budget)
    hanging.released.set()
    assert cut.ending == cut.draws.settings["ending"] == reason and hanging.calls == (ended != "before")
    assert torch.equal(cut.log_evidence, whole.log_evidence) and not cut.draws.sample_stats
    assert cut.draws.unconstrained.shape == whole.draws.unconstrained.shape
    assert "log_marginal_likelihood" in cut.to_arviz()["sample_stats"]
    moved = sample_smc(used, **settings, time_budget=1e-6)  # by what is compiled already
    assert moved.ending == "finished" and torch.equal(moved.draws.unconstrained, whole.draws.unconstrained)


def sleep(seconds=3.0):
    """Sleep in pieces, between which a thread hears what it is told."""
    for _ in range(round(100 * seconds)):
        time.sleep(0.01)


def test_a_compilation_that_does_not_hear_that_it_was_given_up_is_told_again(hang, monkeypatch):
    monkeypatch.setattr(inductor, "_TELL_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(inductor, "MAX_COMPILE_SECONDS", 5.0)

    def first(graph, examples, options):
        with suppress(SystemExit):  # as in the callback of a weak reference
            ctrl_c()
            sleep()
        sleep(12.0)

    hanging = hang()
    hanging.compile = first
    hanging.released.set()
    with pytest.raises(KeyboardInterrupt):
        compiling().evaluator(3)
    second = hang()
    second.released.set()
    compiling().evaluator(3)
    assert second.calls == 1


@pytest.mark.parametrize("deaf", [False, True], ids=["hears the second", "hears nothing"])
def test_filters_of_warnings_that_the_compiler_borrows_are_given_back(monkeypatch, deaf):
    monkeypatch.setattr(inductor, "_latest", None)
    monkeypatch.setattr(inductor, "_FAREWELL_SECONDS", 0.02 if deaf else 0.5)
    released = threading.Event()

    def borrowing(graph, examples, options):
        with warnings.catch_warnings():
            with suppress(SystemExit):  # as in the callback of a weak reference
                ctrl_c()
                sleep()
            if deaf:
                released.wait()
            sleep()
        return graph

    monkeypatch.setattr(torch._inductor, "compile", borrowing)
    before, shown = list(warnings.filters), warnings._showwarnmsg_impl
    with pytest.raises(KeyboardInterrupt):
        bk.sample(compiling(), **SMALL)
    assert warnings.filters == before
    released.set()
    inductor._latest.join()
    assert warnings.filters == before and warnings._showwarnmsg_impl is shown


def test_a_compiler_that_gives_no_answer_is_done_without(hang, monkeypatch):
    hanging = hang()
    monkeypatch.setattr(inductor, "MAX_COMPILE_SECONDS", 0.1)
    whole = bk.sample(_traced(), **SMALL)
    with pytest.warns(CompilationWarning, match=r"did not finish in 0.1 s.*last digits"):
        draws = bk.sample(compiling(), **SMALL)
    assert torch.equal(draws.unconstrained, whole.unconstrained)
    with pytest.warns(CompilationWarning, match="did not finish"):
        compiling().evaluator(3)
    assert hanging.calls == 1  # it hangs, so that nobody waits for it a second time
    assert torch.distributions.Distribution._validate_args


def _traced():
    target = exact.get("beta_binomial").target()
    target.compile = False
    return target


def test_a_failure_of_the_compiler_arrives_where_it_was_called(hang):
    hanging = hang()
    hanging.released.set()

    def fails(*_):
        raise RuntimeError("no such instruction")

    hanging.compile = fails
    with pytest.warns(CompilationWarning, match="no such instruction"):
        compiling().evaluator(3)


@pytest.mark.parametrize("reason", ["interrupted", "time budget"])
def test_a_step_that_waits_for_the_compiler_is_dropped_and_taken_by_the_next_run(hang, tmp_path, reason):
    """The density of the second step is compiled when that step is taken."""

    class Walk:
        description, num_steps = "walking", 6

        def __init__(self, target):
            self.target = target

        def facts(self):
            return {"model": "walk"}

        def start(self, generator):
            return torch.zeros(2, 1, dtype=torch.float64)

        def advance(self, state, iteration, generator):
            noise = torch.randn(2, 1, generator=generator, dtype=torch.float64)
            if iteration == 2:
                self.target.evaluator(2)
            state = state + noise
            return state, {"x": state}

        def ending(self, state, iteration, records):
            return "finished" if iteration == self.num_steps else None

        def note(self, state, iteration, records):
            return ""

    def generator():
        return torch.Generator().manual_seed(1)

    quick = hang()
    quick.released.set()
    whole = drive(Walk(compiling()), Control(progress=False), generator())
    hang(ctrl_c if reason == "interrupted" else lambda: None)
    budget = 2.0 if reason == "time budget" else None
    control = Control(tmp_path / "state", time_budget=budget, progress=False)
    cut = drive(Walk(compiling()), control, generator())
    assert cut.ending == reason and cut.num_iterations == 2
    assert torch.equal(cut.records["x"], whole.records["x"][:2])
    hang().released.set()
    inductor._latest = None
    rest = drive(Walk(compiling()), Control(tmp_path / "state", progress=False), torch.Generator())
    assert rest.ending == "finished" and torch.equal(rest.records["x"], whole.records["x"])


# -- bits ----------------------------------------------------------------------------------


@pytest.mark.calibration
@pytest.mark.compiler
def test_values_do_not_depend_on_what_was_compiled_before():
    """The rounding of the compiled graph differs, so that a fresh and a used target would start differently."""
    target = compiling("linreg10")
    u = target.sample_prior(400, seed=3)
    first = target.evaluate(u, compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(target.evaluate(u), first, strict=True))  # nothing is compiled yet
    target.evaluator(8)
    again = target.evaluate(u, compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(target.evaluate(u), first, strict=True))


@pytest.mark.calibration
@pytest.mark.parametrize(
    "run",
    [
        lambda target: bk.sample(target, **SMALL),
        lambda target: sample_with_pyro(target, 2, 20, 10, progress=False),
        lambda target: sample_smc(target, 16, 4, num_pilot_particles=64, ess_threshold=0.5, progress=False).draws,
        lambda target: sample_nested(target, 40, num_slice_steps=4, max_blocks=3, progress=False),
    ],
    ids=["hmc", "pyro", "smc", "nested"],
)
def test_a_run_does_not_depend_on_what_was_compiled_before(run, compiled_calls):
    """A resumed run starts without the graphs that an uninterrupted one may have compiled before its last part."""
    used, fresh = compiling("linreg10"), exact.get("linreg10").target()
    fresh.compile = used.compile = False
    used._engine._calls = dict(compiled_calls)
    a, b = run(fresh), run(used)
    for name in ("log_prior", "log_likelihood"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.fixture(scope="module")
def compiled_calls():
    """Return the graphs of a target that has compiled some: of small size, so that every evaluation could use them."""
    target = compiling("linreg10")
    target.evaluator(8)
    return target._engine._calls


# -- when to compile ------------------------------------------------------------------------------


def compiling_shows(monkeypatch, seconds):
    """Let compiled code give other digits than traced code, and be made when traced work comes to so many seconds."""
    sizes = []

    def compile_graph(graph, u, beta):
        sizes.append(len(u))

        def call(*arguments):
            log_prior, log_likelihood, log_density, gradient = graph(*arguments)
            return log_prior, log_likelihood, log_density * (1 + 1e-6), gradient

        return call

    monkeypatch.setattr("bayeskit._compiler.engine.compile_graph", compile_graph)
    monkeypatch.setattr(cost, "COMPILE_SECONDS", seconds)
    monkeypatch.setattr(cost, "COMPILE_SECONDS_PER_NODE", 0.0)
    return sizes


def switch_of(target, settings, monkeypatch):
    """Iterations after which a run had compiled."""
    advance, seen = Chains.advance, []

    def watched(self, state, iteration, generator):
        result = advance(self, state, iteration, generator)
        seen.append(any(compiled for _, compiled in self.target._engine._calls))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Chains, "advance", watched)
        draws = bk.sample(target, **settings)
    return draws, seen.index(True) if True in seen else None


@pytest.mark.long
@pytest.mark.parametrize("kernel", [HMC(), NUTS()], ids=["HMC", "NUTS"])
def test_a_run_compiles_when_what_is_left_repays_it_and_resumes_alike_on_either_side(kernel, tmp_path, monkeypatch):
    # Repaid by some 190 calls; at the first window, 75 transitions are left, of three leapfrog steps at least.
    sizes = compiling_shows(monkeypatch, 0.018)
    settings = {"num_chains": 4, "num_warmup": 60, "num_samples": 30, "seed": 2, "progress": False, "kernel": kernel}
    whole, switch = switch_of(exact.get("linreg10").target(), settings, monkeypatch)
    assert sizes == [4] and switch is not None and 5 < switch < 60  # neither at the start nor after the warm-up
    advance = Chains.advance
    for stop in (switch - 2, switch + 3, 75):

        def dies(self, state, iteration, generator, stop=stop):
            if iteration == stop:
                raise ArithmeticError
            return advance(self, state, iteration, generator)

        path = tmp_path / f"state-{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(Chains, "advance", dies)
            with pytest.raises(ArithmeticError):
                bk.sample(exact.get("linreg10").target(), **settings, checkpoint=path, checkpoint_seconds=0)
        resumed = bk.sample(exact.get("linreg10").target(), **settings, checkpoint=path)
        assert torch.equal(resumed.unconstrained, whole.unconstrained), stop
        assert (
            torch.equal(resumed.log_likelihood, whole.log_likelihood) and resumed.num_gradients == whole.num_gradients
        )


@pytest.mark.calibration
def test_cheap_runs_are_not_compiled_and_temperatures_are_alike(monkeypatch):
    sizes = compiling_shows(monkeypatch, 1e3)
    assert switch_of(exact.get("linreg10").target(), SMALL, monkeypatch)[1] is None and not sizes
    sizes = compiling_shows(monkeypatch, 0.05)
    sample_ladder(exact.get("linreg10").target(), 4, 3, 60, 40, exchange=True, progress=False)
    assert sizes == [12]
