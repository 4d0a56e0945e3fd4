import itertools
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.progress import look
from bayeskit.errors import BudgetError, CheckpointError, CheckpointWarning, OutputError, SamplingWarning, SettingsError
from bayeskit.inference import evidence
from bayeskit.inference.samplers import HMC, Adaptation, Control, Convergence, RunSettings, drive, run
from bayeskit.inference.samplers import _driver as driver
from bayeskit.inference.samplers._driver import Records

QUIET = Control(progress=False)


class WalkState(NamedTuple):
    position: torch.Tensor
    steps: torch.Tensor


@dataclass
class Walk:
    """A random walk that records every second position, and from the twentieth step on all numbers of steps."""

    length: int = 20
    scale: float = 1.0
    after_step: dict = field(default_factory=dict)
    description = "walking"

    @property
    def num_steps(self):
        return self.length

    def facts(self):
        return {"model": "walk", "length": self.length, "scale": self.scale}

    def start(self, generator):
        return WalkState(torch.randn(3, generator=generator), torch.zeros((), dtype=torch.int64))

    def advance(self, state, iteration, generator):
        new = WalkState(state.position + self.scale * torch.randn(3, generator=generator), state.steps + 1)
        self.after_step.get(iteration, lambda: None)()
        late = {"steps": new.steps} if iteration >= 20 else {}
        return new, late | ({"position": new.position} if iteration % 2 else {})

    def ending(self, state, iteration, records):
        return "finished" if iteration >= self.length else None

    def note(self, state, iteration, records):
        return f"at {iteration}"


def generator():
    return torch.Generator().manual_seed(3)


def stop():
    os.kill(os.getpid(), signal.SIGINT)


def whole():
    return drive(Walk(), QUIET, generator())


def test_records_grow_and_keep_their_order():
    records = Records(together=3, block_bytes=64)
    for i in range(37):
        records.append({"x": torch.tensor([i, -i])} | ({"y": torch.tensor(i)} if i % 3 == 0 else {}))
        if i == 20:
            assert records["x"].tolist() == [[j, -j] for j in range(21)]
    assert records["x"].tolist() == [[i, -i] for i in range(37)]
    assert records["y"].tolist() == list(range(0, 37, 3))
    assert records.count("x") == 37 and records.count("z") == 0 and "z" not in records


def test_records_are_kept_in_blocks_of_bounded_size_until_they_are_joined():
    records = Records(together=3, block_bytes=64)
    for i in range(100):
        records.append({"x": torch.tensor([i, -i])})
    blocks = records.blocks("x")
    assert max(len(block) for block in blocks) == 64 // 16 and torch.equal(torch.cat(blocks)[:, 0], torch.arange(100))
    for first in (0, 1, 50, 99, 100):
        assert torch.cat(records.blocks("x", first))[:, 0].tolist() == list(range(first, 100))
    assert [block.data_ptr() for block in records.blocks("x")] == [block.data_ptr() for block in blocks]
    assert records["x"][:, 0].tolist() == list(range(100)) and len(records.blocks("x")) == 1
    records.append({"x": torch.tensor([100, -100])})
    assert records["x"][:, 0].tolist() == list(range(101))


def test_the_rows_of_a_short_run_fill_their_memory():
    """So that a copy or a file of them takes no more."""
    records = Records()
    for i in range(20):
        records.append({"x": torch.tensor([i, -i])})
    assert records["x"].untyped_storage().nbytes() == 20 * 16


def test_an_algorithm_runs_to_its_end():
    outcome = whole()
    assert outcome.ending == "finished" and outcome.num_iterations == 20
    assert outcome.records["position"].shape == (10, 3)
    assert torch.equal(outcome.records["position"][-1], outcome.state.position)


@pytest.mark.parametrize("at", [0, 7, 18, 19])
def test_ctrl_c_ends_between_two_steps_and_the_run_resumes_bit_for_bit(tmp_path, at):
    control = Control(checkpoint=tmp_path / "state", progress=False)
    before = signal.getsignal(signal.SIGINT)
    walk = Walk(after_step={at: lambda: os.kill(os.getpid(), signal.SIGINT)})
    cut = drive(walk, control, generator())
    assert cut.ending == "interrupted" and cut.num_iterations == at + 1
    assert signal.getsignal(signal.SIGINT) is before
    rest = drive(Walk(), control, torch.Generator().manual_seed(99))
    assert rest.ending == "finished"
    assert torch.equal(rest.records["position"], whole().records["position"])
    assert torch.equal(rest.state.position, whole().state.position)


def test_the_second_ctrl_c_is_obeyed_at_once():
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        drive(Walk(after_step={3: twice}), QUIET, generator())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_that_looks_is_dropped_and_left_to_the_next_run(tmp_path):
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        look()

    control = Control(checkpoint=tmp_path / "state", progress=False)
    cut = drive(Walk(after_step={7: interrupted}), control, generator())
    assert cut.ending == "interrupted" and cut.num_iterations == 7
    rest = drive(Walk(), control, torch.Generator())
    assert torch.equal(rest.records["position"], whole().records["position"])


def test_a_start_that_is_cut_short_has_nothing_to_return(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])

    def start(self, generator):
        now[0] += 10.0
        look()
        raise AssertionError("must not be reached")

    monkeypatch.setattr(Walk, "start", start)
    with pytest.raises(BudgetError, match="budget of 5 s ended while the density was being compiled"):
        drive(Walk(), Control(time_budget=5.0), generator())


def test_a_run_within_another_hears_the_same_ctrl_c():
    inner = []

    def drive_another():
        walk = Walk(after_step={3: lambda: os.kill(os.getpid(), signal.SIGINT)})
        inner.append(drive(walk, QUIET, generator()))

    outer = drive(Walk(after_step={5: drive_another}), QUIET, generator())
    assert (inner[0].ending, inner[0].num_iterations) == ("interrupted", 4)
    assert (outer.ending, outer.num_iterations) == ("interrupted", 6)


def test_a_thread_may_drive_too():
    results = []
    thread = threading.Thread(target=lambda: results.append(whole()))
    thread.start()
    thread.join()
    assert torch.equal(results[0].state.position, whole().state.position)


def test_a_time_budget_ends_the_run_and_the_next_call_goes_on(tmp_path, monkeypatch):
    """The clock stands still but for one leap in step 5."""
    now = [0.0]
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])

    def leap():
        now[0] += 100.0

    control = Control(checkpoint=tmp_path / "state", time_budget=50.0, progress=False)
    cut = drive(Walk(after_step={5: leap}), control, generator())
    assert cut.ending == "time budget" and cut.num_iterations == 6
    assert torch.equal(cut.records["position"], whole().records["position"][:3])
    rest = drive(Walk(), control, generator())
    assert rest.ending == "finished" and torch.equal(rest.state.position, whole().state.position)


def test_seconds_count_over_all_parts(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])

    def pass_time(seconds):
        now[0] += seconds

    control = Control(checkpoint=tmp_path / "state", time_budget=50.0, progress=False)
    first = drive(Walk(after_step={5: lambda: pass_time(100.0)}), control, generator())
    assert first.seconds == 100.0
    pass_time(1e6)  # in between, nothing runs
    second = drive(Walk(after_step={9: lambda: pass_time(7.0)}), control, generator())
    assert second.ending == "finished" and second.seconds == 107.0
    assert drive(Walk(), control, generator()).seconds == 107.0


def test_an_exception_leaves_the_last_checkpoint(tmp_path):
    def fail():
        raise ArithmeticError("in step 9")

    control = Control(checkpoint=tmp_path / "state", checkpoint_seconds=0, progress=False)
    with pytest.raises(ArithmeticError):
        drive(Walk(after_step={9: fail}), control, generator())
    rest = drive(Walk(), control, generator())
    assert torch.equal(rest.records["position"], whole().records["position"])


@pytest.mark.parametrize(("part_bytes", "full"), [(2**24, range(4, 99)), (2**24, range(4, 9)), (1, range(4, 9))])
def test_a_full_disk_leaves_the_old_checkpoint_and_the_run_goes_on(tmp_path, monkeypatch, part_bytes, full):
    monkeypatch.setattr(driver, "_PART_BYTES", part_bytes)
    control = Control(checkpoint=tmp_path / "state", checkpoint_seconds=0, progress=False)
    calls = itertools.count()

    def fills_up(_):
        if next(calls) in full:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        with pytest.warns(CheckpointWarning, match="No space left"):
            found = drive(Walk(after_step={14: stop}), control, generator())
    assert found.ending == "interrupted" and found.num_iterations == 15
    assert not list(tmp_path.glob(".*.tmp"))
    rest = drive(Walk(), control, generator())
    assert torch.equal(rest.records["position"], whole().records["position"])


def test_a_disk_that_is_full_at_the_start(tmp_path, monkeypatch):
    def is_full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.warns(CheckpointWarning, match="No space left"):
        found = drive(Walk(), Control(checkpoint=tmp_path / "state", progress=False), generator())
    assert torch.equal(found.records["position"], whole().records["position"])
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said_before_the_work(tmp_path):
    with pytest.raises(OutputError, match="cannot write"):
        drive(Walk(), Control(checkpoint=tmp_path / "nowhere" / "state", progress=False), generator())


def test_rows_that_fill_a_part_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_PART_BYTES", 5 * 3 * 4)  # five records
    path, sizes = tmp_path / "state", []
    control = Control(checkpoint=path, checkpoint_seconds=0, progress=False)
    noted = {step: lambda: sizes.append(path.stat().st_size) for step in range(22, 80)}
    drive(Walk(length=100, after_step=noted | {80: stop}), control, generator())
    parts = sorted(tmp_path.glob("state.rows-*"))
    assert [part.name for part in parts] == [f"state.rows-{number:04d}" for number in range(len(parts))]
    assert len(parts) > 5
    assert max(sizes) - min(sizes) < 300  # five records and longer numbers; 812 bytes are recorded meanwhile
    drive(Walk(length=100), control, generator())
    whole_run = drive(Walk(length=100), QUIET, generator())
    again = drive(Walk(length=100), control, generator())  # of what is finished
    for name in ("position", "steps"):
        assert torch.equal(again.records[name], whole_run.records[name])

    # A part of another run, a changed one and a missing one are noticed; a new run begins without parts.
    kept = parts[1].read_bytes()
    others = tmp_path / "others"
    others.mkdir()
    control_there = Control(checkpoint=others / "state", checkpoint_seconds=0, progress=False)
    drive(Walk(length=100), control_there, generator())
    changed = bytearray(kept)
    changed[-1] ^= 1
    for data, words in (
        ((others / parts[1].name).read_bytes(), "belongs to another run"),
        (bytes(changed), "do not match their checksum"),
        (None, "does not exist"),
    ):
        parts[1].unlink()
        if data is not None:
            parts[1].write_bytes(data)
        with pytest.raises(CheckpointError, match=words):
            drive(Walk(length=100), control, generator())
        parts[1].write_bytes(kept)
    path.unlink()
    drive(Walk(length=2), control, generator())
    assert list(tmp_path.glob("state.rows-*")) == []


@pytest.mark.parametrize(("other", "name"), [(Walk(scale=2.0), "scale"), (Walk(length=30), "length")])
def test_other_settings_are_refused(tmp_path, other, name):
    control = Control(checkpoint=tmp_path / "state", progress=False)
    drive(Walk(), control, generator())
    with pytest.raises(CheckpointError, match=name):
        drive(other, control, generator())


@pytest.mark.parametrize("setting", [{"checkpoint_seconds": -1.0}, {"time_budget": 0.0}])
def test_controls_outside_their_domain_are_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        Control(**setting)


# -- through bk.sample ---------------------------------------------------------------------


class _Interrupting(bk.Target):
    """A target that sends Ctrl-C at its n-th gradient."""

    def __init__(self, target, at):
        self.__dict__.update(vars(target))
        self._target, self._at, self._calls = target, at, 0

    def evaluator(self, num_vectors, num_calls=1):
        right = self._target.evaluator(num_vectors, num_calls)

        def counted(position, beta):
            self._calls += 1
            if self._calls == self._at:
                os.kill(os.getpid(), signal.SIGINT)
            return right(position, beta)

        return counted


@pytest.mark.calibration
def test_ctrl_c_returns_the_draws_that_are_done():
    target = exact.get("linreg10").target()
    counting = _Interrupting(target, 0)  # never
    full = bk.sample(counting, 4, 50, 400, seed=1, progress=False)
    with pytest.warns(SamplingWarning, match=r"interrupted after \d+ of 400 draws"):
        part = bk.sample(_Interrupting(target, counting._calls - 200), 4, 50, 400, seed=1, progress=False)
    assert 0 < part.num_draws < 400 and part.settings["ending"] == "interrupted"
    assert torch.equal(part.unconstrained, full.unconstrained[:, : part.num_draws])
    for name, value in part.sample_stats.items():
        assert value.shape == (4, part.num_draws), name


def test_ctrl_c_during_warm_up_has_nothing_to_return():
    with pytest.raises(KeyboardInterrupt):
        bk.sample(_Interrupting(exact.get("linreg10").target(), 30), 4, 50, 400, seed=1, progress=False)


@pytest.mark.calibration
def test_ctrl_c_ends_a_comparison_and_the_next_call_goes_on(tmp_path):
    """Where several runs follow each other, the first Ctrl-C has to end them all."""
    target = exact.get("beta_binomial").target()
    budget = evidence.Budget(4, 50, 400)
    settings = {"methods": ["bridge_sampling", "smc"], "budget": budget, "seed": 1, "progress": False}
    counting = _Interrupting(target, 0)  # never
    bk.sample(counting, 4, 50, 400, seed=1, progress=False)
    with pytest.raises(KeyboardInterrupt), pytest.warns(SamplingWarning, match="interrupted"):
        evidence.compare(_Interrupting(target, counting._calls - 100), **settings, checkpoint=tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["state.posterior"]
    resumed = evidence.compare(target, **settings, checkpoint=tmp_path / "state")
    whole = evidence.compare(target, **settings)
    for name in settings["methods"]:
        assert resumed[name].log_evidence == whole[name].log_evidence


def test_a_time_budget_too_short_for_the_warm_up_says_so(tmp_path):
    target = exact.get("linreg10").target()
    with pytest.raises(BudgetError, match="iteration 1 of the 50 of the warm-up.*give more time, or a checkpoint"):
        bk.sample(target, 4, 50, 50, time_budget=1e-9, progress=False)
    with pytest.raises(BudgetError, match="the same call resumes from the checkpoint"):
        bk.sample(target, 4, 50, 50, time_budget=1e-9, checkpoint=tmp_path / "state", progress=False)
    resumed = bk.sample(target, 4, 50, 50, checkpoint=tmp_path / "state", progress=False)
    assert torch.equal(resumed.unconstrained, bk.sample(target, 4, 50, 50, progress=False).unconstrained)


@pytest.mark.calibration
def test_draws_count_the_seconds_of_all_parts(tmp_path, monkeypatch):
    ticks = itertools.count()  # a clock that moves whenever it is read, however busy the machine
    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: float(next(ticks)))
    target = exact.get("beta_binomial").target()
    counting = _Interrupting(target, 0)  # never
    bk.sample(counting, 4, 50, 400, progress=False)
    with pytest.warns(SamplingWarning, match="interrupted after"):
        first = bk.sample(
            _Interrupting(target, counting._calls - 100), 4, 50, 400, checkpoint=tmp_path / "state", progress=False
        )
    second = bk.sample(target, 4, 50, 400, checkpoint=tmp_path / "state", progress=False)
    assert 0 < first.num_draws < 400 == second.num_draws and second.seconds > first.seconds > 0


def test_the_text_that_is_shown_does_not_change_the_draws():
    target, adaptation = exact.get("beta_binomial").target(), Adaptation(HMC(), 20)

    def positions(description, stream):
        settings = RunSettings(2, 20, 5, description, seed=1, control=QUIET, stream=stream)
        return run(target, adaptation, settings).position

    assert torch.equal(positions("one text", "posterior"), positions("another", "posterior"))
    assert not torch.equal(positions("one text", "posterior"), positions("one text", "other"))
    assert torch.equal(positions("one text", ""), positions("another", "one text"))


@pytest.mark.calibration
def test_a_run_stops_once_it_has_converged():
    target = exact.get("linreg10").target()
    stop = Convergence(effective_draws=300, check_every=50)
    early = bk.sample(target, 16, 200, 3000, seed=2, stop=stop, progress=False)
    assert early.num_draws < 3000 and early.num_draws % 50 == 0 and early.settings["ending"] == "converged"
    assert stop.reached(early.unconstrained.movedim(1, 0), early.log_density.T)
    long = bk.sample(target, 16, 200, 3000, seed=2, progress=False)
    assert torch.equal(early.unconstrained, long.unconstrained[:, : early.num_draws])


@pytest.mark.parametrize(
    "setting",
    [
        {"r_hat": 1.0},
        {"effective_draws": 0.0},
        {"effective_draws": float("inf")},
        {"effective_draws": float("nan")},
        {"check_every": 2},
        {"check_every": 50.0},
    ],
    ids=str,
)
def test_a_convergence_that_cannot_be_is_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        Convergence(**setting)
