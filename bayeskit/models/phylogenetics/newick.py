"""Trees through DendroPy, and the statements of NEXUS files.

DendroPy reads; the code here adds what it leaves out: it drops an empty node before ')', lets a
second branch length replace the first, and takes a file that ends too early for a complete one.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import dendropy
from dendropy.dataio.nexusprocessing import NexusTokenizer
from dendropy.utility.error import DataParseError

from bayeskit.errors import AlignmentError, TreeError

QUOTED = re.compile(r"'(?:[^']|'')*'")
_PIECE = re.compile(r"[^'\[\];]+|'(?:[^']|'')*'|.")
_COMMENT_EDGE = re.compile(r"[\[\]]")
#: What DendroPy accepts without a word: pattern, problem, remedy.
_ACCEPTED_FAULTS = (
    (re.compile(r"[(,]\s*([,)])"), "a node is missing before {!r}", "name every tip"),
    (re.compile(r"[^\s(),:'](')"), "a quotation mark {!r} stands inside a word", "quote the whole label"),
    (
        re.compile(r":\s*+[^\s,():{}=\"\\]++\s*+([^\s,()])"),
        "{!r} after a length does not follow a node",
        "write each length once, after its node",
    ),
)
#: What DendroPy refuses: how its message starts, problem, remedy.
_REFUSED_FAULTS = (
    (
        r"Invalid edge length: ';'|Unbalanced",
        "there is no complete tree: the text ends inside a parenthesis or a length",
        "balance the parentheses",
    ),
    (r"Invalid edge length: (.*)", "the branch length {} is not a number", "write a number"),
    (r"Incomplete or improperly.*was ('.*') instead", "{} stands outside all parentheses", "balance the parentheses"),
    (r"Malformed tree statement", "'(' follows a complete node", "separate sister nodes by ','"),
    (r"Expecting .* but found (.*)", "{} follows a complete node", "quote labels that contain blanks or marks"),
    (r"(.*)", "{}", "give a tree such as '((A,B),C,D);'"),
)
ErrorType = type[AlignmentError] | type[TreeError]
_LIMIT = threading.Lock()


@dataclass(frozen=True)
class ParsedTree:
    """Nodes of one Newick description, in the order in which they open; the root is node 0.

    Attributes
    ----------
    children : list of list of int
        Children of each node, from left to right.
    labels : list of str or None
        Label of each node.
    lengths : list of float or None
        Length of the edge above each node.
    """

    children: list[list[int]]
    labels: list[str | None]
    lengths: list[float | None]


@dataclass(frozen=True)
class TreeText:
    """One Newick description, where it stands, and the labels it abbreviates."""

    newick: str
    source: str
    line: int
    translate: Mapping[str, str]


def read_text(path: str | os.PathLike[str], what: str, error: ErrorType) -> str:
    """Read a text file that should hold `what`."""
    source = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        missing = "there is no such file, it" if isinstance(problem, FileNotFoundError) else "the file"
        raise error(f"{source}: {missing} cannot be read as text ({problem}). Remedy: give the path of {what}.") from (
            problem
        )
    if not text.strip():
        raise error(f"{source}: the file is empty. Remedy: give {what}.")
    return text


def statements(text: str, source: str, error: ErrorType, line: int = 1) -> Iterator[tuple[int, str, bool]]:
    """Yield each statement with its first line and whether a ';' outside quotes and comments ends it.

    Comments are left out, but not their line ends; `line` is where `text` starts in the file. A
    '#NEXUS' at the start is skipped.
    """
    head = re.match(r"\s*#nexus", text, re.IGNORECASE)
    position = head.end() if head else 0
    line += text.count("\n", 0, position)
    parts: list[str] = []

    def statement(closed: bool) -> tuple[int, str, bool]:
        body = "".join(parts).lstrip()
        parts.clear()
        return line - body.count("\n"), body.rstrip(), closed

    while match := _PIECE.match(text, position):
        piece, position = match.group(), match.end()
        if piece in ("'", "]"):
            what = "quotation mark" if piece == "'" else f"character {piece!r}"
            raise error(f"{source}, line {line}: unmatched {what}. Remedy: close or remove it.")
        if piece == ";":
            yield statement(True)
            continue
        if piece == "[":
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(text, position)
                if edge is None:
                    raise error(f"{source}, line {line}: a comment is never closed. Remedy: add ']'.")
                depth += 1 if edge.group() == "[" else -1
                position = edge.end()
            piece = "\n" * text.count("\n", match.start(), position)
        parts.append(piece)
        line += piece.count("\n")
    last = statement(False)
    if last[1]:
        yield last


def nexus_commands(text: str, source: str, error: ErrorType) -> Iterator[tuple[str, str, int, str]]:
    """Yield block, first word, its line and the rest of each NEXUS command; refuse a file that ends too early."""
    block, line = "", 1
    for line, statement, closed in statements(text, source, error):
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
            yield block, head, line, rest
    if block:
        raise error(
            f"{source}, line {line}: the file ends inside {block.upper()}, without 'END;'. Remedy: the file "
            "seems truncated; write or copy it again."
        )


@contextmanager
def _frames(number: int) -> Iterator[None]:
    """Allow so many more nested calls: DendroPy reads a tree by recursion, one call for each nested node.

    Since Python 3.11 these calls take no C stack, so the limit is all that stands against it.
    """
    with _LIMIT:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + number)
        try:
            yield
        finally:
            sys.setrecursionlimit(limit)


def unquoted(text: str) -> str:
    """Return a text whose quoted words stand without their quotes."""
    return QUOTED.sub(lambda found: found.group()[1:-1].replace("''", "'"), text)


def quote(label: str) -> str:
    """Return a label as Newick text, in quotes where it needs them."""
    return label if re.fullmatch(r"[^\s()\[\]{},:;='\"\\]+", label) else "'" + label.replace("'", "''") + "'"


def parse_newick(text: str, source: str = "Newick text", first_line: int = 1) -> ParsedTree:
    """Read one Newick description.

    Parameters
    ----------
    text : str
        The description, with or without its closing semicolon.
    source : str
        Name of its origin, for error messages.
    first_line : int
        Line of the file on which it starts.

    Returns
    -------
    ParsedTree
        Its nodes, labels and lengths.

    Raises
    ------
    TreeError
        If the text is not one Newick tree; the message names source and line.
    """
    found = list(statements(text, source, TreeError, first_line))
    line, newick, _ = found[0] if found else (first_line, "", True)

    def fail(line: int, problem: str, remedy: str) -> TreeError:
        return TreeError(f"{source}, line {line}: {problem}. Remedy: {remedy}.")

    if not newick:
        raise fail(line, "there is no complete tree", "give a tree such as '((A,B),C,D);'")
    if len(found) > 1:
        raise fail(found[1][0], f"{found[1][1]!r} follows the end of the tree", "give one tree, ended by ';'")
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
                # Labels as they stand: as taxa, names that differ in case only would be one.
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
    return ParsedTree(
        [[number[child] for child in node.child_node_iter()] for node in nodes],
        [node.label for node in nodes],
        [node.edge_length for node in nodes],
    )


def read_tree_texts(path: str | os.PathLike[str]) -> list[TreeText]:
    """Find the tree descriptions of a Newick or NEXUS file.

    Parameters
    ----------
    path : str or os.PathLike
        The file.

    Returns
    -------
    list of TreeText
        One entry for each tree, in file order.

    Raises
    ------
    TreeError
        If the file cannot be read or holds no tree.
    """
    source = os.fspath(path)
    text = read_text(path, "a file with a Newick or NEXUS tree", TreeError)
    found: list[TreeText] = []
    translate: dict[str, str] = {}
    if text.lstrip()[:6].upper() != "#NEXUS":
        found = [TreeText(newick, source, line, {}) for line, newick, _ in statements(text, source, TreeError)]
    else:
        # DendroPy's own NEXUS reader takes a label such as '1' for the first taxon it has met, even
        # where no block numbers the taxa, so it gets the descriptions one by one.
        for block, head, line, rest in nexus_commands(text, source, TreeError):
            if block == "trees" and head == "translate":
                translate = _translation(rest, source, line)
            elif block == "trees" and head in ("tree", "utree"):
                name = re.match(r"(?:[^'=]|'(?:[^']|'')*')*=", rest)
                if name is None:
                    raise TreeError(f"{source}, line {line}: a tree without '='. Remedy: write 'tree NAME = ...;'.")
                found.append(TreeText(rest[name.end() :], source, line + name.group().count("\n"), translate))
    if not found:
        raise TreeError(f"{source}: the file holds no tree. Remedy: give a file with a Newick or NEXUS tree.")
    return found


def _translation(text: str, source: str, line: int) -> dict[str, str]:
    translate: dict[str, str] = {}
    entry: list[str] = []
    for word in [*NexusTokenizer(StringIO(text), preserve_unquoted_underscores=True), ","]:
        if word != ",":
            entry.append(word)
            continue
        if len(entry) not in (0, 2):
            raise TreeError(
                f"{source}, line {line}: the translate entry {' '.join(entry)!r} is not a pair. "
                "Remedy: write 'KEY NAME' pairs separated by ','."
            )
        if entry:
            translate[entry[0]] = entry[1]
        entry = []
    return translate
