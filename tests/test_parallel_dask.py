"""A real Dask cluster on this machine, two worker processes."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import dask
import joblib
import pytest
import torch
from distributed import Client, LocalCluster

import bayeskit as bk
from bayeskit import parallel
from bayeskit._core.randomness import new_generator
from bayeskit.errors import WorkerError
from bayeskit.parallel import map_tasks

LOCAL = {"threads_per_worker": 1, "processes": True, "host": "127.0.0.1", "dashboard_address": ":0"}


@pytest.fixture(scope="module")
def client():
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        LocalCluster(n_workers=2, **LOCAL) as cluster,
        Client(cluster) as client,
    ):
        yield client


def lonely_cluster():
    return LocalCluster(n_workers=1, **LOCAL)


@dataclass(frozen=True)
class Job:
    seed: int
    log: str
    folder: str = ""
    num_deaths: int = 0
    fails: bool = False


def work(job):
    with open(job.log, "a", encoding="utf-8") as file:
        file.write(f"{job.seed}\n")
    if starts(job.log).count(job.seed) <= job.num_deaths:
        while len(list(Path(job.folder).glob("*.safetensors"))) < 5:  # until everybody else's result is safe
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if job.fails:
        raise ZeroDivisionError("no such number")
    return torch.randn(3, generator=new_generator(job.seed), dtype=torch.float64), torch.get_num_threads()


def starts(log):
    return [int(line) for line in Path(log).read_text(encoding="utf-8").split()]


def jobs(log, **special):
    return [Job(seed, str(log), **(special if seed == 2 else {})) for seed in range(6)]


def same(first, second):
    return all(torch.equal(a[0], b[0]) and a[1] == b[1] == 1 for a, b in zip(first, second, strict=True))


@pytest.mark.long
def test_dask_and_serial_agree_and_each_task_has_its_process_to_itself(client, tmp_path):
    """Processes are compared with the serial run in test_parallel.py, for equality, hence with Dask too."""
    tasks = jobs(tmp_path / "log")
    serial = map_tasks(work, tasks, progress=False)
    with joblib.parallel_config(backend="dask"):
        assert same(serial, map_tasks(work, tasks, num_jobs=4, progress=False))


@pytest.mark.long
def test_groups_of_chains_are_the_same_here_in_processes_and_on_a_cluster(client):
    settings = {"num_chains": 4, "num_warmup": 30, "num_samples": 10, "num_groups": 2, "progress": False}
    target = bk.exact.get("linreg10").target()
    serial = bk.sample(target, **settings)
    processes = bk.sample(target, **settings, num_jobs=2)
    with joblib.parallel_config(backend="dask"):
        cluster = bk.sample(target, **settings, num_jobs=2)
        automatic = bk.sample(target, **settings | {"num_groups": None}, num_jobs=-1)  # a group for each worker
    for other in (processes, cluster, automatic):
        assert torch.equal(serial.unconstrained, other.unconstrained)
        assert torch.equal(serial.log_density, other.log_density)
        assert torch.equal(serial.sample_stats["energy"], other.sample_stats["energy"])
        assert serial.settings == other.settings
    assert not torch.equal(serial.unconstrained[:2], serial.unconstrained[2:])


@pytest.mark.long
def test_a_killed_worker_costs_only_its_task(client, tmp_path):
    expected = map_tasks(work, jobs(tmp_path / "calm"), progress=False)
    log, folder = tmp_path / "log", tmp_path / "run"
    tasks = jobs(log, folder=str(folder), num_deaths=1)
    with joblib.parallel_config(backend="dask"):
        results = map_tasks(work, tasks, num_jobs=2, checkpoint=folder, progress=False)
        again = map_tasks(work, tasks, num_jobs=2, checkpoint=folder, progress=False)
    assert same(expected, results) and same(expected, again)
    assert sorted(starts(log)) == [0, 1, 2, 2, 3, 4, 5]


@pytest.mark.long
def test_an_error_names_its_task(client, tmp_path):
    with joblib.parallel_config(backend="dask"), pytest.raises(ZeroDivisionError) as caught:
        map_tasks(work, jobs(tmp_path / "log", fails=True), num_jobs=2, progress=False)
    assert caught.value.__notes__[0].startswith("raised by task 2: Job(seed=2")


@pytest.mark.long
def test_a_task_that_kills_every_worker_is_named(client, tmp_path):
    log, folder = tmp_path / "log", tmp_path / "run"
    tasks = jobs(log, folder=str(folder), num_deaths=99)
    with joblib.parallel_config(backend="dask"), pytest.raises(WorkerError, match="task 2 died 1 times.*num_jobs=1"):
        map_tasks(work, tasks, num_jobs=2, max_retries=0, checkpoint=folder, progress=False)
    assert {path.name for path in folder.glob("*.safetensors")} == {
        f"task-{i:06d}.safetensors" for i in (0, 1, 3, 4, 5)
    }
    assert starts(log).count(2) == 2  # Dask's own second try included


def stuck(job):
    first = job.seed == 0 or job.seed in (starts(job.log) if Path(job.log).exists() else [])
    result = work(job)
    time.sleep(0.0 if first else 60.0)
    return result


@pytest.mark.calibration
def test_a_dead_cluster_is_said_and_finished_tasks_are_kept(tmp_path, monkeypatch):
    """The only worker is taken away while task 1 is under way; what is left would wait for ever."""
    monkeypatch.setattr(parallel, "DASK_PATIENCE", 1.0)
    log, folder = tmp_path / "log", tmp_path / "run"
    tasks = [Job(seed, str(log)) for seed in range(2)]
    with lonely_cluster() as cluster, Client(cluster) as client, joblib.parallel_config(backend="dask", client=client):
        watcher = threading.Thread(target=take_workers_away, args=(cluster, log))
        watcher.start()
        with pytest.raises(WorkerError, match=r"the Dask cluster has no worker; start workers"):
            map_tasks(stuck, tasks, num_jobs=2, checkpoint=folder, progress=False)
        watcher.join()
    assert [path.name for path in folder.glob("*.safetensors")] == ["task-000000.safetensors"]
    map_tasks(stuck, tasks, checkpoint=folder, progress=False)
    assert starts(log) == [0, 1, 1]


def take_workers_away(cluster, log):
    while not Path(log).exists() or 1 not in starts(log):
        time.sleep(0.05)
    cluster.scale(0)


@pytest.mark.calibration
def test_a_closed_cluster_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "DASK_PATIENCE", 1.0)
    cluster = lonely_cluster()
    client = Client(cluster)
    with joblib.parallel_config(backend="dask", client=client):
        cluster.close()
        with pytest.raises(WorkerError, match="the Dask cluster"):
            map_tasks(work, [Job(0, str(tmp_path / "log"))], num_jobs=2, progress=False)
    client.close()
