"""Chains in groups that adapt by themselves, each group a task for a process of its own."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor

from bayeskit._engine import Engine
from bayeskit._files import as_output_folder
from bayeskit._settings import whole_number
from bayeskit.errors import CheckpointError, SettingsError
from bayeskit.inference.samplers.adaptation import Adaptation
from bayeskit.inference.samplers.chains import RunSettings
from bayeskit.inference.samplers.run import RunResult, run
from bayeskit.parallel import map_tasks
from bayeskit.target import Target


class Group(NamedTuple):
    """Chains that learn from each other and from nobody else."""

    adaptation: Adaptation
    num_chains: int
    initial: Tensor | None = None


class GroupResults(NamedTuple):
    """What the groups of a run leave behind."""

    results: list[RunResult]  # fewer than groups where Ctrl-C came between
    seconds: float  # wall-clock time


def require_groups(num_groups: int, num_jobs: int, count: int, what: str, *, equal: bool = False) -> None:
    """Refuse a division that cannot be made of ``count`` things called ``what``.

    Raises
    ------
    SettingsError
        If a number is below 1, there are more groups than things, or ``equal`` groups leave a remainder.
    """
    whole_number("num_jobs", num_jobs, 1)
    if whole_number("num_groups", num_groups, 1) > max(count, 1) or (equal and count % num_groups):
        kind = "equal groups" if equal else "groups"
        raise SettingsError(
            f"{count} {what} cannot be divided into {num_groups} {kind}; choose another num_groups"
            + (f", or a multiple of it as the number of {what}" if equal else "")
        )


def run_groups(target: Target, groups: Sequence[Group], settings: RunSettings, *, num_jobs: int = 1) -> GroupResults:
    """Run each group on random numbers of its own, so that the number of jobs decides nothing but the time.

    Parameters
    ----------
    target : Target
    groups : sequence of Group
    settings : RunSettings
        Of all groups together. Each gets a file in the folder ``checkpoint``, a stream of random numbers named after
        it, and as much of the time budget as lets all of them have their turn.
    num_jobs : int, default 1
        Groups under way at a time; see :func:`bayeskit.parallel.map_tasks`.

    Returns
    -------
    GroupResults

    Raises
    ------
    CheckpointError
        If ``checkpoint`` is a file, or a group's checkpoint belongs to another run.
    KeyboardInterrupt
        If Ctrl-C came before the first draws that could be returned, or while other processes were at work.

    Warns
    -----
    BayeskitWarning
        What the groups warned of, in whichever process.

    Examples
    --------
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers import HMC, Adaptation, RunSettings
    >>> from bayeskit.inference.samplers.groups import Group, run_groups
    >>> groups = [Group(Adaptation(HMC(), 50), 2), Group(Adaptation(HMC(), 50), 2)]
    >>> done = run_groups(exact.get("beta_binomial").target(), groups, RunSettings(4, 50, 10))
    >>> [result.position.shape for result in done.results]
    [torch.Size([10, 2, 1]), torch.Size([10, 2, 1])]
    """
    begin = time.monotonic()
    tasks = _tasks(groups, settings, num_jobs)
    function = _RunGroup(target, uuid4().hex)
    if num_jobs == 1:
        outcomes = _one_after_another(function, tasks)
    else:
        outcomes = map_tasks(
            function,
            tasks,
            num_jobs=num_jobs,
            progress=settings.control.progress,
            description=f"{settings.description}, groups",
        )
    _warn_again(outcomes, tasks)
    results = [outcome.result for outcome in outcomes]
    # Seconds spent before a checkpoint was resumed count, too.
    at_least = sum(result.seconds for result in results) / min(num_jobs, len(groups))
    return GroupResults(results, max(time.monotonic() - begin, at_least))


class _Task(NamedTuple):
    """Everything that the draws of a group depend on, the target excepted."""

    group: Group
    settings: RunSettings

    def __repr__(self) -> str:
        return self.settings.description


class _Outcome(NamedTuple):
    result: RunResult
    warnings: list[tuple[type[Warning], str]]


def _tasks(groups: Sequence[Group], settings: RunSettings, num_jobs: int) -> list[_Task]:
    control, count = settings.control, len(groups)
    folder = None if control.checkpoint is None else _folder(control.checkpoint)
    budget = control.time_budget
    if budget is not None:
        budget /= math.ceil(count / num_jobs)
    tasks = []
    for i, group in enumerate(groups):
        own = replace(
            control,
            checkpoint=None if folder is None else folder / f"group-{i + 1}-of-{count}",
            time_budget=budget,
            progress=control.progress and num_jobs == 1,
        )
        name = f"group {i + 1} of {count}"
        own_settings = replace(
            settings,
            num_chains=group.num_chains,
            description=f"{settings.description}, {name}",
            stream=f"{settings.stream}, {name}",
            control=own,
        )
        tasks.append(_Task(group, own_settings))
    return tasks


def _folder(checkpoint: str | Path) -> Path:
    if Path(checkpoint).is_file():
        raise CheckpointError(
            f"{checkpoint} is the checkpoint of a run without groups; runs in groups keep theirs in a folder, so give "
            "another path or delete it"
        )
    return as_output_folder(checkpoint)


def _one_after_another(function: _RunGroup, tasks: Sequence[_Task]) -> list[_Outcome]:
    """Run the groups here; Ctrl-C ends with those that are done."""
    outcomes: list[_Outcome] = []
    for task in tasks:
        try:
            outcomes.append(function(task))
        except KeyboardInterrupt:
            if not outcomes:
                raise
            last = outcomes[-1]
            outcomes[-1] = last._replace(result=last.result._replace(ending="interrupted"))
        if outcomes[-1].result.ending == "interrupted":
            break
    return outcomes


def worth_joining(done: GroupResults) -> GroupResults:
    """Leave out a group that Ctrl-C ended so early that cutting the others to its length would lose more.

    Parameters
    ----------
    done : GroupResults
    """
    results = done.results
    lengths = [len(result.position) for result in results]
    if len(results) == 1 or results[-1].ending != "interrupted":
        return done
    if len(results) * min(lengths) >= (len(results) - 1) * min(lengths[:-1]):
        return done
    return done._replace(results=[*results[:-2], results[-2]._replace(ending="interrupted")])


def _warn_again(outcomes: Sequence[_Outcome], tasks: Sequence[_Task]) -> None:
    """Warn here of what groups warned of elsewhere, once where several said the same."""
    said: dict[tuple[type[Warning], str], list[str]] = {}
    for outcome, task in zip(outcomes, tasks, strict=False):
        for warning in dict.fromkeys(outcome.warnings):
            said.setdefault(warning, []).append(task.settings.description)
    for (category, text), by in said.items():
        named = len(by) > 1 or by[0] in text
        warnings.warn(text if named else f"{by[0]}: {text}", category, stacklevel=4)


# -- on the way to other processes ------------------------------------------------------------


class _RunGroup:
    """The function of a group; where several come to one process, they share a target and its graphs."""

    def __init__(self, target: Target, key: str) -> None:
        self._target, self._key = target, key

    def __call__(self, task: _Task) -> _Outcome:
        adaptation, _, initial = task.group
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run(self._target, adaptation, task.settings, initial=initial)
        return _Outcome(result, [(warning.category, str(warning.message)) for warning in caught])

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (without_graphs(self._target), self._key)


_here: dict[str, _RunGroup] = {}  # the one that this process worked with last


def _arrived(target: Target, key: str) -> _RunGroup:
    if key not in _here:
        _here.clear()
        _here[key] = _RunGroup(target, key)
    return _here[key]


def without_graphs(target: Target) -> Target:
    """Return a copy of ``target`` that can be pickled, its density neither traced nor compiled yet.

    Examples
    --------
    >>> import pickle
    >>> from bayeskit import exact
    >>> from bayeskit.inference.samplers.groups import without_graphs
    >>> target = exact.get("linreg10").target()
    >>> copy = pickle.loads(pickle.dumps(without_graphs(target)))
    >>> copy.fingerprint() == target.fingerprint()
    True
    """
    if not isinstance(target, Target):
        return target
    bare = copy.copy(target)
    bare._engine = Engine(bare._joint_of_batch, bare.dim, bare.dtype, bare.device)
    return bare
