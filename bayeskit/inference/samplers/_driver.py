"""The loop that runs algorithms in steps, with progress bar, checkpoints, time budget and interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import torch
from torch import Tensor

from bayeskit._core.folders import Schema, save_or_warn
from bayeskit._core.inputs import real_number, warn_user, whole_number
from bayeskit._core.progress import Stopped, progress_bar, watching
from bayeskit._core.randomness import one_thread
from bayeskit._core.storage import loaded_tensors, save_tensors
from bayeskit.errors import BudgetError, CheckpointError, SamplingWarning, ShapeError

# Bitwise exact save and restore of a run.

_SCHEMA = Schema("a checkpoint of a run in steps", 3)
_PART_SCHEMA = Schema("rows of a run in steps", 1)
#: Rows of so many bytes are written into a part.
_PART_BYTES = 2**22
#: Rows of so many bytes are kept together in memory.
_BLOCK_BYTES = 2**22
_MOST_ITERATIONS = 2**53
#: The setting that may be larger in a resumed run.
_MAY_GROW = "num_samples"


def flatten(state: Any, prefix: str = "state") -> dict[str, Tensor]:
    """Return the tensors of nested named tuples by path, such as ``state.kernel.position``."""
    if isinstance(state, Tensor):
        return {prefix: state}
    result: dict[str, Tensor] = {}
    for field in state._fields:
        result.update(flatten(getattr(state, field), f"{prefix}.{field}"))
    return result


def _restore(template: Any, tensors: dict[str, Tensor], prefix: str = "state") -> Any:
    """Rebuild named tuples shaped like ``template`` from named tensors; ShapeError if one does not fit.

    A tensor that starts without rows may have any number of them.
    """
    if isinstance(template, Tensor):
        found = tensors[prefix]
        first = 1 if template.dim() and not len(template) else 0
        if found.shape[first:] != template.shape[first:] or found.dtype != template.dtype:
            raise ShapeError(f"{prefix} has the wrong shape or type for this run")
        # Memory of its own, as in the run that saved it: products of views with another offset round differently.
        return found.to(template.device, copy=True)
    return type(template)(*(_restore(getattr(template, f), tensors, f"{prefix}.{f}") for f in template._fields))


class _Checkpoint:
    """File of a run in steps. Rows that fill a part are written once, into a file beside it, at the same cost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._run = uuid4().hex
        self._parts = 0
        self._written: dict[str, int] = {}  # rows of each record in the parts

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.rows-{number:04d}")

    def clear_parts(self) -> None:
        """Delete parts of another run, and those that this run had not yet noted when it was killed."""
        for number in count(self._parts):
            part = self._part(number)
            if not part.exists():
                return
            with suppress(OSError):  # a folder that cannot be written is named by the next checkpoint
                part.unlink()

    def save(
        self,
        state: Any,
        records: Records,
        generator: torch.Generator,
        settings: Mapping[str, Any],
        iteration: int,
        seconds: float,
    ) -> None:
        """Write the state of a run and replace an older checkpoint atomically."""
        rest = {name: torch.cat(records.blocks(name, self._written.get(name, 0))) for name in records.names()}
        counts = {name: records.count(name) for name in rest}
        if sum(rows.numel() * rows.element_size() for rows in rest.values()) >= _PART_BYTES:
            save_tensors(self._part(self._parts), rest, {"run": self._run}, _PART_SCHEMA)
            self._parts += 1
            self._written = counts
            rest = {name: rows[:0] for name, rows in rest.items()}
        tensors = flatten(state) | {f"record.{name}": rows for name, rows in rest.items()}
        tensors["generator"] = generator.get_state()
        shapes = {name: [str(rows.dtype), counts[name], *rows.shape[1:]] for name, rows in rest.items()}
        facts = {"settings": settings, "iteration": iteration, "seconds": seconds, "records": shapes}
        save_tensors(self.path, tensors, facts | {"run": self._run, "parts": self._parts}, _SCHEMA)

    def load(
        self, template: Any, generator: torch.Generator, settings: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor], int, float]:
        """Return state, records, iteration and seconds of the same run, and set ``generator``; else CheckpointError."""
        path = self.path
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a folder, such as a run in groups writes; give the num_groups that it was written with, or "
                "the path of a file"
            )
        with loaded_tensors(path, _SCHEMA) as (tensors, facts):
            _check_settings(path, facts["settings"], settings)
            state = _restore(template, tensors)
            self._run, self._parts = str(facts["run"]), whole_number("parts", facts["parts"], 0)
            pieces = [self._read_part(number) for number in range(self._parts)]
            rest = {k.removeprefix("record."): v for k, v in tensors.items() if k.startswith("record.")}
            # Of a record that begins later, earlier parts have none.
            earlier = {name: [piece[name] for piece in pieces if name in piece] for name in rest}
            self._written = {name: sum(map(len, found)) for name, found in earlier.items()}
            records = {name: torch.cat([*earlier[name], rows]) for name, rows in rest.items()}
            if {name: [str(rows.dtype), *rows.shape] for name, rows in records.items()} != facts["records"]:
                raise ShapeError("its records have not the shapes that it names")
            generator.set_state(tensors["generator"])
            iteration = whole_number("iteration", facts["iteration"], 0)
            if iteration > _MOST_ITERATIONS:
                raise ShapeError(f"{iteration} iterations are too many")
            return state, records, iteration, real_number("seconds", facts["seconds"])

    def _read_part(self, number: int) -> dict[str, Tensor]:
        part = self._part(number)
        with loaded_tensors(part, _PART_SCHEMA) as (rows, facts):
            if facts["run"] != self._run:
                raise CheckpointError(f"{part} belongs to another run than {self.path}; move both, or neither")
            return rows


def _check_settings(path: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a run has other settings than its checkpoint."""
    if saved.get("model") != settings["model"]:
        raise CheckpointError(
            f"{path} is a checkpoint of another model or of other data; give another path, or move it away"
        )
    for name in [*settings, *(extra for extra in saved if extra not in settings)]:
        if name == _MAY_GROW and saved.get(name, math.inf) <= settings.get(name, -math.inf):
            continue
        if saved.get(name) != settings.get(name):
            raise CheckpointError(
                f"{path} was written with {name}={saved.get(name)!r}, this run has {name}={settings.get(name)!r}; "
                "resume with the same settings, or give another path"
            )


# The loop that runs algorithms in steps, with progress bar, checkpoints, time budget and Ctrl-C.

CHECKPOINT_SECONDS = 10.0
Ending = Literal["finished", "converged", "time budget", "interrupted"]


@dataclass(frozen=True)
class Control:
    """Checkpoint, time budget and progress bar of a run; no setting changes the draws.

    Parameters
    ----------
    checkpoint : path, optional
        File for the state of the run. If it exists, the run resumes from it. Long runs write rows of 4 MiB and more
        beside it, as `checkpoint.rows-0000` and so on, which belong to it.
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
        object.__setattr__(
            self, "checkpoint_seconds", real_number("checkpoint_seconds", self.checkpoint_seconds, "[0, inf]")
        )
        if self.time_budget is not None:
            object.__setattr__(self, "time_budget", real_number("time_budget", self.time_budget, "(0, inf]"))


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
    """Rows of tensors by name, in blocks of bounded size; an appended row must not be changed in place."""

    def __init__(self, together: int = 256, block_bytes: int = _BLOCK_BYTES) -> None:
        self._together, self._block_bytes = together, block_bytes
        self._full: dict[str, list[Tensor]] = {}
        self._block: dict[str, Tensor] = {}  # which rows are written to; what is not written to takes no memory
        self._used: dict[str, int] = {}  # rows of the block
        self._pending: dict[str, list[Tensor]] = {}

    def append(self, row: Mapping[str, Tensor]) -> None:
        """Add one row to each name in ``row``."""
        for name, value in row.items():
            waiting = self._pending.setdefault(name, [])
            waiting.append(value)
            if len(waiting) >= self._together:
                self._copy(name)

    def fill(self, rows: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Take over saved rows, ``{name: (N, ...)}``."""
        for name, value in rows.items():
            self._full[name] = [value.to(device)]

    def _copy(self, name: str) -> None:
        waiting = self._pending.pop(name, None)
        if not waiting:
            return
        rows = torch.stack(waiting)
        full = self._full.setdefault(name, [])
        while len(rows):
            block, used = self._block.pop(name, None), self._used.pop(name, 0)
            if block is None:
                most = self._block_bytes // max(1, rows[0].numel() * rows.element_size())
                # As many rows as there are before it, up to the bound: those of a short run fill their memory.
                block = rows.new_empty((max(len(rows), min(sum(map(len, full)), most)), *rows.shape[1:]))
            fitting = min(len(rows), len(block) - used)
            block[used : used + fitting], rows = rows[:fitting], rows[fitting:]
            if used + fitting == len(block):
                full.append(block)
            else:
                self._block[name], self._used[name] = block, used + fitting

    def __contains__(self, name: str) -> bool:
        return self.count(name) > 0

    def __getitem__(self, name: str) -> Tensor:
        blocks = self.blocks(name)
        if len(blocks) > 1:  # once joined, they stay together
            blocks = self._full[name] = [torch.cat(blocks)]
            self._block.pop(name, None), self._used.pop(name, None)
        return blocks[0]

    def blocks(self, name: str, first: int = 0) -> list[Tensor]:
        """Return the rows of ``name``, from the ``first`` on, in pieces; at least one, which may be empty."""
        self._copy(name)
        found = list(self._full[name])
        if name in self._block:
            found.append(self._block[name][: self._used[name]])
        while len(found) > 1 and first >= len(found[0]):
            first -= len(found.pop(0))
        return [found[0][first:], *found[1:]]

    def count(self, name: str) -> int:
        """Return how many rows ``name`` has."""
        full = sum(map(len, self._full.get(name, ())))
        return full + self._used.get(name, 0) + len(self._pending.get(name, ()))

    def names(self) -> list[str]:
        """Return the names that have rows, in the order of their first ones."""
        return [*self._full, *(name for name in self._pending if name not in self._full)]

    def as_dict(self) -> dict[str, Tensor]:
        """Return all rows by name."""
        return {name: self[name] for name in self.names()}


class Place(NamedTuple):
    """Where a run in steps stands: all that its next steps depend on."""

    state: Any
    num_iterations: int
    stream: Tensor  # state of the generator


class Outcome(NamedTuple):
    """Result of a run."""

    state: Any
    records: Records
    num_iterations: int
    seconds: float
    ending: Ending
    stream: Tensor  # state of the generator

    @property
    def place(self) -> Place:
        """Where the run ended, from where a longer one goes on."""
        return Place(self.state, self.num_iterations, self.stream)


def drive(
    algorithm: Algorithm,
    control: Control,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    place: Place | None = None,
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
    place : Place, optional
        Where an earlier run of the same algorithm ended; by default the run begins with the algorithm's first state.

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
        If the first checkpoint cannot be written. Failures of later ones, as on a disk that is full for some time, only
        warn; the previous one is kept.
    """
    begin = here = time.monotonic()
    with one_thread(), torch.no_grad(), watching(control.time_budget) as watch:
        iteration = 0
        if place is not None:
            state, iteration = place.state, place.num_iterations
            generator.set_state(place.stream)
        else:
            try:
                state = algorithm.start(generator)
            except Stopped as stopped:
                raise _nothing_begun(stopped.reason, control) from None
        records = Records()
        facts = algorithm.facts() | {"torch": torch.__version__, "device": torch.device(device).type}
        checkpoint = None if control.checkpoint is None else _Checkpoint(control.checkpoint)
        if checkpoint is not None and checkpoint.path.exists():
            state, saved, iteration, before = checkpoint.load(state, generator, facts)
            records.fill(saved, device)
            begin -= before  # seconds are summed over resumed runs; the budget is for this run alone

        def save() -> None:
            if checkpoint is not None:
                seconds = time.monotonic() - begin
                checkpoint.save(state, records, generator, facts, iteration, seconds)

        if checkpoint is not None:
            checkpoint.clear_parts()
            if iteration == 0:
                save_or_warn(save, "the run goes on, and writes again", first=True)
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
                if checkpoint is not None and time.monotonic() - last_save >= interval:
                    writing = time.monotonic()
                    if save_or_warn(save, "the run goes on, and writes again"):
                        saved_at = iteration
                    last_save = time.monotonic()
                    interval = max(control.checkpoint_seconds, 10 * (last_save - writing) * bool(interval))
        if iteration > saved_at:
            save_or_warn(save, "the last one is missing")  # a failed write must not lose the result
    if watch.interrupted.is_set():
        ending = "interrupted"  # even during the last step, so that a caller with several runs can stop
    return Outcome(state, records, iteration, time.monotonic() - begin, ending, generator.get_state())


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
