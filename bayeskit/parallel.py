"""The one seam to parallel execution: every task carries its own seed, so order and number of workers do not matter."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cloudpickle import dumps
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend
from loky import BrokenProcessPool, ProcessPoolExecutor

from bayeskit.core.inputs import whole_number
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import one_thread
from bayeskit.core.storage import TaskFolder
from bayeskit.errors import WorkerError

__all__ = ["DASK_PATIENCE", "Result", "Task", "map_tasks"]

Task = TypeVar("Task")
Result = TypeVar("Result")

DASK_PATIENCE = 30.0
"""Seconds that a Dask cluster may be without any worker before it counts as dead."""

_POLL_SECONDS = 1.0
# torch's random stream and number of threads belong to the process, so tasks that a backend puts into threads
# of one process take turns.
_ONE_AT_A_TIME = threading.RLock()


def map_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    num_jobs: int = 1,
    checkpoint: str | Path | None = None,
    result_types: Sequence[type] = (),
    max_retries: int = 2,
    progress: bool = True,
    description: str = "tasks",
) -> list[Result]:
    """Apply ``function`` to every task, in order, with one intra-op thread each.

    A worker that dies costs the task it worked on and nothing else: that task starts again in a fresh
    process. With ``checkpoint``, what is finished outlives this process too.

    Parameters
    ----------
    function : callable
        It and the tasks travel to other processes.
    tasks : sequence
        Each holds everything its result depends on, its seed included.
    num_jobs : int, default 1
        Tasks under way at a time; 1 runs here. Several run in processes of this machine, or wherever a
        ``joblib.parallel_config`` around the call sends them: with ``backend="dask"`` on the workers of a Dask
        cluster, which should have one thread each.
    checkpoint : path, optional
        Folder that takes each result as soon as it is there. A later call with the same function and tasks
        computes only what is missing. Values of globals that a function reads do not tell it from another: pass
        data by closure or ``functools.partial``. Results must be tensors, arrays, numbers, strings, or dicts, lists
        and tuples of those.
    result_types : sequence of type, optional
        Dataclasses and named tuples that results hold; only these are made when a checkpoint is loaded.
    max_retries : int, default 2
        How often a task starts again after its process died. A Dask scheduler starts it again by itself first, as
        often as its setting ``distributed.scheduler.allowed-failures`` says.
    progress : bool, default True
        Show a bar on anything over two seconds.
    description : str
        What the bar says.

    Returns
    -------
    list
        One result a task, in the order of the tasks.

    Raises
    ------
    SettingsError
        If ``num_jobs`` is below 1 or ``max_retries`` negative.
    WorkerError
        If a task keeps killing its process, a Dask cluster is gone, or what a task raised cannot be pickled.
    CheckpointError
        If the folder belongs to another function or other tasks, or a result cannot be stored.
    OutputError
        If a result cannot be written.

    Notes
    -----
    What a task raises is raised here, with a note that names the task; tasks under way are finished and stored
    first.

    Examples
    --------
    >>> from bayeskit.parallel import map_tasks
    >>> map_tasks(abs, [-1, -2, 3])
    [1, 2, 3]
    """
    num_jobs, max_retries = whole_number("num_jobs", num_jobs, 1), whole_number("max_retries", max_retries, 0)
    folder = None if checkpoint is None else TaskFolder(checkpoint, function, tasks, result_types)
    results: dict[int, Any] = {} if folder is None else folder.load()
    missing = [(index, task) for index, task in enumerate(tasks) if index not in results]
    with progress_bar(description, len(tasks), progress) as bar:
        for index, result in _outcomes(function, missing, num_jobs, max_retries):
            if folder is not None:
                folder.save(index, result)
            results[index] = result
            bar.update(len(results))
    return [results[index] for index in range(len(tasks))]


def _outcomes(
    function: Callable[[Any], Any], tasks: list[tuple[int, Any]], num_jobs: int, max_retries: int
) -> Iterator[tuple[int, Any]]:
    """Yield index and result of each task as they come."""
    if num_jobs == 1 or not tasks:
        return (_call(function, index, task) for index, task in tasks)
    backend, _ = get_active_backend()
    # By name: to import the class of Dask's backend would import Dask for everybody.
    kinds = {kind.__name__ for kind in type(backend).__mro__}
    if "DaskDistributedBackend" in kinds:
        return _pooled(_DaskPool(backend.client), function, tasks, num_jobs, max_retries)
    if "LokyBackend" in kinds:
        return _pooled(_ProcessPool(), function, tasks, num_jobs, max_retries)
    parallel = Parallel(n_jobs=num_jobs, return_as="generator_unordered", batch_size=1)
    return iter(parallel(delayed(_call_elsewhere)(function, index, task) for index, task in tasks))


def _call(function: Callable[[Task], Result], index: int, task: Task) -> tuple[int, Result]:
    with _ONE_AT_A_TIME, one_thread():
        try:
            return index, function(task)
        except Exception as error:
            error.add_note(f"raised by task {index}: {repr(task)[:200]}")
            raise


def _call_elsewhere(function: Callable[[Task], Result], index: int, task: Task) -> tuple[int, Result]:
    try:
        return _call(function, index, task)
    except Exception as error:
        try:
            reduced: Any = error.__reduce__()
            reduced[0](*reduced[1])
            dumps(error)
        except Exception:
            # Thrown at the receiver instead, it would look like a dead process.
            raise WorkerError(
                f"task {index} raised {type(error).__name__}: {error}; this exception cannot travel between "
                "processes, so run the task with num_jobs=1 to see all of it"
            ) from None
        raise


class _Pool(Protocol):
    """Where calls run, each in a process whose death ends no other call."""

    deaths: tuple[type[BaseException], ...]
    """What a future raises when its process died."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]: ...

    def finished(self, future: Future[Any], died: bool) -> None:
        """Take back what ``future`` occupied."""
        ...

    def check(self) -> None:
        """Raise WorkerError if there is nobody left to work."""
        ...

    def close(self) -> None: ...


def _pooled(
    pool: _Pool, function: Callable[[Any], Any], tasks: list[tuple[int, Any]], num_jobs: int, max_retries: int
) -> Iterator[tuple[int, Any]]:
    waiting = deque(tasks)
    running: dict[Future[Any], tuple[int, Any]] = {}
    num_deaths: Counter[int] = Counter()
    failure: BaseException | None = None
    try:
        while running or (waiting and failure is None):
            while waiting and failure is None and len(running) < num_jobs:
                index, task = waiting.popleft()
                running[pool.submit(_call_elsewhere, function, index, task)] = index, task
            done, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            if not done:
                pool.check()
            for future in done:
                index, task = running.pop(future)
                error = CancelledError() if future.cancelled() else future.exception()
                died = isinstance(error, pool.deaths)
                pool.finished(future, died)
                if error is None:
                    yield future.result()
                elif not died:
                    failure = failure or error
                else:
                    num_deaths[index] += 1
                    if num_deaths[index] <= max_retries:
                        waiting.appendleft((index, task))
                    else:
                        failure = failure or _killed(index, num_deaths[index], error)
    finally:
        pool.close()
    if failure is not None:
        raise failure


def _killed(index: int, num_deaths: int, error: BaseException) -> WorkerError:
    why = (str(error) or type(error).__name__).splitlines()[0][:120]
    if "un-serialize" in why:
        # It ends a worker, but no crash did: most often a decorator whose result pickles by its name in __main__.
        return WorkerError(
            f"task {index} could not be sent to a process ({why}); what a script wraps, as by functools.cache, cannot "
            "travel: move it into a module that can be imported, or leave the decorator away"
        )
    lost = WorkerError(
        f"the process that worked on task {index} died {num_deaths} times ({why}); "
        "it may lack memory or crash in native code: run the task alone with num_jobs=1, or make the tasks smaller. "
        "With checkpoint=FOLDER finished tasks are kept"
    )
    lost.__cause__ = error
    return lost


_idle: list[ProcessPoolExecutor] = []  # shared by all calls, because a process needs seconds to import torch
_IDLE_SECONDS = 60  # after which a process ends by itself


class _ProcessPool:
    """One process a slot, each an executor of its own, because an executor dies as a whole."""

    deaths: tuple[type[BaseException], ...] = (BrokenProcessPool,)

    def __init__(self) -> None:
        self._busy: dict[Future[Any], ProcessPoolExecutor] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        executor, future = self._from_idle(function, args)
        if future is None:
            environment = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            executor = ProcessPoolExecutor(1, timeout=_IDLE_SECONDS, env=environment)
            future = executor.submit(function, *args)
        self._busy[future] = executor
        return future

    @staticmethod
    def _from_idle(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Future[Any] | None]:
        """Give the task to a process that waits, passing over those that died meanwhile."""
        while _idle:
            executor = _idle.pop()
            try:
                return executor, executor.submit(function, *args)
            except (BrokenProcessPool, RuntimeError):
                executor.shutdown(wait=False)
        return None, None

    def finished(self, future: Future[Any], died: bool) -> None:
        executor = self._busy.pop(future)
        if died:
            executor.shutdown(wait=True)
        else:
            _idle.append(executor)

    def check(self) -> None:
        """Do nothing: a process can always be started again."""

    def close(self) -> None:
        for executor in self._busy.values():  # an error or Ctrl-C: nobody waits for these any more
            executor.shutdown(wait=True, kill_workers=True)


class _DaskPool:
    """Workers of a Dask cluster, whose scheduler itself repeats the tasks of a worker that died."""

    def __init__(self, client: Any) -> None:
        from distributed import KilledWorker

        self.deaths: tuple[type[BaseException], ...] = (KilledWorker, CancelledError)
        self._client = client
        self._executor = client.get_executor(pure=False)
        self._seen = time.monotonic()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._client.status != "running":
            raise self._gone()
        return self._executor.submit(function, *args)

    def finished(self, future: Future[Any], died: bool) -> None:
        """Do nothing: workers are the scheduler's."""
        if died and (future.cancelled() or self._client.status != "running"):
            raise self._gone()

    def check(self) -> None:
        with suppress(OSError):  # the scheduler went away while it was asked
            if self._client.status == "running" and self._client.nthreads():
                self._seen = time.monotonic()
        if self._client.status == "closed" or time.monotonic() - self._seen > DASK_PATIENCE:
            raise self._gone()

    def close(self) -> None:
        if self._client.status == "running":
            self._executor.shutdown(wait=False)

    def _gone(self) -> WorkerError:
        state = "has no worker" if self._client.status == "running" else f"cannot be reached ({self._client.status})"
        return WorkerError(
            f"the Dask cluster {state}; start workers, or a new cluster and client, and repeat the call. "
            "With checkpoint=FOLDER finished tasks are kept and only the missing ones run"
        )
