"""C++ compiled on first use by the machine's compiler, and kept for the next process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from bayeskit._core.progress import progress_bar
from bayeskit._core.trusted_folders import is_own_file, make_private, own_folders
from bayeskit.errors import ModelError

#: Flags of every library, which uses all vector instructions of this processor.
FLAGS = ("-O3", "-shared", "-fPIC", *(() if sys.platform == "darwin" else ("-march=native",)))
#: Seconds by the clock after which a compiler counts as hung; it needs four of a processor, which may be shared.
_COMPILE_SECONDS = 1800.0
_POLL_SECONDS = 0.2
_MOST = 1000  # libraries of one name in a folder, beyond which the oldest are deleted


def compiler() -> str | None:
    """Return the path of a C++ compiler: that of the variable CXX, or the first of g++, clang++ and c++; or None."""
    return _found(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@lru_cache
def _found(named: str, path: str) -> str | None:
    return next(
        (found for name in (named, "g++", "clang++", "c++") if name and (found := shutil.which(name, path=path))), None
    )


def load_library(
    name: str, sources: Mapping[str, str], flags: Sequence[str], linked: Sequence[str] = ()
) -> ctypes.CDLL:
    """Load the library of C++ sources, the first of which is compiled; an earlier process may have done it.

    Libraries that it needs are ``linked``. Raise ``OSError`` without a compiler, or if no folder can hold the library,
    and ``subprocess.SubprocessError`` if the compiler fails.
    """
    chosen = compiler()
    if chosen is None:
        raise OSError("no C++ compiler was found; install g++ or clang++")
    identity = _identity(chosen, sources, (*flags, *linked))
    problem = OSError("no folder can hold it")
    for folder in own_folders():
        try:
            make_private(folder)  # code of other users is not run
            path = _kept(folder, f"{name}_{identity}") or _made(
                folder, f"{name}_{identity}", chosen, sources, flags, linked
            )
            return ctypes.CDLL(str(path))
        except OSError as error:  # the folder may be read-only, full, or not for code
            problem = error
    raise problem


def raise_for_status(status: int, what: str) -> None:
    """Raise the error of a call of compiled code on ``what`` that has not returned 0."""
    if status == 2:
        raise ModelError(f"compiled code cannot go on with {what}: all weights of a choice are NaN or zero")
    if status:
        raise MemoryError(f"compiled code had too little memory for {what}")


def _identity(chosen: str, sources: Mapping[str, str], flags: Sequence[str]) -> str:
    """Return a short text that differs for each source, compiler and processor."""
    binary = os.stat(chosen)
    known = (chosen, str(binary.st_size), str(binary.st_mtime_ns), _processor())
    return _digest("\0".join((*sources, *sources.values(), *flags, *known)).encode())


@lru_cache
def _processor() -> str:
    """Return the name of the processor's kind, and its instructions where Linux lists them."""
    found = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        found += next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _kept(folder: Path, stem: str) -> Path | None:
    """Return the library in a folder, if any, and delete libraries that are damaged or may come from other users."""
    for path in folder.glob(f"{stem}_*.so"):
        # Loading a truncated library could crash the process.
        if is_own_file(path) and path.stem.rpartition("_")[2] == _digest(path.read_bytes()):
            return path
        path.unlink()
    return None


def _made(
    folder: Path, stem: str, chosen: str, sources: Mapping[str, str], flags: Sequence[str], linked: Sequence[str]
) -> Path:
    """Compile the library into a folder, under a name with the hash of its content."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for file, text in sources.items():
            (Path(scratch) / file).write_text(text, encoding="utf-8")
        made = Path(scratch) / "library.so"
        _compile([chosen, *flags, str(Path(scratch) / next(iter(sources))), *linked, "-o", str(made)])
        made.chmod(0o700)
        path = made.replace(folder / f"{stem}_{_digest(made.read_bytes())}.so")
    _forget_the_oldest(folder, stem.partition("_")[0])
    return path


def _compile(command: Sequence[str]) -> None:
    """Run the compiler, with a bar on a terminal if it takes more than two seconds."""
    begin = time.monotonic()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        progress_bar("compiling C++, once on this machine", None) as bar,
    ):
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - begin
                    if seconds > _COMPILE_SECONDS:
                        raise subprocess.TimeoutExpired(command[0], _COMPILE_SECONDS) from None
                    bar.update(int(seconds))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)


def _forget_the_oldest(folder: Path, name: str) -> None:
    """Delete the oldest libraries of a name where there are very many; a process that has one open keeps it."""
    with suppress(OSError):
        found = sorted(folder.glob(f"{name}_*.so"), key=lambda path: path.stat().st_mtime)
        for path in found[:-_MOST]:
            path.unlink()
