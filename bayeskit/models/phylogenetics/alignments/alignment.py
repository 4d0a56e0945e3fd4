"""Nucleotide alignments as weighted site patterns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bayeskit.errors import AlignmentError
from bayeskit.models.phylogenetics.alignments.files import BASES, Record, read_records

_MASK_OF_BYTE = np.zeros(256, dtype=np.uint8)
for _symbol, _mask in BASES.items():
    _MASK_OF_BYTE[ord(_symbol)] = _MASK_OF_BYTE[ord(_symbol.lower())] = _mask


@dataclass(frozen=True, eq=False, repr=False)
class Alignment:
    """Aligned nucleotide sequences, with equal columns stored once.

    Use `from_file` or `from_sequences` to make one.

    Attributes
    ----------
    taxa : tuple of str
        Names in file order.
    patterns : Tensor
        Distinct columns, shape `(taxa, patterns)`, uint8. Each entry is a set of bases as bits:
        A=1, C=2, G=4, T=U=8; ambiguity codes are unions, gaps and unknown bases are 15.
    weights : Tensor
        Number of sites that show each pattern, shape `(patterns,)`, float64.
    site_patterns : Tensor
        Pattern of each site, shape `(num_sites,)`, int64.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "ACGTT", "B": "ACGAA", "C": "RC-AA"})
    >>> alignment.num_taxa, alignment.num_sites, alignment.num_patterns
    (3, 5, 4)
    >>> alignment.patterns[2].tolist(), alignment.weights.tolist()
    ([5, 2, 15, 1], [1.0, 1.0, 1.0, 2.0])
    >>> alignment
    Alignment(3 taxa, 5 sites, 4 patterns)
    """

    taxa: tuple[str, ...]
    patterns: Tensor
    weights: Tensor
    site_patterns: Tensor

    def __repr__(self) -> str:
        return f"Alignment({self.num_taxa} taxa, {self.num_sites} sites, {self.num_patterns} patterns)"

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], format: str | None = None) -> Alignment:
        r"""Read a FASTA, NEXUS or PHYLIP file.

        Parameters
        ----------
        path : str or os.PathLike
            The file. NEXUS and PHYLIP may be interleaved; NEXUS may use its own gap, missing and
            match characters. A FASTA name is the first word after '>'; a NEXUS name in quotes
            gets underscores for its blanks.
        format : {"fasta", "nexus", "phylip"}, optional
            Its format; by default told from its content, then from its suffix.

        Returns
        -------
        Alignment
            The alignment.

        Raises
        ------
        AlignmentError
            If the file is missing, empty, truncated or malformed, holds other data than
            nucleotides, or has sequences of unequal lengths or twice the same name. The message
            names file, line and taxon.
        SettingsError
            If `format` is none of the three.

        Examples
        --------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "three.fasta"
        >>> _ = path.write_text(">A\nACGT\n>B\nACGA\n>C\nAC-A\n")
        >>> Alignment.from_file(path).taxa
        ('A', 'B', 'C')
        """
        return cls._from_records(read_records(path, format), os.fspath(path))

    @classmethod
    def from_sequences(cls, sequences: Mapping[str, str]) -> Alignment:
        """Make an alignment from sequences held in memory.

        Parameters
        ----------
        sequences : mapping of str to str
            Sequence of each taxon; all of one length.

        Returns
        -------
        Alignment
            The alignment, with the taxa in the order of the mapping.

        Raises
        ------
        AlignmentError
            If there is no site, a character is unknown or lengths are unequal.

        Examples
        --------
        >>> Alignment.from_sequences({"A": "ac", "B": "gt", "C": "u?"}).patterns.tolist()
        [[1, 2], [4, 8], [8, 15]]
        """
        records = [Record(name, text, []) for name, text in sequences.items()]
        return cls._from_records(records, "sequences")

    @classmethod
    def _from_records(cls, records: Sequence[Record], source: str) -> Alignment:
        if not records or not records[0].text:
            raise AlignmentError(f"{source}: there is no site. Remedy: give sequences with at least one site.")
        num_sites = len(records[0].text)
        first_seen: dict[str, Record] = {}
        rows = np.empty((len(records), num_sites), dtype=np.uint8)
        for row, record in zip(rows, records, strict=True):
            if record.name in first_seen:
                raise AlignmentError(
                    f"{_at(source, record.line)}: the taxon {record.name!r} stands twice"
                    + (f" (first in line {first_seen[record.name].line})" if record.line else "")
                    + ". Remedy: make names unique"
                    + (" (a FASTA name ends at its first blank)." if record.line else ".")
                )
            first_seen[record.name] = record
            masks = _masks(record, source)
            if len(masks) != num_sites:
                raise AlignmentError(
                    f"{_at(source, record.line)}: taxon {record.name!r} has {len(masks)} sites, but "
                    f"{num_sites} are expected, as in {records[0].name!r}. Remedy: align them to one length."
                )
            row[:] = masks
        return cls._from_rows(tuple(record.name for record in records), rows)

    @classmethod
    def _from_rows(cls, taxa: tuple[str, ...], rows: np.ndarray) -> Alignment:
        """Find the patterns of sets of bases, shape `(taxa, sites)`."""
        columns, site_patterns, counts = np.unique(rows, axis=1, return_inverse=True, return_counts=True)
        # In order of first appearance, so that patterns follow the file and not the codes.
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
        )

    def select(self, taxa: Sequence[str]) -> Alignment:
        """Return the alignment of some of the taxa.

        Parameters
        ----------
        taxa : sequence of str
            Which, in the order wanted.

        Returns
        -------
        Alignment
            Of all sites; columns that are now equal are one pattern.

        Raises
        ------
        AlignmentError
            If a name is not in the alignment, or stands twice, or there is none; if one string is given.

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
            problem = f"there is no taxon {unknown[0]!r}" if unknown else "each taxon must be named once, one at least"
            raise AlignmentError(f"taxa: {problem}. Remedy: choose from {', '.join(self.taxa)}.")
        rows = self.patterns.numpy()[[row[taxon] for taxon in taxa]][:, self.site_patterns.numpy()]
        return self._from_rows(tuple(taxa), rows)

    @property
    def num_taxa(self) -> int:
        """Number of sequences."""
        return len(self.taxa)

    @property
    def num_sites(self) -> int:
        """Number of columns."""
        return len(self.site_patterns)

    @property
    def num_patterns(self) -> int:
        """Number of distinct columns."""
        return len(self.weights)


def _at(source: str, line: int | None) -> str:
    return source if line is None else f"{source}, line {line}"


def _masks(record: Record, source: str) -> np.ndarray:
    """Translate a sequence to sets of bases, shape `(sites,)`."""
    text = record.text
    codes = text.encode("latin-1", errors="replace")
    masks = _MASK_OF_BYTE[np.frombuffer(codes, dtype=np.uint8)]
    # Characters outside Latin-1 arrive as '?', which would be read as missing data.
    foreign = [] if text.isascii() else [site for site, symbol in enumerate(text) if ord(symbol) > 127]
    unknown = sorted({*np.flatnonzero(masks == 0).tolist(), *foreign})
    if unknown:
        site = unknown[0]
        symbol = text[site]
        hint = "; this looks like protein data" if symbol.upper() in "EFIJLPQZ*" else ""
        raise AlignmentError(
            f"{_at(source, record.line_of(site))}: unknown character {symbol!r} in taxon {record.name!r} "
            f"at site {site + 1}{hint}. Remedy: use IUPAC nucleotide codes (ACGTU, RYSWKMBDHV, N), '-' for "
            "gaps and '?' for missing data."
        )
    return masks
