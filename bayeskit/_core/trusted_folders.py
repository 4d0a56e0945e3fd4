"""Folders that compiled code is loaded from: those that nobody but this user can change."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


def own_folders() -> Iterator[Path]:
    """Yield where code may be kept: the user's cache, the user's folder of temporary files, one of this process."""
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(RuntimeError):  # the home folder is unknown
        yield (Path(cache) if cache else Path.home() / ".cache") / "bayeskit"
    if hasattr(os, "getuid"):
        yield Path(tempfile.gettempdir()) / f"bayeskit_{os.getuid()}"
    with suppress(OSError):
        yield _of_this_process(os.getpid())


def make_private(folder: Path) -> None:
    """Make a folder of mode 0700 unless there is one; raise ``OSError`` unless this user alone can change it."""
    if not os.path.lexists(folder):
        if os.path.lexists(folder.parent):
            _check_way_to(folder)  # nothing is made where a stranger's link leads
        else:
            make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    if not hasattr(os, "getuid"):  # Windows, where the folders of a user belong to the user
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        return
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is a link or a file, not a folder")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"other users can write to {folder}; chmod 700 keeps them out")
    _check_way_to(folder)


def check_contents(folder: Path) -> None:
    """Raise ``OSError`` if a file below a folder of :func:`make_private` is a link, or another user's to change."""
    if not hasattr(os, "getuid"):
        return
    # A file that others may write is out of their reach in a folder that they cannot enter.
    refused = _OTHERS_WRITE if folder.lstat().st_mode & _OTHERS_ENTER else 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            place = os.path.join(parent, name)
            with suppress(FileNotFoundError):  # another process has just deleted it
                status = os.lstat(place)
                if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & refused:
                    raise PermissionError(f"{place} may come from another user; delete {folder}")


def is_own_file(path: Path) -> bool:
    """Tell whether a path is a file, not a link, that belongs to this user and that nobody else can write to."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return False
    return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & _OTHERS_WRITE)


def _check_way_to(folder: Path) -> None:
    """Raise ``OSError`` if others can rename a folder on the way, and so put another one in its place."""
    if not hasattr(os, "getuid"):
        return
    for place in _way(folder.parent):
        status = place.lstat()
        if status.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{place} belongs to another user, who can replace {folder}")
        if stat.S_ISDIR(status.st_mode) and status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(f"other users can write to {place} and replace {folder}")


def _way(folder: Path) -> Iterator[Path]:
    """Yield the folders and links by which the system finds a folder."""
    folder.resolve(strict=True)  # raises where links turn in a circle
    place = Path(folder.absolute().anchor)
    yield place
    rest = list(folder.absolute().parts[1:])
    while rest:
        name = rest.pop(0)
        if name == os.pardir:
            place = place.parent
            continue
        yield place / name
        if (place / name).is_symlink():
            target = (place / name).readlink()
            place = Path(target.anchor) if target.anchor else place
            rest[:0] = target.parts[1:] if target.anchor else target.parts
        else:
            place = place / name


@lru_cache
def _of_this_process(process: int) -> Path:
    """Make a folder that is deleted when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="bayeskit_"))

    def delete() -> None:
        if os.getpid() == process:  # not in a copy of the process
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(delete)
    return folder
