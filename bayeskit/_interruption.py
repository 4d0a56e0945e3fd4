"""Ctrl-C and time budgets: a run hears them between two steps, and waiting for something slow hears them at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

Reason = Literal["time budget", "interrupted"]


class Stopped(BaseException):
    """A step was given up because the run is to end; not an ``Exception``, so that nothing but the run catches it.

    Parameters
    ----------
    reason : str
        ``"time budget"`` or ``"interrupted"``.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Watch(NamedTuple):
    """What can end a run from outside."""

    interrupted: threading.Event
    deadline: float | None  # by time.monotonic

    def reason(self) -> Reason | None:
        """Return why the run is to end, or None where it may go on."""
        if self.interrupted.is_set():
            return "interrupted"
        return "time budget" if self.deadline is not None and time.monotonic() >= self.deadline else None


_watch: ContextVar[Watch | None] = ContextVar("_watch", default=None)


def look() -> None:
    """Raise :class:`Stopped` if the run under way, if any, is to end; for places where its step may be dropped.

    Examples
    --------
    >>> from bayeskit._interruption import look
    >>> look()  # belongs to no run
    """
    watch = _watch.get()
    reason = None if watch is None else watch.reason()
    if reason is not None:
        raise Stopped(reason)


@contextmanager
def watching(seconds: float | None) -> Iterator[Watch]:
    """Turn the first Ctrl-C into a flag, so that no step is cut in two, and set a deadline; a second Ctrl-C raises.

    One inside another hears the same Ctrl-C, and has a deadline of its own.
    """
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
        yield  # somebody else looks after Ctrl-C
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
