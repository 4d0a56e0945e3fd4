"""Chains in groups that adapt by themselves, each group a task for a process of its own."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor

from bayeskit._files import as_output_folder
from bayeskit._settings import whole_number
from bayeskit.errors import BudgetError, CheckpointError, SamplingWarning, SettingsError
from bayeskit.inference.samplers.adaptation import Adaptation
from bayeskit.inference.samplers.chains import RunSettings
from bayeskit.inference.samplers.climb import Climb
from bayeskit.inference.samplers.driver import Control, Ending, say_early
from bayeskit.inference.samplers.run import RunResult, run
from bayeskit.parallel import map_tasks
from bayeskit.target import Target

_LEAST_SECONDS = 1e-3
_EARLY: tuple[Ending, ...] = ("interrupted", "time budget")  # what a user most needs to know first


class Group(NamedTuple):
    """Chains that learn from each other and from nobody else."""

    adaptation: Adaptation
    num_chains: int
    initial: Tensor | Climb | None = None


class GroupResults(NamedTuple):
    """What the groups of a run leave behind."""

    results: list[RunResult]  # of the groups that are worth joining
    seconds: float  # wall-clock time
    endings: list[Ending]  # of every group, those without results too

    @property
    def ending(self) -> Ending:
        """The one of all that a user most needs to know."""
        return next(one for one in (*_EARLY, "finished", *self.endings) if one in self.endings)


def require_groups(num_groups: int, num_jobs: int, count: int, what: str, *, equal: bool = False) -> tuple[int, int]:
    """Return both numbers as Python's own; refuse a division that cannot be made of ``count`` things called ``what``.

    Raises
    ------
    SettingsError
        If a number is below 1, there are more groups than things, or ``equal`` groups leave a remainder.

    Warns
    -----
    SamplingWarning
        If there are several jobs and only one group, which is nothing to share out.
    """
    num_groups, num_jobs = whole_number("num_groups", num_groups, 1), whole_number("num_jobs", num_jobs, 1)
    if num_groups > max(count, 1) or (equal and count % num_groups):
        kind = "equal groups" if equal else "groups"
        raise SettingsError(
            f"{count} {what} cannot be divided into {num_groups} {kind}; choose another num_groups"
            + (f", or a multiple of it as the number of {what}" if equal else "")
        )
    if num_jobs > 1 and num_groups == 1:
        warnings.warn(
            f"num_jobs={num_jobs} changes nothing: all {what} are one group, which runs here in one batch; give "
            "num_groups for groups that can run in processes of their own, or leave num_jobs out",
            SamplingWarning,
            stacklevel=3,
        )
    return num_groups, num_jobs


def run_groups(
    target: Target, groups: Sequence[Group], settings: RunSettings, *, num_jobs: int = 1, all_needed: bool = False
) -> GroupResults:
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
    all_needed : bool, default False
        Return all groups or none. Otherwise groups that were ended early are left out where cutting the others to
        their length would lose more draws than they bring.

    Returns
    -------
    GroupResults

    Raises
    ------
    BudgetError
        If the time budget ended before the first draw of every group; with ``all_needed``, of any.
    CheckpointError
        If ``checkpoint`` is a file or the folder of another number of groups, or a group's checkpoint belongs to
        another run.
    KeyboardInterrupt
        If Ctrl-C came before the first draws that could be returned, or while other processes were at work.

    Warns
    -----
    SamplingWarning
        If groups were ended early, by the time budget or by Ctrl-C.
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
        outcomes = _one_after_another(function, tasks, settings.control.time_budget)
    else:
        outcomes = map_tasks(
            function,
            tasks,
            num_jobs=num_jobs,
            progress=settings.control.progress,
            description=f"{settings.description}, groups",
        )
    _warn_again(outcomes, tasks)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    # Seconds spent before a checkpoint was resumed count, too.
    at_least = sum(result.seconds for result in results) / min(num_jobs, len(groups))
    not_begun: list[Ending] = ["interrupted"] * (len(tasks) - len(outcomes))
    endings = [outcome.ending for outcome in outcomes] + not_begun
    done = GroupResults(results, max(time.monotonic() - begin, at_least), endings)
    lacking = len(tasks) - len(results)
    if lacking and (all_needed or not results):
        raise _nothing_done(done.ending, settings.control, f"{lacking} of {len(tasks)} groups")
    if not all_needed:
        done = _worth_joining(done)
    count = min(len(result.position) for result in done.results)
    after = f"after {count} of {settings.num_samples} draws a chain of {len(done.results)} of {len(tasks)} groups"
    say_early(done.ending, settings.control, settings.description, after, stacklevel=4)
    return done


class _Task(NamedTuple):
    """Everything that the draws of a group depend on, the target excepted."""

    group: Group
    settings: RunSettings

    def __repr__(self) -> str:
        return self.settings.description

    def within(self, seconds: float) -> _Task:
        """Return the task with another time budget."""
        control = replace(self.settings.control, time_budget=max(seconds, _LEAST_SECONDS))
        return self._replace(settings=replace(self.settings, control=control))


class _Outcome(NamedTuple):
    result: RunResult | None  # None of a group that was ended before its first draw
    ending: Ending
    warnings: list[tuple[type[Warning], str]]


def _tasks(groups: Sequence[Group], settings: RunSettings, num_jobs: int) -> list[_Task]:
    control, count = settings.control, len(groups)
    folder = None if control.checkpoint is None else _folder(control.checkpoint, count)
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


def _folder(checkpoint: str | Path, count: int) -> Path:
    if Path(checkpoint).is_file():
        raise CheckpointError(
            f"{checkpoint} is the checkpoint of a run without groups; runs in groups keep theirs in a folder, so give "
            "another path, or move it away"
        )
    folder = as_output_folder(checkpoint)
    names = (re.fullmatch(r"group-\d+-of-(\d+)", path.name) for path in folder.iterdir())
    others = {int(name[1]) for name in names if name} - {count}
    if others:
        raise CheckpointError(
            f"{folder} was written with num_groups={min(others)}, this run has num_groups={count}; resume with "
            f"num_groups={min(others)}, or give another path"
        )
    return folder


def _one_after_another(function: _RunGroup, tasks: Sequence[_Task], seconds: float | None) -> list[_Outcome]:
    """Run the groups here, each in its part of the time that those before it have left; Ctrl-C ends them."""
    begin, outcomes = time.monotonic(), list[_Outcome]()
    for task in tasks:
        if seconds is not None:
            left = seconds - (time.monotonic() - begin)
            task = task.within(left / (len(tasks) - len(outcomes)))
        outcomes.append(function(task))
        if outcomes[-1].ending == "interrupted":
            break
    return outcomes


def _nothing_done(ending: Ending, control: Control, groups: str) -> BudgetError | KeyboardInterrupt:
    if ending == "interrupted":
        return KeyboardInterrupt()
    remedy = (
        ", or a checkpoint from which the same call goes on"
        if control.checkpoint is None
        else "; the same call goes on from what the checkpoint holds"
    )
    return BudgetError(
        f"the time budget of {control.time_budget:g} s ended while {groups} were compiling or warming up, before there "
        f"was anything to return; give more time{remedy}"
    )


def _worth_joining(done: GroupResults) -> GroupResults:
    """Leave out groups that were ended so early that cutting the others to their length would lose more."""

    def kept(least: int) -> list[RunResult]:
        return [one for one in done.results if len(one.position) >= least or one.ending not in _EARLY]

    def worth(results: list[RunResult]) -> tuple[int, int]:
        return len(results) * min(len(one.position) for one in results), len(results)

    return done._replace(results=max((kept(len(one.position)) for one in done.results), key=worth))


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Which budget ended, and what is returned then, is said of all groups together.
            own_end = re.escape(task.settings.description) + ": (interrupted|ended by the time budget)"
            warnings.filterwarnings("ignore", own_end, SamplingWarning)
            result, ending = self._run(task, caught)
        return _Outcome(result, ending, [(warning.category, str(warning.message)) for warning in caught])

    def _run(self, task: _Task, caught: Sequence[warnings.WarningMessage]) -> tuple[RunResult | None, Ending]:
        try:
            result = run(self._target, task.group.adaptation, task.settings, initial=task.group.initial)
        except BudgetError:
            return None, "time budget"
        except KeyboardInterrupt:
            return None, "interrupted"
        except Exception as error:
            for text in dict.fromkeys(str(warning.message) for warning in caught):
                error.add_note(f"{task.settings.description} had warned: {text}")
            raise
        return result, result.ending

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._target, self._key)


_here: dict[str, _RunGroup] = {}  # the one that this process worked with last


def _arrived(target: Target, key: str) -> _RunGroup:
    if key not in _here:
        _here.clear()
        _here[key] = _RunGroup(target, key)
    return _here[key]
