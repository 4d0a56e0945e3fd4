"""The lock of what Python, torch and Pyro have once per process, and warnings recorded by thread."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Pyro's handlers, parameters and replaced functions, and torch's default dtype, global random stream and validation of
# distributions belong to the process. Whatever changes one of them, or reads or runs a model that depends on them,
# holds this lock. Compiled and traced densities depend on none of them.
_lock = threading.RLock()


@contextmanager
def process_state() -> Iterator[bool]:
    """Let no other thread use state that the process has once, and yield whether one did; a thread may nest this."""
    lock = _lock
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    try:
        yield waits
    finally:
        lock.release()


# A fork waits until no thread has changed this state, because the child would keep the change for good; but not for
# ever, as a thread may hold the lock while it waits for the child.

_PATIENCE = 30.0
_forking = threading.local()


def _before_fork() -> None:
    _forking.lock, _forking.held = _lock, _lock.acquire(timeout=_PATIENCE)


def _after_fork() -> None:
    if _forking.held:
        _forking.lock.release()


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


# Python's own recording of warnings replaces the filters of all threads, and leaves them replaced if two overlap.

_LOG: ContextVar[list[warnings.WarningMessage] | None] = ContextVar("recorded warnings", default=None)


class _OfRecordingThread(type):
    def __subclasscheck__(cls, category: type) -> bool:
        return _LOG.get() is not None


class _Recorded(Warning, metaclass=_OfRecordingThread):
    """Any warning that is issued while its thread records."""


class _Recorders:
    """Number of threads that record, and the function that shows the warnings of others."""

    def __init__(self) -> None:
        self.number = 0
        self.shown: Callable[..., None] = warnings.showwarning

    def enter(self) -> None:
        with process_state():
            self.number += 1
            warnings.simplefilter("always", _Recorded)
            if warnings.showwarning != self.show:
                self.shown, warnings.showwarning = warnings.showwarning, self.show

    def leave(self) -> None:
        with process_state():
            self.number -= 1
            filters: list[Any] = warnings.filters  # type: ignore[assignment]
            kept = [entry for entry in filters if entry[2] is not _Recorded]
            if self.number == 0 and len(kept) < len(filters):
                filters[:] = kept
                warnings._filters_mutated()  # type: ignore[attr-defined]
            if self.number == 0 and warnings.showwarning == self.show:
                warnings.showwarning = self.shown

    def show(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        log = _LOG.get()
        if log is None:
            self.shown(message, category, filename, lineno, file, line)
        else:
            log.append(warnings.WarningMessage(message, category, filename, lineno, file, line))


_recorders = _Recorders()


@contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect the warnings of this thread instead of showing them; those of other threads are treated as before."""
    log: list[warnings.WarningMessage] = []
    token = _LOG.set(log)
    _recorders.enter()
    try:
        yield log
    finally:
        _recorders.leave()
        _LOG.reset(token)
