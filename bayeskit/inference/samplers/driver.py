"""The loop that runs algorithms in steps, with progress bar, checkpoints, time budget and interruption."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit.core.inputs import real_number, warn_user
from bayeskit.core.progress import Stopped, progress_bar, watching
from bayeskit.core.randomness import one_thread
from bayeskit.core.storage import load_tensors, save_tensors
from bayeskit.errors import BudgetError, CheckpointError, OutputError, SamplingWarning, SettingsError

__all__ = [
    "Algorithm",
    "CHECKPOINT_SECONDS",
    "Control",
    "Ending",
    "Outcome",
    "Records",
    "drive",
    "flatten",
    "nothing_done",
    "obey",
    "say_early",
]

# Bitwise exact save and restore of a run.

_VERSION = 2


def flatten(state: Any, prefix: str = "state") -> dict[str, Tensor]:
    """Return the tensors of nested named tuples by path, such as ``state.kernel.position``."""
    if isinstance(state, Tensor):
        return {prefix: state}
    result: dict[str, Tensor] = {}
    for field in state._fields:
        result.update(flatten(getattr(state, field), f"{prefix}.{field}"))
    return result


def _restore(template: Any, tensors: dict[str, Tensor], prefix: str = "state") -> Any:
    """Rebuild named tuples shaped like ``template`` from named tensors; CheckpointError if one does not fit.

    A tensor that starts without rows may have any number of them.
    """
    if isinstance(template, Tensor):
        found = tensors.get(prefix)
        first = 1 if template.dim() and not len(template) else 0
        if found is None or found.shape[first:] != template.shape[first:] or found.dtype != template.dtype:
            raise CheckpointError(
                f"the checkpoint's {prefix!r} does not fit this run; it was written by another version or model"
            )
        # Memory of its own, as in the run that saved it: products of views with another offset round differently.
        return found.to(template.device, copy=True)
    return type(template)(*(_restore(getattr(template, f), tensors, f"{prefix}.{f}") for f in template._fields))


def _save_checkpoint(
    path: str | Path,
    state: Any,
    records: dict[str, Tensor],
    generator: torch.Generator,
    settings: dict[str, Any],
    iteration: int,
    seconds: float,
) -> None:
    """Write the state of a run and replace an older checkpoint atomically."""
    tensors = flatten(state)
    tensors |= {f"record.{name}": tensor for name, tensor in records.items()}
    tensors["generator"] = generator.get_state()
    save_tensors(path, tensors, {"version": _VERSION, "settings": settings, "iteration": iteration, "seconds": seconds})


def _load_checkpoint(
    path: str | Path, template: Any, generator: torch.Generator, settings: dict[str, Any]
) -> tuple[Any, dict[str, Tensor], int, float]:
    """Return state, records, iteration and seconds of the same run, and set ``generator``; else CheckpointError."""
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path} is a folder, such as a run in groups writes; give the num_groups that it was written with, or "
            "the path of a file"
        )
    tensors, facts = load_tensors(path)
    if (
        facts.get("version") != _VERSION
        or not {"settings", "iteration", "seconds"} <= facts.keys()
        or "generator" not in tensors
    ):
        raise CheckpointError(f"{path} is no checkpoint of this version of bayeskit; move it, or give another path")
    saved = facts["settings"]
    if saved.get("model") != settings["model"]:
        raise CheckpointError(
            f"{path} is a checkpoint of another model or of other data; give another path, or move it away"
        )
    for name in [*settings, *(extra for extra in saved if extra not in settings)]:
        if saved.get(name) != settings.get(name):
            raise CheckpointError(
                f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; "
                "resume with the same settings, or give another path"
            )
    state = _restore(template, tensors)
    generator.set_state(tensors["generator"])
    records = {k.removeprefix("record."): v for k, v in tensors.items() if k.startswith("record.")}
    return state, records, int(facts["iteration"]), float(facts["seconds"])


# The loop that runs algorithms in steps, with progress bar, checkpoints, time budget and Ctrl-C.

CHECKPOINT_SECONDS = 10.0
Ending = Literal["finished", "converged", "time budget", "interrupted"]


@dataclass(frozen=True)
class Control:
    """Checkpoint, time budget and progress bar of a run; no setting changes the draws.

    Parameters
    ----------
    checkpoint : path, optional
        File for the state of the run. If it exists, the run resumes from it.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints; 0 writes one after every step. The interval grows if writing takes more than a
        tenth of it.
    time_budget : float, optional
        Seconds, compilation included, after which the run ends with the steps completed so far.
    progress : bool, default True
        Show a progress bar for runs longer than two seconds.
    """

    checkpoint: str | Path | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    time_budget: float | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint_seconds", real_number("checkpoint_seconds", self.checkpoint_seconds))
        if self.time_budget is not None:
            object.__setattr__(self, "time_budget", real_number("time_budget", self.time_budget))
        if not self.checkpoint_seconds >= 0:
            raise SettingsError(f"checkpoint_seconds must not be negative, not {self.checkpoint_seconds}")
        if self.time_budget is not None and not self.time_budget > 0:
            raise SettingsError(f"time_budget must be positive, not {self.time_budget}")


class Algorithm(Protocol):
    """Protocol of algorithms for :func:`drive`.

    The state is a ``NamedTuple`` of tensors (possibly nested) with constant shapes. The next step depends only on the
    state and the generator.
    """

    @property
    def description(self) -> str:
        """Text of the progress bar."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None if it depends on the run."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and a resumed run, as JSON; includes "model"."""
        ...

    def start(self, generator: torch.Generator) -> Any:
        """Return the first state."""
        ...

    def advance(self, state: Any, iteration: int, generator: torch.Generator) -> tuple[Any, Mapping[str, Tensor]]:
        """Take one step; return the new state and the values to record.

        Records of one name have a constant shape; a step without records returns ``{}``.
        """
        ...

    def ending(self, state: Any, iteration: int, records: Records) -> Ending | None:
        """Return how the run ends after ``iteration`` steps, or None; called before each step."""
        ...

    def note(self, state: Any, iteration: int, records: Records) -> str:
        """Return the text behind the progress bar."""
        ...


class Records:
    """Rows of tensors by name, copied together in blocks; an appended row must not be changed in place."""

    def __init__(self, block: int = 256) -> None:
        self._block = block
        self._buffers: dict[str, Tensor] = {}  # of growing capacity
        self._counts: dict[str, int] = {}  # rows in the buffer
        self._pending: dict[str, list[Tensor]] = {}

    def append(self, row: Mapping[str, Tensor]) -> None:
        """Add one row to each name in ``row``."""
        for name, value in row.items():
            waiting = self._pending.setdefault(name, [])
            waiting.append(value)
            if len(waiting) >= self._block:
                self._copy(name)

    def fill(self, rows: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Take over saved rows, ``{name: (N, ...)}``."""
        for name, value in rows.items():
            self._buffers[name], self._counts[name] = value.to(device), len(value)

    def _copy(self, name: str) -> None:
        waiting = self._pending.pop(name, None)
        if not waiting:
            return
        rows = torch.stack(waiting)
        count, buffer = self._counts.get(name, 0), self._buffers.get(name)
        if buffer is None:
            buffer = rows
        elif count + len(rows) > len(buffer):
            room = max(len(buffer), len(rows))
            buffer = torch.cat([buffer[:count], rows, rows.new_empty((room, *rows.shape[1:]))])
        else:
            buffer[count : count + len(rows)] = rows
        self._buffers[name], self._counts[name] = buffer, count + len(rows)

    def __contains__(self, name: str) -> bool:
        return self.count(name) > 0

    def __getitem__(self, name: str) -> Tensor:
        self._copy(name)
        return self._buffers[name][: self._counts[name]]

    def count(self, name: str) -> int:
        """Return how many rows ``name`` has."""
        return self._counts.get(name, 0) + len(self._pending.get(name, ()))

    def as_dict(self) -> dict[str, Tensor]:
        """Return all rows by name."""
        return {name: self[name] for name in [*self._buffers, *(p for p in self._pending if p not in self._buffers)]}


class Outcome(NamedTuple):
    """Result of a run."""

    state: Any
    records: Records
    num_iterations: int
    seconds: float
    ending: Ending


def drive(
    algorithm: Algorithm, control: Control, generator: torch.Generator, device: torch.device | str = "cpu"
) -> Outcome:
    """Run ``algorithm`` to its end, to the end of the time budget, or to Ctrl-C.

    Parameters
    ----------
    algorithm : Algorithm
    control : Control
    generator : torch.Generator
        The only source of randomness.
    device
        Device of the records.

    Returns
    -------
    Outcome
        ``ending`` is the reason for the end; ``"interrupted"`` after any Ctrl-C, even during the last step. Ctrl-C
        and the time budget let the current step finish, unless it waits for compilation: then it is dropped, and a
        resumed run repeats it. A second Ctrl-C raises ``KeyboardInterrupt`` at once.

    Raises
    ------
    BudgetError
        If the time budget ends during the compilation of the first step.
    KeyboardInterrupt
        On Ctrl-C during the compilation of the first step.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.
    OutputError
        If a checkpoint cannot be written; the previous one is kept. A failure of the last one only warns.
    """
    begin = here = time.monotonic()
    with one_thread(), torch.no_grad(), watching(control.time_budget) as watch:
        try:
            state = algorithm.start(generator)
        except Stopped as stopped:
            raise _nothing_begun(stopped.reason, control) from None
        records = Records()
        facts = algorithm.facts() | {"torch": torch.__version__, "device": torch.device(device).type}
        iteration = 0
        path = control.checkpoint
        if path is not None and Path(path).exists():
            state, saved, iteration, before = _load_checkpoint(path, state, generator, facts)
            records.fill(saved, device)
            begin -= before  # seconds are summed over resumed runs; the budget is for this run alone

        def save() -> None:
            if path is not None:
                seconds = time.monotonic() - begin
                _save_checkpoint(path, state, records.as_dict(), generator, facts, iteration, seconds)

        if path is not None and iteration == 0:
            save()  # raises before the work if the path cannot be written
        first = iteration
        last_save, interval, saved_at = time.monotonic(), control.checkpoint_seconds, iteration
        total = algorithm.num_steps
        with progress_bar(algorithm.description, total, control.progress) as bar:
            while (ending := algorithm.ending(state, iteration, records)) is None:
                if (ending := watch.reason()) is not None:
                    break
                stream = generator.get_state()
                try:
                    state, row = algorithm.advance(state, iteration, generator)
                except Stopped as stopped:
                    generator.set_state(stream)
                    ending = stopped.reason
                    break
                records.append(row)
                iteration += 1
                if bar.due(iteration):
                    speed = (iteration - first) / (time.monotonic() - here)
                    bar.update(iteration, f"{algorithm.note(state, iteration, records)}, {speed:.3g} steps/s")
                if path is not None and time.monotonic() - last_save >= interval:
                    writing = time.monotonic()
                    save()
                    last_save, saved_at = time.monotonic(), iteration
                    interval = max(control.checkpoint_seconds, 10 * (last_save - writing) * bool(interval))
        if iteration > saved_at:
            try:
                save()
            except OutputError as error:
                # The run is complete; a failed write must not lose its result.
                warn_user(f"the last checkpoint is missing: {error}", SamplingWarning)
    if watch.interrupted.is_set():
        ending = "interrupted"  # even during the last step, so that a caller with several runs can stop
    return Outcome(state, records, iteration, time.monotonic() - begin, ending)


def obey(ending: object) -> None:
    """Raise KeyboardInterrupt if a run was interrupted, for callers with further runs."""
    if ending == "interrupted":
        raise KeyboardInterrupt


def _nothing_begun(ending: Ending, control: Control) -> BudgetError | KeyboardInterrupt:
    """Return the error for a run that ended before its first state, and so before its first checkpoint."""
    if ending == "interrupted":
        return KeyboardInterrupt()
    if control.checkpoint is not None and Path(control.checkpoint).exists():
        rest = "before the run resumed; its checkpoint is unchanged; give more time"
    else:
        rest = "before there was anything to return or keep; give more time, or set target.compile = False"
    return BudgetError(
        f"the time budget of {control.time_budget:g} s ended while the density was being compiled, {rest}"
    )


def nothing_done(ending: Ending, control: Control, where: str) -> BudgetError | KeyboardInterrupt:
    """Return the error for a run that ended early, ``where`` such as ``"in iteration 3"``, without a result."""
    if ending == "interrupted":
        return KeyboardInterrupt()
    remedy = (
        "give more time, or a checkpoint from which the same call resumes"
        if control.checkpoint is None
        else "the same call resumes from the checkpoint"
    )
    return BudgetError(
        f"the time budget of {control.time_budget:g} s ended {where}, before there was anything to return; {remedy}"
    )


def say_early(ending: Ending, control: Control, what: str, done: str) -> None:
    """Warn if the time budget or Ctrl-C ended a run early."""
    # ``done`` describes the result, such as "after 3 of 10 draws a chain"; stack level 3 is the caller of the caller.
    if ending not in ("interrupted", "time budget"):
        return
    why = "interrupted" if ending == "interrupted" else f"ended by the time budget of {control.time_budget:g} s"
    rest = "these are returned" if control.checkpoint is None else "the same call resumes from the checkpoint"
    warn_user(f"{what}: {why} {done}; {rest}", SamplingWarning)
