"""Groups of chains: their number decides what is drawn, processes and interruptions never do."""

import itertools
import os
import signal
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cloudpickle import dumps

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit.errors import (
    BudgetError,
    CheckpointError,
    InitializationWarning,
    SamplingWarning,
    SettingsError,
    ShapeError,
)
from bayeskit.inference import evidence
from bayeskit.inference.samplers import HMC, Chains, Control, Convergence, RunSettings, sample_ladder
from bayeskit.inference.samplers import _sampling as module

SHORT = {"num_chains": 4, "num_warmup": 20, "num_samples": 10, "seed": 3, "progress": False}


@pytest.fixture(scope="module")
def target():
    """A regression with ten coefficients whose posterior is known."""
    return bk.exact.get("linreg10").target()


@pytest.fixture(scope="module")
def quick():
    """A coin, for tests that only count steps."""
    return bk.exact.get("beta_binomial").target()


def same(first, second):
    names = ("unconstrained", "log_prior", "log_likelihood", "beta")
    equal = [torch.equal(getattr(first, name), getattr(second, name)) for name in names]
    equal += [torch.equal(value, second.sample_stats[name]) for name, value in first.sample_stats.items()]
    return all(equal) and first.num_gradients == second.num_gradients and first.settings == second.settings


def test_processes_do_not_change_the_draws(target):
    serial = bk.sample(target, **SHORT, num_groups=2)
    assert same(serial, bk.sample(target, **SHORT, num_groups=2, num_jobs=2))
    assert serial.num_chains == 4 and serial.settings["endings"] == ["finished"] * 2


def test_one_group_is_the_plain_run_and_more_are_others(target):
    plain = bk.sample(target, **SHORT)
    with pytest.warns(SamplingWarning, match="num_jobs=2 changes nothing: all chains are one group") as said:
        assert same(plain, bk.sample(target, **SHORT, num_groups=1, num_jobs=2))
    assert Path(said[0].filename) == Path(__file__)
    two = bk.sample(target, **SHORT, num_groups=2)
    assert not torch.equal(two.unconstrained[:2], two.unconstrained[2:])  # each has random numbers of its own
    assert not torch.equal(two.unconstrained, plain.unconstrained)
    assert same(two, bk.sample(target, **SHORT, num_jobs=2))  # as many groups as jobs
    assert bk.sample(target, **SHORT, num_jobs=3).settings["num_groups"] == 2  # which divide four chains


def test_what_a_target_was_used_for_before_does_not_matter(target, monkeypatch):
    """A worker meets the density untraced; here it has been traced and compiled, and compiled graphs cannot travel."""

    def compile_graph(graph, u, beta):
        lock = threading.Lock()  # which cannot travel either

        def call(*arguments):
            with lock:
                return graph(*arguments)

        return call

    monkeypatch.setattr("bayeskit._compiler.engine.compile_graph", compile_graph)
    used = bk.exact.get("linreg10").target()
    used.compile = True
    used.value_and_grad(torch.zeros(3, 10, dtype=torch.float64))
    used.compile = "auto"
    with pytest.raises((TypeError, ValueError), match="pickle"):  # compiled code of either kind
        dumps(used._engine._calls)
    serial = bk.sample(target, **SHORT, num_groups=2)
    assert same(serial, bk.sample(used, **SHORT, num_groups=2))
    assert same(serial, bk.sample(used, **SHORT, num_groups=2, num_jobs=2))


@pytest.mark.calibration
def test_groups_sample_the_posterior(target, limit):
    case = bk.exact.get("linreg10")
    draws = bk.sample(target, 8, 150, 300, seed=1, num_groups=2, progress=False)
    b = draws.values()["b"].movedim(-1, 0)
    z = (b.mean((1, 2)) - case.posterior_mean["b"]) / mean_error(b)
    assert float(z.abs().max()) < limit(10)


def test_groups_on_the_same_random_numbers_are_noticed(target, monkeypatch):
    """The mutation: groups share one stream of random numbers."""
    tasks = module._tasks

    def alike(*arguments):
        return [t._replace(settings=module.replace(t.settings, stream="posterior")) for t in tasks(*arguments)]

    monkeypatch.setattr(module, "_tasks", alike)
    draws = bk.sample(target, **SHORT, num_groups=2)
    assert torch.equal(draws.unconstrained[:2], draws.unconstrained[2:])


# -- dying, resuming, ending early ----------------------------------------------------------------


@dataclass(frozen=True)
class Mortal(HMC):
    """HMC that counts its steps of two chains in a log and kills its process at one of them."""

    log: str = ""
    dies_at: int = 0

    def step(self, target, state, *, generator):
        if self.log:
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(".")
            if Path(self.log).stat().st_size == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(target, state, generator=generator)


@pytest.mark.calibration
def test_a_killed_worker_changes_nothing(target, tmp_path):
    log, keep = tmp_path / "log", {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    calm = bk.sample(target, **SHORT, num_groups=2, kernel=Mortal(log=str(tmp_path / "calm")))
    killed = bk.sample(target, **SHORT, num_groups=2, num_jobs=2, kernel=Mortal(log=str(log), dies_at=45), **keep)
    assert same(calm, killed)
    steps = 2 * (SHORT["num_warmup"] + SHORT["num_samples"])
    assert Path(tmp_path / "calm").stat().st_size == steps
    assert log.stat().st_size == steps + 1  # only the step it died in was repeated


@pytest.mark.calibration
def test_groups_resume_from_a_folder(quick, tmp_path):
    whole = bk.sample(quick, **SHORT, num_groups=2)
    folder = tmp_path / "run"
    advance, calls = Chains.advance, []

    def fails_at_45(self, *arguments):
        calls.append(1)
        if len(calls) == 45:
            raise ArithmeticError
        return advance(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chains, "advance", fails_at_45)
        with pytest.raises(ArithmeticError):
            bk.sample(quick, **SHORT, num_groups=2, checkpoint=folder, checkpoint_seconds=0)
        assert {path.name for path in folder.iterdir()} == {"group-1-of-2", "group-2-of-2"}
        resumed = bk.sample(quick, **SHORT, num_groups=2, checkpoint=folder)
    assert same(whole, resumed)
    assert len(calls) == 45 + 60 - 44  # nothing but the step that failed was repeated
    with pytest.raises(CheckpointError, match="seed"):
        bk.sample(quick, **SHORT | {"seed": 4}, num_groups=2, checkpoint=folder)
    with pytest.raises(CheckpointError, match="is a folder, such as a run in groups writes"):
        bk.sample(quick, **SHORT, checkpoint=folder)
    with pytest.raises(CheckpointError, match="num_groups=2, this run has num_groups=4; resume with num_groups=2"):
        bk.sample(quick, **SHORT, num_groups=4, checkpoint=folder)
    assert len(list(folder.iterdir())) == 2
    bk.sample(quick, **SHORT, checkpoint=tmp_path / "single")
    with pytest.raises(CheckpointError, match="without groups"):
        bk.sample(quick, **SHORT, num_groups=2, checkpoint=tmp_path / "single")


def interrupted_at(call, monkeypatch):
    advance, calls = Chains.advance, []

    def interrupts(self, *arguments):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self, *arguments)

    monkeypatch.setattr(Chains, "advance", interrupts)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("call", "chains", "draws"),
    [
        (25, 2, 5),  # in the draws of the first group
        (40, 2, 10),  # in the warm-up of the second
        (52, 2, 10),  # early in its draws, which are worth less than the first group's
        (57, 4, 7),  # late in them
    ],
)
def test_ctrl_c_returns_what_is_worth_most(quick, monkeypatch, call, chains, draws):
    interrupted_at(call, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        done = bk.sample(quick, **SHORT, num_groups=2)
    assert (done.num_chains, done.num_draws, done.settings["ending"]) == (chains, draws, "interrupted")


@pytest.mark.calibration
def test_ctrl_c_before_any_draw_is_raised(quick, monkeypatch):
    interrupted_at(10, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        bk.sample(quick, **SHORT, num_groups=2)


def passes_time(calls, monkeypatch):
    """Let a clock that stands still otherwise go on by so many seconds before so many calls."""
    advance, now, count = Chains.advance, [0.0], itertools.count(1)

    def waits(self, *arguments):
        now[0] += calls.get(next(count), 0.0)
        return advance(self, *arguments)

    monkeypatch.setattr("bayeskit.inference.samplers._driver.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Chains, "advance", waits)


TOO_LONG = [
    # seconds before calls; chains, draws, endings. A group has 20 calls for its warm-up and 10 for its draws
    ({22: 8.0}, 2, 10, ["time budget", "finished"]),  # in the draws of the first group
    ({15: 8.0}, 2, 10, ["time budget", "finished"]),  # in its warm-up
    ({45: 16.0}, 2, 10, ["finished", "time budget"]),  # in the warm-up of the second
    ({52: 16.0}, 2, 10, ["finished", "time budget"]),  # early in its draws
    ({57: 16.0}, 4, 7, ["finished", "time budget"]),  # late in them
    ({22: 8.0, 47: 8.0}, 2, 5, ["time budget", "time budget"]),  # in the draws of both
]


@pytest.mark.calibration
@pytest.mark.parametrize(("calls", "chains", "draws", "endings"), TOO_LONG)
def test_a_time_budget_returns_what_is_worth_most(quick, monkeypatch, calls, chains, draws, endings):
    passes_time(calls, monkeypatch)
    kept = f"after {draws} of 10 draws a chain of {chains // 2} of 2 groups; these are returned"
    with pytest.warns(SamplingWarning) as said:
        done = bk.sample(quick, **SHORT, num_groups=2, time_budget=16.0)
    assert [str(one.message) for one in said] == [f"posterior: ended by the time budget of 16 s {kept}"]
    assert Path(said[0].filename) == Path(__file__)
    assert (done.num_chains, done.num_draws, done.settings["ending"]) == (chains, draws, "time budget")
    assert done.settings["endings"] == endings


@pytest.mark.calibration
def test_groups_that_are_not_worth_joining_cost_draws(quick, monkeypatch):
    """The mutation: every group that has draws is kept."""
    passes_time({52: 16.0}, monkeypatch)
    monkeypatch.setattr(module, "_worth_joining", lambda done: done)
    with pytest.warns(SamplingWarning, match="after 2 of 10 draws a chain of 2 of 2 groups"):
        done = bk.sample(quick, **SHORT, num_groups=2, time_budget=16.0)
    assert (done.num_chains, done.num_draws) == (4, 2)


def test_no_other_choice_of_groups_has_more_draws():
    """Against all choices that leave out nothing but groups that were ended early."""
    every = [(n, ending) for n in (1, 3, 4, 7) for ending in ("finished", "converged", "time budget", "interrupted")]
    for groups in itertools.combinations_with_replacement(every, 3):
        results = [SimpleNamespace(position=range(n), ending=ending) for n, ending in groups]
        done = module._worth_joining(module.GroupResults(results, 0.0, [ending for _, ending in groups])).results
        early = [one for one in results if one.ending in ("time budget", "interrupted")]
        rest = [one for one in results if one not in early]
        choices = [rest + list(some) for k in range(4) for some in itertools.combinations(early, k)]
        worth = [len(some) * min(len(one.position) for one in some) for some in choices if some]
        assert len(done) * min(len(one.position) for one in done) == max(worth), groups


@pytest.mark.calibration
def test_what_a_group_leaves_of_the_time_goes_to_the_next(quick, monkeypatch):
    passes_time({5: 2.0, 35: 13.0}, monkeypatch)
    assert bk.sample(quick, **SHORT, num_groups=2, time_budget=16.0).settings["endings"] == ["finished"] * 2


@pytest.mark.calibration
def test_a_time_budget_that_leaves_nothing_names_all_of_it(quick, tmp_path, monkeypatch):
    limited = {"num_groups": 2, "time_budget": 16.0}
    with monkeypatch.context() as patch:
        passes_time({15: 8.0, 30: 8.0}, patch)
        with pytest.raises(BudgetError, match="16 s ended while 2 of 2 groups .* give more time, or a checkpoint"):
            bk.sample(quick, **SHORT, **limited)
    with monkeypatch.context() as patch:
        passes_time({15: 8.0, 30: 8.0}, patch)
        with pytest.raises(BudgetError, match="the same call resumes from the checkpoints of the groups"):
            bk.sample(quick, **SHORT, **limited, checkpoint=tmp_path / "run")
    resumed = bk.sample(quick, **SHORT, num_groups=2, checkpoint=tmp_path / "run")
    assert same(resumed, bk.sample(quick, **SHORT, num_groups=2))


@dataclass(frozen=True)
class Failing(HMC):
    """HMC that cannot step."""

    def step(self, target, state, *, generator):
        raise ArithmeticError("no step")


@pytest.mark.filterwarnings("ignore:.*transitions diverged")
@pytest.mark.parametrize("num_jobs", [1, 2])
def test_warnings_arrive_from_every_process(num_jobs):
    half = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: torch.where(u[..., 0] > 1.5, -torch.inf, 0 * u[..., 0]), 2
    )
    lost = torch.tensor([[-1.0, 0.0], [2.0, 0.0], [-0.5, 0.1], [-0.2, 0.0]], dtype=torch.float64)
    settings = SHORT | {"initial": lost, "num_groups": 2, "num_jobs": num_jobs}
    with pytest.warns(InitializationWarning, match=r"posterior, group 1 of 2: chains \[1\] start"):
        bk.sample(half, **settings)
    with pytest.raises(ArithmeticError, match="no step") as failed:
        bk.sample(half, **settings | {"initial": lost[[0, 1, 0, 1]]}, kernel=Failing())
    assert any("of 2 had warned: chains [1] start" in note for note in failed.value.__notes__)


def test_each_group_judges_its_own_convergence(target):
    enough = Convergence(r_hat=1.2, effective_draws=30, check_every=10)
    settings = SHORT | {"num_samples": 400, "num_warmup": 100}
    draws = bk.sample(target, **settings, num_groups=2, stop=enough)
    assert draws.settings["endings"] == ["converged"] * 2 and draws.num_draws < 400
    parts = [draws.select(chains) for chains in ([0, 1], [2, 3])]  # cut to the one that was ready first
    assert any(enough.reached(part.unconstrained.movedim(0, 1), part.log_density.T) for part in parts)
    with pytest.raises(SettingsError, match="two chains"):
        bk.sample(target, **settings, num_groups=4, stop=enough)


def test_the_time_budget_is_shared():
    settings, parts = RunSettings(6, 40, 20, control=Control(time_budget=6.0)), [module.Group(None, 2)] * 3
    assert [t.settings.control.time_budget for t in module._tasks(parts, settings, 1)] == [2.0] * 3
    assert [t.settings.control.time_budget for t in module._tasks(parts, settings, 2)] == [3.0] * 3
    assert [t.settings.control.time_budget for t in module._tasks(parts, settings, 3)] == [6.0] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "4 chains cannot be divided into 3 equal groups"),
        ({"num_groups": 0}, "num_groups must be at least 1"),
        ({"num_groups": 2, "num_jobs": 0}, "num_jobs must be at least 1"),
    ],
)
def test_divisions_that_cannot_be_made_are_refused(target, change, message):
    with pytest.raises(SettingsError, match=message):
        bk.sample(target, **SHORT, **change)


def test_starting_points_go_to_their_chains(target):
    points = torch.arange(4, dtype=torch.float64).unsqueeze(-1).expand(4, 10) / 10
    assert same(
        bk.sample(target, **SHORT, num_groups=2, initial=points),
        bk.sample(target, **SHORT, num_groups=2, num_jobs=2, initial=points),
    )
    for wrong in (points[:3], points[0, :3], points[0, 0], points[:2]):
        with pytest.raises(ShapeError, match=r"must have shape \(10,\) or \(4, 10\)"):
            bk.sample(target, **SHORT, num_groups=2, initial=wrong)


@pytest.mark.calibration
def test_numbers_of_numpy_can_be_saved(quick, tmp_path):
    numpy = {"num_groups": np.int64(2), "target_acceptance": np.float32(0.75)}
    sampled = bk.sample(quick, **SHORT, **numpy)
    for draws in (sampled, sample_ladder(quick, **LADDER, **numpy).draws):
        draws.save(tmp_path / "draws")
        settings = bk.Draws.load(tmp_path / "draws", quick).settings
        assert (settings["num_groups"], settings["target_acceptance"]) == (2, 0.75)
    assert same(sampled, bk.sample(quick, **SHORT, num_groups=2, target_acceptance=0.75))


# -- temperatures ---------------------------------------------------------------------------------

LADDER = {"num_temperatures": 5, "num_chains": 2, "num_warmup": 20, "num_samples": 10, "progress": False}


def test_a_ladder_in_groups_is_the_same_in_processes(target):
    serial = sample_ladder(target, **LADDER, num_groups=2)
    parallel = sample_ladder(target, **LADDER, num_groups=2, num_jobs=2)
    assert same(serial.draws, parallel.draws) and torch.equal(serial.beta, parallel.beta)
    assert torch.equal(serial.draws.beta, serial.beta.repeat_interleave(2))
    whole = sample_ladder(target, **LADDER)
    assert torch.equal(whole.prior.unconstrained, serial.prior.unconstrained)
    assert not torch.equal(whole.posterior.unconstrained, serial.posterior.unconstrained)


@pytest.mark.calibration
def test_a_ladder_in_groups_gives_the_evidence(limit):
    case = bk.exact.get("beta_binomial")
    target = case.target()
    ladder = sample_ladder(target, 10, 8, 60, 200, seed=2, num_groups=3, progress=False)
    z = evidence.stepping_stone(target, ladder)
    assert z.trusted and z.standard_error < 0.05
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


def test_groups_that_cannot_exchange_are_refused(target):
    with pytest.raises(SettingsError, match="num_groups=1 with exchange=True"):
        sample_ladder(target, **LADDER, num_groups=2, exchange=True)
    with pytest.raises(SettingsError, match="5 temperatures cannot be divided into 6 groups"):
        sample_ladder(target, **LADDER, num_groups=6)


@pytest.mark.calibration
def test_an_interrupted_ladder_goes_on_from_its_folder(quick, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupted_at(50, patch)
        with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            sample_ladder(quick, **LADDER, num_groups=3, checkpoint=folder)
    resumed = sample_ladder(quick, **LADDER, num_groups=3, checkpoint=folder)
    assert same(resumed.draws, sample_ladder(quick, **LADDER, num_groups=3).draws)


@pytest.mark.calibration
def test_a_ladder_without_all_its_temperatures_is_nothing_to_return(quick, monkeypatch):
    with monkeypatch.context() as patch:
        passes_time({15: 8.0}, patch)
        with pytest.raises(BudgetError, match="16 s ended while 1 of 2 groups"):
            sample_ladder(quick, **LADDER, num_groups=2, time_budget=16.0)
    passes_time({52: 16.0}, monkeypatch)
    with pytest.warns(SamplingWarning, match="16 s after 2 of 10 draws a chain of 2 of 2 groups; these are returned"):
        ladder = sample_ladder(quick, **LADDER, num_groups=2, time_budget=16.0)
    assert ladder.draws.num_draws == 2 and len(ladder.beta) == 6


def test_the_ends_of_a_ladder(target):
    ladder = sample_ladder(target, **LADDER)
    assert repr(ladder) == "Ladder(6 temperatures x 2 chains x 10 draws, dim 10, sites: b)"
    assert torch.equal(ladder.posterior.log_likelihood, ladder.log_likelihood[-1])
    torch.testing.assert_close(
        ladder.posterior.log_density, target.log_density(ladder.posterior.unconstrained), rtol=1e-12, atol=0
    )
    data = ladder.to_arviz()
    assert data.posterior["b"].shape == data.prior["b"].shape == (2, 10, 10)
    torch.testing.assert_close(torch.as_tensor(data.prior["b"].values), ladder.prior.values()["b"])
    assert data.posterior["b"].values.std() < data.prior["b"].values.std()
