"""The folder in which torch's compiler keeps code, and from which it loads libraries and pickles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from bayeskit._core.trusted_folders import check_contents, make_private, own_folders

_TORCH, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_lock = Lock()
_before: list[dict[str, str | None]] = []  # the variables before each context that has not ended


class CompilerCache(NamedTuple):
    """Where compiled code is kept, options of the compiler, and why a folder that the user chose is not used."""

    folder: Path
    options: dict[str, Any]
    problem: str | None


@contextmanager
def compiler_cache() -> Iterator[CompilerCache]:
    """Have torch's compiler load code only from folders that nobody but this user can change.

    That is the folder of ``TORCHINDUCTOR_CACHE_DIR``, torch's default or, where these are refused, one of bayeskit. In
    the context the variable names it, because the compiler reads it anew at each step; contexts may overlap in threads,
    and the last to end restores the variables. Raise ``OSError`` where no folder can be used.
    """
    if os.environ.get(_TORCH):
        _problem(Path(os.environ[_TORCH]).absolute())  # makes it, if need be, before an import of torch does
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = Path(default_cache_dir()).absolute()
    with _lock:  # what the first of several contexts found holds for the others
        named = _before[0][_TORCH] if _before else os.environ.get(_TORCH)
        wanted = Path(named or default).absolute()
        folder, problem = _first_usable(wanted)
        options: dict[str, Any] = {}
        # Torch keeps precompiled headers in its default folder, whatever the variable names.
        if hasattr(config, "cpp_cache_precompile_headers") and _problem(default / "precompiled_headers"):
            options["cpp_cache_precompile_headers"] = False
        _before.append({name: os.environ.get(name) for name in (_TORCH, _TRITON)} if not _before else _before[0])
        os.environ[_TORCH] = str(folder)
        if _TRITON in os.environ and _problem(Path(os.environ[_TRITON]).absolute()):
            os.environ[_TRITON] = str(folder / "triton")
    try:
        yield CompilerCache(folder, options, _said(wanted, problem, folder) if wanted != default else None)
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value


def _first_usable(wanted: Path) -> tuple[Path, str | None]:
    """Return the first folder that can be used, and what is wrong with the wanted one."""
    problem = last = _problem(wanted)
    if problem is None:
        return wanted, None
    for folder in own_folders():
        last = _problem(folder / "torch")
        if last is None:
            return folder / "torch", problem
    raise OSError(f"no folder can hold compiled code: {last}")


def _problem(folder: Path) -> str | None:
    try:
        make_private(folder)
        _check_contents_once(folder)
    except OSError as error:
        return str(error)
    return None


@lru_cache
def _check_contents_once(folder: Path) -> None:
    # Nobody else can add to them afterwards: that the folder is private is tested each time.
    check_contents(folder)


def _said(wanted: Path, problem: str | None, folder: Path) -> str | None:
    return problem and (
        f"compiled code is not loaded from {wanted}, which {_TORCH} names ({problem}); it is kept in {folder}. Remedy: "
        "choose a folder that nobody else can write to"
    )
