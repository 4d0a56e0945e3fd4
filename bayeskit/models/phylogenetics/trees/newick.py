"""Trees in Newick text, through DendroPy.

DendroPy reads; the code here adds what it leaves out: it drops an empty node before ')' and lets a
second branch length replace the first. Descriptions of plain names and numbers, which is what
samplers write by the thousand, are read here, with the same result in a twentieth of the time.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import dendropy
from dendropy.utility.error import DataParseError

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics.trees.statements import QUOTED, statements

#: What only DendroPy reads or refuses: quotes, comments and the like, and parentheses in a wrong place.
_NOT_PLAIN = re.compile(r"['\"\\\[\]{}=;]|[(,][ \t\r\n]*[,)]|[^(, \t\r\n][ \t\r\n]*\(")
#: A mark with the label and the length behind it, or a character that fits none.
_PLAIN = re.compile(
    r"([(),])[ \t\r\n]*([^\s(),:]*)[ \t\r\n]*"
    r"(?::[ \t\r\n]*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)[ \t\r\n]*)?|(.)",
    re.DOTALL,
)
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
    (r"Malformed tree statement", "'(' follows a complete node", "separate sister nodes by ',', and trees by ';'"),
    (
        r"Expecting .* but found (.*)",
        "{} follows a complete node",
        "quote labels that contain blanks or marks, and end each tree by ';'",
    ),
    (r"(.*)", "{}", "give a tree such as '((A,B),C,D);'"),
)
_LIMIT = threading.Lock()
#: Where a text comes from that is in no file.
_IN_MEMORY = "Newick text"


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


def quote(label: str) -> str:
    """Return a label as Newick text, in quotes where it needs them."""
    return label if re.fullmatch(r"[^\s()\[\]{},:;='\"\\]+", label) else "'" + label.replace("'", "''") + "'"


def parse_newick(text: str, source: str = _IN_MEMORY, first_line: int = 1) -> ParsedTree:
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
    line, newick = found[0][:2] if found else (first_line, "")

    def fail(line: int, problem: str, remedy: str) -> TreeError:
        if problem.startswith("there is no complete tree: ") and source != _IN_MEMORY:
            remedy += ", or, of a file that is still written, use TreeSample.from_file(..., incomplete='warn')"
        return TreeError(f"{source}, line {line}: {problem}. Remedy: {remedy}.")

    if not newick:
        raise fail(line, "there is no complete tree", "give a tree such as '((A,B),C,D);'")
    if len(found) > 1:
        raise fail(found[1].line, f"{found[1].text!r} follows the end of the tree", "give one tree, ended by ';'")
    if plain := _read_plain(newick):
        return plain
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


def _read_plain(newick: str) -> ParsedTree | None:
    """Read a tree of plain labels and lengths; leave to DendroPy whatever is more, or wrong."""
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
