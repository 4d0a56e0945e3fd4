"""FASTA, PHYLIP and NEXUS alignments, read by DendroPy and checked against their files.

DendroPy gets an alphabet of all characters that a file has, because its own has no U beside T;
which of them are nucleotides is told afterwards, with taxon and site. It says nothing about a
wrong number of taxa, and where a sequence is too short it takes the next name for characters.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dendropy
from dendropy.dataio.nexusreader import NexusReader
from dendropy.utility.error import DataParseError

from bayeskit.errors import AlignmentError, ConversionWarning, SettingsError
from bayeskit.models.phylogenetics.trees.statements import QUOTED, nexus_commands, read_text, unquoted

#: Sets of bases as bits (A=1, C=2, G=4, T=8) for each IUPAC code; gaps and unknowns are all four.
BASES = {
    **{"A": 1, "C": 2, "M": 3, "G": 4, "R": 5, "S": 6, "V": 7, "T": 8, "U": 8, "W": 9, "Y": 10},
    **{"H": 11, "K": 12, "D": 13, "B": 14, "N": 15, "X": 15, "O": 15, "?": 15, "-": 15},
}
_SET = re.compile(r"[{(]([^{}()]*)[})]")
_LETTER = {mask: letter for letter, mask in reversed(BASES.items()) if letter.isalpha()}
#: What DendroPy does not take for a character, and the gap and missing characters that it knows anyway.
_NO_SYMBOLS = set(" \t\n{}(),;:=\\\"'[]-?")
_SETTING = re.compile(r"(\w+)(?:\s*=\s*(\"[^\"]*\"|\S+))?")
_SUFFIXES = {
    **dict.fromkeys((".fasta", ".fa", ".fas", ".fna", ".ffn"), "fasta"),
    **dict.fromkeys((".nex", ".nexus", ".nxs"), "nexus"),
    **dict.fromkeys((".phy", ".phylip", ".ph"), "phylip"),
}
_TREE_FILE = "this is a file of trees. Remedy: read it by Tree.from_file or TreeSample.from_file."


class _Misread(Exception):
    """The line from which on DendroPy took names for characters, or characters for names."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


@dataclass
class Record:
    """One sequence and the lines on which it stands.

    Attributes
    ----------
    name : str
        Name of the taxon.
    text : str
        Its characters, one a site.
    rows : list of (int, int)
        Line and number of sites, for each line; empty where there is no file.
    """

    name: str
    text: str
    rows: list[tuple[int, int]]

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
    text = read_text(path, "a FASTA, NEXUS or PHYLIP file", AlignmentError)
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
    if re.match(r"(\[[^\]]*\]\s*)?([0-9.eE+-]+\s+)?\(", start):
        raise AlignmentError(f"{source}: {_TREE_FILE}")
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


def _sites(row: str) -> int:
    return len(_SET.sub("N", "".join(row.split())))


def _parse(text: str, schema: str, **options: bool) -> list[tuple[str, str]]:
    """Let DendroPy read names and sequences."""
    if schema != "nexus":
        symbols = "".join(set(text) - set(" \t\n"))
        options["default_state_alphabet"] = dendropy.StateAlphabet(fundamental_states=symbols, case_sensitive=True)
    names = dendropy.TaxonNamespace(is_case_sensitive=True)
    matrix = dendropy.StandardCharacterMatrix.get(data=text, schema=schema, taxon_namespace=names, **options)
    return [(taxon.label, matrix[taxon].symbols_as_string()) for taxon in matrix]


def _records(
    sequences: list[tuple[str, str]],
    rows: list[tuple[int, str]],
    split: Callable[[str], tuple[str, str]],
    layout: str = "sequential",
) -> list[Record]:
    """Find the lines of each sequence and check that they hold as many sites as DendroPy read."""
    records = [Record(name, text, []) for name, text in sequences]
    named = {record.name: record for record in records}
    waiting = iter(records)
    record: Record | None = None
    missing = 0
    for at, (line, row) in enumerate(rows):
        name, rest = split(row)
        if layout == "sequential":
            starts = missing <= 0
            record = next(waiting, None) if starts else record
        else:
            starts = layout == "interleaved with names" or at < len(records)
            record = named.get(name) if layout == "interleaved with names" else records[at % len(records)]
        if record is None or (starts and record.name != name):
            raise _Misread(line, f"{name!r} is not where a name is expected")
        sites = _sites(rest if starts else row)
        missing = (len(record.text) if starts else missing) - sites
        record.rows.append((line, sites))
    for record in records:
        sites = sum(sites for _, sites in record.rows)
        if sites != len(record.text):
            raise _Misread(record.line or 1, f"taxon {record.name!r} has {sites} sites")
    return records


def _blame(
    source: str, rows: list[tuple[int, str]], split: Callable[[str], tuple[str, str]], num_sites: int | None
) -> None:
    """Find the fault in rows of which each starts a sequence, and holds it all where `num_sites` is given."""
    first: dict[str, int] = {}
    for line, row in rows:
        name, rest = split(row)
        if name in first:
            raise AlignmentError(
                f"{source}, line {line}: the taxon {name!r} stands twice (first in line {first[name]}). "
                "Remedy: make names unique, or set 'interleave' in a NEXUS FORMAT."
            )
        first[name] = line
        if num_sites is not None and _sites(rest) != num_sites:
            raise _wrong_length(source, line, name, _sites(rest), f"nchar={num_sites} is")


def _wrong_length(source: str, line: int | None, name: str, sites: int, announced: str) -> AlignmentError:
    return AlignmentError(
        f"{source}, line {line}: taxon {name!r} has {sites} sites, but {announced} announced. "
        "Remedy: align the sequences to one length and correct the number."
    )


def _first_word(row: str) -> tuple[str, str]:
    name, *rest = row.split(None, 1)
    return name, "".join(rest)


def _first_ten(row: str) -> tuple[str, str]:
    return row[:10].strip(), row[10:]


def _fasta_name(row: str) -> tuple[str, str]:
    return (row.strip()[1:].strip(), "") if row.strip().startswith(">") else ("", row)


def _read_fasta(text: str, source: str) -> list[Record]:
    text = re.sub(r"(?m)^;.*", "", text)
    rows = list(_lines(text))
    names = [(line, row) for line, row in rows if row.strip().startswith(">")]
    if not names or names[0] != rows[0]:
        line = rows[0][0] if rows else 1
        raise AlignmentError(f"{source}, line {line}: FASTA must start with '>NAME'. Remedy: add it, or give format=.")
    for line, row in names:
        if not _fasta_name(row)[0]:
            raise AlignmentError(f"{source}, line {line}: a sequence has no name. Remedy: add it.")
    try:
        records = _records(_parse(text, "fasta"), rows, _fasta_name)
    except DataParseError as error:
        _blame(source, names, _fasta_name, None)
        raise AlignmentError(
            f"{source}, line {error.line_num}: there is no site above this name. Remedy: give each name a sequence."
        ) from error
    for record in records:
        record.name = record.name.split()[0]
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
    if (
        len(body) > num_taxa
        and len(body) % num_taxa
        and all(_sites(_first_word(row)[1]) == num_sites for _, row in body)
    ):
        raise AlignmentError(
            f"{source}, line {head_line}: {num_taxa} taxa are announced, but {len(body)} follow. Remedy: correct the "
            "number."
        )
    if len(body) < num_taxa:
        raise AlignmentError(
            f"{source}, line {head_line}: {num_taxa} taxa are announced, but {len(body)} lines follow. "
            "Remedy: correct the number, or write the file again if it is truncated."
        )
    # Nothing in the file says which variant it is; most often only the right one gives the announced lengths.
    readings: list[list[Record]] = []
    best: list[Record] = []
    for strict in (False, True):
        rows = [(line, row if strict else row.lstrip()) for line, row in body]
        # DendroPy refuses a text of two lines, so a blank one follows.
        plain = "\n".join([f"{num_taxa} {num_sites}", *(row for _, row in rows), "", ""])
        for interleaved in (True, False):
            try:
                sequences = _parse(plain, "phylip", strict=strict, interleaved=interleaved)
                split = _first_ten if strict else _first_word
                records = _records(sequences, rows, split, "interleaved" if interleaved else "sequential")
            # DendroPy fails with TypeError while it words what is wrong with a repeated taxon.
            except (DataParseError, TypeError, _Misread):
                continue
            if all(len(record.text) == num_sites for record in records):
                readings.append(records)
            best = best or records
    if readings:
        return _likeliest(readings, source, head_line)
    _blame(source, body[:num_taxa], _first_word, None)
    for record in best:
        if len(record.text) != num_sites:
            raise _wrong_length(source, record.line, record.name, len(record.text), f"{num_sites} are")
    raise AlignmentError(
        f"{source}, line {head_line}: the lines that follow are not the {num_taxa} taxa and {num_sites} sites that "
        "are announced. Remedy: correct the numbers, or write the file again if it is truncated."
    )


def _likeliest(readings: list[list[Record]], source: str, line: int) -> list[Record]:
    """Choose among variants of PHYLIP that all give the announced lengths: names are not bases, nor bases names."""
    distinct = list({tuple((record.name, record.text) for record in reading): reading for reading in readings}.values())
    nucleotides = [reading for reading in distinct if all(set(record.text.upper()) <= set(BASES) for record in reading)]
    candidates = nucleotides or distinct[:1]
    doubts = [sum(set(record.name) <= set("ACGTU") for record in reading) for reading in candidates]
    likely = [reading for reading, doubt in zip(candidates, doubts, strict=True) if doubt == min(doubts)]
    if len(likely) > 1:
        one, other = (", ".join(record.name for record in reading[:4]) for reading in likely[:2])
        raise AlignmentError(
            f"{source}, line {line}: the file can be read in two ways, with the taxa {one} or {other}, as some names "
            "may be bases. Remedy: write it as FASTA or NEXUS."
        )
    return likely[0]


def _read_nexus(text: str, source: str) -> list[Record]:
    settings: dict[str, str] = {}
    records: list[Record] | None = None
    has_trees = False
    for block, head, line, rest in nexus_commands(text, source, AlignmentError):
        if _leaves_out(block, head, rest):
            warnings.warn(
                f"{source}, line {line}: the command {head.upper()} is not read: all sites of all taxa count, each "
                "once. To follow it, write the matrix without what it leaves out",
                ConversionWarning,
                stacklevel=4,
            )
        has_trees = has_trees or (block == "trees" and head in ("tree", "utree"))
        if block in ("data", "characters") and head == "eliminate":
            raise AlignmentError(
                f"{source}, line {line}: the command ELIMINATE is not supported. Remedy: write the matrix without the "
                "columns that it leaves out."
            )
        if block in ("data", "characters") and head == "matrix" and records is not None:
            raise AlignmentError(
                f"{source}, line {line}: this is a second MATRIX. Remedy: give a file with one, or join the two."
            )
        if block in ("data", "characters") and head in ("dimensions", "format"):
            settings |= {key.lower(): value.strip("\"'") for key, value in _SETTING.findall(rest)}
            _check_format(settings, source, line)
        elif block in ("data", "characters") and head == "matrix":
            records = _nexus_matrix(rest, source, line, settings)
    if records is None:
        problem = _TREE_FILE if has_trees else "there is no DATA block with a MATRIX. Remedy: add one."
        raise AlignmentError(f"{source}: {problem}")
    return records


def _leaves_out(block: str, head: str, rest: str) -> bool:
    """Whether a command takes sites or taxa out, or weighs them, for the programs that heed it."""
    if head in ("exset", "wtset"):  # a star makes the set the one that holds
        return rest.lstrip().startswith("*") and bool(rest.split("=")[-1].strip())
    return block in ("paup", "mrbayes") and head in ("exclude", "delete", "weights")


def _check_format(settings: dict[str, str], source: str, line: int) -> None:
    kind = settings.get("datatype", "dna").lower()
    if kind not in ("dna", "rna", "nucleotide"):
        raise AlignmentError(
            f"{source}, line {line}: the data are of type {kind!r}. Remedy: give nucleotide sequences "
            "(datatype=dna); protein and other data have no substitution model here."
        )
    for key in ("equate", "transpose", "tokens", "nolabels", "labels"):
        if key in settings and (key != "labels" or settings[key].lower() not in ("", "left")):
            raise AlignmentError(
                f"{source}, line {line}: the format option {key.upper()!r} is not supported. Remedy: write "
                "the matrix without it."
            )


def _nexus_matrix(text: str, source: str, first_line: int, settings: dict[str, str]) -> list[Record]:
    if not settings.get("nchar", "").isdigit():
        raise AlignmentError(f"{source}, line {first_line}: nchar is not announced. Remedy: write it in DIMENSIONS.")
    num_sites, num_taxa = int(settings["nchar"]), settings.get("ntax", "")
    interleaved = settings.get("interleave", "no").lower() not in ("no", "n", "false")
    # A name in quotes may hold blanks; underscores stand for them in the rest of the file.
    text = QUOTED.sub(lambda found: "_".join(found.group().split()), text)
    rows = [(first_line + offset - 1, row) for offset, row in _lines(unquoted(text))]
    # DendroPy wants a number of taxa but takes any below it, and takes '.' for a match character if none is set.
    plain = (
        f"#NEXUS begin data; dimensions ntax={len(rows)} nchar={num_sites}; format datatype=standard "
        f'symbols="{"".join(set(text.upper()) - _NO_SYMBOLS)}" matchchar={settings.get("matchchar", chr(1))} '
        f"interleave={'yes' if interleaved else 'no'}; matrix {text}\n; end;"
    )
    try:
        found = _parse(plain, "nexus", preserve_underscores=True, case_sensitive_taxon_labels=True)
        sequences = [(name, _SET.sub(_set_letter, states)) for name, states in found]
        records = _records(sequences, rows, _first_word, "interleaved with names" if interleaved else "sequential")
    except (DataParseError, NexusReader.BlockTerminatedException, _Misread) as error:
        line = error.line if isinstance(error, _Misread) else first_line - 1 + (getattr(error, "line_num", None) or 1)
        if "MATCHCHAR" in str(error):
            name = next(_first_word(row)[0] for at, row in rows if at == line)
            raise AlignmentError(
                f"{source}, line {line}: taxon {name!r} has the match character where the first sequence has no "
                "character. Remedy: write the first sequence in full."
            ) from error
        if not interleaved and num_taxa in ("", str(len(rows))):
            _blame(source, rows, _first_word, num_sites)
        # The line and column that DendroPy adds to its message count from the start of `plain`.
        said = getattr(error, "message", str(error)) or "the last sequence is too short"
        raise AlignmentError(
            f"{source}, line {line}: the matrix is not {num_taxa or 'of'} sequences of {num_sites} sites ({said}). "
            "Remedy: give each taxon once, with as many sites as DIMENSIONS announces."
        ) from error
    own = ((settings.get("gap", "-"), "-"), (settings.get("missing", "?"), "?"))
    usual = str.maketrans({symbol.upper(): letter for symbol, letter in own if len(symbol) == 1})
    for record in records:
        record.text = record.text.translate(usual)
        if len(record.text) != num_sites:
            raise _wrong_length(source, record.line, record.name, len(record.text), f"nchar={num_sites} is")
    if num_taxa not in ("", str(len(records))):
        raise AlignmentError(
            f"{source}, line {first_line}: the matrix has {len(records)} taxa, but ntax={num_taxa} is "
            "announced. Remedy: correct DIMENSIONS, or write the file again if it is truncated."
        )
    return records


def _set_letter(found: re.Match[str]) -> str:
    """Return the code of a set of bases, or a symbol of it that is no base."""
    mask = 0
    for symbol in found.group(1).replace(",", "").upper():
        if symbol not in BASES:
            return symbol
        mask |= BASES[symbol]
    return _LETTER.get(mask, "?")
