"""Files with data of one type or several: their matrices, types of characters, and usual models."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayeskit.errors import AlignmentError, DataWarning, SettingsError
from bayeskit.extend import warn_user
from bayeskit.models._substitution_names import CODON_MODELS, KNOWN_NAMES, SYNONYMS
from bayeskit.models.phylogenetics._alignments import (
    Alignment,
    FileMatrix,
    gives_types,
    is_continuous,
    matrices_of_file,
    named_alignments,
)
from bayeskit.models.phylogenetics._amino_acids import AminoAcidModel
from bayeskit.models.phylogenetics._data_types import DataType, codons, standard_characters
from bayeskit.models.phylogenetics._model_names import parse_substitution
from bayeskit.models.phylogenetics._newick import nexus_commands, read_text, unquoted
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites, SiteRates
from bayeskit.models.phylogenetics._site_sets import check_partition, named_set, parse_numbers, ranges, read_partitions
from bayeskit.models.phylogenetics._substitution import (
    HKY85,
    JC69,
    Binary,
    Mk,
    OrderedMk,
    SubstitutionModel,
    VariableSites,
)
from bayeskit.models.phylogenetics._variable_sites import sites_left_out

#: Types of data that are coded: which characters can be in the data.
CODED = ("standard", "restriction")
_TYPES = {"dna": "DNA", "rna": "DNA", "nucleotide": "DNA"} | {name: name for name in ("protein", "codon", *CODED)}
#: The coding of data in which no site is as it forbids.
_USUAL_CODING = {"standard": "variable", "restriction": "noabsence"}


# Matrices.


@dataclass(frozen=True, eq=False)
class FilePart:
    """Data of one type in a file: of a block, of a type of a mixed matrix, or of a subset of its sites."""

    name: str
    kind: str  # "DNA", "protein", "codon", "standard" or "restriction"
    alignment: Alignment
    columns: NDArray[np.int64]  # (sites,), counted from 0 through all matrices of the file
    block: int = 0
    as_codons: Callable[[DataType], Alignment] | None = None

    def select(self, places: NDArray[np.int64], name: str | None = None) -> FilePart:
        """Return some of the sites, by their places in this part."""
        whole = np.array_equal(places, np.arange(len(self.columns)))
        alignment = self.alignment if whole else self.alignment.select_sites(places)
        again = self.as_codons if whole else None
        return replace(self, name=name or self.name, alignment=alignment, columns=self.columns[places], as_codons=again)


def read_parts(
    path: str | os.PathLike[str], blocks_read: Collection[str] | None = None, data_type: DataType | str | None = None
) -> list[FilePart]:
    """Return the matrices of a file, as `read_matrices`, with their types and columns.

    With `blocks_read`, the caller reads these blocks and no types of characters elsewhere.
    """
    matrices = matrices_of_file(path, None, blocks_read or (), types_read=blocks_read is None)
    before: dict[int, int] = {}
    first = 0
    for block in sorted({matrix.block for matrix in matrices}):
        before[block] = first
        first += sum(len(matrix.records[0].text) for matrix in matrices if matrix.block == block)
    parts = []
    for (name, alignment), matrix in zip(named_alignments(path, matrices, data_type).items(), matrices, strict=True):
        sites = np.arange(len(matrix.records[0].text)) if matrix.sites is None else matrix.sites
        kind = "restriction" if matrix.declared == "restriction" else alignment.data_type.name
        again = _codon_reader(path, matrix, alignment.taxa) if kind == "DNA" else None
        parts.append(FilePart(name, kind, alignment, sites + before[matrix.block], matrix.block, again))
    return parts


def _codon_reader(
    path: str | os.PathLike[str], matrix: FileMatrix, taxa: tuple[str, ...]
) -> Callable[[DataType], Alignment]:
    """Return the function that reads a matrix of bases as codons."""

    def read(data_type: DataType) -> Alignment:
        (alignment,) = named_alignments(path, [matrix], data_type).values()
        return alignment if alignment.taxa == taxa else alignment.select(taxa)

    return read


def joined(parts: Sequence[FilePart], name: str) -> FilePart:
    """Return parts of one type as one; standard data have the states of the part with most of them."""
    if len(parts) == 1:
        return replace(parts[0], name=name)
    largest = max((part.alignment.data_type for part in parts), key=lambda data_type: data_type.num_states)
    rows = []
    for part in parts:
        masks = part.alignment.patterns.numpy().astype(np.int64)
        masks = np.where(masks == part.alignment.data_type.everything, largest.everything, masks)
        rows.append(masks[:, part.alignment.site_patterns.numpy()])
    columns = np.concatenate([part.columns for part in parts])
    order = np.argsort(columns)
    states = np.concatenate(rows, axis=1)[:, order].astype(np.uint8 if largest.num_states <= 8 else np.int64)
    alignment = Alignment._from_rows(parts[0].alignment.taxa, states, largest)
    return FilePart(name, parts[0].kind, alignment, columns[order], parts[0].block)


def type_of(parts: Sequence[FilePart], columns: NDArray[np.int64], name: str, where: str) -> str:
    """Return the type of columns of a file; AlignmentError, which begins with `where`, if they are of two types."""
    found = {part.kind: np.intersect1d(part.columns, columns) for part in parts}
    found = {kind: sites for kind, sites in found.items() if len(sites)}
    if len(found) > 1:
        several = ", ".join(f"{kind} in {ranges(sites)}" for kind, sites in found.items())
        raise AlignmentError(
            f"{where}: the subset {name!r} has data of several types ({several}). Remedy: give each type a subset of "
            "its own."
        )
    return next(iter(found))


def part_of(parts: Sequence[FilePart], columns: NDArray[np.int64], name: str, where: str) -> FilePart:
    """Return columns of a file, of one type as `type_of` checks, as one part."""
    kind = type_of(parts, columns, name, where)
    chosen = [(part, np.flatnonzero(np.isin(part.columns, columns))) for part in parts if part.kind == kind]
    return joined([part.select(places) for part, places in chosen if len(places)], name)


# Types of characters.


def ordered_columns(path: str | os.PathLike[str], parts: Sequence[FilePart]) -> NDArray[np.int64]:
    """Return the ordered characters of a NEXUS file, counted as `FilePart.columns`.

    These are the standard data that an active TYPESET, CTYPE of a MRBAYES or PAUP block, or OPTIONS DEFTYPE names; a
    later command overrides an earlier one. AlignmentError for types without a model.
    """
    if all(part.kind != "standard" for part in parts):
        return np.arange(0)
    text, source = read_text(path, "an alignment", AlignmentError), os.fspath(path)
    if text.lstrip()[:6].upper() != "#NEXUS":
        return np.arange(0)
    num_columns = sum(len(part.columns) for part in parts)
    ordered = np.zeros(num_columns, dtype=bool)
    standard = np.zeros(num_columns, dtype=bool)
    for part in parts:
        standard[part.columns] = part.kind == "standard"
    blocks = [
        np.sort(np.concatenate([part.columns for part in parts if part.block == block]))
        for block in sorted({part.block for part in parts})
    ]
    titles: list[str] = []
    sets: list[tuple[str, str]] = []
    title = linked = last = ""
    continuous = False
    for block, head, line, rest in nexus_commands(text, source, AlignmentError):
        where = f"{source}, line {line}"
        plain = unquoted(rest)
        linked, last = linked if block == last else "", block
        if head == "title" and block in ("data", "characters"):
            title = plain.strip().lower()
        elif head == "format" and block in ("data", "characters"):
            continuous = is_continuous(rest)
        elif head == "matrix" and block in ("data", "characters"):
            titles += [] if continuous else [title]
            title, continuous = "", False
        elif head == "link":
            found = re.search(r"characters\s*=\s*(\S+)", plain, re.IGNORECASE)
            linked = found[1].lower() if found else ""
        elif head == "charset":
            sets.append((rest, where))
        elif head == "options" and block == "assumptions":
            given = re.search(r"deftype\s*=\s*([^\s,]+)", plain, re.IGNORECASE)
            if given is not None:
                ordered |= is_ordered(given[1], where) & standard
        elif gives_types(block, head, rest):
            named = re.search(r"\(\s*characters\s*=\s*([^)]+?)\s*\)", plain, re.IGNORECASE)
            wanted = named[1].lower() if named else linked
            members = named_set(rest, where)[1] if head == "typeset" else plain
            columns = _columns_of(wanted, titles, blocks, where)
            known = _known_sets(sets, len(columns))
            for word, sites in _types(members, where):
                chosen = columns[parse_numbers(sites, len(columns), known, where, "character")]
                chosen = chosen[standard[chosen]]  # types of other data have no effect
                if len(chosen):
                    ordered[chosen] = is_ordered(word, where)
    return np.flatnonzero(ordered)


def _columns_of(
    title: str, titles: Sequence[str], blocks: Sequence[NDArray[np.int64]], where: str
) -> NDArray[np.int64]:
    """Return the columns of the block with a title, or of the only block."""
    if len(blocks) == 1:
        return blocks[0]
    if titles.count(title) != 1 or not title:
        raise AlignmentError(
            f"{where}: the command is for one of {len(blocks)} matrices, but does not say which. Remedy: give each "
            "block a TITLE, and write (CHARACTERS = TITLE) behind the name of the set."
        )
    return blocks[titles.index(title)]


def _known_sets(sets: Sequence[tuple[str, str]], num_sites: int) -> dict[str, NDArray[np.int64]]:
    """Return the character sets that can be read."""
    known: dict[str, NDArray[np.int64]] = {}
    for text, where in sets:
        # A set of another matrix may reach beyond this one; who names it sees that it is missing.
        with contextlib.suppress(AlignmentError):
            name, members = named_set(text, where)
            known[name] = parse_numbers(members, num_sites, known, where)
    return known


def _types(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield type and members of text such as `unord: 1-3, ord: 4`."""
    first, *pieces = re.split(r",?\s*([^\s:,]+)\s*:", text)
    if first.strip() or not pieces:
        raise AlignmentError(
            f"{where}: {text.strip()!r:.60} gives no types of characters. Remedy: write them as 'unord: 1-3, ord: 4-6'."
        )
    yield from zip(pieces[::2], pieces[1::2], strict=True)


def is_ordered(word: str, where: str) -> bool:
    """Return whether a type of characters is ordered, not unordered; AlignmentError for any other."""
    plain = word.lower()
    for name in ("ordered", "unordered"):
        if len(plain) > 1 and name.startswith(plain):
            return name == "ordered"
    raise AlignmentError(
        f"{where}: there is no model for characters of the type {word!r}, only for 'ord' and 'unord' ones. Remedy: "
        "give these characters one of the two types, or take them out of the matrix."
    )


# Subsets with models.


def check_coding(part: FilePart, coding: str, source: str, remedy: str = "use coding='all'") -> FilePart:
    """Leave out characters that cannot be in data of a coding, with a warning; AlignmentError if none is left."""
    with_coding(Mk(2), coding)  # an unknown one is an error
    out = np.arange(0) if coding == "all" else sites_left_out(part.alignment, coding)
    if not len(out):
        return part
    said = f"{source}: the characters {ranges(part.columns[out])} (counted from 1) of {part.name!r}"
    if len(out) == len(part.columns):
        raise AlignmentError(
            f"{said} cannot be in data of coding={coding!r}, and there are no others. Remedy: {remedy}."
        )
    warn_user(f"{said} cannot be in data of coding={coding!r}, and are left out.", DataWarning)
    return part.select(np.setdiff1d(np.arange(len(part.columns)), out))


def usual_coding(parts: Sequence[FilePart], kind: str) -> str:
    """Return the coding of a type of data in which none of its sites is left out: the strictest, or "all"."""
    coding = _USUAL_CODING[kind]
    return "all" if any(len(sites_left_out(part.alignment, coding)) for part in parts if part.kind == kind) else coding


def _why_all(part: FilePart) -> str:
    """Return the sites that keep data from their usual coding, in words."""
    out = part.columns[sites_left_out(part.alignment, _USUAL_CODING[part.kind])]
    may = "constant" if part.kind == "standard" else "absent in all taxa"
    return f" (may be {may}: {ranges(out)})" if len(out) else ""


def with_coding(model: SubstitutionModel, coding: str | None) -> SubstitutionModel:
    """Return a model of sites that were chosen, unless `coding` is "all" or None, or it is such a model already."""
    if coding in (None, "all") or isinstance(model, VariableSites):
        return model
    return VariableSites(model, str(coding))


def by_states(
    alignment: Alignment, ordered: NDArray[np.int64], coding: str
) -> dict[str, tuple[Alignment, SubstitutionModel]]:
    """Divide standard data by the number of states that characters show, and by order, with the model of each.

    `ordered` are sites of the alignment; all can be in data of the coding.
    """
    counts = np.maximum(alignment.num_states_shown, 2)
    in_order = np.zeros(alignment.num_sites, dtype=bool)
    in_order[ordered] = True
    in_order &= counts > 2  # two states are always neighbours
    found = {}
    for number, is_in_order in sorted({*zip(counts.tolist(), in_order.tolist(), strict=True)}):
        subset = alignment.select_sites(np.flatnonzero((counts == number) & (in_order == is_in_order)))
        # They show the first states alone.
        kind = standard_characters("".join(subset.data_type.states[:number]))
        subset = replace(subset, patterns=subset.patterns & kind.everything, data_type=kind)
        model = with_coding(OrderedMk(number) if is_in_order else Mk(number), coding)
        found[f"{'ordered' if is_in_order else 'states'}_{number}"] = (subset, model)
    return found


def characters(
    part: FilePart, ordered: NDArray[np.int64], coding: str, prefix: str = ""
) -> dict[str, tuple[Alignment, SubstitutionModel]]:
    """Divide standard data as `by_states`; `ordered` are columns of the file."""
    found = by_states(part.alignment, np.flatnonzero(np.isin(part.columns, ordered)), coding)
    return {f"{prefix}{name}": subset for name, subset in found.items()}


class FileData:
    """The data of a file with their models, as arguments of `Partition` and in words.

    Takes the arguments of `Partition.from_file`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        models: Any = None,
        site_rates: Any = None,
        coding: Any = None,
        subsets: Any = None,
    ) -> None:
        self.source = os.fspath(path)
        # Letters may be states, which only the name of the model tells where the file does not say so.
        is_mk = isinstance(models, str) and models.partition("+")[0].strip().lower() in ("mk", "mkv")
        parts = read_parts(path, data_type="standard" if is_mk else None)
        ordered = ordered_columns(path, parts)
        self.parts = parts if subsets is None else self._divided(parts, subsets)
        self._models = self._by_part("models", models, (str, SubstitutionModel))
        self._rates = self._by_part("site_rates", site_rates, SiteRates)
        self._codings = self._by_part("coding", coding, str)
        self.subsets: dict[str, Alignment] = {}
        self.substitution: dict[str, SubstitutionModel] = {}
        self.site_rates: dict[str, SiteRates | None] = {}
        self.linked: dict[str, list[tuple[str, ...]]] = {}
        self._words: list[str] = []
        self._usual = {kind: usual_coding(self.parts, kind) for kind in CODED}
        several = sum(part.kind == "standard" for part in self.parts) > 1
        for part in self.parts:
            self._add(part, ordered, f"{part.name}_" if several else "")

    def __str__(self) -> str:
        sites = sum(len(part.columns) for part in self.parts)
        return "\n".join([f"{self.source}: {len(self.parts[0].alignment.taxa)} taxa, {sites} sites", *self._words])

    def _divided(self, parts: Sequence[FilePart], subsets: Any) -> list[FilePart]:
        """Return the subsets of sites, all of one type."""
        num_sites = sum(len(part.columns) for part in parts)
        where = "subsets" if isinstance(subsets, Mapping) else os.fspath(subsets)
        given = subsets if isinstance(subsets, Mapping) else read_partitions(subsets, num_sites)
        found = {name: np.asarray(sites, dtype=np.int64) for name, sites in given.items()}
        outside = [name for name, sites in found.items() if ((sites < 0) | (sites >= num_sites)).any()]
        if outside:
            raise AlignmentError(
                f"{where}: the subset {outside[0]!r} has sites outside of the {num_sites} of the file. Remedy: give "
                f"numbers from 0 to {num_sites - 1}."
            )
        check_partition(found, num_sites, where)
        return [part_of(parts, sites, name, where) for name, sites in found.items()]

    def _by_part(self, place: str, given: Any, kinds: Any) -> dict[str, Any]:
        """Return what is given for each part, by name or type, or for all parts."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            types = list(dict.fromkeys(part.kind for part in self.parts))
            if place == "models" and len(types) > 1:
                raise SettingsError(
                    f"models: {given!s:.40} is for data of one type, but {self.source} has {', '.join(types)}. Remedy: "
                    f"give a model of each type, such as models={{{types[0]!r}: ...}} ({types[0]}=... on the command "
                    "line)."
                )
            given = {part.name: given for part in self.parts if place != "coding" or part.kind in CODED}
            if not given:
                raise SettingsError(f"coding: {self.source} has {', '.join(types)} data only. Remedy: leave it out.")
        names = {part.name.lower(): [part] for part in self.parts}
        for part in self.parts:
            names.setdefault(f"type {part.kind.lower()}", []).append(part)
        found: dict[str, Any] = {}
        by_name: dict[str, Any] = {}
        for key, value in given.items():
            kind = _TYPES.get(str(key).lower(), str(key)).lower()
            chosen = names.get(str(key).lower(), names.get(f"type {kind}"))
            if chosen is None or not isinstance(value, kinds):
                known = ", ".join(dict.fromkeys([*(part.name for part in self.parts), *(p.kind for p in self.parts)]))
                if chosen is None:
                    problem = f"{self.source} has no data {key!r}. Remedy: choose from {known}"
                else:
                    problem = f"{value!r:.60} of {key!r} has the wrong type. Remedy: give a value for each of {known}"
                raise SettingsError(f"{place}: {problem}.")
            (by_name if str(key).lower() in names else found).update({part.name: value for part in chosen})
        return found | by_name

    def _add(self, part: FilePart, ordered: NDArray[np.int64], prefix: str) -> None:
        """Add the subsets of a part."""
        model, rates = self._models.get(part.name), self._rates.get(part.name)
        coding = self._codings.get(part.name)
        if coding is not None and part.kind not in CODED:
            raise SettingsError(
                f"coding: {part.name!r} are {part.kind} data. Remedy: give a coding for standard and restriction data "
                "only, and a model with +ASC for variable sites of others."
            )
        words: list[str] = []
        if isinstance(model, str) and part.kind in CODED:
            model, text_rates, coding = _named_characters(part, model, coding, self._usual[part.kind])
            rates = _only(rates, text_rates, part.name)
        elif isinstance(model, str):
            part = _as_codons(part, model)
            model, text_rates = parse_substitution(model, part.alignment)
            rates = _only(rates, text_rates, part.name)
        elif model is not None and model.data_type.name == "codon" and part.as_codons is not None:
            part = replace(part, kind="codon", alignment=part.as_codons(model.data_type))
        if isinstance(model, VariableSites) and coding not in (None, model.coding):
            raise SettingsError(
                f"coding={coding!r}: the model of {part.name!r} has coding={model.coding!r}. Remedy: give one of "
                "the two."
            )
        if part.kind in CODED:
            is_usual, why = model is None and coding is None, ""
            coding = self._usual[part.kind] if is_usual else coding
            if is_usual and coding == "all":
                why = _why_all(part)
            before = part.columns
            part = check_coding(part, coding or str(getattr(model, "coding", "all")), self.source)
            words = [f"coding {coding}{why}"] if coding else []
            if len(part.columns) < len(before):
                words.append(f"without {ranges(np.setdiff1d(before, part.columns))}")
        if part.kind == "standard" and model is None:
            found = characters(part, ordered, str(coding), prefix)
            in_order = part.columns[np.isin(part.columns, ordered)]
            words += [f"ordered: {ranges(in_order)}"] if len(in_order) else []
        else:
            usual = {"protein": AminoAcidModel, "restriction": Binary}.get(part.kind, JC69)
            found = {part.name: (part.alignment, with_coding(usual() if model is None else model, coding))}
        names = []
        for wanted, (alignment, chosen) in found.items():
            name = wanted if wanted not in self.subsets else f"{part.name}_{wanted}"
            names.append(name)
            self.subsets[name], self.substitution[name], self.site_rates[name] = alignment, chosen, rates
        shared = {} if rates is None else rates.priors(torch.empty(0, dtype=torch.float64))
        for parameter in (*shared, "relative_rates", "branch_lengths") if len(names) > 1 else ():
            self.linked.setdefault(parameter, []).append(tuple(names))
        self._words += self._in_words(part, names, [*map(called, layers(rates)), *words])

    def _in_words(self, part: FilePart, names: Sequence[str], words: Sequence[str]) -> list[str]:
        """Return lines on a part and its subsets; of one subset with its name, one line."""
        kind = "" if part.kind.lower() == part.name.lower() else f"{part.kind}, "
        head = f"  {part.name} ({kind}{number_of_sites(part)}): "
        if list(names) == [part.name]:
            model = called(self.substitution[part.name]).partition(", coding")[0]
            return [head + ", ".join([model, *words])]
        lines = [f"    {number_of_sites(self.subsets[name])}: {called(self.substitution[name])}" for name in names]
        return [head + ", ".join(words), *lines]


def _only(one: Any, other: Any, name: str) -> Any:
    """Return the one that is given; SettingsError if both are."""
    if one is not None and other is not None:
        raise SettingsError(f"site_rates: the model of {name!r} names its own. Remedy: give them once.")
    return other if one is None else one


def _named_characters(
    part: FilePart, text: str, coding: str | None, usual: str
) -> tuple[SubstitutionModel | None, SiteRates | None, str]:
    """Return the model that a text names, None for Mk of the characters' own states; its rates, and the coding."""
    name, *suffixes = text.strip().split("+")
    variable = name.lower() == "mkv" or any(suffix.upper() == "ASC" for suffix in suffixes)
    if variable and coding not in (None, "variable"):
        raise SettingsError(f"coding={coding!r}: {text!r} means coding='variable'. Remedy: give one of the two.")
    plain = [suffix for suffix in suffixes if suffix.upper() != "ASC"]
    binary = part.kind == "restriction" and name.lower() == "binary"
    name = "Mk" if binary or name.lower() == "mkv" else name
    # Of characters that show the most states: the others get models of their own.
    shown = part.alignment.num_states_shown
    fullest = part.alignment.select_sites(np.flatnonzero(shown == shown.max()))
    model, rates = parse_substitution("+".join([name, *plain]), fullest)
    coding = coding or ("variable" if variable else usual if binary else "all")
    return (Binary() if binary else None if part.kind == "standard" else model), rates, coding


def _as_codons(part: FilePart, text: str) -> FilePart:
    """Return bases as codons if a text names a model of these."""
    name = text.strip().partition("+")[0].lower()
    known = {spelling.lower(): SYNONYMS.get(spelling, spelling) for spelling in KNOWN_NAMES}
    if known.get(name) not in CODON_MODELS or part.as_codons is None:
        return part
    return replace(part, kind="codon", alignment=part.as_codons(codons()))


def file_in_words(path: str | os.PathLike[str], substitution: str | None) -> str:
    """Return what `Partition.from_file` reads, for data of several types or of characters, else nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are for who reads the data
        found = FileData(path, parse_models(substitution))
    return str(found) if len(found.parts) > 1 or found.parts[0].kind in CODED else ""


def parse_models(text: str | None) -> str | dict[str, str] | None:
    """Return the models by type, or the text if it names one.

    Raises
    ------
    SettingsError
        If the text is neither.

    Examples
    --------
    >>> parse_models("GTR+G4"), parse_models("DNA=GTR+G4, standard=Mkv")
    ('GTR+G4', {'DNA': 'GTR+G4', 'standard': 'Mkv'})
    """
    if text is None or "=" not in text:
        return text
    found = {}
    for piece in text.split(","):
        name, equals, model = (word.strip() for word in piece.partition("="))
        if not (name and equals and model) or name in found:
            raise SettingsError(
                f"{text!r} does not name a model of each type. Remedy: write it as DNA=GTR+G4,standard=Mkv."
            )
        found[name] = model
    return found


# Words.


def number_of_sites(data: FilePart | Alignment) -> str:
    """Return the number of sites, or of characters, as text."""
    alignment, kind = (data.alignment, data.kind) if isinstance(data, FilePart) else (data, data.data_type.name)
    word = {"standard": "character", "codon": "codon"}.get(kind, "site")
    return f"{alignment.num_sites} {word}{'' if alignment.num_sites == 1 else 's'}"


def layers(site_rates: SiteRates | None) -> list[SiteRates]:
    """Return site rates and what they contain."""
    if site_rates is None:
        return []
    return [site_rates, *layers(site_rates.others)] if isinstance(site_rates, InvariantSites) else [site_rates]


def called(model: SubstitutionModel | SiteRates) -> str:
    """Return the name of a model.

    Examples
    --------
    >>> called(VariableSites(Mk(3))), called(AminoAcidModel("WAG")), called(GammaRates())
    ('Mk with 3 states, coding variable', 'WAG', 'GammaRates with 4 categories')
    """
    if isinstance(model, VariableSites):
        return f"{called(model.model)}, coding {model.coding}"
    if isinstance(model, AminoAcidModel):
        return model.matrix
    if isinstance(model, HKY85) and isinstance(model.kappa, torch.Tensor) and float(model.kappa) == 1.0:
        return "F81"
    more = ""
    if isinstance(model, Mk | OrderedMk):
        more = f" with {model.states} states"
    elif isinstance(model, GammaRates):
        more = f" with {model.num_categories} categories"
    return type(model).__name__ + more
