"""The trees of Newick and NEXUS files as texts, with what the file says about each."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO

from dendropy.dataio.nexusprocessing import NexusTokenizer

from bayeskit.errors import ConversionWarning, SettingsError, TreeError
from bayeskit.models.phylogenetics.trees.statements import noted_commands, read_text, statements

#: The weight that PAUP and MrBayes give a tree, `[&W 1/3]` or `[p = 0.33, P = 0.9]`, and lists, `0.33 (...)`.
_WEIGHT_NOTE = re.compile(r"&w\s+([^\s/]+)(?:\s*/\s*(\S+))?\s*", re.IGNORECASE)
_PROBABILITY_NOTE = re.compile(r"\s*p\s*=\s*([^\s,]+)\s*(?:,.*)?", re.DOTALL)
_LEADING_WEIGHT = re.compile(r"([-+]?(?:[0-9.]+(?:e[-+]?[0-9]+)?|nan|inf))[ \t]+(?=\()", re.IGNORECASE)


@dataclass(frozen=True)
class TreeText:
    """One Newick description, where it stands, and what the file says about it.

    Attributes
    ----------
    newick : str
        The description.
    source : str
        Name of the file.
    line : int
        Line on which it starts.
    translate : mapping of str to str
        The labels it abbreviates.
    weight : float or None
        Its weight or probability; None where the file gives none.
    rooted : bool or None
        Whether it is marked as rooted or unrooted; None where it is not marked.
    name : str or None
        Its name in NEXUS; None in Newick.
    """

    newick: str
    source: str
    line: int
    translate: Mapping[str, str]
    weight: float | None = None
    rooted: bool | None = None
    name: str | None = None


def read_tree_texts(path: str | os.PathLike[str], incomplete: str = "error") -> list[TreeText]:
    """Find the tree descriptions of a Newick or NEXUS file.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    incomplete : {"error", "warn"}, default "error"
        What to do where the file ends too early: refuse it, or read the trees that are complete.

    Returns
    -------
    list of TreeText
        One entry for each tree, in file order.

    Raises
    ------
    TreeError
        If the file cannot be read, ends too early, or holds no tree.
    SettingsError
        If `incomplete` is none of the two.

    Warns
    -----
    ConversionWarning
        If the file ended too early and `incomplete` is "warn".
    """
    if incomplete not in ("error", "warn"):
        raise SettingsError(f"incomplete={incomplete!r} is unknown. Remedy: use 'error' or 'warn'.")
    source = os.fspath(path)
    text = read_text(path, "a file with a Newick or NEXUS tree", TreeError)
    _refuse_alignment(text, source)
    complete = _complete_part(text)
    if complete is None:
        return _find_texts(text, source)
    if incomplete == "error":
        try:
            return _find_texts(text, source)
        except TreeError as error:
            raise TreeError(
                f"{error} Where a chain is still written, TreeSample.from_file(..., incomplete='warn') reads the trees "
                "that are complete."
            ) from error
    found = _find_texts(complete, source)
    line = text.count("\n", 0, text.rfind(";")) + 1
    warnings.warn(
        f"{source}: the file ends too early. Its {len(found)} complete trees, up to line {line}, were read.",
        ConversionWarning,
        stacklevel=5,
    )
    return found


def _refuse_alignment(text: str, source: str) -> None:
    start = text.lstrip()
    if start.startswith(">") or re.match(r"[0-9]+[ \t]+[0-9]+[ \t]*\r?\n", start):
        raise TreeError(f"{source}: this is an alignment, it holds no tree. Remedy: read it by Alignment.from_file.")


def _complete_part(text: str) -> str | None:
    """Return the part of a file that ends too early which can be read; None where it ends as it should."""
    end = text.rfind(";") + 1
    behind = re.sub(r"\[[^\[\]]*\]", "", text[end:]).strip()
    if text.lstrip()[:6].upper() != "#NEXUS":
        return text[:end] if behind and end else None
    closed = re.search(r"\bend(block)?\s*;$", text[:end], re.IGNORECASE)
    return None if closed and not behind else text[:end] + "\nend;"


def _find_texts(text: str, source: str) -> list[TreeText]:
    found: list[TreeText] = []
    translate: dict[str, str] = {}
    if text.lstrip()[:6].upper() != "#NEXUS":
        for line, statement, _, notes in statements(text, source, TreeError):
            leading = _LEADING_WEIGHT.match(statement)
            skipped = leading.end() if leading else 0
            notes = (*notes, f"&W {leading.group(1)}") if leading else notes
            weight = _weight(notes, source, line)
            found.append(TreeText(statement[skipped:], source, line, translate, weight, _rooted(notes)))
    else:
        # DendroPy's own NEXUS reader takes a label such as '1' for the first taxon it has met, even
        # where no block numbers the taxa, so it gets the descriptions one by one.
        for block, head, line, rest, notes in noted_commands(text, source, TreeError):
            if block == "taxa" and head == "taxlabels":
                translate = _numbers(rest)
            elif block == "trees" and head == "translate":
                translate = _translation(rest, source, line)
            elif block == "trees" and head in ("tree", "utree"):
                name = re.match(r"(?:[^'=]|'(?:[^']|'')*')*=", rest)
                if name is None:
                    raise TreeError(f"{source}, line {line}: a tree without '='. Remedy: write 'tree NAME = ...;'.")
                at = line + name.group().count("\n")
                rooted = False if head == "utree" else _rooted(notes)
                weight = _weight(notes, source, line)
                label = name.group()[:-1].strip(" *\t\r\n")
                found.append(TreeText(rest[name.end() :], source, at, translate, weight, rooted, label))
    if not found:
        if re.search(r"\bmatrix\b", text, re.IGNORECASE):
            remedy = "this is an alignment, read it by Alignment.from_file"
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
    """Let the number of each taxon of a TAXLABELS command stand for it, save where a taxon is called so."""
    taxa = list(NexusTokenizer(StringIO(text), preserve_unquoted_underscores=True))
    return {str(number): taxon for number, taxon in enumerate(taxa, start=1) if str(number) not in taxa}


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
        if entry and entry[0] in translate:
            raise TreeError(
                f"{source}, line {line}: the translate key {entry[0]!r} stands twice. Remedy: give each name its own."
            )
        if entry:
            translate[entry[0]] = entry[1]
        entry = []
    return translate
