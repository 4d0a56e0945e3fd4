"""Readers of FASTA, PHYLIP and NEXUS alignments that remember where each character stood.

General readers accept truncated NEXUS files, take interleaved PHYLIP for sequential, refuse U
beside T and forget line numbers; an alignment that was read wrongly still has a likelihood, so
these readers are strict instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bayeskit.errors import AlignmentError, SettingsError

#: Sets of bases as bits (A=1, C=2, G=4, T=8) for each IUPAC code; gaps and unknowns are all four.
BASES = {
    **{"A": 1, "C": 2, "M": 3, "G": 4, "R": 5, "S": 6, "V": 7, "T": 8, "U": 8, "W": 9, "Y": 10},
    **{"H": 11, "K": 12, "D": 13, "B": 14, "N": 15, "X": 15, "O": 15, "?": 15, "-": 15},
}
_LETTER = {mask: letter for letter, mask in reversed(BASES.items()) if letter.isalpha()}
_SET = re.compile(r"\{([^{}()]*)\}|\(([^{}()]*)\)")
_NEXUS_PIECE = re.compile(r"'(?:[^']|'')*'|[\[\];]")
_SETTING = re.compile(r"(\w+)(?:\s*=\s*(\"[^\"]*\"|\S+))?")
_SUFFIXES = {
    **dict.fromkeys((".fasta", ".fa", ".fas", ".fna", ".ffn"), "fasta"),
    **dict.fromkeys((".nex", ".nexus", ".nxs"), "nexus"),
    **dict.fromkeys((".phy", ".phylip", ".ph"), "phylip"),
}


@dataclass
class Record:
    """One sequence, in the pieces in which it stands in its file.

    Attributes
    ----------
    name : str
        Name of the taxon.
    line : int or None
        Line of the name; None where there is no file.
    pieces : list of (int or None, str)
        Line and characters, one character a site.
    """

    name: str
    line: int | None
    pieces: list[tuple[int | None, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All characters."""
        return "".join(piece for _, piece in self.pieces)

    def line_of(self, site: int) -> int | None:
        """Line on which a site stands, counted from 0."""
        for line, piece in self.pieces:
            if site < len(piece):
                return line
            site -= len(piece)
        return self.line


def read_records(path: str | os.PathLike[str], format: str | None = None) -> list[Record]:
    """Read the sequences of an alignment file.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    format : {"fasta", "nexus", "phylip"}, optional
        Its format; by default told from its content, then from its suffix.

    Returns
    -------
    list of Record
        The sequences in file order. Their characters are not checked here.

    Raises
    ------
    AlignmentError
        If the file is missing, empty, truncated or malformed.
    SettingsError
        If `format` is none of the three.
    """
    source = os.fspath(path)
    if format is not None and format.lower() not in ("fasta", "nexus", "phylip"):
        raise SettingsError(f"format={format!r} is unknown. Remedy: use 'fasta', 'nexus' or 'phylip'.")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise AlignmentError(f"{source}: there is no such file. Remedy: check the path.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise AlignmentError(
            f"{source}: cannot be read as text ({error}). Remedy: give the path of a FASTA, NEXUS or PHYLIP file."
        ) from error
    if not text.strip():
        raise AlignmentError(f"{source}: the file is empty. Remedy: give a FASTA, NEXUS or PHYLIP alignment.")
    kind = format.lower() if format else _guess(text, source)
    reader = {"fasta": _read_fasta, "nexus": _read_nexus, "phylip": _read_phylip}[kind]
    return reader(text, source)


def _guess(text: str, source: str) -> str:
    start = text.lstrip()
    if start.startswith((">", ";")):
        return "fasta"
    if start[:6].upper() == "#NEXUS":
        return "nexus"
    if re.match(r"\d+\s+\d+", start):
        return "phylip"
    suffix = Path(source).suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise AlignmentError(
        f"{source}, line 1: the format is not recognized (FASTA starts with '>', NEXUS with '#NEXUS', "
        "PHYLIP with two numbers). Remedy: convert the file, or give format=."
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _read_fasta(text: str, source: str) -> list[Record]:
    records: list[Record] = []
    for number, line in _lines(text):
        if line.startswith(">"):
            words = line[1:].split()
            if not words:
                raise AlignmentError(f"{source}, line {number}: a sequence has no name. Remedy: add it.")
            records.append(Record(words[0], number))
        elif line.startswith(";"):
            continue
        elif not records:
            raise AlignmentError(
                f"{source}, line {number}: FASTA must start with '>NAME'. Remedy: add it, or give format=."
            )
        else:
            records[-1].pieces.append((number, _squeeze(line)))
    return records


def _read_phylip(text: str, source: str) -> list[Record]:
    (head_line, head), *body = _lines(text)
    match = re.match(r"\s*(\d+)\s+(\d+)", head)
    if match is None or int(match.group(1)) < 1:
        raise AlignmentError(
            f"{source}, line {head_line}: PHYLIP must start with the numbers of taxa and sites. Remedy: add "
            "them, or give format=."
        )
    num_taxa, num_sites = int(match.group(1)), int(match.group(2))
    if len(body) < num_taxa:
        raise AlignmentError(
            f"{source}, line {head_line}: {num_taxa} taxa are announced, but {len(body)} lines follow. "
            "Remedy: correct the number, or write the file again if it is truncated."
        )
    # Nothing in the file says which variant it is; only the right one gives the announced lengths.
    attempts = []
    for name_width in (None, 10):
        attempts.append(_phylip_interleaved(body, num_taxa, name_width))
        attempts.append(_phylip_sequential(body, num_taxa, num_sites, name_width))
    for records in attempts:
        if len(records) == num_taxa and all(len(record.text) == num_sites for record in records):
            return records
    best = attempts[0] if len(body) % num_taxa == 0 else attempts[1]
    wrong = next((record for record in best if len(record.text) != num_sites), None)
    if wrong is None:
        raise AlignmentError(
            f"{source}, line {head_line}: {num_taxa} taxa are announced and {len(best)} found. "
            "Remedy: correct the number, or write the file again if it is truncated."
        )
    raise AlignmentError(
        f"{source}, line {wrong.line}: taxon {wrong.name!r} has {len(wrong.text)} sites, but {num_sites} are "
        "announced. Remedy: align the sequences to one length and correct the first line."
    )


def _phylip_row(number: int, line: str, name_width: int | None) -> Record:
    if name_width is None:
        name, *rest = line.split(None, 1)
        return Record(name, number, [(number, _squeeze(rest[0]))] if rest else [])
    return Record(line[:name_width].strip(), number, [(number, _squeeze(line[name_width:]))])


def _phylip_interleaved(body: list[tuple[int, str]], num_taxa: int, name_width: int | None) -> list[Record]:
    records = [_phylip_row(number, line, name_width) for number, line in body[:num_taxa]]
    for position, (number, line) in enumerate(body[num_taxa:]):
        records[position % num_taxa].pieces.append((number, _squeeze(line)))
    return records


def _phylip_sequential(
    body: list[tuple[int, str]], num_taxa: int, num_sites: int, name_width: int | None
) -> list[Record]:
    records: list[Record] = []
    missing = 0
    for number, line in body:
        if missing > 0:
            records[-1].pieces.append((number, _squeeze(line)))
            missing -= len(records[-1].pieces[-1][1])
        else:
            records.append(_phylip_row(number, line, name_width))
            missing = num_sites - len(records[-1].text)
    return records


def _read_nexus(text: str, source: str) -> list[Record]:
    settings: dict[str, str] = {}
    flags: set[str] = set()
    records: list[Record] | None = None
    block = ""
    for line, statement, closed in _nexus_statements(text, source):
        words = statement.split()
        head = words[0].lower() if words else ""
        if not closed:
            if block or head:
                where = head.upper() or f"block {block.upper()}"
                raise AlignmentError(
                    f"{source}, line {line}: the file ends inside {where}, without ';'. Remedy: the file "
                    "seems truncated; write or copy it again."
                )
            break
        if head == "begin":
            block = words[1].lower() if len(words) > 1 else ""
        elif head in ("end", "endblock"):
            block = ""
        elif block in ("data", "characters") and head in ("dimensions", "format"):
            for key, value in _SETTING.findall(statement[len(head) :]):
                settings[key.lower()] = value
                flags.add(key.lower())
            _check_format(settings, source, line)
        elif block in ("data", "characters") and head == "matrix" and records is None:
            records = _nexus_matrix(statement, source, line, settings, flags)
    if records is None:
        raise AlignmentError(f"{source}: there is no DATA block with a MATRIX. Remedy: add one.")
    return records


def _nexus_statements(text: str, source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each statement without comments: its first line, its text, and whether ';' closes it."""
    parts: list[str] = []
    line = statement_line = position = 1
    position = len(text) - len(text.lstrip()) + len("#NEXUS")
    line = statement_line = 1 + text.count("\n", 0, position)
    while True:
        match = _NEXUS_PIECE.search(text, position)
        stop = len(text) if match is None else match.start()
        parts.append(text[position:stop])
        line += text.count("\n", position, stop)
        if match is None or match.group() == ";":
            statement = "".join(parts)
            blank_lines = statement[: len(statement) - len(statement.lstrip())].count("\n")
            yield statement_line + blank_lines, statement.strip(), match is not None
            if match is None:
                return
            parts, statement_line = [], line
            position = match.end()
            continue
        end = match.end()
        if match.group() == "[":
            end = text.find("]", end) + 1
            if end == 0:
                raise AlignmentError(f"{source}, line {line}: a comment is never closed. Remedy: add ']'.")
            parts.append("\n" * text.count("\n", match.start(), end))
        else:
            # A name in quotes may hold blanks; underscores stand for them in the rest of the file.
            parts.append("_".join(match.group()[1:-1].replace("''", "'").split()))
        line += text.count("\n", match.start(), end)
        position = end


def _check_format(settings: dict[str, str], source: str, line: int) -> None:
    kind = settings.get("datatype", "dna").lower()
    if kind not in ("dna", "rna", "nucleotide"):
        raise AlignmentError(
            f"{source}, line {line}: the data are of type {kind!r}. Remedy: give nucleotide sequences "
            "(datatype=dna); protein and other data have no substitution model here."
        )
    for key in ("equate", "transpose", "tokens"):
        if key in settings:
            raise AlignmentError(
                f"{source}, line {line}: the format option {key.upper()!r} is not supported. Remedy: write "
                "the matrix without it."
            )


def _nexus_matrix(
    statement: str, source: str, first_line: int, settings: dict[str, str], flags: set[str]
) -> list[Record]:
    num_sites = int(settings["nchar"]) if settings.get("nchar", "").isdigit() else None
    interleaved = "interleave" in flags and settings["interleave"].lower() not in ("no", "n", "false")
    # A symbol of more than one character is left to the check for unknown characters.
    own_symbols = ((settings.get("gap", ""), "-"), (settings.get("missing", ""), "?"))
    symbols = str.maketrans({own.strip("\"'"): usual for own, usual in own_symbols if len(own.strip("\"'")) == 1})
    match_symbol = settings.get("matchchar", "").strip("\"'")
    known = (
        set("".join(BASES)) | set("".join(BASES).lower()) | {chr(code) for code in symbols} | set("{}()" + match_symbol)
    )
    records: dict[str, Record] = {}
    last: Record | None = None
    for offset, row in _lines(statement[len("matrix") :]):
        line = first_line + offset - 1
        name, *rest = row.split(None, 1)
        if interleaved:
            last = records.setdefault(name, Record(name, line))
            piece = rest[0] if rest else ""
        elif (
            last is None
            or num_sites is None
            or len(last.text) >= num_sites
            or not set(_squeeze(row)) <= known
            or (rest and len(last.text) + len(_squeeze(row)) > num_sites)
        ):
            # A row that cannot continue the sequence before starts a taxon even if that sequence
            # is too short; the check of lengths below then reports that one.
            if name in records:
                raise AlignmentError(
                    f"{source}, line {line}: the taxon {name!r} stands twice (first in line "
                    f"{records[name].line}). Remedy: make names unique, or set 'interleave' in FORMAT."
                )
            last = records[name] = Record(name, line)
            piece = rest[0] if rest else ""
        else:
            piece = row
        piece = _SET.sub(lambda found: _set_letter(found, source, line), _squeeze(piece))  # noqa: B023
        last.pieces.append((line, piece.translate(symbols)))
    found = list(records.values())
    _resolve_matches(found, match_symbol, source)
    for record in found:
        if num_sites is not None and len(record.text) != num_sites:
            raise AlignmentError(
                f"{source}, line {record.line}: taxon {record.name!r} has {len(record.text)} sites, but "
                f"nchar={num_sites} is announced. Remedy: align them to one length and correct DIMENSIONS."
            )
    num_taxa = settings.get("ntax", "")
    if num_taxa.isdigit() and int(num_taxa) != len(found):
        raise AlignmentError(
            f"{source}, line {first_line}: the matrix has {len(found)} taxa, but ntax={num_taxa} is "
            "announced. Remedy: correct DIMENSIONS, or write the file again if it is truncated."
        )
    return found


def _set_letter(found: re.Match[str], source: str, line: int) -> str:
    mask = 0
    for symbol in (found.group(1) or found.group(2) or "").replace(",", "").upper():
        if symbol not in BASES:
            raise AlignmentError(
                f"{source}, line {line}: unknown character {symbol!r} in {found.group()!r}. "
                "Remedy: use IUPAC nucleotide codes."
            )
        mask |= BASES[symbol]
    return _LETTER[mask] if mask else "?"


def _resolve_matches(records: list[Record], symbol: str, source: str) -> None:
    """Replace the match character by what the first sequence has at the same site."""
    if len(symbol) != 1 or not records:
        return
    reference = records[0].text
    for record in records:
        site = 0
        for position, (line, piece) in enumerate(record.pieces):
            if symbol in piece:
                if record is records[0] or site + len(piece) > len(reference):
                    raise AlignmentError(
                        f"{source}, line {line}: taxon {record.name!r} has the match character {symbol!r} "
                        "where the first sequence has no character. Remedy: write the first sequence in full."
                    )
                there = reference[site : site + len(piece)]
                piece = "".join(b if a == symbol else a for a, b in zip(piece, there, strict=True))
                record.pieces[position] = (line, piece)
            site += len(piece)
