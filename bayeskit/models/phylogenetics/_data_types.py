"""Types of aligned data: which states a site may have, and which symbols stand for sets of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from bayeskit.errors import SettingsError
from bayeskit.extend import unknown_name, whole_number

#: Amino acids of the 64 codons in the order TTT, TTC, TTA, TTG, TCT, ... (NCBI's tables 1 to 5); a star is a stop.
GENETIC_CODES: Mapping[str, str] = MappingProxyType(
    {
        "standard": "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG",
        "vertebrate mitochondrial": "FFLLSSSSYY**CCWWLLLLPPPPHHQQRRRRIIMMTTTTNNKKSS**VVVVAAAADDEEGGGG",
        "yeast mitochondrial": "FFLLSSSSYY**CCWWTTTTPPPPHHQQRRRRIIMMTTTTNNKKSSRRVVVVAAAADDEEGGGG",
        "mold mitochondrial": "FFLLSSSSYY**CCWWLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG",
        "invertebrate mitochondrial": "FFLLSSSSYY**CCWWLLLLPPPPHHQQRRRRIIMMTTTTNNKKSSSSVVVVAAAADDEEGGGG",
    }
)
_SYMBOLS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_GAPS = "-?"
#: Sets of bases as bits (A=1, C=2, G=4, T=8) for each IUPAC code.
_BASES = {
    **{"A": 1, "C": 2, "M": 3, "G": 4, "R": 5, "S": 6, "V": 7, "T": 8, "U": 8, "W": 9, "Y": 10},
    **{"H": 11, "K": 12, "D": 13, "B": 14, "N": 15, "X": 15, "O": 15},
}
_AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
#: Codes of several amino acids; selenocysteine (U) and pyrrolysine (O) are unknown to all models.
_SEVERAL = {"B": "ND", "Z": "QE", "J": "IL", "X": _AMINO_ACIDS, "U": _AMINO_ACIDS, "O": _AMINO_ACIDS}


@dataclass(frozen=True)
class DataType:
    """What the sites of an alignment are: bases, amino acids, codons or symbols of a morphological character.

    Use `DNA`, `PROTEIN`, `codons` and `standard_characters`.

    Attributes
    ----------
    name : str
        "DNA", "protein", "codon" or "standard".
    states : tuple of str
        The states, at most 64, in the order of all vectors and matrices.
    genetic_code : str
        For codons one of `GENETIC_CODES`, else empty.

    Examples
    --------
    >>> DNA.states, PROTEIN.num_states, codons().num_states
    (('A', 'C', 'G', 'T'), 20, 61)
    >>> str(standard_characters(3))
    'standard with 3 states'
    """

    name: str
    states: tuple[str, ...]
    genetic_code: str = ""

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self.states)

    @property
    def amino_acids(self) -> str:
        """The amino acid of each codon."""
        meaning = _translation(self.genetic_code)
        return "".join(meaning[codon] for codon in self.states)

    @property
    def everything(self) -> int:
        """The set of all states, as bits."""
        return (1 << self.num_states) - 1

    @property
    def symbols(self) -> Mapping[str, int]:
        """Set of states, as bits, for each symbol of a file, in capitals; for codons those of bases."""
        return _symbols(DNA if self.name == "codon" else self)

    def fits(self, other: DataType) -> bool:
        """Tell whether data of one type can be those of a model of the other; names of standard states are free."""
        return self == other or (self.name == other.name == "standard" and self.num_states == other.num_states)

    def __str__(self) -> str:
        return f"standard with {self.num_states} states" if self.name == "standard" else self.name


@lru_cache
def _symbols(data_type: DataType) -> Mapping[str, int]:
    if data_type == DNA:
        found = dict(_BASES)
    else:
        found = {state: 1 << place for place, state in enumerate(data_type.states)}
    if data_type == PROTEIN:
        found |= {symbol: sum(found[one] for one in several) for symbol, several in _SEVERAL.items()}
        found["*"] = data_type.everything  # the end of a protein, which the models do not have
    return MappingProxyType(found | dict.fromkeys(_GAPS, data_type.everything))


#: Bases; U counts as T.
DNA = DataType("DNA", tuple("ACGT"))
#: Amino acids, in the alphabetical order of their names.
PROTEIN = DataType("protein", tuple(_AMINO_ACIDS))


def standard_characters(states: int | str) -> DataType:
    """Return the type of morphological characters.

    Parameters
    ----------
    states : int or str
        Number of states, whose symbols are then 0 to 9 and A to Z, or these symbols; from 2 to 36.

    Returns
    -------
    DataType

    Raises
    ------
    SettingsError
        If there are fewer than two states or more than 36, or a symbol occurs twice or means missing data.

    Examples
    --------
    >>> standard_characters("01").states
    ('0', '1')
    """
    symbols: tuple[str, ...] = ()
    if isinstance(states, str):
        symbols = tuple(states.upper())
    elif whole_number("states", states) <= len(_SYMBOLS):
        symbols = tuple(_SYMBOLS[: max(states, 0)])
    if not 2 <= len(symbols) <= len(_SYMBOLS) or len(set(symbols)) < len(symbols) or not all(map(str.isalnum, symbols)):
        raise SettingsError(
            f"states={states!r}: there may be from 2 to {len(_SYMBOLS)} different digits and letters. Remedy: give the "
            "symbols of the states, such as '012', or their number."
        )
    return DataType("standard", symbols)


def codons(genetic_code: str = "standard") -> DataType:
    """Return the type of codons that encode an amino acid.

    Parameters
    ----------
    genetic_code : str, default "standard"
        One of `GENETIC_CODES`.

    Returns
    -------
    DataType
        The sense codons in alphabetical order, 61 of the standard code.

    Raises
    ------
    UnknownNameError
        If there is no such code.

    Examples
    --------
    >>> codons().states[:3], codons("vertebrate mitochondrial").num_states
    (('AAA', 'AAC', 'AAG'), 60)
    """
    if genetic_code not in GENETIC_CODES:
        raise unknown_name("genetic code", genetic_code, GENETIC_CODES)
    sense = (codon for codon, amino_acid in _translation(genetic_code).items() if amino_acid != "*")
    return DataType("codon", tuple(sorted(sense)), genetic_code)


def _translation(genetic_code: str) -> dict[str, str]:
    """Return the amino acid, or a star, for each codon."""
    return dict(zip(map("".join, itertools.product("TCAG", repeat=3)), GENETIC_CODES[genetic_code], strict=True))
