"""Atomic writes of files, records of facts with a checksum, and folders of results that know their run.

A record has a schema, a version of it, facts, and a checksum of all. What is read back is what was written, or it is
refused with the name of the file and the reason.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from bayeskit._core.inputs import warn_user
from bayeskit.errors import BayeskitError, CheckpointError, CheckpointWarning, OutputError

if TYPE_CHECKING:
    import pandas as pd

# Atomic writes: write to a temporary name, then rename.


def write_atomically(path: str | Path, *data: bytes | memoryview) -> None:
    """Write ``data`` to ``path``, whole or not at all; raise ``OutputError`` if it cannot be written."""
    path = Path(path)
    clear_temporary_files(path.parent)
    # Not a file of tempfile, which is private: a result should have the permissions of the user's umask.
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists, is writable and has space"
        ) from error


def save_or_warn(save: Callable[[], None], what: str, *, first: bool = False) -> bool:
    """Write a checkpoint, or warn that it cannot be written, ``what`` follows, and return whether it was.

    The ``first`` one raises the ``OutputError``, before the work is done, unless it is for want of space.
    """
    try:
        save()
    except (OutputError, MemoryError) as error:
        if first and isinstance(error, OutputError) and getattr(error.__cause__, "errno", None) not in _NO_SPACE:
            raise
        warn_user(f"a checkpoint cannot be written ({error or 'too little memory'}); {what}", CheckpointWarning)
        return False
    return True


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_csv(
    path: str | Path,
    table: pd.DataFrame,
    *,
    index: bool = False,
    index_label: str | None = None,
    float_format: str | None = "%.10g",
) -> None:
    """Write a table as CSV, atomically.

    Texts that a spreadsheet would take for a formula get an apostrophe in front; numbers stay as they are.
    """
    table = table.map(_no_formula).rename(index=_no_formula, columns=_no_formula).rename_axis(index=_no_formula)
    text = table.to_csv(index=index, index_label=index_label, float_format=float_format)
    write_atomically(path, text.encode())


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("=", "+", "-", "@")):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


# A process that is killed while it writes leaves its temporary file. The number of a process says nothing on another
# host, or in another container, which may share the folder; so the name tells the host, and each host clears its own.

_TEMPORARY = re.compile(r"\..+\.(\d+)\.([0-9a-f]{8})[0-9a-f]{8}\.tmp", re.DOTALL)
_SECONDS_BETWEEN_LOOKS = 60.0
_looked: dict[Path, float] = {}  # when a folder was last searched


def temporary_name(path: Path) -> Path:
    """Return a name beside ``path``, to write and rename, that tells which process of which host writes.

    OutputError if ``path`` has no name, such as an empty text.
    """
    if not path.name:
        raise OutputError(f"path {str(path)!r} names no file; give the name of a file to write")
    return path.with_name(f".{path.name}.{os.getpid()}.{_host()}{uuid4().hex[:8]}.tmp")


def clear_temporary_files(folder: Path) -> None:
    """Delete what processes of this host that have died left half-written in a folder; those of other hosts stay."""
    now = time.monotonic()
    if now - _looked.get(folder, -_SECONDS_BETWEEN_LOOKS) < _SECONDS_BETWEEN_LOOKS:
        return
    _looked[folder] = now
    with suppress(OSError):  # a folder that cannot be read or written; a write says so
        for name in os.listdir(folder):
            found = _TEMPORARY.fullmatch(name)
            if found and found[2] == _host() and _is_dead(int(found[1])):
                with suppress(OSError):
                    os.unlink(folder / name)


@cache
def _host() -> str:
    """Return eight digits for the host and, on Linux, the container by which processes are numbered."""
    numbering = ""
    with suppress(OSError):
        numbering = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{platform.node()} {numbering}".encode()).hexdigest()[:8]


def _is_dead(process: int) -> bool:
    if os.name != "posix":
        return False  # elsewhere os.kill would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False  # it belongs to another user
    return False


def as_output_folder(path: str | Path) -> Path:
    """Create ``path`` if needed and return it; raise ``OutputError`` if it cannot be written."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write to the folder {folder}: {error.strerror or error}; choose another folder "
            "(option --out of the command line)"
        ) from error
    return folder


# Records of facts, alone in a file of JSON or beside tensors, with a checksum.

_REMEDY = "pass another path, or delete the file to compute it again"


class Schema(NamedTuple):
    """The kind of contents of a file, in words such as "draws", and the version of its format."""

    name: str
    version: int


def record_of(facts: Mapping[str, Any], schema: Schema, payload: Iterable[bytes | memoryview] = ()) -> dict[str, Any]:
    """Return JSON-able facts with schema and version, and the checksum of these and of ``payload``."""
    whole = {"schema": schema.name, "version": schema.version, "facts": json.loads(json.dumps(dict(facts)))}
    return whole | {"sha256": _checksum(whole, payload)}


def facts_of(
    path: str | Path, record: object, schema: Schema, payload: Iterable[bytes | memoryview] = ()
) -> dict[str, Any]:
    """Return the facts of a record read from ``path``; ``CheckpointError`` if it is changed or of another schema."""
    if not isinstance(record, dict) or not record.keys() >= {"schema", "version", "facts", "sha256"}:
        raise CheckpointError(
            f"{path} has no checksum: it is not a file of bayeskit, or one of a version before 0.1; {_REMEDY}"
        )
    if record["sha256"] != _checksum({name: record[name] for name in ("schema", "version", "facts")}, payload):
        raise CheckpointError(f"{path} is damaged: its contents do not match their checksum; {_REMEDY}")
    found = Schema(record["schema"], record["version"])
    if found.name != schema.name:
        raise CheckpointError(f"{path} holds {found.name}, not {schema.name}; pass another path, or move the file away")
    if found.version != schema.version:
        raise CheckpointError(
            f"{path} holds {found.name} of version {found.version}, this bayeskit reads version {schema.version}; use "
            "the bayeskit that wrote it, or move the file away to compute it again"
        )
    if not isinstance(record["facts"], dict):
        raise CheckpointError(f"{path}: its facts are no object; {_REMEDY}")
    return record["facts"]


def _checksum(whole: Mapping[str, Any], payload: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode())
    for part in payload:
        digest.update(part)
    return digest.hexdigest()


def write_facts(path: str | Path, facts: Mapping[str, Any], schema: Schema) -> None:
    """Write JSON-able facts as a file of JSON; raise ``OutputError`` if it cannot be written."""
    write_atomically(path, json.dumps(record_of(facts, schema), indent=1).encode())


def read_facts(path: str | Path, schema: Schema) -> dict[str, Any]:
    """Return the facts of a file of :func:`write_facts`; raise ``CheckpointError`` for another or damaged file."""
    try:
        record = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is truncated or not a file of bayeskit ({error}); {_REMEDY}") from error
    with restoring(path):
        return facts_of(path, record, schema)


@contextmanager
def restoring(path: str | Path) -> Iterator[None]:
    """Turn every error of a block that restores something from a file into a ``CheckpointError`` that names the file.

    A checksum cannot tell that a file of another version, or made by hand, lacks a part or has one that does not fit.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) and str(path) in str(error):
            raise
        said = str(error) if isinstance(error, BayeskitError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path}: its contents do not fit together ({said:.500}); {_REMEDY}") from error


# Folders of runs.

_RECORD, _RUN = "run.json", Schema("a run", 1)
#: What runs write before they are finished, and read when they resume.
_UNFINISHED = ("checkpoint*", "*/checkpoint*", "generated")


class RunFolder:
    """A folder of results and ``run.json``, which tells the settings of the run and, once it is finished, its result.

    Without a path, it is ``default``, or the first of ``default-2``, ``default-3`` and so on that holds no other run.
    Raise ``OutputError`` for a folder with another run or with other files, unless ``force``, and for one that cannot
    be written.
    """

    def __init__(
        self, path: str | Path | None, settings: Mapping[str, Any], *, default: str | Path = "", force: bool = False
    ) -> None:
        self._settings = json.loads(json.dumps(dict(settings)))
        numbered = (Path(default if number == 1 else f"{default}-{number}") for number in count(1))
        candidates = numbered if path is None else iter([Path(path)])
        self.path = next(folder for folder in candidates if path is not None or self._problem(folder) is None)
        problem = self._problem(self.path)
        if problem is not None and not force:
            raise OutputError(f"{problem}; choose another folder by --out, or pass --force, which replaces results")
        #: What the finished run said at its end, and its exit status; None if it is not finished or is to be repeated.
        self.finished: tuple[str, int] | None = None
        begun = (self.path / _RECORD).exists()
        if problem is None and begun and not force:
            self.finished = _read_run(self.path / _RECORD)[1]
            if self.finished is not None:
                return
        as_output_folder(self.path)
        if force and begun:
            _delete_unfinished(self.path)
        self._write(None)

    def finish(self, said: str, status: int = 0) -> None:
        """Note that the run is finished, what it said, and its exit status."""
        self._write({"said": said, "status": status})

    def leave_if_empty(self) -> None:
        """Delete the folder if the run was refused before it wrote a result, so that a better one finds it free."""
        if not self.files():
            (self.path / _RECORD).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()

    def files(self) -> list[str]:
        """Return the names of the results."""
        return sorted(p.name for p in self.path.iterdir() if p.name != _RECORD and not p.name.startswith("."))

    def _write(self, finished: Mapping[str, Any] | None) -> None:
        write_facts(self.path / _RECORD, {"settings": self._settings, "finished": finished}, _RUN)

    def _problem(self, folder: Path) -> str | None:
        """Return why a folder cannot hold the run, or None."""
        if not (folder / _RECORD).exists():
            with suppress(OSError):  # a folder that cannot be read cannot be written either, which is found later
                strange = next((p.name for p in sorted(folder.iterdir()) if not p.name.startswith(".")), None)
                return strange and f"the folder {folder} holds other files, such as {strange!r}"
            return None
        try:
            theirs, ours = _read_run(folder / _RECORD)[0], self._settings
        except CheckpointError as error:
            return str(error)
        differing = [k for k in (*ours, *(k for k in theirs if k not in ours)) if ours.get(k) != theirs.get(k)]
        if not differing:
            return None
        shown = ", ".join(f"{k} {theirs.get(k)!r} instead of {ours.get(k)!r}" for k in differing[:3])
        return f"the folder {folder} holds another run, with {shown}"


def _read_run(path: Path) -> tuple[dict[str, Any], tuple[str, int] | None]:
    """Return the settings of a run, and what it said at its end with its exit status, if it is finished."""
    facts = read_facts(path, _RUN)
    with restoring(path):
        settings, finished = dict(facts["settings"]), facts["finished"]
        return settings, finished and (str(finished["said"]), int(finished["status"]))


def _delete_unfinished(folder: Path) -> None:
    for path in [p for pattern in _UNFINISHED for p in folder.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
