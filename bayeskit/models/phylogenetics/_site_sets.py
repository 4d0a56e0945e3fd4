"""Sets of sites: as text of NEXUS and partition files, and as partitions of an alignment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bayeskit.errors import AlignmentError, ConversionWarning
from bayeskit.extend import warn_user
from bayeskit.models.phylogenetics._newick import nexus_commands, read_text, unquoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A substitution model where NEXUS has the name of a subset, as IQ-TREE writes it.
_MODEL = re.compile(r"(JC|F81|K80|K2P|K3P|HKY|TN|TIM|TPM|TVM|SYM|GTR|LG|WAG|JTT|MK|GY|MG)\w*([+{].*)?|.*\+.*")

# Numbers count from 0 in arrays and from 1 in texts, both in files and in messages.


def parse_numbers(
    text: str, count: int, sets: Mapping[str, NDArray[np.int64]], where: str, kind: str = "site"
) -> NDArray[np.int64]:
    r"""Read a list such as `1-30\3 45 second .`, where '.' is the last number, as indices counted from 0.

    Parameters
    ----------
    text : str
        Numbers, ranges with or without a stride, 'all', and names of sets, separated by blanks or commas.
    count : int
        Largest number.
    sets : mapping of str to numpy.ndarray
        Indices of each named set; letter case in names is ignored.
    where : str
        Place in messages.
    kind : str, default "site"
        What the numbers count, in messages.

    Returns
    -------
    numpy.ndarray
        Shape `(n,)`, int64, each index once, ascending.

    Raises
    ------
    AlignmentError
        If a word is neither a number nor a set, or a number is outside 1, ..., `count`.

    Examples
    --------
    >>> parse_numbers("1-6\\3, 9 -.", 10, {}, "here").tolist()
    [0, 3, 8, 9]
    """
    named = {name.lower(): members for name, members in sets.items()}
    chosen = np.zeros(count, dtype=bool)
    for word in re.sub(r"\s*([-\\/])\s*", r"\1", text.replace(",", " ")).split():
        match = re.fullmatch(r"(\d{1,18}|\.)(?:-(\d{1,18}|\.)(?:[\\/](\d{1,18}))?)?", word)
        if word.lower() in named:
            chosen[named[word.lower()]] = True
        elif word.lower() == "all":
            chosen[:] = True
        elif match is None:
            known = f"; the sets are {', '.join(sets)}" if sets else ""
            raise AlignmentError(
                f"{where}: {word!r} is neither a {kind} nor a set{known}. Remedy: write numbers such as '1-30\\3 45', "
                "or define the set before it is used."
            )
        else:
            first, last, stride = match.groups()
            start = count if first == "." else int(first)
            end = start if last is None else count if last == "." else int(last)
            if not (1 <= start <= end <= count and stride != "0"):
                raise AlignmentError(
                    f"{where}: {word!r} is not within the {count} {kind}s. Remedy: write first and last, both from 1 "
                    f"to {count}, in ascending order."
                )
            chosen[start - 1 : end : int(stride or 1)] = True
    return np.flatnonzero(chosen)


def ranges(indices: Sequence[int] | NDArray[np.integer[Any]]) -> str:
    """Return ascending indices as text, counted from 1.

    Examples
    --------
    >>> ranges([0, 1, 2, 6])
    '1-3, 7'
    """
    sites = np.asarray(indices, dtype=np.int64) + 1
    runs = np.split(sites, np.flatnonzero(np.diff(sites) > 1) + 1)
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if len(run)]
    return ", ".join(words[:10]) + (f" and {len(words) - 10} more ranges" if len(words) > 10 else "")


def check_partition(subsets: Mapping[str, NDArray[np.integer[Any]]], num_sites: int, where: str) -> None:
    """Check that each site is in exactly one subset.

    Parameters
    ----------
    subsets : mapping of str to numpy.ndarray
        Indices of the sites of each subset, counted from 0.
    num_sites : int
    where : str
        Place in messages.

    Raises
    ------
    AlignmentError
        If a subset has no site, a site occurs twice, in one subset or in two, or a site is in none.
    """
    owner = np.full(num_sites, -1)
    for number, (name, sites) in enumerate(subsets.items()):
        if not len(sites):
            raise AlignmentError(f"{where}: the subset {name!r} has no site. Remedy: give it sites, or remove it.")
        values, times = np.unique(sites, return_counts=True)
        if (times > 1).any():
            raise AlignmentError(
                f"{where}: the subset {name!r} has the sites {ranges(values[times > 1])} (counted from 1) more than "
                "once. Remedy: give each site once."
            )
        shared = values[owner[values] >= 0]
        if len(shared):
            other = list(subsets)[owner[shared[0]]]
            both = shared[owner[shared] == owner[shared[0]]]
            raise AlignmentError(
                f"{where}: the subsets {other!r} and {name!r} overlap; sites in both are {ranges(both)} (counted from "
                "1). Remedy: give each site to one subset."
            )
        owner[sites] = number
    left = np.flatnonzero(owner < 0)
    if len(left):
        raise AlignmentError(
            f"{where}: the sites {ranges(left)} (counted from 1, of {num_sites}) are in no subset. Remedy: add them to "
            "a subset, or leave them out of the alignment."
        )


def read_partitions(path: str | os.PathLike[str], num_sites: int) -> dict[str, NDArray[np.int64]]:
    r"""Read the subsets of sites of a partition file of RAxML or IQ-TREE, or the character sets of a NEXUS file.

    Lines are `DNA, first = 1-500\3, 700-900`. In NEXUS, the subsets are those of CHARPARTITION or PARTITION or, without
    these, every CHARSET. Models in the file are not read, which a warning says.

    Parameters
    ----------
    path : str or os.PathLike
    num_sites : int
        Number of sites of the alignment.

    Returns
    -------
    dict of str to numpy.ndarray
        Indices of the sites of each subset, counted from 0, in file order. Whether they overlap is not checked:
        `Alignment.partitioned` does.

    Raises
    ------
    AlignmentError
        If the file is missing or malformed, a name occurs twice, or a site is outside the alignment.

    Warns
    -----
    ConversionWarning
        If the file names models.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "genes.txt"
    >>> _ = path.write_text("DNA, first = 1-6\\3\nDNA, others = 2-6\\3 3-6\\3\n")
    >>> {name: sites.tolist() for name, sites in read_partitions(path, 6).items()}
    {'first': [0, 3], 'others': [1, 2, 4, 5]}
    """
    text = read_text(path, "a partition file of RAxML, IQ-TREE or NEXUS", AlignmentError)
    source = os.fspath(path)
    is_nexus = text.lstrip()[:6].upper() == "#NEXUS"
    entries = _nexus_entries(text, source, num_sites) if is_nexus else _line_entries(text, source)
    subsets: dict[str, NDArray[np.int64]] = {}
    for where, name, sites in entries:
        if name in subsets:
            raise AlignmentError(f"{where}: the subset {name!r} occurs twice. Remedy: make names unique.")
        subsets[name] = sites if isinstance(sites, np.ndarray) else parse_numbers(sites, num_sites, {}, where)
    if not subsets:
        raise AlignmentError(f"{source}: there is no subset. Remedy: write lines such as 'DNA, first = 1-500'.")
    return subsets


def _line_entries(text: str, source: str) -> list[tuple[str, str, str]]:
    """Return place, name and sites of each line `MODEL, NAME = SITES`."""
    found, models = [], set()
    for number, row in enumerate(text.splitlines(), start=1):
        row = row.split("#")[0].strip()
        if not row:
            continue
        match = re.fullmatch(r"(?:([^=]*),)?\s*([^=,]+?)\s*=\s*(.+)", row)
        if match is None:
            raise AlignmentError(
                f"{source}, line {number}: {row!r:.60} is not a subset. Remedy: write lines such as "
                "'DNA, first = 1-500'."
            )
        model, name, sites = match.groups()
        models |= {model.strip()} if model and model.strip().upper() != "DNA" else set()
        found.append((f"{source}, line {number}", name, sites))
    _say_unread(models, source)
    return found


def _nexus_entries(text: str, source: str, num_sites: int) -> list[tuple[str, str, NDArray[np.int64]]]:
    """Return place, name and sites of the subsets of a NEXUS file."""
    sets: dict[str, NDArray[np.int64]] = {}
    found: list[tuple[str, str, NDArray[np.int64]]] = []
    divided: str | None = None
    models = set()
    for _, head, line, rest in nexus_commands(text, source, AlignmentError):
        where = f"{source}, line {line}"
        if head == "charset":
            name, sites = named_set(rest, where)
            sets[name] = parse_numbers(sites, num_sites, sets, where)
        elif head in ("charpartition", "partition"):
            if divided:
                raise AlignmentError(f"{where}: there is a partition in {divided} as well. Remedy: keep one of them.")
            divided = where
            _, parts = named_set(rest, where)
            for number, part in enumerate(re.split(r",(?![^{]*\})", re.sub(r"^\s*\d+\s*:", "", parts)), start=1):
                label, _, members = (word.strip() for word in part.rpartition(":"))
                if _MODEL.fullmatch(label):
                    models.add(label)
                    label = ""
                name = label or (members if members in sets else str(number))
                found.append((where, name, parse_numbers(members, num_sites, sets, where)))
    _say_unread(models, source)
    return found if divided else [(source, name, sites) for name, sites in sets.items()]


def named_set(text: str, where: str) -> tuple[str, str]:
    """Return name and members of the text `NAME = MEMBERS` of a command; parentheses behind the name are left out.

    Raises
    ------
    AlignmentError
        If the text has another form.

    Examples
    --------
    >>> named_set(" first = 1-500", "here")
    ('first', '1-500')
    >>> named_set("* first (CHARACTERS = matrix) = 1-500", "here")
    ('first', '1-500')
    """
    head = re.match(r"([^=()]|\([^()]*\))*", unquoted(text))
    start = head.group() if head else ""
    name = re.sub(r"\([^()]*\)", "", start).strip(" *\t\r\n")
    _, equals, members = unquoted(text)[len(start) :].partition("=")
    if not (equals and name and members.strip()):
        raise AlignmentError(f"{where}: {text.strip()!r:.60} defines no set. Remedy: write 'NAME = 1-500'.")
    return name, members.strip()


def _say_unread(models: set[str], source: str) -> None:
    if models:
        warn_user(
            f"{source}: the models {', '.join(sorted(models))} are not read, only the sites. Remedy: give substitution "
            "models and site rates to Partition.",
            ConversionWarning,
        )
