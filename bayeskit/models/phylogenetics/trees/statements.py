"""The statements of Newick and NEXUS files, one after another.

DendroPy takes a file that ends too early for a complete one; the code here does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bayeskit.errors import AlignmentError, TreeError

QUOTED = re.compile(r"'(?:[^']|'')*'")
_PIECE = re.compile(r"[^'\[\];]+|'(?:[^']|'')*'|.")
_COMMENT_EDGE = re.compile(r"[\[\]]")
ErrorType = type[AlignmentError] | type[TreeError]


class Statement(NamedTuple):
    """Text up to a ';', its first line, whether there is a ';', and the comments before any parenthesis."""

    line: int
    text: str
    closed: bool
    notes: tuple[str, ...]


def read_text(path: str | os.PathLike[str], what: str, error: ErrorType) -> str:
    """Read a text file that should hold `what`."""
    source = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        if isinstance(problem, FileNotFoundError):
            said = "there is no such file"
        else:
            said = f"the file cannot be read as text ({getattr(problem, 'strerror', None) or problem})"
        raise error(f"{source}: {said}. Remedy: give the path of {what}.") from problem
    if not text.strip():
        raise error(f"{source}: the file is empty. Remedy: give {what}.")
    return text


def statements(text: str, source: str, error: ErrorType, line: int = 1) -> Iterator[Statement]:
    """Yield each statement, ended by a ';' outside quotes and comments or by the end of the text.

    Comments are left out, but not their line ends; `line` is where `text` starts in the file. A
    '#NEXUS' at the start is skipped.
    """
    head = re.match(r"\s*#nexus", text, re.IGNORECASE)
    position = head.end() if head else 0
    line += text.count("\n", 0, position)
    parts: list[str] = []
    notes: list[str] = []
    opened = False

    def statement(closed: bool) -> Statement:
        body = "".join(parts).lstrip()
        found = Statement(line - body.count("\n"), body.rstrip(), closed, tuple(notes))
        parts.clear()
        notes.clear()
        return found

    while match := _PIECE.match(text, position):
        piece, position = match.group(), match.end()
        if piece in ("'", "]"):
            what = "quotation mark" if piece == "'" else f"character {piece!r}"
            raise error(f"{source}, line {line}: unmatched {what}. Remedy: close or remove it.")
        if piece == ";":
            yield statement(True)
            opened = False
            continue
        if piece == "[":
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(text, position)
                if edge is None:
                    raise error(f"{source}, line {line}: a comment is never closed. Remedy: add ']'.")
                depth += 1 if edge.group() == "[" else -1
                position = edge.end()
            if not opened:
                notes.append(text[match.end() : position - 1])
            piece = "\n" * text.count("\n", match.start(), position)
        opened = opened or "(" in piece
        parts.append(piece)
        line += piece.count("\n")
    last = statement(False)
    if last.text:
        yield last


def nexus_commands(text: str, source: str, error: ErrorType) -> Iterator[tuple[str, str, int, str]]:
    """Yield block, first word, its line and the rest of each NEXUS command; refuse a file that ends too early."""
    for block, head, line, rest, _ in noted_commands(text, source, error):
        yield block, head, line, rest


def noted_commands(text: str, source: str, error: ErrorType) -> Iterator[tuple[str, str, int, str, tuple[str, ...]]]:
    """Yield what `nexus_commands` does, and the comments of each command."""
    block, line = "", 1
    for line, statement, closed, notes in statements(text, source, error):
        first = statement.split(None, 1)[0] if statement else ""
        head, rest = first.lower(), statement[len(first) :]
        if not closed:
            block = block or head
            break
        if head == "begin":
            block = rest.strip().lower()
        elif head in ("end", "endblock"):
            block = ""
        else:
            yield block, head, line, rest, notes
    if block:
        raise error(
            f"{source}, line {line}: the file ends inside {block.upper()}, without 'END;'. Remedy: the file "
            "seems truncated; write or copy it again."
        )


def unquoted(text: str) -> str:
    """Return a text whose quoted words stand without their quotes."""
    return QUOTED.sub(lambda found: found.group()[1:-1].replace("''", "'"), text)
