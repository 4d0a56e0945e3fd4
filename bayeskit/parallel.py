"""Parallel execution of tasks: every task has its own seed, so order and number of workers do not change results."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bayeskit._core.folders import save_or_warn
from bayeskit._core.inputs import whole_number
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import one_thread
from bayeskit._core.storage import TaskFolder
from bayeskit.errors import WorkerError

if TYPE_CHECKING:
    from loky import ProcessPoolExecutor

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

    If a worker dies, only its task starts again, in a fresh process. With ``checkpoint``, finished results
    survive the end of this process, too.

    Parameters
    ----------
    function : callable
        Pickled for other processes, as are the tasks.
    tasks : sequence
        Each task contains everything that its result depends on, its seed included.
    num_jobs : int, default 1
        Number of tasks run in parallel; 1 runs them in this process. Several run in processes of this machine, or
        on the backend of a ``joblib.parallel_config`` around the call: with ``backend="dask"`` on the workers of a
        Dask cluster, which should have one thread each.
    checkpoint : path, optional
        Folder in which each result is stored as soon as it is computed. A later call with the same function and
        tasks computes only the missing results. The comparison of functions ignores the globals that they read: pass
        data by closure or ``functools.partial``. Results must be tensors, arrays, numbers, strings, or dicts, lists
        and tuples of those.
    result_types : sequence of type, optional
        Dataclasses and named tuples in results; loading a checkpoint creates objects of these types only.
    max_retries : int, default 2
        Number of times that a task starts again after its process died. A Dask scheduler first restarts it by
        itself, up to its setting ``distributed.scheduler.allowed-failures``.
    progress : bool, default True
        Show a progress bar if the call takes more than two seconds.
    description : str
        Label of the progress bar.

    Returns
    -------
    list
        One result for each task, in the order of the tasks.

    Raises
    ------
    SettingsError
        If ``num_jobs`` is below 1 or ``max_retries`` negative.
    WorkerError
        If a task keeps killing its process, a Dask cluster is gone, or the exception of a task cannot be pickled.
    CheckpointError
        If the folder belongs to another function or other tasks, or a result cannot be stored.
    OutputError
        If the folder cannot be written.

    Warns
    -----
    CheckpointWarning
        If a result cannot be written, as on a full disk.

    Notes
    -----
    The exception of a task is raised here, with a note that names the task, after the running tasks have finished
    and their results are stored.

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
                save_or_warn(partial(folder.save, index, result), "the other tasks go on")
            results[index] = result
            bar.update(len(results))
    return [results[index] for index in range(len(tasks))]


def _outcomes(
    function: Callable[[Any], Any], tasks: list[tuple[int, Any]], num_jobs: int, max_retries: int
) -> Iterator[tuple[int, Any]]:
    """Yield index and result of each task as they come."""
    if num_jobs == 1 or not tasks:
        return (_call(function, index, task) for index, task in tasks)
    from joblib import Parallel, delayed
    from joblib.parallel import get_active_backend

    backend, _ = get_active_backend()
    # Compared by name, because importing the class of Dask's backend would import Dask.
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
    from cloudpickle import dumps

    try:
        return _call(function, index, task)
    except Exception as error:
        try:
            reduced: Any = error.__reduce__()
            reduced[0](*reduced[1])
            dumps(error)
        except Exception:
            # If the receiver could not unpickle the exception, it would take the process for dead.
            raise WorkerError(
                f"task {index} raised {type(error).__name__}: {error}; the exception cannot be pickled; "
                "run the task with num_jobs=1 for the original exception"
            ) from None
        raise


class _Pool(Protocol):
    """An executor of calls, each in a process whose death ends no other call."""

    deaths: tuple[type[BaseException], ...]
    """Exceptions of a future whose process died."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]: ...

    def finished(self, future: Future[Any], died: bool) -> None:
        """Release the process of ``future``."""
        ...

    def check(self) -> None:
        """Raise WorkerError if no worker is left."""
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
        # The worker ended without a crash, most often by a decorated function that is pickled by its name in __main__.
        return WorkerError(
            f"task {index} could not be sent to a process ({why}); a function decorated in a script, for "
            "example by functools.cache, cannot be pickled. Remedy: move it to an importable module, or remove its "
            "decorator"
        )
    lost = WorkerError(
        f"the process that worked on task {index} died {num_deaths} times ({why}), perhaps from lack of memory or a "
        "crash in native code; run the task alone with num_jobs=1, or make the tasks smaller. "
        "With checkpoint=FOLDER finished tasks are kept"
    )
    lost.__cause__ = error
    return lost


_idle: list[ProcessPoolExecutor] = []  # shared by all calls, because a process needs seconds to import torch
_IDLE_SECONDS = 60  # after which a process ends by itself


class _ProcessPool:
    """One process a slot, each an executor of its own, because an executor dies as a whole."""

    def __init__(self) -> None:
        from loky import BrokenProcessPool

        self.deaths: tuple[type[BaseException], ...] = (BrokenProcessPool,)
        self._busy: dict[Future[Any], ProcessPoolExecutor] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        executor, future = self._from_idle(function, args)
        if future is None:
            from loky import ProcessPoolExecutor

            environment = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            executor = ProcessPoolExecutor(1, timeout=_IDLE_SECONDS, env=environment)
            future = executor.submit(function, *args)
        self._busy[future] = executor
        return future

    def _from_idle(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Future[Any] | None]:
        """Submit the task to an idle process, and skip processes that died meanwhile."""
        deaths: tuple[type[BaseException], ...] = (*self.deaths, RuntimeError)
        while _idle:
            executor = _idle.pop()
            try:
                return executor, executor.submit(function, *args)
            except deaths:
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
        for executor in self._busy.values():  # after an error or Ctrl-C, these results are not needed
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
        """Raise WorkerError if the cluster is gone; the scheduler itself releases its workers."""
        if died and (future.cancelled() or self._client.status != "running"):
            raise self._gone()

    def check(self) -> None:
        with suppress(OSError):  # the scheduler stopped during the request
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
