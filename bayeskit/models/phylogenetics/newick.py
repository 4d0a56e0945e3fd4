"""Reading tree descriptions: Newick text and the TREES block of NEXUS files.

DendroPy reads Newick by recursion, one Python frame per nested node, and so cannot read
a caterpillar of a thousand taxa. The reader here keeps its own stack.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bayeskit.errors import TreeError

_TOKEN = re.compile(r"'(?:[^']|'')*'|\[|[(),:;]|[^\s()\[\],:;']+")
_COMMENT_EDGE = re.compile(r"[\[\]]")


@dataclass
class ParsedTree:
    """Nodes of one Newick description, in the order in which they open.

    Attributes
    ----------
    parents : list of int
        Parent of each node, -1 for the root, which is node 0.
    labels : list of str or None
        Label of each node.
    lengths : list of float or None
        Length of the edge above each node.
    children : list of list of int
        Children of each node, from left to right.
    """

    parents: list[int] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    lengths: list[float | None] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)

    def add(self, parent: int) -> int:
        """Append a node below `parent` and return its number."""
        node = len(self.parents)
        self.parents.append(parent)
        self.labels.append(None)
        self.lengths.append(None)
        self.children.append([])
        if parent >= 0:
            self.children[parent].append(node)
        return node


@dataclass(frozen=True)
class TreeText:
    """One Newick description, where it stands, and the labels it abbreviates."""

    newick: str
    source: str
    line: int
    translate: Mapping[str, str]


def tokens(text: str, source: str, first_line: int = 1) -> Iterator[tuple[str, int]]:
    """Yield the tokens of Newick or NEXUS text with their lines; comments are left out.

    Parameters
    ----------
    text : str
        The text.
    source : str
        Name of its origin, for error messages.
    first_line : int
        Line of the file on which `text` starts.

    Yields
    ------
    token : str
        A punctuation mark or a word; quoted words keep their quotes.
    line : int
        Line on which it starts.

    Raises
    ------
    TreeError
        If a comment or a quoted label is never closed.
    """
    position, line = 0, first_line
    while True:
        match = _TOKEN.search(text, position)
        gap_end = len(text) if match is None else match.start()
        line += text.count("\n", position, gap_end)
        stray = text[position:gap_end].strip()
        if stray:
            what = "quotation mark" if "'" in stray else f"character {stray[0]!r}"
            raise TreeError(f"{source}, line {line}: unmatched {what}. Remedy: close or remove it.")
        if match is None:
            return
        if match.group() == "[":
            position, depth = match.end(), 1
            while depth:
                edge = _COMMENT_EDGE.search(text, position)
                if edge is None:
                    raise TreeError(f"{source}, line {line}: this comment is never closed. Remedy: add ']'.")
                depth += 1 if edge.group() == "[" else -1
                position = edge.end()
            line += text.count("\n", match.start(), position)
            continue
        yield match.group(), line
        line += match.group().count("\n")
        position = match.end()


def unquote(token: str) -> str:
    """Return a label without its quotes; underscores stay as they are."""
    return token[1:-1].replace("''", "'") if token.startswith("'") else token


def quote(label: str) -> str:
    """Return a label as Newick text, in quotes where it needs them."""
    return "'" + label.replace("'", "''") + "'" if re.search(r"[\s()\[\],:;']", label) or not label else label


def parse_newick(text: str, source: str = "Newick text", first_line: int = 1) -> ParsedTree:
    """Read one Newick description without recursion.

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
    tree = ParsedTree()
    node = tree.add(-1)
    line, previous, ended = first_line, "", False

    def fail(problem: str, remedy: str) -> TreeError:
        return TreeError(f"{source}, line {line}: {problem}. Remedy: {remedy}.")

    for token, at_line in tokens(text, source, first_line):
        line = at_line
        if ended:
            raise fail(f"{token!r} follows the end of the tree", "give one tree, ended by ';'")
        if previous == ":":
            try:
                tree.lengths[node] = float(token)
            except ValueError:
                raise fail(f"the branch length {token!r} is not a number", "write a number") from None
            previous = "length"
        elif token == "(":
            if previous not in ("", "(", ","):
                raise fail("'(' follows a complete node", "separate sister nodes by ','")
            node, previous = tree.add(node), token
        elif token in (",", ")"):
            if previous in ("(", ",", ""):
                raise fail(f"a node is missing before {token!r}", "name every tip")
            parent = tree.parents[node]
            if parent < 0:
                raise fail(f"{token!r} stands outside all parentheses", "balance the parentheses")
            node, previous = (tree.add(parent) if token == "," else parent), token
        elif token == ":":
            if previous in ("(", ",", "", "length"):
                raise fail("':' does not follow a node", "write each length once, after its node")
            previous = token
        elif token == ";":
            ended = True
        else:
            if previous not in ("", "(", ",", ")"):
                raise fail(f"the label {token!r} follows a complete node", "quote labels that contain blanks")
            tree.labels[node], previous = unquote(token), "label"
    if tree.parents[node] >= 0:
        raise fail("the text ends inside a parenthesis", "balance the parentheses")
    if previous in ("", ":"):
        raise fail("there is no complete tree", "give a tree such as '((A,B),C,D);'")
    return tree


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
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(f"{source}: cannot be read as text ({error}). Remedy: give the path of a tree file.") from error
    if not text.strip():
        raise TreeError(f"{source}: the file is empty. Remedy: give a file with a Newick or NEXUS tree.")
    is_nexus = text.lstrip()[:6].upper() == "#NEXUS"
    found = _nexus_trees(text, source) if is_nexus else _newick_trees(text, source)
    if not found:
        raise TreeError(f"{source}: the file holds no tree. Remedy: give a file with a Newick or NEXUS tree.")
    return found


def _newick_trees(text: str, source: str) -> list[TreeText]:
    found: list[TreeText] = []
    words: list[tuple[str, int]] = []
    for token, line in tokens(text, source):
        words.append((token, line))
        if token == ";":
            found.append(TreeText(_join(words), source, words[0][1], {}))
            words = []
    if words:
        found.append(TreeText(_join(words), source, words[0][1], {}))
    return found


def _nexus_trees(text: str, source: str) -> list[TreeText]:
    found: list[TreeText] = []
    translate: dict[str, str] = {}
    statement: list[tuple[str, int]] = []
    block, line = "", 1
    for token, line in tokens(text, source):
        if token.upper() == "#NEXUS":
            continue
        if token != ";":
            statement.append((token, line))
            continue
        words, statement = statement, []
        head = words[0][0].lower() if words else ""
        start = words[0][1] if words else line
        if head == "begin" and len(words) > 1:
            block = words[1][0].lower()
        elif head in ("end", "endblock"):
            block = ""
        elif block == "trees" and head == "translate":
            translate = _translation([word for word, _ in words[1:]], source, start)
        elif block == "trees" and head in ("tree", "utree"):
            joined = _join(words)
            if "=" not in joined:
                raise TreeError(f"{source}, line {start}: a tree without '='. Remedy: write 'tree NAME = ...;'.")
            name, newick = joined.split("=", 1)
            found.append(TreeText(newick + ";", source, start + name.count("\n"), translate))
    if block == "trees" or statement:
        raise TreeError(
            f"{source}, line {line}: the file ends inside a statement or block. "
            "Remedy: the file seems truncated; write or copy it again."
        )
    return found


def _join(words: list[tuple[str, int]]) -> str:
    """Write tokens as text again, each on the line on which it stood."""
    parts: list[str] = []
    at = words[0][1]
    for word, line in words:
        parts.append("\n" * (line - at) if line > at else " ")
        parts.append(word)
        at = line + word.count("\n")
    return "".join(parts)


def _translation(words: list[str], source: str, line: int) -> dict[str, str]:
    translate: dict[str, str] = {}
    entry: list[str] = []
    for word in [*words, ","]:
        if word != ",":
            entry.append(word)
            continue
        if len(entry) == 2:
            translate[unquote(entry[0])] = unquote(entry[1])
        elif entry:
            raise TreeError(
                f"{source}, line {line}: the translate entry {' '.join(entry)!r} is not a pair. "
                "Remedy: write 'KEY NAME' pairs separated by ','."
            )
        entry = []
    return translate
