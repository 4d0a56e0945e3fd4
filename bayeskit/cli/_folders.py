"""The folder of a run, and the files it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from bayeskit._core.folders import RunFolder
from bayeskit.cli._application import OPENED
from bayeskit.cli._tables import new_console, print_files
from bayeskit.errors import AlignmentError, TreeError


def opened(
    command: str, name: str, out: Path | None, force: bool, quiet: bool, settings: Mapping[str, Any]
) -> RunFolder | None:
    """Return the folder of a run, or None if the run is finished, which is said."""
    default = Path("results") / f"{command}-{name}"
    folder = RunFolder(out, {"command": command, **settings}, default=default, force=force)
    if folder.finished is None:
        OPENED.set(folder)
        return folder
    said, status = folder.finished
    if not quiet:
        new_console().print(Text(f"finished before: {said}", style="bold"), soft_wrap=True)
        print_files(folder.path, folder.files())
        typer.echo("pass --force to run it again")
    if status:
        raise typer.Exit(status)
    return None


def say_where(folder: RunFolder, out: Path | None, quiet: bool) -> None:
    if out is None and not quiet:
        typer.echo(f"results go to {folder.path}", err=True)


def named_files(*paths: Path | None) -> dict[str, str]:
    return {path.name: file_digest(path) for path in paths if path is not None}


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def checked_files(alignment: Path | None, tree: Path | None, substitution: str | None) -> str:
    """Return the title of the run of an alignment on a tree."""
    from bayeskit.gallery._trees import check_substitution

    if substitution is not None:
        check_substitution(substitution)
    for path, kind in ((alignment, AlignmentError), (tree, TreeError)):
        if path is not None and not path.is_file():
            raise kind(f"{path}: there is no such file")
    return "" if alignment is None else alignment.name
