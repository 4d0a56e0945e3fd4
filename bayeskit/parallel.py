"""The one seam to parallel execution: every task carries its own seed, so order and number of workers do not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from joblib import Parallel, delayed

from bayeskit._progress import progress_bar
from bayeskit._torch import one_thread
from bayeskit.errors import SettingsError

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    num_jobs: int = 1,
    progress: bool = True,
    description: str = "tasks",
) -> list[Result]:
    """Apply ``function`` to every task, in order, with one intra-op thread each.

    Parameters
    ----------
    function : callable
        Importable from a module; it and the tasks travel to other processes.
    tasks : sequence
        Each holds everything its result depends on, its seed included.
    num_jobs : int, default 1
        Processes; 1 runs here. A ``joblib.parallel_config`` around the call, such as
        one for Dask, decides where several run.
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
        If ``num_jobs`` is below 1.

    Examples
    --------
    >>> from bayeskit.parallel import map_tasks
    >>> map_tasks(abs, [-1, -2, 3])
    [1, 2, 3]
    """
    if num_jobs < 1:
        raise SettingsError(f"num_jobs must be at least 1, not {num_jobs}")
    results: list[Any] = []
    with progress_bar(description, len(tasks), progress) as bar:
        if num_jobs == 1:
            stream = (_call(function, task) for task in tasks)
        else:
            stream = Parallel(n_jobs=num_jobs, return_as="generator")(delayed(_call)(function, t) for t in tasks)
        for result in stream:
            results.append(result)
            bar.update(len(results))
    return results


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    with one_thread():
        return function(task)
