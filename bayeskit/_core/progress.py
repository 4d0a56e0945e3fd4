"""Progress bars, Ctrl-C and time budgets."""

from __future__ import annotations

import html
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# A progress bar that appears only on work of more than two seconds.

_DELAY = 2.0
_INTERVAL = 0.2


class Bar:
    """Count steps towards a total, if one is known; draws itself at most five times a second."""

    def __init__(self, description: str, total: int | None, enabled: bool) -> None:
        self._notebook = enabled and not sys.stderr.isatty() and _is_notebook()
        self._description, self._total = description, total
        self._enabled = enabled and (self._notebook or sys.stderr.isatty())
        self._begin = self._last = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._output: Any = None  # the notebook's line

    def due(self, completed: int) -> bool:
        """Tell whether the bar is due to be drawn, so that a note is computed only then."""
        if not self._enabled:
            return False
        now = time.monotonic()
        return now - self._begin >= _DELAY and (now - self._last >= _INTERVAL or completed == self._total)

    def update(self, completed: int, note: str = "") -> None:
        """Show the number of completed steps; ``note`` is shown behind the bar."""
        if not self.due(completed):
            return
        self._last = time.monotonic()
        if self._notebook:
            self._show(completed, note)
            return
        if self._progress is None:
            from rich import console, progress

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}"),
                console=console.Console(file=sys.stderr),
                auto_refresh=False,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._description, total=self._total, note=note)
        if self._task is not None:
            self._progress.update(self._task, completed=completed, note=note, refresh=True)

    def _show(self, completed: int, note: str) -> None:
        """Show the state below the notebook's cell, in place of the state before."""
        from IPython.display import display

        seconds = time.monotonic() - self._begin
        of, left = "", ""
        if self._total is not None:
            of, left = f" of {self._total}", f", {seconds * (self._total / max(completed, 1) - 1):.0f} s left"
        text = f"{self._description}: {completed}{of}, {seconds:.0f} s{left}" + (f", {note}" if note else "")
        limit = "" if self._total is None else f' max="{self._total}" value="{completed}"'
        shown = {"text/plain": text, "text/html": f"<progress{limit}></progress> {html.escape(text)}"}
        if self._output is None:
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)

    def close(self) -> None:
        """Leave the last state of the bar on the screen; in a notebook, where cells have outputs of their own, none."""
        if self._progress is not None:
            self._progress.stop()
        if self._output is not None:
            self._output.update({"text/plain": "", "text/html": ""}, raw=True)


def _is_notebook() -> bool:
    """Tell whether the code runs in a Jupyter kernel."""
    made = sys.modules.get("IPython")
    shell = None if made is None else made.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


_silent: ContextVar[bool] = ContextVar("_silent", default=False)


@contextmanager
def without_bars(silent: bool = True) -> Iterator[None]:
    """Show no bar in this context, not even one of work that no setting switches off."""
    token = _silent.set(silent or _silent.get())
    try:
        yield
    finally:
        _silent.reset(token)


@contextmanager
def progress_bar(description: str, total: int | None, enabled: bool = True) -> Iterator[Bar]:
    """Open a bar, which is shown on a terminal and in a notebook only."""
    bar = Bar(description, total, enabled and not _silent.get())
    try:
        yield bar
    finally:
        bar.close()


# Ctrl-C and time budgets: a run checks them between two steps, and slow waits check them at once.

Reason = Literal["time budget", "interrupted"]


class Stopped(BaseException):
    """The end of a run during a step; not an ``Exception``, so that nothing but the run catches it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Watch(NamedTuple):
    """External causes that end a run: Ctrl-C and a deadline."""

    interrupted: threading.Event
    deadline: float | None  # by time.monotonic

    def reason(self) -> Reason | None:
        """Return why the run is to end, or None if it may go on."""
        if self.interrupted.is_set():
            return "interrupted"
        return "time budget" if self.deadline is not None and time.monotonic() >= self.deadline else None


_watch: ContextVar[Watch | None] = ContextVar("_watch", default=None)


def look() -> None:
    """Raise :class:`Stopped` if the current run is to end; for places where its step may be dropped."""
    watch = _watch.get()
    reason = None if watch is None else watch.reason()
    if reason is not None:
        raise Stopped(reason)


@contextmanager
def watching(seconds: float | None) -> Iterator[Watch]:
    """Turn the first Ctrl-C into a flag, so that no step is cut in two, and set a deadline; a second Ctrl-C raises."""
    # Nested watches share the flag of Ctrl-C, and have deadlines of their own.
    outer = _watch.get()
    flag = threading.Event() if outer is None else outer.interrupted
    watch = Watch(flag, None if seconds is None else time.monotonic() + seconds)
    token = _watch.set(watch)
    try:
        with _flagging(watch.interrupted):
            yield watch
    finally:
        _watch.reset(token)


@contextmanager
def _flagging(flag: threading.Event) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield  # Ctrl-C has another handler
        return

    def handler(number: int, frame: Any) -> None:
        if flag.is_set():
            signal.default_int_handler(number, frame)
        flag.set()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
