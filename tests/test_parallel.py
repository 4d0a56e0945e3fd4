import json
import math
import os
import signal
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import joblib
import numpy as np
import pytest
import torch
from loky import BrokenProcessPool

from bayeskit import parallel
from bayeskit._core import folders as _files
from bayeskit._core import storage as _tasks
from bayeskit._core.randomness import new_generator
from bayeskit._core.storage import decode, digest, encode
from bayeskit.errors import CheckpointError, CheckpointWarning, SettingsError, WorkerError
from bayeskit.parallel import map_tasks


@dataclass(frozen=True)
class Job:
    """A task that leaves a line in a log each time it starts, and may kill its process."""

    seed: int
    log: str
    num_deaths: int = 0
    fails: bool = False


def work(job):
    with open(job.log, "a", encoding="utf-8") as file:
        file.write(f"{job.seed}\n")
    if starts(job.log).count(job.seed) <= job.num_deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.fails:
        raise ZeroDivisionError("no such number")
    return {"draw": torch.randn(3, generator=new_generator(job.seed), dtype=torch.float64), "seed": job.seed}


def starts(log):
    return [int(line) for line in Path(log).read_text(encoding="utf-8").split()]


def jobs(log, count=6, **special):
    """Jobs with the settings in ``special`` for job 2."""
    return [Job(seed, str(log), **(special if seed == 2 else {})) for seed in range(count)]


def same(first, second):
    return all(torch.equal(a["draw"], b["draw"]) and a["seed"] == b["seed"] for a, b in zip(first, second, strict=True))


def threads(_):
    return torch.get_num_threads()


def test_order_is_kept_and_each_task_has_one_thread():
    assert map_tasks(abs, [-3, 2, -1], progress=False) == [3, 2, 1]
    assert map_tasks(threads, [0, 1], num_jobs=2, progress=False) == [1, 1]
    assert map_tasks(abs, [], num_jobs=2) == []


def test_serial_processes_and_threads_agree(tmp_path):
    tasks = jobs(tmp_path / "log")
    serial = map_tasks(work, tasks, progress=False)
    assert same(serial, map_tasks(work, tasks, num_jobs=2, progress=False))
    with joblib.parallel_config(backend="threading"):
        assert same(serial, map_tasks(work, tasks, num_jobs=2, progress=False))


def test_a_function_that_draws_from_a_shared_stream_is_noticed():
    """The mutation: a task whose result depends on what ran before it in its process."""
    generator = new_generator(0)

    def draw(_):
        return {"draw": torch.randn(3, generator=generator), "seed": 0}

    assert not same(map_tasks(draw, [0] * 6, progress=False), map_tasks(draw, [0] * 6, num_jobs=2, progress=False))


@pytest.mark.calibration
def test_a_killed_process_costs_only_its_task(tmp_path):
    expected = map_tasks(work, jobs(tmp_path / "calm"), progress=False)
    log = tmp_path / "log"
    results = map_tasks(work, jobs(log, num_deaths=1), num_jobs=2, progress=False)
    assert same(expected, results)
    assert sorted(starts(log)) == [0, 1, 2, 2, 3, 4, 5]  # nobody else's work was repeated


def kill_idle(noticed):
    """Kill the processes that wait for tasks; return how many, once all are dead and, if asked, known to be."""
    dead = 0
    for executor in parallel._idle:
        manager, processes = executor._executor_manager_thread, list(executor._processes.values())
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            dead += 1
        if noticed and processes:
            manager.join()  # ends as soon as it has marked the executor as broken
    return dead


@pytest.mark.long
@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "just now"])
def test_processes_that_die_while_idle_cost_no_task(tmp_path, noticed):
    expected = map_tasks(work, jobs(tmp_path / "calm"), num_jobs=2, progress=False)
    assert kill_idle(noticed) >= 2
    log = tmp_path / "log"
    # A task handed to a process whose death nobody has noticed yet comes back, and starts elsewhere.
    results = map_tasks(work, jobs(log), num_jobs=2, max_retries=0 if noticed else 2, progress=False)
    assert same(expected, results)
    assert sorted(starts(log)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.calibration
def test_trusting_idle_processes_would_lose_the_run(tmp_path, monkeypatch):
    """The mutation: a task goes to the process that waits, whether it lives or not."""

    def trusting(function, args):
        executor = parallel._idle.pop()
        return executor, executor.submit(function, *args)

    map_tasks(work, jobs(tmp_path / "calm"), num_jobs=2, progress=False)
    kill_idle(noticed=True)
    monkeypatch.setattr(parallel._ProcessPool, "_from_idle", staticmethod(trusting))
    with pytest.raises(BrokenProcessPool):
        map_tasks(work, jobs(tmp_path / "log"), num_jobs=2, progress=False)


@pytest.mark.calibration
def test_a_task_that_always_kills_its_process_is_named_and_the_others_are_kept(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(WorkerError, match=r"task 2 died 2 times"):
        map_tasks(work, jobs(log, num_deaths=2), num_jobs=2, max_retries=1, checkpoint=tmp_path / "run", progress=False)
    kept = set(starts(log)) - {2}
    assert {0, 1} <= kept
    results = map_tasks(work, jobs(log, num_deaths=2), num_jobs=2, checkpoint=tmp_path / "run", progress=False)
    assert same(results, map_tasks(work, jobs(tmp_path / "calm"), progress=False))
    assert sorted(starts(log)) == [0, 1, 2, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_an_error_names_its_task_and_the_others_are_kept(tmp_path, num_jobs):
    log, folder = tmp_path / "log", tmp_path / "run"
    with pytest.raises(ZeroDivisionError) as caught:
        map_tasks(work, jobs(log, fails=True), num_jobs=num_jobs, checkpoint=folder, progress=False)
    assert caught.value.__notes__[0].startswith("raised by task 2: Job(seed=2")
    assert {path.name for path in folder.glob("*.safetensors")} >= {f"task-{i:06d}.safetensors" for i in (0, 1)}


class Untransportable(Exception):
    def __init__(self, message, *, code):
        super().__init__(message)


def raise_untransportable(_):
    raise Untransportable("strange", code=3)


def test_an_error_that_cannot_be_pickled_is_no_dead_process():
    with pytest.raises(WorkerError, match="task 0 raised Untransportable: strange"):
        map_tasks(raise_untransportable, [0], num_jobs=2, progress=False)


def test_a_rerun_computes_only_what_is_missing(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "run"
    first = map_tasks(work, jobs(log), checkpoint=folder, progress=False)
    (folder / "task-000004.safetensors").unlink()
    again = map_tasks(work, jobs(log), num_jobs=2, checkpoint=folder, progress=False)
    assert same(first, again)
    assert starts(log) == [0, 1, 2, 3, 4, 5, 4]


def other_work(job):
    return work(job)


def test_a_folder_of_another_run_is_refused(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "run"
    map_tasks(work, jobs(log), checkpoint=folder, progress=False)
    with pytest.raises(CheckpointError, match="another task 2"):
        map_tasks(work, jobs(log, num_deaths=1), checkpoint=folder, progress=False)
    with pytest.raises(CheckpointError, match=r"of 6 tasks, this run has 5"):
        map_tasks(work, jobs(log, 5), checkpoint=folder, progress=False)
    with pytest.raises(CheckpointError, match=r"results of .*work"):
        map_tasks(other_work, jobs(log), checkpoint=folder, progress=False)
    (folder / "task-000001.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"task-000001.*truncated"):
        map_tasks(work, jobs(log), checkpoint=folder, progress=False)
    (folder / "tasks.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tasks.json is truncated"):
        map_tasks(work, jobs(log), checkpoint=folder, progress=False)


def test_a_file_moved_to_another_task_is_refused(tmp_path):
    folder = tmp_path / "run"
    map_tasks(abs, [1, -2], checkpoint=folder, progress=False)
    (folder / "task-000000.safetensors").rename(folder / "task-000001.safetensors")
    with pytest.raises(CheckpointError, match="another task"):
        map_tasks(abs, [1, -2], checkpoint=folder, progress=False)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    log, folder = tmp_path / "log", tmp_path / "run"
    replace, written = os.replace, []

    def replace_until_full(source, target):
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        written.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(_files.os, "replace", replace_until_full)
        with pytest.warns(CheckpointWarning, match="No space left"):
            map_tasks(work, jobs(log), checkpoint=folder, progress=False)
    assert not list(folder.glob(".*.tmp"))
    map_tasks(work, jobs(log), checkpoint=folder, progress=False)
    assert starts(log) == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]  # the manifest and two results were safe


# -- what results and tasks may be made of ------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: float


@dataclass(frozen=True)
class Estimate:
    pair: Pair
    notes: tuple[str, ...]


def round_trip(value, types=()):
    tensors = {}
    known = {_tasks.qualified_name(t): t for t in types}
    structure = json.loads(json.dumps(encode(value, tensors, known)))
    return decode(structure, tensors, known)


def test_results_return_as_they_were():
    base = torch.arange(6, dtype=torch.float32)
    value = {
        "none": None,
        3: [True, 2**70, -0.0, float("inf"), "text"],
        (1, "a"): (base[:3], base[1:4], torch.tensor(1 + 2j), torch.zeros(0, 2, dtype=torch.bool)),
        "numpy": [np.arange(4, dtype=np.uint16).reshape(2, 2).T, np.float64(0.1), np.bool_(True)],
        "estimate": Estimate(Pair(torch.ones(2, dtype=torch.bfloat16), 0.1), ("a", "b")),
        "counts": [Counter({9: 1, 2: 1}), OrderedDict(b=1, a=(base, 2))],
        "views": [base.expand(2, 6), torch.tensor([1 + 2j]).conj().imag],
    }
    result = round_trip(value, (Estimate, Pair))
    assert repr(result) == repr(value)
    assert result["numpy"][0].dtype == np.uint16 and type(result["numpy"][1]) is np.float64
    np.testing.assert_array_equal(result["numpy"][0], value["numpy"][0])
    assert round_trip(float("nan")) != round_trip(float("nan"))


@pytest.mark.parametrize(
    ("value", "place"), [({"a": [object()]}, r"\['a'\]\[0\] is of type builtins.object"), (Pair(1, 2), "Pair")]
)
def test_what_cannot_be_stored_is_named_with_the_remedy(value, place):
    with pytest.raises(CheckpointError, match=rf"{place}.*result_types"):
        encode(value, {}, {})


def test_loading_makes_no_type_that_was_not_named():
    with pytest.raises(CheckpointError, match="os.system"):
        decode({"type": "os.system", "fields": {"command": "true"}}, {}, {})
    with pytest.raises(CheckpointError, match="unknown part"):
        decode({"call": "os.system"}, {}, {})


def test_digests_see_values_closures_and_types():
    def closing_over(value):
        def function(x):
            return x + value

        return function

    assert digest(closing_over(torch.ones(2))) == digest(closing_over(torch.ones(2)))
    assert digest(closing_over(torch.ones(2))) != digest(closing_over(torch.zeros(2)))
    assert digest(np.ones(2)) != digest(np.ones(2, dtype=np.float32))
    assert digest(slice(1)) != digest(slice(2))
    assert digest((1, 2)) != digest([1, 2]) and digest({1, 2}) == digest({2, 1})
    assert digest(torch.nn.Linear(1, 1)) != digest(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"fingerprint\(\)"):
        digest(iter([1]))


def test_digests_see_what_a_function_does():
    """Functions of one name, as two calls of one line of a program make them."""
    functions = [
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x + 2.0,
        lambda x: x.real,
        lambda x: x.imag,
        lambda *x: x,
        lambda x: x,
        lambda y: y,  # called by keyword, another
        lambda x: x[..., 0],
        lambda x: x[0, ...],
        lambda x: lambda y: y + x + 1,
        lambda x: lambda y: y + x + 2,
        lambda x: x in {"a", "b"},
        lambda x: x in {"a", "c"},
    ]
    assert len({function.__qualname__ for function in functions}) == 1
    assert len({digest(function) for function in functions}) == len(functions)

    def again(number):
        return [lambda x: x + number, lambda x: lambda y: [y, x, ..., 1.5, {"a"}]]

    assert list(map(digest, again(1))) == list(map(digest, again(1)))
    assert digest(again(1)[0]) != digest(again(2)[0])


def test_settings_outside_their_domain_are_refused():
    with pytest.raises(TypeError):
        map_tasks(abs, ["x"], progress=False)
    with pytest.raises(SettingsError, match="num_jobs"):
        map_tasks(abs, [1], num_jobs=0)
    with pytest.raises(SettingsError, match="max_retries"):
        map_tasks(abs, [1], max_retries=-1)


class Unloadable:
    """Its pickle names something that is not there, as that of a decorated function of a script does."""

    def __reduce__(self):
        return getattr, (math, "no_such_name")


@pytest.mark.calibration
def test_what_cannot_be_loaded_elsewhere_is_called_that():
    with pytest.raises(WorkerError, match="task 0 could not be sent to a process.*functools.cache"):
        map_tasks(work, [Unloadable()], num_jobs=2, max_retries=0, progress=False)
