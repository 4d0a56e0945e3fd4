"""Trees in Newick and NEXUS text."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import NamedTuple

import dendropy
import torch
from dendropy.dataio.nexusprocessing import NexusTokenizer
from dendropy.utility.error import DataParseError

from bayeskit.errors import AlignmentError, ConversionWarning, SettingsError, TreeError
from bayeskit.extend import warn_user

# The statements of Newick and NEXUS files. DendroPy accepts a truncated file as complete; this code does not.

# A quotation mark right behind a letter or digit is part of the word, as in O'Brien.
QUOTED = re.compile(r"(?<!\w)'(?:[^']|'')*'")
_PIECE = re.compile(r"(?:[^'\[\];]+|(?<=\w)')+|'(?:[^']|'')*'|.")
#: The first line of a NEXUS file, and the lines before its first block that begin with '#'.
_NEXUS_HEAD = re.compile(r"\s*#nexus(?:(?:\s|\[[^\[\]]*\])*\n[ \t]*#[^\n]*)*", re.IGNORECASE)
#: A quoted label, or one with an apostrophe inside and its blanks in front.
_APOSTROPHE = re.compile(rf"{QUOTED.pattern}|(?<=[(,)])(\s*)([^\s()\[\]{{}},:;='\"]+'[^\s()\[\]{{}},:;=\"]*)")
_COMMENT_EDGE = re.compile(r"[\[\]]")
ErrorType = type[AlignmentError] | type[TreeError]


class _Statement(NamedTuple):
    """Text up to a ';', its first line, whether there is a ';', and the comments before any parenthesis."""

    line: int
    text: str
    closed: bool
    notes: tuple[str, ...]


#: First bytes of compressed files that are not read.
_COMPRESSED = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def path_name(path: object, what: str, error: ErrorType) -> str:
    """Return a path as text; raise `error` for anything else."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise error(f"path: {path!r:.60} is not a path. Remedy: give the path of {what}.")
    return name


def read_text(path: str | os.PathLike[str], what: str, error: ErrorType) -> str:
    """Read a text file, plain or compressed by gzip, that should hold `what`."""
    source = path_name(path, what, error)
    try:
        content = Path(source).read_bytes()
        for start, kind in _COMPRESSED.items():
            if content.startswith(start):
                raise error(f"{source}: the file is compressed ({kind}). Remedy: unpack it, or compress it with gzip.")
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        encoding = _encoding(content)
        text = TextIOWrapper(BytesIO(content), encoding=encoding).read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as problem:
        if isinstance(problem, FileNotFoundError):
            said = "there is no such file"
        else:
            said = f"the file cannot be read as text ({getattr(problem, 'strerror', None) or problem})"
        raise error(f"{source}: {said}. Remedy: give the path of {what}.") from problem
    if not text.strip():
        raise error(f"{source}: the file is empty. Remedy: give {what}.")
    if encoding not in _UTF_8:
        warn_user(
            f"{source}: the file is not in UTF-8; it was read as {encoding}. Remedy: check the names with accents, and "
            "write the file in UTF-8.",
            ConversionWarning,
        )
    return text


_UTF_8 = ("utf-8", "utf-8-sig")
#: Encodings by their byte order mark, the longer marks first.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def _encoding(content: bytes) -> str:
    """Return the encoding of a text: by its byte order mark, else UTF-8 where it is that, else Latin-1.

    Bytes 128 to 159 are control characters in Latin-1, so they mean that the text is in its extension Windows-1252.
    UnicodeDecodeError if the bytes are no text in any of them.
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return encoding
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        if b"\x00" in content:  # no text in Latin-1 holds it
            raise
        encoding = "Windows-1252" if re.search(rb"[\x80-\x9f]", content) else "Latin-1"
        content.decode(encoding)
        return encoding
    return "utf-8"


def _statements(text: str, source: str, error: ErrorType, line: int = 1) -> Iterator[_Statement]:
    """Yield each statement up to a ';' outside quotes and comments, or to the end of the text."""
    # Comments are left out, but not their line ends; `line` is that of the start of `text`.
    head = _NEXUS_HEAD.match(text)
    position = head.end() if head else 0
    line += text.count("\n", 0, position)
    parts: list[str] = []
    notes: list[str] = []
    opened = False

    def statement(closed: bool) -> _Statement:
        body = "".join(parts).lstrip()
        found = _Statement(line - body.count("\n"), body.rstrip(), closed, tuple(notes))
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
    """Yield block, first word, its line and the rest of each NEXUS command; raise `error` for a truncated file."""
    for block, head, line, rest, _ in _noted_commands(text, source, error):
        yield block, head, line, rest


def _noted_commands(text: str, source: str, error: ErrorType) -> Iterator[tuple[str, str, int, str, tuple[str, ...]]]:
    """Yield the commands as `nexus_commands` does, with the comments of each command."""
    block, line = "", 1
    for line, statement, closed, notes in _statements(text, source, error):
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
    """Remove the quotes of quoted words."""
    return QUOTED.sub(lambda found: found.group()[1:-1].replace("''", "'"), text)


# Random resolution of nodes with too many children.


def resolve_at_random(
    children: list[list[int]], lengths: list[float | None], length: float | None, generator: torch.Generator
) -> None:
    """Resolve polytomies in place, all ways equally likely; new nodes are appended, with edges of length `length`."""
    for node in range(len(children)):
        # Three edges meet at the root of an unrooted tree; the first serves as the edge above it.
        kept = 1 if node == 0 and len(children[node]) > 2 else 0
        if len(children[node]) - kept > 2:
            top = _join(children[node][kept:], children, lengths, length, generator)
            # The node itself replaces the topmost new node.
            children[node] = [*children[node][:kept], *children[top]]
            children[top] = []


def _join(
    parts: list[int],
    children: list[list[int]],
    lengths: list[float | None],
    length: float | None,
    generator: torch.Generator,
) -> int:
    """Join nodes two at a time and return the topmost of the new ones."""
    nodes = [parts[0]]
    parents: dict[int, int] = {}
    for part in parts[1:]:
        # Grafted onto the edge above a node chosen uniformly.
        target = nodes[int(torch.randint(len(nodes), (), generator=generator))]
        joint = len(children)
        children.append([target, part])
        lengths.append(length)
        if target in parents:
            above = children[parents[target]]
            above[above.index(target)] = joint
            parents[joint] = parents[target]
        parents[target] = parents[part] = joint
        nodes += [joint, part]
    return next(node for node in nodes if node not in parents)


# The trees of Newick and NEXUS files as texts, with their annotations.

#: The weight that PAUP and MrBayes give a tree, `[&W 1/3]` or `[p = 0.33, P = 0.9]`, and lists, `0.33 (...)`.
_WEIGHT_NOTE = re.compile(r"&w\s+([^\s/]+)(?:\s*/\s*(\S+))?\s*", re.IGNORECASE)
_PROBABILITY_NOTE = re.compile(r"\s*p\s*=\s*([^\s,]+)\s*(?:,.*)?", re.DOTALL)
_LEADING_WEIGHT = re.compile(r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|nan|inf))[ \t]+(?=\()", re.IGNORECASE)
#: The names that MrBayes and BEAST give the trees of a chain, such as `gen.1000` and `STATE_1000`.
_GENERATION = re.compile(r"'?(?:gen|generation|state|iteration)[._ ]?([0-9]+)'?", re.IGNORECASE)
#: Columns of a log (RevBayes, BEAST) that number the rows of a chain, and the column that numbers its runs.
_GENERATION_COLUMNS = ("iteration", "generation", "sample", "state")
_RUN_COLUMN = "replicate_id"
#: First line of a tree file of PHYLIP (number of trees) or PAML (number of taxa, number of trees).
_COUNTS = re.compile(r"\s*(?:([0-9]+)[ \t]+)?([0-9]+)[ \t]*\r?\n(?=\s*[(\[])")
_OPAQUE = rf"\[[^\[\]]*\]|{QUOTED.pattern}"
_TREE_END = re.compile(rf"{_OPAQUE}|(;)")
#: Marks of branches and ages of nodes in PAML's trees, such as `#1`, `$1`, `@0.5`, `'>0.6<0.8'` and `'B(0.6, 0.8)'`,
#: and remarks from a '/' to the end of a line.
_PAML_MARK = r"(?:'(?:[#$@<>]|[A-Z0-9]+\()[^']*'|(?:[#$@<>][ ]*(?:[0-9]+\.?[0-9]*|\.[0-9]+))+)"
_PAML_REMARK = re.compile(r"(?:(?<=;)[ \t]*|^[ \t]*/)/[^\n]*", re.MULTILINE)


@dataclass(frozen=True)
class TreeText:
    """A Newick description, its place in a file, and its annotations there."""

    newick: str
    source: str  # name of the file
    line: int  # where the description starts
    translate: Mapping[str, str]  # names by their abbreviations, as in `every_name`
    weight: float | None = None  # weight or probability; None where the file gives none
    rooted: bool | None = None  # None where it is not marked
    name: str | None = None  # in NEXUS; None in Newick
    generation: int | None = None  # its number in a chain; None where the file gives none
    run: str = ""  # in a log of several runs


def read_tree_texts(path: str | os.PathLike[str], incomplete: str = "error") -> list[TreeText]:
    """Return the tree descriptions of a file in file order; TreeError if it is invalid or has none.

    The file is NEXUS, a list in Newick (PHYLIP and PAML put counts before it), or a log of RevBayes. Of a truncated
    file, `incomplete="warn"` returns the complete trees with a ConversionWarning.
    """
    if incomplete not in ("error", "warn"):
        raise SettingsError(f"incomplete={incomplete!r} is unknown. Remedy: use 'error' or 'warn'.")
    text = read_text(path, "a file with a Newick or NEXUS tree", TreeError)
    source = os.fspath(path)
    _refuse_alignment(text, source)
    text, announced = _announced_part(text, source)
    log = _log_columns(text) is not None
    find = _log_texts if log else _find_texts
    complete = _complete_log(text) if log else _complete_part(text, announced)
    if complete is None:
        return find(text, source)
    if incomplete == "error":
        try:
            found = find(text, source)
            if len(found) < announced:
                raise TreeError(
                    f"{source}: the first line announces {announced} trees, but the file has {len(found)}. Remedy: "
                    "correct the number, or write the file again."
                )
            return found
        except TreeError as error:
            raise TreeError(
                f"{error} If the file is still being written, use TreeSample.from_file(..., incomplete='warn'), which "
                "reads the complete trees."
            ) from error
    found = find(complete, source)
    line = text.count("\n", 0, text.rfind(";")) + 1
    warn_user(
        f"{source}: the file ends too early. Its {len(found)} complete trees, up to line {line}, were read.",
        ConversionWarning,
    )
    return found


def _refuse_alignment(text: str, source: str) -> None:
    start = text.lstrip()
    if start.startswith(">") or (re.match(r"[0-9]+[ \t]+[0-9]+[ \t]*\r?\n", start) and not _COUNTS.match(text)):
        raise TreeError(f"{source}: this is an alignment, not a tree. Remedy: read it with Alignment.from_file.")


def _announced_part(text: str, source: str) -> tuple[str, int]:
    """Return the trees that a first line of counts announces, at their lines, and their number; else the text and 0."""
    counts = _COUNTS.match(text)
    if counts is None:
        return text, 0
    num_taxa, number = counts.group(1), int(counts.group(2))
    start, text = counts.end(), _PAML_REMARK.sub("", text)
    ends = [start, *(end.end() for end in _TREE_END.finditer(text, start) if end.group(1))]
    stop = ends[number] if len(ends) > number else len(text)
    if found := re.search(r"^\s*\(", text[stop:], re.MULTILINE):
        line = text.count("\n", 0, stop + found.end()) + 1
        warn_user(
            f"{source}, line {line}: the first line announces {number} trees; what follows them was not read.",
            ConversionWarning,
        )
    # The names of PHYLIP, which gives one count, may hold such marks, but no blank.
    marks = re.compile(rf"({_OPAQUE})|{'[ ]*' if num_taxa else '(?:[ ]+|(?<=[)]))'}{_PAML_MARK}")
    trees = marks.sub(lambda mark: mark.group(1) or "", text[start:stop].replace("\t", " "))
    return "\n" * counts.group().count("\n") + trees, number


def _complete_part(text: str, announced: int) -> str | None:
    """Return the readable part of a truncated file, or None if the file is complete."""
    end = text.rfind(";") + 1
    behind = re.sub(r"\[[^\[\]]*\]", "", text[end:]).strip()
    if text.lstrip()[:6].upper() != "#NEXUS":
        short = announced and announced > sum(end.group(1) is not None for end in _TREE_END.finditer(text))
        return text[:end] if (behind or short) and end else None
    closed = re.search(r"\bend(block)?\s*;$", text[:end], re.IGNORECASE)
    return None if closed and not behind else text[:end] + "\nend;"


def _log_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the columns of each line of a log that is neither blank nor a comment."""
    for line, row in enumerate(text.split("\n"), start=1):
        if row.strip() and not row.startswith("#"):
            yield line, [column.strip() for column in row.split("\t")]


def _log_columns(text: str) -> list[str] | None:
    """Return the names of the columns of a log, or None for any other text."""
    _, header = next(_log_lines(text), (0, []))
    numbered = any(name.lower() in _GENERATION_COLUMNS for name in header)
    return header if numbered and len(header) > 1 and not any("(" in name for name in header) else None


def _is_tree(entry: str) -> bool:
    return entry.endswith(";") and re.match(r"(\[[^\[\]]*\]\s*)*\(", entry) is not None


def _complete_log(text: str) -> str | None:
    """Return the complete rows of a log whose last row is truncated, or None if it is complete."""
    header, *rows = (row for _, row in _log_lines(text))
    if not rows or (len(rows[-1]) == len(header) and any(map(_is_tree, rows[-1]))):
        return None
    return text[: text.rstrip().rfind("\n") + 1]


def _log_texts(text: str, source: str) -> list[TreeText]:
    """Return the trees of a log: a header, and one column of Newick among columns of numbers."""
    (header_line, header), *rows = _log_lines(text)
    names = [name.lower() for name in header]
    generation = next(names.index(name) for name in _GENERATION_COLUMNS if name in names)
    columns = [column for column, entry in enumerate(rows[0][1] if rows else []) if _is_tree(entry)]
    if len(columns) != 1:
        held = " and ".join(repr(header[column]) for column in columns[:5])
        raise TreeError(
            f"{source}, line {header_line}: "
            + (
                f"the columns {held} hold trees. Remedy: keep one of them in a copy of the file."
                if columns
                else "no column of this log holds trees. Remedy: give the file to which the sampler writes its trees."
            )
        )
    found = []
    for line, row in rows:
        if len(row) != len(header) or not _is_tree(row[columns[0]]):
            said = f"the row has {len(row)} columns of {len(header)}" if len(row) != len(header) else "there is no tree"
            raise TreeError(f"{source}, line {line}: {said}. Remedy: write the row again, or remove it.")
        if not re.fullmatch(r"[0-9]+", row[generation]):
            raise TreeError(
                f"{source}, line {line}: {row[generation]!r} in the column {header[generation]!r} is not a whole "
                "number. Remedy: give the number of the generation."
            )
        run = row[names.index(_RUN_COLUMN)] if _RUN_COLUMN in names else ""
        newick = row[columns[0]].removesuffix(";")
        marks = tuple(note[1:-1] for note in re.findall(r"\[[^\[\]]*\]", newick[: newick.index("(")]))
        place = TreeText(newick, source, line, {}, _weight(marks, source, line), _rooted(marks))
        found.append(replace(place, generation=int(row[generation]), run=run))
    return found


def _find_texts(text: str, source: str) -> list[TreeText]:
    found: list[TreeText] = []
    translate: Mapping[str, str] = {}
    if text.lstrip()[:6].upper() != "#NEXUS":
        for line, statement, _, notes in _statements(text, source, TreeError):
            leading = _LEADING_WEIGHT.match(statement)
            skipped = leading.end() if leading else 0
            notes = (*notes, f"&W {leading.group(1)}") if leading else notes
            weight = _weight(notes, source, line)
            found.append(TreeText(statement[skipped:], source, line, translate, weight, _rooted(notes)))
    else:
        # DendroPy's own NEXUS reader takes a label such as '1' for the first taxon it has met, even
        # where no block numbers the taxa, so it gets the descriptions one by one.
        tables: dict[str, Mapping[str, str]] = {}
        title = ""
        for block, head, line, rest, notes in _noted_commands(text, source, TreeError):
            if block == "taxa" and head == "title":
                title = unquoted(rest).strip().lower()
            elif block == "taxa" and head == "taxlabels":
                translate = tables[title] = every_name(_numbers(rest))
            elif block == "trees" and head == "link":
                linked = re.search(rf"\btaxa\s*=\s*({QUOTED.pattern}|\S+)", rest, re.IGNORECASE)
                translate = tables.get(unquoted(linked[1]).lower(), translate) if linked else translate
            elif block == "trees" and head == "translate":
                translate = every_name(_translation(rest, source, line))
            elif block == "trees" and head in ("tree", "utree"):
                name = re.match(r"(?:[^'=]|'(?:[^']|'')*')*=", rest)
                if name is None:
                    raise TreeError(f"{source}, line {line}: a tree without '='. Remedy: write 'tree NAME = ...;'.")
                at = line + name.group().count("\n")
                rooted = False if head == "utree" else _rooted(notes)
                weight = _weight(notes, source, line)
                label = name.group()[:-1].strip(" *\t\r\n")
                number = _GENERATION.fullmatch(label)
                generation = int(number.group(1)) if number else None
                found.append(TreeText(rest[name.end() :], source, at, translate, weight, rooted, label, generation))
    if not found:
        if re.search(r"\bmatrix\b", text, re.IGNORECASE):
            remedy = "this is an alignment; read it with Alignment.from_file"
        else:
            remedy = "give a file with a Newick or NEXUS tree"
        raise TreeError(f"{source}: the file holds no tree. Remedy: {remedy}.")
    return found


def _rooted(notes: tuple[str, ...]) -> bool | None:
    """Read the mark `[&R]` or `[&U]`."""
    marks = [note.strip().upper() for note in notes]
    return True if "&R" in marks else False if "&U" in marks else None


def _weight(notes: tuple[str, ...], source: str, line: int) -> float | None:
    """Read `[&W ...]`, or else `[p = ...]`, which has fewer digits."""
    found = [
        match for pattern in (_WEIGHT_NOTE, _PROBABILITY_NOTE) for note in notes if (match := pattern.fullmatch(note))
    ]
    if not found:
        return None
    try:
        numerator, *denominator = (float(number) for number in found[0].groups() if number is not None)
        weight = numerator / denominator[0] if denominator else numerator
    except (ValueError, ZeroDivisionError):
        weight = float("nan")
    if not 0.0 <= weight < float("inf"):
        raise TreeError(
            f"{source}, line {line}: {found[0].group().strip()!r} gives no weight of at least 0. Remedy: write a "
            "number such as '[&W 0.25]'."
        )
    return weight


def _numbers(text: str) -> dict[str, str]:
    """Map the number of each taxon of a TAXLABELS command to its name, unless that number is itself a name."""
    taxa = list(NexusTokenizer(StringIO(text), preserve_unquoted_underscores=True))
    known = set(taxa)
    return {str(number): taxon for number, taxon in enumerate(taxa, start=1) if str(number) not in known}


def every_name(table: Mapping[str, str]) -> dict[str, str]:
    """Add to a table of names each name itself, and its forms with blanks for underscores and underscores for blanks.

    NEXUS takes a blank and an underscore for the same. A form that two names share is left out.
    """
    forms: dict[str, str | None] = {}
    for name in dict.fromkeys(table.values()):
        for form in {name.replace("_", " "), name.replace(" ", "_")}:
            forms[form] = None if form in forms else name
    added = {form: name for form, name in forms.items() if name is not None} | {name: name for name in table.values()}
    return {**table, **{form: name for form, name in added.items() if form not in table}}


def _translation(text: str, source: str, line: int) -> dict[str, str]:
    translate: dict[str, str] = {}
    entry: list[str] = []
    for word in [*NexusTokenizer(StringIO(text), preserve_unquoted_underscores=True), ","]:
        if word != ",":
            entry.append(word)
            continue
        if len(entry) not in (0, 2):
            raise TreeError(
                f"{source}, line {line}: the translate entry {' '.join(entry)!r} is not a pair of key and "
                "name. Remedy: write 'KEY NAME' pairs separated by ','."
            )
        if entry and entry[0] in translate:
            raise TreeError(
                f"{source}, line {line}: the translate key {entry[0]!r} occurs twice. Remedy: give each name its own "
                "key."
            )
        if entry:
            translate[entry[0]] = entry[1]
        entry = []
    return translate


# Trees in Newick text, read by DendroPy. It drops an empty node before ')' and lets a second branch length replace the
# first; both are refused here. Descriptions of plain names and numbers, as samplers write them by the thousand, are
# read without it, with the same result in a twentieth of the time.

#: Syntax left to DendroPy to read or refuse: quotes, comments and misplaced parentheses.
_NOT_PLAIN = re.compile(r"['\"\\\[\]{}=;]|[(,][ \t\r\n]*[,)]|[^(, \t\r\n][ \t\r\n]*\(")
#: A parenthesis or comma with the label and length behind it, or any other character.
_PLAIN = re.compile(
    r"([(),])[ \t\r\n]*([^\s(),:]*)[ \t\r\n]*"
    r"(?::[ \t\r\n]*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)[ \t\r\n]*)?|(.)",
    re.DOTALL,
)
#: Faults that DendroPy accepts: pattern, problem, remedy.
_ACCEPTED_FAULTS = (
    (re.compile(r"[(,]\s*([,)])"), "a node is missing before {!r}", "name every tip"),
    (re.compile(r"[^\s(),:'](')"), "a quotation mark {!r} is inside a word", "quote the whole label"),
    (
        re.compile(r":\s*+[^\s,():{}=\"\\]++\s*+([^\s,()])"),
        "{!r} after a length does not follow a node",
        "write each length once, after its node",
    ),
)
#: Faults that DendroPy refuses: start of its message, problem, remedy.
_REFUSED_FAULTS = (
    (
        r"Invalid edge length: ';'|Unbalanced",
        "there is no complete tree: the text ends inside a parenthesis or a length",
        "balance the parentheses",
    ),
    (r"Invalid edge length: (.*)", "the branch length {} is not a number", "write a number"),
    (r"Incomplete or improperly.*was ('.*') instead", "{} is outside all parentheses", "balance the parentheses"),
    (r"Malformed tree statement", "'(' follows a complete node", "separate sister nodes by ',', and trees by ';'"),
    (
        r"Expecting .* but found (.*)",
        "{} follows a complete node",
        "quote labels that contain blanks or marks, and end each tree by ';'",
    ),
    (r"(.*)", "{}", "give a tree such as '((A,B),C,D);'"),
)
_LIMIT = threading.Lock()
#: Source of a text that is not from a file.
_IN_MEMORY = "Newick text"


@dataclass(frozen=True)
class ParsedTree:
    """Nodes of one Newick description, in the order in which they open; the root is node 0."""

    children: list[list[int]]  # from left to right
    labels: list[str | None]
    lengths: list[float | None]  # of the edge above each node


@contextmanager
def _frames(number: int) -> Iterator[None]:
    """Raise the recursion limit by `number`."""
    # DendroPy reads a tree by recursion, one call for each nested node; since Python 3.11 these calls take no C stack.
    with _LIMIT:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + number)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


def quote(label: str) -> str:
    """Return a label as Newick text, in quotes where it needs them."""
    return label if re.fullmatch(r"[^\s()\[\]{},:;='\"\\]+", label) else "'" + label.replace("'", "''") + "'"


def parse_newick(text: str, source: str = _IN_MEMORY, first_line: int = 1) -> ParsedTree:
    """Read one Newick description; a TreeError names `source` and the line, counted from `first_line`."""
    found = list(_statements(text, source, TreeError, first_line))
    line, newick = found[0][:2] if found else (first_line, "")

    def fail(line: int, problem: str, remedy: str) -> TreeError:
        if problem.startswith("there is no complete tree: ") and source != _IN_MEMORY:
            remedy += ", or, if the file is still being written, use TreeSample.from_file(..., incomplete='warn')"
        return TreeError(f"{source}, line {line}: {problem}. Remedy: {remedy}.")

    if not newick:
        raise fail(line, "there is no complete tree", "give a tree such as '((A,B),C,D);'")
    if len(found) > 1:
        raise fail(found[1].line, f"{found[1].text!r} follows the end of the tree", "give one tree, ended by ';'")
    if plain := _read_plain(newick):
        return _without_single_children(plain, source)
    newick = _APOSTROPHE.sub(
        lambda label: label.group(1) + quote(label.group(2)) if label.group(2) else label[0], newick
    )
    bare = QUOTED.sub(lambda match: "'" * len(match.group()), newick)
    for fault, problem, remedy in _ACCEPTED_FAULTS:
        if match := fault.search(bare):
            raise fail(line + newick.count("\n", 0, match.start(1)), problem.format(match.group(1)), remedy)
    try:
        with _frames(bare.count("(")):
            tree = dendropy.Tree.get(
                data=newick + ";",
                schema="newick",
                preserve_underscores=True,
                # Labels, not taxa: DendroPy merges taxa whose names differ only in case.
                suppress_leaf_node_taxa=True,
                suppress_internal_node_taxa=True,
            )
    except DataParseError as error:
        for start, problem, remedy in _REFUSED_FAULTS:
            if match := re.match(start, error.message):
                raise fail(line - 1 + error.line_num, problem.format(*match.groups()), remedy) from error
        raise
    nodes = list(tree.preorder_node_iter())
    number = {node: position for position, node in enumerate(nodes)}
    parsed = ParsedTree(
        [[number[child] for child in node.child_node_iter()] for node in nodes],
        [node.label for node in nodes],
        [node.edge_length for node in nodes],
    )
    return _without_single_children(parsed, source)


def _without_single_children(tree: ParsedTree, source: str) -> ParsedTree:
    """Join each node with one child to this child, with the sum of their lengths."""
    kept = [node for node, below in enumerate(tree.children) if len(below) != 1]
    if len(kept) == len(tree.children):
        return tree
    warn_user(
        f"{source}: nodes with one child were joined to this child, and their lengths were added. The label of such a "
        "node, as that of a sampled ancestor, is not read.",
        ConversionWarning,
    )
    lengths, last = list(tree.lengths), list(range(len(tree.lengths)))
    for node, below in enumerate(tree.children):  # parents come first
        if len(below) == 1:
            length, more = lengths[node], lengths[below[0]]
            lengths[below[0]] = None if length is None or more is None else length + more
    for node in reversed(range(len(last))):
        if len(tree.children[node]) == 1:
            last[node] = last[tree.children[node][0]]
    number = {node: position for position, node in enumerate(kept)}
    return ParsedTree(
        [[number[last[child]] for child in tree.children[node]] for node in kept],
        [tree.labels[node] for node in kept],
        [lengths[node] for node in kept],
    )


def _read_plain(newick: str) -> ParsedTree | None:
    """Read a tree of plain labels and lengths; return None for any other text."""
    if not newick.startswith("(") or _NOT_PLAIN.search(newick):
        return None
    tree = ParsedTree([], [], [])
    unclosed: list[int] = []

    def new_node() -> int:
        node = len(tree.children)
        if unclosed:
            tree.children[unclosed[-1]].append(node)
        tree.children.append([])
        tree.labels.append(None)
        tree.lengths.append(None)
        return node

    for mark, label, length, other in _PLAIN.findall(newick):
        if other or (mark != "(" and not unclosed):
            return None
        if mark == "(":
            unclosed.append(new_node())
        if mark == ")":
            node = unclosed.pop()
        elif label:
            node = new_node()
        elif length:
            return None
        else:
            continue
        tree.labels[node] = label or None
        tree.lengths[node] = float(length) if length else None
    return None if unclosed else tree
