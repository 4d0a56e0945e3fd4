"""A progress bar that appears only on work of more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

DELAY = 2.0
INTERVAL = 0.2


class Bar:
    """Count steps towards a total, if one is known; draws itself at most five times a second."""

    def __init__(self, description: str, total: int | None, enabled: bool) -> None:
        self._description, self._total, self._enabled = description, total, enabled
        self._begin = self._last = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def due(self, completed: int) -> bool:
        """Tell whether it is time to draw again; ask before computing a note."""
        if not self._enabled:
            return False
        now = time.monotonic()
        return now - self._begin >= DELAY and (now - self._last >= INTERVAL or completed == self._total)

    def update(self, completed: int, note: str = "") -> None:
        """Say how much is done; ``note`` is shown behind the bar."""
        if not self.due(completed):
            return
        self._last = time.monotonic()
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=sys.stderr),
                auto_refresh=False,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._description, total=self._total, note=note)
        if self._task is not None:
            self._progress.update(self._task, completed=completed, note=note, refresh=True)

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def progress_bar(description: str, total: int | None, enabled: bool = True) -> Iterator[Bar]:
    """Open a bar; on anything but a terminal it stays silent."""
    bar = Bar(description, total, enabled and sys.stderr.isatty())
    try:
        yield bar
    finally:
        bar.close()
