"""Alignments as weighted site patterns, and readers for FASTA, NEXUS, PHYLIP, Clustal and Stockholm files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import AlignmentError, ConversionWarning, SettingsError
from bayeskit.extend import unknown_name, warn_user
from bayeskit.models.phylogenetics._data_types import DNA, PROTEIN, DataType, codons, standard_characters
from bayeskit.models.phylogenetics._newick import QUOTED, nexus_commands, path_name, read_text, unquoted
from bayeskit.models.phylogenetics._site_sets import check_partition, named_set, parse_numbers, ranges, read_partitions
from bayeskit.models.phylogenetics._trees import Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The readers of PHYLIP and NEXUS are not those of DendroPy, which takes the next name for characters if a sequence is
# too short, and loses the case of symbols, which EQUATE may tell apart.

_SET = re.compile(r"[{(]([^{}()]*)[})]")
#: Stands for a set of symbols in the text of a sequence.
_ANY = "\x01"
#: A site of a NEXUS matrix: a symbol, or symbols in brackets.
_SITE = re.compile(rf"{_SET.pattern}|(\S)")
_SETTING = re.compile(r"(\w+)(?:\s*=\s*(\"[^\"]*\"|\w+\s*\([^()]*\)|\S+))?")
_MIXED = re.compile(r"mixed\s*\((.*)\)", re.IGNORECASE | re.DOTALL)
#: Values of options that are not set.
_OFF = ("no", "n", "false")
#: A type of characters in TYPESET and CTYPE that restricts their changes.
_RESTRICTED = re.compile(r"(?<![\w.])(?!unord)[^\s:,=]+\s*:", re.IGNORECASE)
_EQUATION = re.compile(r"(\S)\s*=\s*(?:[{(]([^{}()]*)[})]|(\S))\s*")
_SUFFIXES = {
    **dict.fromkeys((".fasta", ".fa", ".fas", ".fna", ".ffn"), "fasta"),
    **dict.fromkeys((".nex", ".nexus", ".nxs"), "nexus"),
    **dict.fromkeys((".phy", ".phylip", ".ph"), "phylip"),
    **dict.fromkeys((".aln", ".clustal", ".clustalw"), "clustal"),
    **dict.fromkeys((".sto", ".stk", ".stockholm"), "stockholm"),
}
#: First line of an alignment in PHYLIP: numbers of taxa and sites, and the letters of options.
_COUNTS = re.compile(r"\s*([1-9]\d{0,17})\s+([1-9]\d{0,17})(?!\d)([A-Z \t]*)", re.IGNORECASE)
#: The option G of PAML: the number of genes, and of the sites of each or, in the next rows, the gene of each site.
_GENES = re.compile(r"\s*G\s*\d+((?:\s+\d+)*)\s*")
#: The mark '>' of FASTA, and the number of sites so far, which may stand in a file of PAML.
_COUNTERS = re.compile(r"^\s*>|(?:^|\s)\s*\d+\s*$")
_FORMATS = ("fasta", "nexus", "phylip", "clustal", "stockholm")
_ALIGNMENT_FILE = "a FASTA, NEXUS, PHYLIP, Clustal or Stockholm file"
#: First words of files in the format of Clustal, and the marks of its lines on conserved sites.
_CLUSTAL = re.compile(r"(CLUSTAL|MUSCLE|PROBCONS|MSAPROBS|Kalign|T-COFFEE)", re.IGNORECASE)
_CONSERVATION = re.compile(r"\s+[*:. ]+")
_TREE_FILE = "this is a file of trees. Remedy: read it with Tree.from_file or TreeSample.from_file."


class _Misread(Exception):
    """Names were read as characters, or characters as names, from `line` on."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


@dataclass
class _Record:
    """A sequence of an alignment, with its lines in the file."""

    name: str
    text: str  # one character per site, or per base of a codon
    rows: list[tuple[int, int]]  # line and number of its sites; empty without a file
    sets: tuple[str, ...] = ()  # the symbols of each `_ANY` in `text`

    @property
    def line(self) -> int | None:
        """Line of the name."""
        return self.rows[0][0] if self.rows else None

    def line_of(self, site: int) -> int | None:
        """Line on which a site stands, counted from 0."""
        for line, sites in self.rows:
            if site < sites:
                return line
            site -= sites
        return self.line


@dataclass
class FileMatrix:
    """Sequences of one type, with the type that the file declares and the place of the matrix in the file."""

    records: list[_Record]
    kind: DataType | str | None = None
    declared: str = ""  # name of the type in the file
    title: str = ""
    line: int | None = None
    sites: NDArray[np.int64] | None = None  # columns of a mixed matrix, counted from 0; None for all
    block: int = 0  # number of its block among those with a matrix
    block_title: str = ""

    @property
    def described(self) -> str:
        """Type, and columns of a mixed matrix."""
        name = self.title or self.declared or "data"
        return name if self.sites is None else f"{name} in the sites {ranges(self.sites)}"


def _read_records(
    path: str | os.PathLike[str], format: str | None = None, blocks_read: Collection[str] = ()
) -> tuple[list[_Record], DataType | str | None]:
    """Return the sequences of an alignment file in file order, their characters unchecked, and the type it declares.

    Without `format` it is guessed from content, then suffix; AlignmentError if the file is missing or malformed, or
    holds several matrices. There is no warning about commands in `blocks_read`.
    """
    matrices = matrices_of_file(path, format, blocks_read)
    if len(matrices) > 1:
        described = ", ".join(matrix.described for matrix in matrices[:4]) + (", ..." if len(matrices) > 4 else "")
        raise AlignmentError(
            f"{_at(os.fspath(path), matrices[1].line)}: the file holds {len(matrices)} matrices ({described}), but one "
            "alignment is asked for. Remedy: read_matrices(path) returns an alignment of each; Partition(...) joins "
            "them with a model of each."
        )
    return matrices[0].records, matrices[0].kind


def matrices_of_file(
    path: str | os.PathLike[str],
    format: str | None = None,
    blocks_read: Collection[str] = (),
    types_read: bool = False,
) -> list[FileMatrix]:
    """Return the matrices of an alignment file: one, or those of the blocks of a NEXUS file.

    There is no warning about commands in `blocks_read` or, with `types_read`, about TYPESET and CTYPE.
    """
    source = path_name(path, _ALIGNMENT_FILE, AlignmentError)
    if format is not None and (not isinstance(format, str) or format.lower() not in _FORMATS):
        known = ", ".join(map(repr, _FORMATS[:-1]))
        raise SettingsError(f"format={format!r} is unknown. Remedy: use {known} or {_FORMATS[-1]!r}.")
    text = read_text(path, _ALIGNMENT_FILE, AlignmentError)
    kind = format.lower() if format else _guess(text, source)
    if kind == "nexus":
        return _read_nexus(text, source, blocks_read, types_read)
    readers = {"fasta": _read_fasta, "clustal": _read_clustal, "stockholm": _read_stockholm}
    return _read_phylip(text, source) if kind == "phylip" else [FileMatrix(readers[kind](text, source))]


def _guess(text: str, source: str) -> str:
    start = text.lstrip()
    if start.startswith((">", ";")):
        return "fasta"
    if start[:6].upper() == "#NEXUS":
        return "nexus"
    if re.match(r"#\s*STOCKHOLM\b", start):
        return "stockholm"
    if _CLUSTAL.match(start):
        return "clustal"
    if re.match(r"\d+\s+\d+", start):
        return "phylip"
    if re.match(r"(\[[^\]]*\]\s*)?([0-9.eE+-]+\s+)?\(", start):
        raise AlignmentError(f"{source}: {_TREE_FILE}")
    suffix = Path(source.removesuffix(".gz")).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise AlignmentError(
        f"{source}, line 1: the format is not recognized (FASTA starts with '>', NEXUS with '#NEXUS', PHYLIP with two "
        "numbers, Clustal with 'CLUSTAL', Stockholm with '# STOCKHOLM'). Remedy: convert the file, or pass "
        f"format={', '.join(map(repr, _FORMATS[:-1]))} or {_FORMATS[-1]!r}."
    )


_LINE_ENDS = re.compile(r"\r\n|\r|\n")  # splitlines would also cut at separators within names


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_LINE_ENDS.split(text), start=1):
        if line.strip():
            yield number, line


def _sites(row: str) -> int:
    return len(_SET.sub("N", "".join(row.split())))


def _blame(
    source: str, rows: list[tuple[int, str]], split: Callable[[str], tuple[str, str]], num_sites: int | None
) -> None:
    """Raise AlignmentError if rows, each the start of a sequence, repeat a name or do not have `num_sites` sites."""
    first: dict[str, int] = {}
    for line, row in rows:
        name, rest = split(row)
        if name in first:
            raise AlignmentError(
                f"{source}, line {line}: the taxon {name!r} occurs twice (first in line {first[name]}). "
                "Remedy: make names unique, or set 'interleave' in the FORMAT command of a NEXUS file."
            )
        first[name] = line
        if num_sites is not None and _sites(rest) != num_sites:
            raise AlignmentError(
                f"{source}, line {line}: taxon {name!r} has {_sites(rest)} sites, but nchar={num_sites} is announced. "
                "Remedy: align the sequences to one length and correct the number."
            )


def _first_word(row: str) -> tuple[str, str]:
    name, *rest = row.split(None, 1)
    return name, "".join(rest)


def _first_ten(row: str) -> tuple[str, str]:
    return row[:10].strip(), row[10:]


def _two_blanks(row: str) -> tuple[str, str]:
    name, *rest = re.split(r"\s{2,}", row.strip(), maxsplit=1)
    return "_".join(name.split()), "".join(rest)


def _fasta_name(row: str) -> tuple[str, str]:
    return (row.strip()[1:].strip(), "") if row.strip().startswith(">") else ("", row)


def _read_fasta(text: str, source: str) -> list[_Record]:
    text = re.sub(r"(?m)^;.*", "", text)
    rows = list(_lines(text))
    names = [(line, row) for line, row in rows if row.strip().startswith(">")]
    if not names or names[0] != rows[0]:
        line = rows[0][0] if rows else 1
        raise AlignmentError(
            f"{source}, line {line}: FASTA must start with '>NAME'. Remedy: add this line, or pass the right format=."
        )
    for line, row in names:
        if not _fasta_name(row)[0]:
            raise AlignmentError(f"{source}, line {line}: a sequence has no name. Remedy: add the name.")
    records: list[_Record] = []
    parts: list[list[str]] = []
    for line, row in rows:
        name, rest = _fasta_name(row)
        if name:
            records.append(_Record(name, "", [(line, 0)]))
            parts.append([])
            continue
        part = "".join(rest.split())
        if _SET.search(part):
            raise AlignmentError(
                f"{source}, line {line}: taxon {records[-1].name!r} has a set of bases in brackets. Remedy: write it "
                "as one letter of the IUPAC code."
            )
        records[-1].rows.append((line, len(part)))
        parts[-1].append(part)
    _blame(source, names, _fasta_name, None)
    firsts = {record.name.split()[0] for record in records}
    if len(firsts) < len(records):
        warn_user(
            f"{source}: the first words of the names are not unique; each whole line is a name, with underscores for "
            "blanks.",
            ConversionWarning,
        )
    for record, found in zip(records, parts, strict=True):
        if not found:
            raise AlignmentError(
                f"{source}, line {record.line}: taxon {record.name!r} has no sites. Remedy: give each name a sequence."
            )
        words = record.name.split()
        record.name, record.text = "_".join(words) if len(firsts) < len(records) else words[0], "".join(found)
    if "." in records[0].text:  # a gap, as it is no match character
        for record in records:
            record.text = record.text.replace(".", "-")
    return records


def _read_clustal(text: str, source: str) -> list[_Record]:
    rows: list[tuple[int, str]] = []
    head = 0
    for line, row in enumerate(_LINE_ENDS.split(text), start=1):
        if not head and row.strip():
            head = line
            if not _CLUSTAL.match(row.strip()):
                raise AlignmentError(
                    f"{source}, line {line}: Clustal must start with 'CLUSTAL'. Remedy: add this line, or pass the "
                    "right format=."
                )
        elif _CONSERVATION.fullmatch(row):
            rows.append((line, ""))
        elif head:
            # The number of letters so far may stand at the end.
            rows.append((line, re.sub(r"(\S\s+\S.*?)\s+\d+\s*$", r"\1", row)))
    return _named_rows(rows, source)


def _read_stockholm(text: str, source: str) -> list[_Record]:
    (head, title), *body = _lines(text)
    if not re.match(r"\s*#\s*STOCKHOLM\b", title):
        raise AlignmentError(
            f"{source}, line {head}: Stockholm must start with '# STOCKHOLM 1.0'. Remedy: add this line, or pass the "
            "right format=."
        )
    end = next((line for line, row in body if row.strip() == "//"), None)
    if end is None:
        last = body[-1][0] if body else head
        raise AlignmentError(
            f"{source}, line {last}: the file ends without '//'. Remedy: the file seems truncated; write or copy it "
            "again."
        )
    more = [line for line, _ in body if line > end]
    if more:
        raise AlignmentError(
            f"{source}, line {more[0]}: a second alignment begins here. Remedy: give a file with one alignment."
        )
    rows = [(line, row) for line, row in enumerate(_LINE_ENDS.split(text), start=1) if head < line < end]
    rows = [(line, row) for line, row in rows if not row.lstrip().startswith("#")]
    records = _named_rows(rows, source)
    for record in records:
        record.text = record.text.replace(".", "-")
    return records


def _named_rows(rows: list[tuple[int, str]], source: str) -> list[_Record]:
    """Join rows of a name and sites, in blocks that blank rows end."""
    records: dict[str, _Record] = {}
    parts: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    for line, row in rows:
        if not row.strip():
            seen.clear()
            continue
        name, rest = _first_word(row)
        part = "".join(rest.split())
        if not part:
            raise AlignmentError(f"{source}, line {line}: taxon {name!r} has no sites. Remedy: add them in this line.")
        if name in seen:
            raise AlignmentError(
                f"{source}, line {line}: the taxon {name!r} occurs twice (first in line {seen[name]}). Remedy: make "
                "names unique, and separate blocks by a blank line."
            )
        seen[name] = line
        records.setdefault(name, _Record(name, "", [])).rows.append((line, len(part)))
        parts.setdefault(name, []).append(part)
    if not records:
        raise AlignmentError(f"{source}: there is no sequence. Remedy: write a name and its sites in each line.")
    for record in records.values():
        record.text = "".join(parts[record.name])
    return list(records.values())


def _read_phylip(text: str, source: str) -> list[FileMatrix]:
    found: list[FileMatrix] = []
    rows = list(_lines(text))
    while not found or _announces(rows):
        (line, head), *body = rows
        records, rows = _phylip_records(head, body, source, line)
        found.append(FileMatrix(records, line=line, block=len(found)))
    if rows:
        warn_user(
            f"{source}, line {rows[0][0]}: this line and all below follow the last sequence and were not read.",
            ConversionWarning,
        )
    return found


def _announces(rows: list[tuple[int, str]]) -> bool:
    """Whether rows begin as an alignment in PHYLIP, and there are at least as many as it has taxa."""
    counts = _COUNTS.match(rows[0][1]) if rows else None
    return counts is not None and int(counts.group(1)) < len(rows)


def _phylip_records(
    head: str, body: list[tuple[int, str]], source: str, line: int
) -> tuple[list[_Record], list[tuple[int, str]]]:
    """Return the sequences of an alignment and the rows that follow it; AlignmentError if they do not fit its head."""
    counts = _COUNTS.match(head)
    if counts is None:
        raise AlignmentError(
            f"{source}, line {line}: PHYLIP must start with the numbers of taxa and sites. Remedy: add "
            "these numbers, or pass the right format=."
        )
    num_taxa, num_sites = int(counts.group(1)), int(counts.group(2))
    if len(body) < num_taxa:
        raise AlignmentError(
            f"{source}, line {line}: {num_taxa} taxa are announced, but {len(body)} lines follow. "
            "Remedy: correct the number, or write the file again if it is truncated."
        )
    # The file does not name the layout; usually only the right one gives the announced lengths. Layouts of PAML are
    # tried after those of PHYLIP.
    misread: list[_Misread] = []
    more = False
    for rows, splits in ((body, (_first_word, _first_ten)), (_paml_rows(body, num_sites), (_first_word, _two_blanks))):
        readings: list[tuple[list[_Record], list[tuple[int, str]]]] = []
        for split, interleaved in itertools.product(splits, (False, True)):
            try:
                records, rest = _phylip_rows(rows, num_taxa, num_sites, split, interleaved)
            except _Misread as error:
                misread.append(error)
                continue
            if not rest or _announces(rest) or _is_remark(rest, records):
                readings.append((records, rest))
            more = True
        readings = [one for one in readings if not one[1]] or readings
        readings = [one for one in readings if len({record.name for record in one[0]}) == num_taxa] or readings
        if readings:
            if "G" in counts.group(3).upper():
                warn_user(
                    f"{source}, line {line}: the sites of each gene (option G) are not read. Remedy: divide the sites "
                    "by Alignment.partitioned.",
                    ConversionWarning,
                )
            likeliest = _likeliest([records for records, _ in readings], source, line)
            return next(one for one in readings if one[0] is likeliest)
    if more:
        raise AlignmentError(
            f"{source}, line {line}: {num_taxa} taxa are announced, but more sequences or sites follow. Remedy: "
            "correct the numbers of taxa and sites."
        )
    worst = max(misread[:4], key=lambda error: error.line)
    raise AlignmentError(
        f"{source}, line {worst.line}: {worst}. Remedy: align the sequences to one length and correct the numbers of "
        "taxa and sites, or write the file again if it is truncated."
    )


def _paml_rows(rows: list[tuple[int, str]], num_sites: int) -> list[tuple[int, str]]:
    """Leave out what PAML has beside names and sites: the genes of the sites, counters, and the mark of FASTA."""
    if genes := _GENES.fullmatch(rows[0][1]):
        rows, marks = rows[1:], 0
        # There is one mark for each site or codon.
        while not genes.group(1) and rows and rows[0][1].strip().isdigit() and marks not in (num_sites, num_sites // 3):
            marks += len(rows[0][1].strip())
            rows = rows[1:]
    return [(line, text) for line, row in rows if (text := _COUNTERS.sub("", row)).strip()]


def _is_remark(rows: list[tuple[int, str]], records: list[_Record]) -> bool:
    """Whether rows behind an alignment cannot be more of it: neither symbols of its sites only nor a sequence."""
    symbols = set("".join(record.text for record in records).upper()) | set("-?. \t")
    if not set("".join(row for _, row in rows).upper()) - symbols:
        return False
    for split in (_first_word, _first_ten, _two_blanks):
        with contextlib.suppress(_Misread):
            _phylip_rows(rows, 1, len(records[0].text), split, interleaved=False)
            return False
    return True


def _phylip_rows(
    rows: list[tuple[int, str]],
    num_taxa: int,
    num_sites: int,
    split: Callable[[str], tuple[str, str]],
    interleaved: bool,
) -> tuple[list[_Record], list[tuple[int, str]]]:
    """Read sequences in one layout; return them and the rows behind them; _Misread if they have other lengths."""
    records: list[_Record] = []
    parts: list[list[str]] = []
    missing: list[int] = []
    end = len(rows)
    for at, (line, row) in enumerate(rows):
        if len(records) == num_taxa and not (any(missing) if interleaved else missing[-1]):
            end = at
            break
        name, rest = "", row
        if at < num_taxa if interleaved else not (missing and missing[-1]):
            name, rest = split(row)
            if not name:
                raise _Misread(line, "a taxon has no name")
            records.append(_Record(name, "", []))
            parts.append([])
            missing.append(num_sites)
        place = at % num_taxa if interleaved else -1
        part = "".join(rest.split())
        parts[place].append(part)
        records[place].rows.append((line, len(part)))
        missing[place] -= len(part)
        if missing[place] < 0:
            break
    for record, sites in zip(records, missing, strict=True):
        if sites:
            problem = f"taxon {record.name!r} has {num_sites - sites} sites, but {num_sites} are announced"
            raise _Misread(record.line or 1, problem)
    if len(records) < num_taxa:
        raise _Misread(rows[-1][0], f"there are {len(records)} taxa, but {num_taxa} are announced")
    for record, texts in zip(records, parts, strict=True):
        record.text = "".join(texts)
    if "." not in records[0].text:  # a point is the symbol of the first sequence
        for record in records[1:]:
            record.text = "".join(_matched(records[0].text, record.text, "."))
    return records, rows[end:]


def _likeliest(readings: list[list[_Record]], source: str, line: int) -> list[_Record]:
    """Choose among PHYLIP variants that all give the announced lengths: known symbols, fewest names like bases."""
    distinct = list({tuple((record.name, record.text) for record in reading): reading for reading in readings}.values())
    nucleotides, proteins = (
        [reading for reading in distinct if all(kind.symbols.keys() >= set(record.text.upper()) for record in reading)]
        for kind in (DNA, PROTEIN)
    )
    candidates = nucleotides or proteins or distinct[:1]
    doubts = [sum(set(record.name) <= set("ACGTU") for record in reading) for reading in candidates]
    likely = [reading for reading, doubt in zip(candidates, doubts, strict=True) if doubt == min(doubts)]
    if len(likely) > 1:
        one, other = (", ".join(record.name for record in reading[:4]) for reading in likely[:2])
        raise AlignmentError(
            f"{source}, line {line}: the file can be read in two ways, with the taxa {one} or {other}; some names may "
            "be bases. Remedy: write the alignment as FASTA or NEXUS."
        )
    return likely[0]


def _read_nexus(text: str, source: str, blocks_read: Collection[str], types_read: bool) -> list[FileMatrix]:
    settings: dict[str, str] = {}
    found: list[FileMatrix] = []
    sets: list[tuple[str, str]] = []
    taxa: list[str] = []
    has_trees = False
    title, number_of_blocks = "", 0
    continuous: list[str] = []
    for block, head, line, rest in nexus_commands(text, source, AlignmentError):
        where = f"{source}, line {line}"
        if block not in blocks_read and _leaves_out(block, head, rest):
            warn_user(
                f"{where}: the command {head.upper()} is not read; all sites of all taxa are used with weight one. "
                "Remedy: to apply the command, remove the excluded taxa and sites from the matrix.",
                ConversionWarning,
            )
        unread = not types_read and block not in blocks_read and gives_types(block, head, rest)
        if unread and _RESTRICTED.search(rest.partition("=")[2] or rest):
            warn_user(
                f"{where}: the command {head.upper()} is not read; all characters are unordered. Remedy: to have "
                "ordered characters, read the file by Partition.from_file.",
                ConversionWarning,
            )
        has_trees = has_trees or (block == "trees" and head in ("tree", "utree"))
        if head == "charset":
            sets.append((rest, where))
        elif head == "taxlabels":
            taxa = unquoted(_joined(rest)).split()
        if block not in ("data", "characters"):
            continue
        if head == "eliminate":
            raise AlignmentError(
                f"{where}: the command ELIMINATE is not supported. Remedy: write the matrix without the eliminated "
                "columns."
            )
        if head == "title":
            title = unquoted(_joined(rest)).strip()
        elif head in ("dimensions", "format"):
            settings |= {key.lower(): value.strip("\"'") for key, value in _SETTING.findall(rest)}
            if head == "format" or "place" not in settings:
                settings["place"] = where  # of errors about the type of data
            if not is_continuous(rest):
                _check_format(settings, where, bool(taxa))
        elif head == "matrix" and settings.get("datatype", "").lower() == "continuous":
            continuous.append(settings["place"])
            settings, title = {}, ""
        elif head == "matrix":
            records = _nexus_matrix(rest, source, line, settings, taxa)
            parts = _mixed_parts(records, settings) or [FileMatrix(records, *_declared_type(settings, where))]
            for part in parts:
                part.line, part.title = line, title if part.sites is None else ""
                part.block, part.block_title = number_of_blocks, title
            found += parts
            number_of_blocks += 1
            settings, title = {}, ""
    for where in continuous:
        if not found:
            _declared_type({"datatype": "continuous"}, where)  # raises
        warn_user(f"{where}: the matrix of continuous characters is not read.", ConversionWarning)
    if not found:
        problem = _TREE_FILE if has_trees else "there is no DATA block with a MATRIX. Remedy: add this block."
        raise AlignmentError(f"{source}: {problem}")
    _name_parts([part for part in found if part.sites is not None], sets)
    return found


def _joined(text: str) -> str:
    """Replace the blanks in quoted names by underscores, as in the rest of a NEXUS file."""
    return QUOTED.sub(lambda found: "_".join(found.group().split()), text)


def _name_parts(parts: list[FileMatrix], sets: list[tuple[str, str]]) -> None:
    """Name each part of a mixed matrix after the character set of exactly its sites, if there is one."""
    columns = {id(part): part.sites for part in parts if part.sites is not None}
    num_sites = max((int(sites[-1]) + 1 for sites in columns.values()), default=0)
    known: dict[str, NDArray[np.int64]] = {}
    for text, where in sets if parts else ():
        # A set that cannot be read here names no part; who uses the sets reads them again.
        with contextlib.suppress(AlignmentError):
            name, members = named_set(text, where)
            known[name] = parse_numbers(members, num_sites, known, where)
    for part in parts:
        same = [name for name, sites in known.items() if np.array_equal(sites, columns[id(part)])]
        part.title = same[0] if same else ""


def gives_types(block: str, head: str, rest: str) -> bool:
    """Whether a command says which characters are ordered: CTYPE, or an active TYPESET, which has a star.

    Examples
    --------
    >>> gives_types("assumptions", "typeset", "* mine = ord: 1-3"), gives_types("assumptions", "typeset", "a = ord: 1")
    (True, False)
    """
    if head == "typeset":
        return rest.lstrip().startswith("*")
    return head == "ctype" and block in ("paup", "mrbayes")


def is_continuous(text: str) -> bool:
    """Whether a FORMAT command declares continuous characters."""
    return re.search(r"datatype\s*=\s*continuous\b", text, re.IGNORECASE) is not None


def _leaves_out(block: str, head: str, rest: str) -> bool:
    """Whether a command excludes or weights sites or taxa in the programs that support it."""
    if head in ("exset", "wtset"):  # a star marks the active set
        return rest.lstrip().startswith("*") and bool(rest.split("=")[-1].strip())
    return block in ("paup", "mrbayes") and head in ("exclude", "delete", "weights")


def _check_format(settings: dict[str, str], where: str, has_taxa: bool) -> None:
    """Raise AlignmentError for options of FORMAT that are not read."""
    refused = [key for key in ("transpose", "tokens") if settings.get(key, "no").lower() not in _OFF]
    labels = settings.get("labels", "").lower()
    refused += ["labels"] if labels == "right" else []
    if ("nolabels" in settings or labels in _OFF) and not has_taxa:
        refused.append("nolabels")  # without names in TAXLABELS
    if refused:
        raise AlignmentError(
            f"{where}: the format option {refused[0].upper()!r} is not supported. Remedy: write the matrix without it."
        )
    if not _MIXED.fullmatch(settings.get("datatype", "")):
        _declared_type(settings, where)


def _declared_type(settings: dict[str, str], where: str, name: str | None = None) -> tuple[DataType | str | None, str]:
    """Return the type of data that FORMAT declares, or that `name` is, and its name."""
    where = settings.get("place", where)
    kind = (settings.get("datatype", "") if name is None else name).lower()
    types: dict[str, tuple[DataType | str | None, str]] = {
        **dict.fromkeys(("dna", "rna", "nucleotide"), (DNA, "DNA")),
        "protein": (PROTEIN, "protein"),
        "restriction": (standard_characters("01"), "restriction"),
        "standard": ("standard", "standard"),
        "": (None, ""),
    }
    if kind not in types:
        raise AlignmentError(
            f"{where}: data of type {kind!r} are not supported. Remedy: give datatype=dna, rna, protein, restriction, "
            "standard, or mixed(dna:1-6,standard:7-9) with the sites of each type."
        )
    symbols = "".join(settings.get("symbols", "").split())
    if kind == "standard" and len(symbols) > 1:
        if "respectcase" in settings and len(set(symbols.upper())) < len(set(symbols)):
            raise AlignmentError(
                f"{where}: the format option 'RESPECTCASE' tells apart symbols that differ in case only, which is not "
                "supported. Remedy: use another symbol for each state."
            )
        # PAUP abbreviates the symbols 0 to 9 as 0~9.
        symbols = re.sub(r"(\w)~(\w)", lambda ends: "".join(map(chr, range(ord(ends[1]), ord(ends[2]) + 1))), symbols)
        # Mesquite lists bases before the digits; letters that no taxon has are no states if they stand behind.
        symbols = "".join(sorted(symbols, key=str.isalpha))
        try:
            return standard_characters(symbols), kind
        except SettingsError as error:
            raise AlignmentError(
                f"{where}: SYMBOLS={settings['symbols']!r} gives no states. Remedy: give from 2 to 36 different digits "
                "and letters."
            ) from error
    return types[kind]


def _mixed_parts(records: list[_Record], settings: dict[str, str]) -> list[FileMatrix]:
    """Divide a matrix that FORMAT declares as `mixed(TYPE:SITES,...)`; there is no part of any other."""
    mixed = _MIXED.fullmatch(settings.get("datatype", ""))
    if mixed is None:
        return []
    where, num_sites = settings["place"], len(records[0].text)
    parts: dict[str, tuple[str, NDArray[np.int64]]] = {}
    for text in re.split(r",(?=\s*\w+\s*:)", mixed.group(1)):
        name, colon, sites = (word.strip() for word in text.partition(":"))
        if not (colon and sites):
            raise AlignmentError(
                f"{where}: {text.strip()!r} gives no type and its sites. Remedy: write mixed(dna:1-6,standard:7-9)."
            )
        _declared_type(settings, where, name)
        label = f"{name}:{sites}"
        parts[f"{label} (again)" if label in parts else label] = (name, parse_numbers(sites, num_sites, {}, where))
    check_partition({label: sites for label, (_, sites) in parts.items()}, num_sites, where)
    return [
        FileMatrix([_columns(record, sites) for record in records], *_declared_type(settings, where, name), sites=sites)
        for name, sites in parts.values()
    ]


def _columns(record: _Record, sites: NDArray[np.int64]) -> _Record:
    """Return some sites of a sequence."""
    lines = np.repeat([line for line, _ in record.rows], [count for _, count in record.rows])[sites]
    several = dict(zip((site for site, symbol in enumerate(record.text) if symbol == _ANY), record.sets, strict=True))
    return _Record(
        record.name,
        "".join(record.text[site] for site in sites),
        [(line, len(list(same))) for line, same in itertools.groupby(lines.tolist())],
        tuple(several[site] for site in sites.tolist() if site in several),
    )


def _nexus_matrix(
    text: str, source: str, first_line: int, settings: dict[str, str], taxa: Sequence[str]
) -> list[_Record]:
    """Read a matrix of `nchar` sites a sequence, whose names are in front or, with NOLABELS, those of `taxa`."""
    if re.fullmatch(r"[1-9]\d{0,17}", settings.get("nchar", "")) is None:
        raise AlignmentError(f"{source}, line {first_line}: nchar is not announced. Remedy: add nchar to DIMENSIONS.")
    num_sites, num_taxa = int(settings["nchar"]), settings.get("ntax", "")
    interleaved = settings.get("interleave", "no").lower() not in _OFF
    rows = [(first_line + offset - 1, row) for offset, row in _lines(unquoted(_joined(text)))]
    if "nolabels" in settings or settings.get("labels", "").lower() in _OFF:
        rows = _with_names(rows, taxa, num_sites, interleaved)
    try:
        records, states = _matrix_rows(rows, num_sites, interleaved)
    except _Misread as error:
        if not interleaved and num_taxa in ("", str(len(rows))):
            _blame(source, rows, _first_word, num_sites)
        raise AlignmentError(
            f"{source}, line {error.line}: the matrix does not consist of {num_taxa or 'whole'} sequences of "
            f"{num_sites} sites ({error}). Remedy: give each taxon once, with the number of sites in DIMENSIONS."
        ) from error
    meaning = _meanings(settings, source, first_line)
    mark = settings.get("matchchar", "")
    if not mark and "." not in meaning and states and "." not in states[0] and any("." in row for row in states):
        mark = "."
        warn_user(
            f"{source}, line {first_line}: FORMAT declares no match character; '.' is read as the symbol of the first "
            "sequence.",
            ConversionWarning,
        )
    _replace_matches(records, states, mark, source)
    for record, row in zip(records, states, strict=True):
        meant = {state: "".join(meaning.get(symbol, symbol) for symbol in state) for state in set(row)}
        # A file may hold the character itself, which is no symbol, so it is kept as a set.
        texts = {state: _ANY if len(symbols) != 1 else symbols for state, symbols in meant.items()}
        record.text = "".join([texts[state] for state in row])
        record.sets = tuple([meant[state] for state in row if texts[state] == _ANY])
    if not records:
        raise AlignmentError(f"{source}, line {first_line}: the matrix is empty. Remedy: add its sequences.")
    if num_taxa not in ("", str(len(records))):
        raise AlignmentError(
            f"{source}, line {first_line}: the matrix has {len(records)} taxa, but ntax={num_taxa} is "
            "announced. Remedy: correct DIMENSIONS, or write the file again if it is truncated."
        )
    return records


def _with_names(
    rows: list[tuple[int, str]], taxa: Sequence[str], num_sites: int, interleaved: bool
) -> list[tuple[int, str]]:
    """Write the names of taxa in front of the rows of a matrix without labels."""
    named: list[tuple[int, str]] = []
    number = sites = 0
    for line, row in rows:
        starts = interleaved or not sites % num_sites
        named.append((line, f"{taxa[number % len(taxa)]} {row}" if starts else row))
        sites += _sites(row)
        number = number + 1 if interleaved else sites // num_sites
    return named


def _matrix_rows(
    rows: list[tuple[int, str]], num_sites: int, interleaved: bool
) -> tuple[list[_Record], list[list[str]]]:
    """Read the names of a matrix and the symbols of each site; _Misread if they do not have `num_sites` sites each."""
    records: dict[str, _Record] = {}
    states: dict[str, list[str]] = {}
    name = ""
    for line, row in rows:
        rest = row
        if interleaved or not name or len(states[name]) >= num_sites:
            name, rest = _first_word(row)
            if name in records and (not interleaved or len(states[name]) >= num_sites):
                raise _Misread(line, f"taxon {name!r} occurs again")
            record = records.setdefault(name, _Record(name, "", []))
            states.setdefault(name, [])
        plain = "".join(rest.split())
        found = [several or one for several, one in _SITE.findall(plain)] if _SET.search(plain) else plain
        record.rows.append((line, len(found)))
        states[name] += found
        if len(states[name]) > num_sites:
            raise _Misread(line, f"taxon {name!r} has {len(states[name])} sites")
    for record in records.values():
        if len(states[record.name]) != num_sites:
            raise _Misread(record.line or 1, f"taxon {record.name!r} has {len(states[record.name])} sites")
    return list(records.values()), list(states.values())


def _replace_matches(records: list[_Record], states: list[list[str]], mark: str, source: str) -> None:
    """Replace the match character by the symbol of the first sequence, in place."""
    if not mark or not states:
        return
    first = states[0]
    if mark in first:
        raise AlignmentError(
            f"{source}, line {records[0].line_of(first.index(mark))}: taxon {records[0].name!r} has the match "
            "character where the first sequence has no character. Remedy: write the first sequence in full."
        )
    for row in states[1:]:
        row[:] = _matched(first, row, mark)


def _matched(first: Sequence[str], row: Sequence[str], mark: str) -> list[str]:
    """Return a sequence with the symbols of the first one in place of the match character."""
    return [same if state == mark else state for same, state in zip(first, row, strict=True)]


def _meanings(settings: dict[str, str], source: str, line: int) -> dict[str, str]:
    """Return what symbols stand for: those of EQUATE, and the file's own signs for gaps and missing data."""
    text = settings.get("equate", "").strip()
    entries = _EQUATION.findall(text)
    if _EQUATION.sub("", text):
        raise AlignmentError(
            f"{settings.get('place', f'{source}, line {line}')}: EQUATE={text!r} is not read. Remedy: write pairs such "
            'as EQUATE="U=T R={AG}".'
        )
    found: dict[str, str] = {}
    usual = ((settings.get("gap", "-"), "-"), (settings.get("missing", "?"), "?"))
    signs = {sign: meaning for sign, meaning in usual if len(sign) == 1}
    pairs = signs | {symbol: "".join((several or one).split()) for symbol, several, one in entries}
    for symbol, meaning in pairs.items():
        meaning = "".join(signs.get(one, one) for one in meaning)
        cases = (symbol,) if "respectcase" in settings else (symbol.swapcase(), symbol)
        found |= {case: meaning for case in cases if case == symbol or case not in pairs}
    return found


# The type of the data, as declared or told by the symbols.

#: Share of bases below which letters that may be amino acids are taken for these; proteins have about a quarter.
_SHARE_OF_BASES = 0.8
#: Number of letters below which all are taken for bases.
_FEW = 10
#: Number of sites from which proteins have other letters than the codes of bases; a third is E, F, I, L, P or Q.
_MANY = 100


def _type_of(
    given: DataType | str | None, declared: DataType | str | None, records: Sequence[_Record], source: str
) -> DataType:
    """Return the type that the caller gives, or the file declares, or the symbols tell."""
    names: dict[str, DataType | str] = dict.fromkeys(("dna", "rna", "nucleotide"), DNA)
    names |= {"protein": PROTEIN, "codon": codons(), "standard": "standard"}
    if isinstance(given, str) and given.lower() not in names:
        raise unknown_name("type of data", given, ("DNA", "protein", "codon", "standard"))
    if not isinstance(given, DataType | str | None):
        raise SettingsError(f"data_type: {given!r:.60} is not a type of data. Remedy: give a name such as 'protein'.")
    kind: DataType | str | None = names[given.lower()] if isinstance(given, str) else given
    known = [one.name if isinstance(one, DataType) else one for one in (declared, kind) if one is not None]
    if len(set(known)) > 1 and known != ["DNA", "codon"]:
        raise AlignmentError(
            f"{source}: the file declares {known[0]} data, but data_type={known[1]!r} is given. Remedy: correct one."
        )
    found = declared if kind is None or (kind == "standard" and declared is not None) else kind
    is_declared = isinstance(found, DataType) and found is declared and found.name == "standard"
    if isinstance(found, DataType) and not is_declared:
        return found
    counts = Counter("".join(record.text + "".join(record.sets) for record in records).upper())
    for blank in ("-", "?", ",", _ANY):
        counts.pop(blank, None)
    if isinstance(found, DataType):  # symbols that no taxon has are no states
        return _standard_of(Counter({one: counts[one] for one in found.states if counts[one]}), source, found.states)
    return _guessed_type(counts, len(records[0].text), source) if found is None else _standard_of(counts, source)


def _standard_of(
    counts: Counter[str], source: str, symbols: tuple[str, ...] = standard_characters(36).states
) -> DataType:
    """Return the type of morphological symbols up to the last of those that occur."""
    unknown = sorted(counts.keys() - set(symbols))
    if unknown:
        raise AlignmentError(
            f"{source}: the symbol {unknown[0]!r} is not a state of standard data. Remedy: use digits and letters."
        )
    number = max([2, *(symbols.index(symbol) + 1 for symbol in counts)])
    return standard_characters("".join(symbols[:number]))


def _guessed_type(counts: Counter[str], num_sites: int, source: str) -> DataType:
    """Return the type told by how often symbols occur; AlignmentError where it cannot be told."""
    letters = counts.total()
    bases = sum(counts[symbol] for symbol in "ACGTU")
    if counts.keys() <= DNA.symbols.keys():
        letters -= sum(counts[symbol] for symbol in "NXO")
        if letters >= _FEW and bases < letters / 2 and num_sites < _MANY:
            raise AlignmentError(
                f"{source}: only {bases} of {letters} letters are A, C, G, T or U, although each is a code of "
                "nucleotides; these look like amino acids. Remedy: give data_type='protein', or data_type='DNA' if "
                "the others are ambiguous bases."
            )
        return DNA
    if counts.keys() <= set("0123456789"):
        return _standard_of(counts, source)
    if letters >= _FEW and counts.keys() <= PROTEIN.symbols.keys() and bases + counts["N"] < _SHARE_OF_BASES * letters:
        return PROTEIN
    return DNA


# Alignments as weighted site patterns.


@dataclass(frozen=True, eq=False, repr=False)
class Alignment:
    """Aligned sequences, stored as distinct columns with counts.

    Use `from_file` or `from_sequences` to make an alignment.

    Attributes
    ----------
    taxa : tuple of str
        Names in file order.
    patterns : Tensor
        Distinct columns, shape `(taxa, patterns)`, uint8, or int64 for more than eight states. Each entry is a set
        of states as bits, for bases A=1, C=2, G=4, T=U=8; ambiguity codes are unions, gaps and unknown states are the
        set of all.
    weights : Tensor
        Number of sites with each pattern, shape `(patterns,)`, float64.
    site_patterns : Tensor
        Index of the pattern of each site, shape `(num_sites,)`, int64.
    data_type : DataType
        What the sites are: `DNA`, `PROTEIN`, codons or the states of morphological characters.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "ACGTT", "B": "ACGAA", "C": "RC-AA"})
    >>> alignment.num_taxa, alignment.num_sites, alignment.num_patterns
    (3, 5, 4)
    >>> alignment.patterns[2].tolist(), alignment.weights.tolist()
    ([5, 2, 15, 1], [1.0, 1.0, 1.0, 2.0])
    >>> alignment
    Alignment(DNA, 3 taxa, 5 sites, 4 patterns)
    """

    taxa: tuple[str, ...]
    patterns: Tensor
    weights: Tensor
    site_patterns: Tensor
    data_type: DataType = DNA

    def __repr__(self) -> str:
        return (
            f"Alignment({self.data_type}, {self.num_taxa} taxa, {self.num_sites} sites, {self.num_patterns} patterns)"
        )

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], format: str | None = None, *, data_type: DataType | str | None = None
    ) -> Alignment:
        r"""Read a FASTA, NEXUS, PHYLIP, Clustal or Stockholm file.

        Parameters
        ----------
        path : str or os.PathLike
            May be compressed by gzip. All formats but FASTA may be interleaved; NEXUS may declare its own gap, missing
            and match characters and, by EQUATE, symbols for others or for sets of them. PHYLIP includes the layouts of
            PAML, where a '.' is the symbol of the first sequence. A FASTA name is the first word after '>', or the
            whole line if these are not unique; blanks in names become underscores. A file in UTF-16 or Latin-1 is read
            with a warning. A file of several matrices, or of a mixed one, is for `read_matrices`.
        format : {"fasta", "nexus", "phylip", "clustal", "stockholm"}, optional
            By default detected from the content, then from the suffix.
        data_type : {"DNA", "protein", "codon", "standard"} or DataType, optional
            By default what a NEXUS file declares, else told by the symbols: bases, amino acids, or digits for the
            states of morphological characters; restriction data are characters with the states 0 and 1. Codons are
            read from bases in frame, by the standard genetic code or that of `codons(genetic_code)`.

        Returns
        -------
        Alignment

        Raises
        ------
        AlignmentError
            If the file is missing, empty, truncated or malformed; if it holds symbols of another type of data,
            sequences of unequal lengths, a repeated name, an incomplete codon or a stop codon; if bases cannot be told
            from amino acids; if the file holds several matrices. The message gives file, line and taxon.
        SettingsError
            If `format` is not one of these names, or `data_type` is unknown.

        Warns
        -----
        ConversionWarning
            If the file is not in UTF-8, has commands that leave out sites or taxa, continuous characters beside
            others, or text behind the sequences; if
            whole lines are FASTA names; if a NEXUS file has '.' but declares no match character; if a protein has '*',
            which counts as missing.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "three.fasta"
        >>> _ = path.write_text(">A\nACGT\n>B\nACGA\n>C\nAC-A\n")
        >>> Alignment.from_file(path).taxa
        ('A', 'B', 'C')
        """
        records, declared = _read_records(path, format)
        return cls._from_records(records, os.fspath(path), data_type, declared)

    @classmethod
    def from_sequences(cls, sequences: Mapping[str, str], *, data_type: DataType | str | None = None) -> Alignment:
        """Make an alignment from sequences in memory.

        Parameters
        ----------
        sequences : mapping of str to str
            Sequence of each taxon, all of the same length.
        data_type : {"DNA", "protein", "codon", "standard"} or DataType, optional
            By default told by the symbols, as in `from_file`.

        Returns
        -------
        Alignment
            The taxa are in the order of the mapping.

        Raises
        ------
        AlignmentError
            If there is no site, a name is empty, a name or sequence is not text, a character is unknown, the lengths
            are unequal, a codon is incomplete or a stop codon, or bases cannot be told from amino acids.
        SettingsError
            If `data_type` is unknown.

        Examples
        --------
        >>> Alignment.from_sequences({"A": "ac", "B": "gt", "C": "u?"}).patterns.tolist()
        [[1, 2], [4, 8], [8, 15]]
        >>> Alignment.from_sequences({"A": "MKVLAT", "B": "MKILGT"})
        Alignment(protein, 2 taxa, 6 sites, 6 patterns)
        >>> Alignment.from_sequences({"A": "ATGAAA", "B": "ATGAAG"}, data_type="codon")
        Alignment(codon, 2 taxa, 2 sites, 2 patterns)
        """
        if not isinstance(sequences, Mapping):
            raise AlignmentError(
                f"sequences: {type(sequences).__name__} is not a mapping. Remedy: give names and sequences, such as "
                '{"A": "ACGT", "B": "ACGA"}.'
            )
        for name, text in sequences.items():
            if not (isinstance(name, str) and isinstance(text, str)):
                raise AlignmentError(
                    f"sequences: taxon {name!r} has the sequence {text!r:.60}. Remedy: give both as text (str)."
                )
        records = [_Record(name, text, []) for name, text in sequences.items()]
        return cls._from_records(records, "sequences", data_type)

    @classmethod
    def _from_records(
        cls,
        records: Sequence[_Record],
        source: str,
        data_type: DataType | str | None,
        declared: DataType | str | None = None,
    ) -> Alignment:
        if not records or not records[0].text:
            raise AlignmentError(f"{source}: there is no site. Remedy: give sequences with at least one site.")
        kind = _type_of(data_type, declared, records, source)
        num_sites = len(_masks(records[0], source, kind))
        first_seen: dict[str, _Record] = {}
        rows = np.empty((len(records), num_sites), dtype=np.uint8 if kind.num_states <= 8 else np.int64)
        for row, record in zip(rows, records, strict=True):
            if record.name in first_seen:
                raise AlignmentError(
                    f"{_at(source, record.line)}: the taxon {record.name!r} occurs twice"
                    + (f" (first in line {first_seen[record.name].line})" if record.line else "")
                    + ". Remedy: make names unique."
                )
            if not record.name.strip():
                raise AlignmentError(f"{_at(source, record.line)}: a taxon has no name. Remedy: name every taxon.")
            first_seen[record.name] = record
            masks = _masks(record, source, kind)
            if len(masks) != num_sites:
                raise AlignmentError(
                    f"{_at(source, record.line)}: taxon {record.name!r} has {len(masks)} sites, but "
                    f"{num_sites} are expected, as in {records[0].name!r}. Remedy: align the sequences to one length."
                )
            row[:] = masks
        ended = next((record for record in records if "*" in record.text), None)
        if ended is not None:
            site = ended.text.index("*")
            warn_user(
                f"{_at(source, ended.line_of(site))}: taxon {ended.name!r} has '*', the end of a protein, at site "
                f"{site + 1}; each '*' counts as missing.",
                ConversionWarning,
            )
        return cls._from_rows(tuple(record.name for record in records), rows, kind)

    @classmethod
    def _from_rows(cls, taxa: tuple[str, ...], rows: np.ndarray, data_type: DataType) -> Alignment:
        """Find the patterns of sets of states, shape `(taxa, sites)`."""
        columns, site_patterns, counts = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
        # In order of first appearance, so that the order of patterns follows the file and not the codes.
        first = np.full(len(counts), rows.shape[1])
        np.minimum.at(first, site_patterns.ravel(), np.arange(rows.shape[1]))
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return cls(
            taxa=taxa,
            patterns=torch.from_numpy(np.ascontiguousarray(columns[:, order])),
            weights=torch.from_numpy(counts[order].astype(np.float64)),
            site_patterns=torch.from_numpy(rank[site_patterns.ravel()]),
            data_type=data_type,
        )

    def select(self, taxa: Sequence[str]) -> Alignment:
        """Return the alignment of a subset of the taxa.

        Parameters
        ----------
        taxa : sequence of str
            Names, in the order of the result.

        Returns
        -------
        Alignment
            All sites; columns that become equal are merged into one pattern.

        Raises
        ------
        AlignmentError
            If a name is unknown or repeated, there is no name, or `taxa` is a single string.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "AC-A"})
        >>> alignment.select(["C", "A"]).num_patterns
        4
        """
        if isinstance(taxa, str):
            raise AlignmentError(f"taxa: {taxa!r} is one name. Remedy: give a list of names, such as [{taxa!r}].")
        row = {taxon: place for place, taxon in enumerate(self.taxa)}
        unknown = [taxon for taxon in taxa if taxon not in row]
        if unknown or not taxa or len(set(taxa)) < len(taxa):
            problem = f"there is no taxon {unknown[0]!r}" if unknown else "name at least one taxon, and each taxon once"
            raise AlignmentError(f"taxa: {problem}. Remedy: choose from {', '.join(self.taxa)}.")
        rows = self.patterns.numpy()[[row[taxon] for taxon in taxa]][:, self.site_patterns.numpy()]
        return self._from_rows(tuple(taxa), rows, self.data_type)

    def select_sites(self, sites: Sequence[int] | NDArray[np.integer[Any]]) -> Alignment:
        """Return the alignment of a subset of the sites.

        Parameters
        ----------
        sites : sequence of int
            Indices of the sites, counted from 0, in the order of the result.

        Returns
        -------
        Alignment

        Raises
        ------
        AlignmentError
            If there is no site, or an index is not a whole number from 0 to `num_sites - 1`.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGT", "B": "ACGA"})
        >>> alignment.select_sites(range(0, 4, 2)).patterns.tolist()
        [[1, 4], [1, 4]]
        """
        chosen = self.site_indices(sites, "sites")
        if not len(chosen):
            raise AlignmentError("sites: there is no site. Remedy: choose at least one.")
        return self._from_rows(self.taxa, self.patterns.numpy()[:, self.site_patterns.numpy()[chosen]], self.data_type)

    def partitioned(
        self, subsets: Mapping[str, Sequence[int] | NDArray[np.integer[Any]]] | str | os.PathLike[str]
    ) -> dict[str, Alignment]:
        r"""Divide the sites into subsets, for a `Partition`.

        Parameters
        ----------
        subsets : mapping of str to sequence of int, or path
            Indices of the sites of each subset, counted from 0; or a file that `read_partitions` reads: of RAxML or
            IQ-TREE, such as `DNA, first = 1-500\3`, or NEXUS with character sets, where sites are counted from 1.

        Returns
        -------
        dict of str to Alignment
            All taxa, and the sites of each subset, in the given order.

        Raises
        ------
        AlignmentError
            If a site occurs twice, in none of the subsets, or outside the alignment; if a subset has no site; or if the
            file is malformed. The message names the sites, counted from 1.

        Examples
        --------
        >>> alignment = Alignment.from_sequences({"A": "ACGTAC", "B": "ACGAAC"})
        >>> alignment.partitioned({"third": [2, 5], "others": [0, 1, 3, 4]})["third"]
        Alignment(DNA, 2 taxa, 2 sites, 2 patterns)
        """
        if isinstance(subsets, Mapping):
            where = "subsets"
            found = {name: self.site_indices(sites, f"{where}, {name!r}") for name, sites in subsets.items()}
        else:
            found, where = read_partitions(subsets, self.num_sites), os.fspath(subsets)
        check_partition(found, self.num_sites, where)
        return {name: self.select_sites(sites) for name, sites in found.items()}

    def site_indices(self, sites: Sequence[int] | NDArray[np.integer[Any]], where: str) -> NDArray[np.int64]:
        """Return sites as an array; AlignmentError, which names the argument, if one is outside the alignment."""
        try:
            indices = np.asarray(sites)
            indices = indices.astype(np.int64) if not indices.size else indices
        except (TypeError, ValueError):
            indices = np.empty((), dtype=object)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or ((indices < 0) | (indices >= self.num_sites)).any():
            raise AlignmentError(
                f"{where}: {sites!r:.60} are not sites. Remedy: give whole numbers from 0 to {self.num_sites - 1}."
            )
        return indices.astype(np.int64)

    @property
    def num_taxa(self) -> int:
        """Number of sequences."""
        return len(self.taxa)

    @property
    def num_sites(self) -> int:
        """Number of columns."""
        return len(self.site_patterns)

    @property
    def num_states_shown(self) -> NDArray[np.int64]:
        """Number of states of each site up to the last one that a taxon shows, 0 without data, shape `(sites,)`."""
        masks = self.patterns.numpy().astype(np.int64)
        shown = np.bitwise_or.reduce(np.where(masks == self.data_type.everything, 0, masks), axis=0)
        return np.array([int(one).bit_length() for one in shown])[self.site_patterns.numpy()]

    @property
    def num_patterns(self) -> int:
        """Number of distinct columns."""
        return len(self.weights)


def read_matrices(path: str | os.PathLike[str]) -> dict[str, Alignment]:
    r"""Read all matrices of a NEXUS file: of several blocks, and of mixed matrices of MrBayes.

    Parameters
    ----------
    path : str or os.PathLike
        A file that `Alignment.from_file` reads, or a NEXUS file with several DATA or CHARACTERS blocks, or with
        `datatype=mixed(DNA:1-6,standard:7-9)`, where sites are counted from 1.

    Returns
    -------
    dict of str to Alignment
        An alignment of each block, and of each type of a mixed matrix, in file order; `Partition` joins them. The
        names are those of TITLE, or of the CHARSET of exactly these sites, or of the type, such as "DNA", "standard"
        and "standard_2". The taxa are in the order of the first matrix.

    Raises
    ------
    AlignmentError
        As in `Alignment.from_file`; if the types of a mixed matrix overlap, leave out a site or reach beyond `nchar`;
        if the matrices have different taxa.

    References
    ----------
    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "mixed.nex"
    >>> _ = path.write_text(
    ...     "#NEXUS\nbegin data;\ndimensions ntax=2 nchar=6;\nformat datatype=mixed(DNA:1-4,standard:5-6);\n"
    ...     "matrix\nA ACGT01\nB ACGA11\n;\nend;\n"
    ... )
    >>> {name: matrix.num_sites for name, matrix in read_matrices(path).items()}
    {'DNA': 4, 'standard': 2}
    """
    return named_alignments(path, matrices_of_file(path))


def named_alignments(
    path: str | os.PathLike[str], matrices: Sequence[FileMatrix], data_type: DataType | str | None = None
) -> dict[str, Alignment]:
    """Return the alignment of each matrix of a file by its name, with the taxa in the order of the first."""
    found: dict[str, Alignment] = {}
    taxa: tuple[str, ...] = ()
    for matrix in matrices:
        source = os.fspath(path) if len(matrices) == 1 else f"{os.fspath(path)}, {matrix.described}"
        alignment = Alignment._from_records(matrix.records, source, data_type, matrix.kind)
        taxa = taxa or alignment.taxa
        odd = sorted(set(taxa) ^ set(alignment.taxa))
        if odd:
            raise AlignmentError(
                f"{_at(os.fspath(path), matrix.line)}: the taxon {odd[0]!r} is not in all matrices. Remedy: give "
                "each matrix all taxa, with '?' for what is missing."
            )
        name = stem = matrix.title or matrix.declared or alignment.data_type.name
        number = 1
        while name in found:
            number += 1
            name = f"{stem}_{number}"
        found[name] = alignment if alignment.taxa == taxa else alignment.select(taxa)
    return found


def _at(source: str, line: int | None) -> str:
    return source if line is None else f"{source}, line {line}"


def _masks(record: _Record, source: str, data_type: DataType) -> np.ndarray:
    """Translate a sequence to sets of states, shape `(sites,)`."""
    symbols = data_type.symbols
    known = {**symbols} | {s.lower(): mask for s, mask in symbols.items()}
    table = np.zeros(256, dtype=np.int64)
    table[[ord(symbol) for symbol in known]] = list(known.values())
    text = record.text
    masks = table[np.frombuffer(text.encode("latin-1", errors="replace"), dtype=np.uint8)]
    # Characters outside Latin-1 become '?', which would be read as missing data.
    foreign = [] if text.isascii() else [site for site, symbol in enumerate(text) if ord(symbol) > 127]
    wrong = {}
    # A file may hold the character itself, which no set belongs to.
    for site, several in zip([site for site, symbol in enumerate(text) if symbol == _ANY], record.sets, strict=False):
        members = several.replace(",", "")
        masks[site] = functools.reduce(operator.or_, (known.get(symbol, 0) for symbol in members), 0)
        strange = [symbol for symbol in members if symbol not in known]
        if strange:
            wrong[site] = strange[0]
    unknown = sorted({*np.flatnonzero(masks == 0).tolist(), *foreign, *wrong})
    if unknown:
        site = unknown[0]
        symbol = wrong.get(site, text[site])
        hint, remedy = _advice(data_type, symbol.upper())
        raise AlignmentError(
            f"{_at(source, record.line_of(site))}: unknown character {symbol!r} in taxon {record.name!r} "
            f"at site {site + 1}{hint}. Remedy: {remedy}, '-' for gaps and '?' for missing data."
        )
    return masks if data_type.name != "codon" else _codon_masks(masks, record, source, data_type)


def _advice(data_type: DataType, symbol: str) -> tuple[str, str]:
    """Return what an unknown symbol suggests, and which symbols there are."""
    if data_type == PROTEIN:
        return "", "use the letters of amino acids (with B, Z, J and X for several)"
    if data_type.name == "standard":
        return "", f"use the symbols {' '.join(data_type.states)}"
    hint = "; this looks like protein data, which data_type='protein' reads" if symbol in "EFIJLPQZ*" else ""
    return hint, "use IUPAC nucleotide codes (ACGTU, RYSWKMBDHV, N)"


def _codon_masks(bases: np.ndarray, record: _Record, source: str, data_type: DataType) -> np.ndarray:
    """Translate sets of bases in frame to sets of codons, shape `(sites / 3,)`."""
    if len(bases) % 3:
        raise AlignmentError(
            f"{_at(source, record.line)}: taxon {record.name!r} has {len(bases)} bases, which is not a multiple of "
            "three. Remedy: align codons in frame, from the first base on."
        )
    places = np.array([["ACGT".index(base) for base in codon] for codon in data_type.states])
    allowed = (bases.reshape(-1, 1, 3) >> places) & 1  # (sites, codons, 3)
    masks: np.ndarray = (allowed.all(axis=-1) << np.arange(data_type.num_states)).sum(axis=1)
    ends = np.flatnonzero(masks == 0)
    if len(ends):
        site = 3 * int(ends[0])
        raise AlignmentError(
            f"{_at(source, record.line_of(site))}: taxon {record.name!r} has the stop codon "
            f"{record.text[site : site + 3]!r} at site {site + 1}. Remedy: remove this column or write '---', check "
            "the reading frame, or give another genetic code, as data_type=codons('vertebrate mitochondrial')."
        )
    return masks


# Data sets of the package.

_PRIMATES_TOPOLOGY = "(2,(12,((11,(10,(9,8))),(7,(6,(5,(4,3)))))),1);"


def primates() -> tuple[Alignment, Tree]:
    """Load mitochondrial DNA of twelve primates and a well-supported topology.

    Returns
    -------
    alignment : Alignment
        12 taxa, 898 sites.
    tree : Tree
        No branch lengths.

    References
    ----------
    K. Hayasaka, T. Gojobori and S. Horai (1988), Molecular phylogeny and evolution of primate
    mitochondrial DNA, Molecular Biology and Evolution 5, 626-644.

    Examples
    --------
    >>> alignment, tree = primates()
    >>> alignment.num_taxa, alignment.num_sites, tree.num_edges
    (12, 898, 21)
    """
    with resources.as_file(resources.files(__package__) / "data" / "primates.nex") as path:
        alignment = Alignment.from_file(path)
    names = {str(number): taxon for number, taxon in enumerate(alignment.taxa, start=1)}
    return alignment, Tree.from_newick(_PRIMATES_TOPOLOGY, translate=names)
