"""Alignments: patterns, formats, and every malformed input."""

import bz2
import gzip
from contextlib import nullcontext

import pytest
import torch

from bayeskit.errors import AlignmentError, ConversionWarning, SettingsError, UnknownNameError
from bayeskit.models.phylogenetics import DNA, PROTEIN, Alignment, codons, standard_characters

HEAD = "#NEXUS\nbegin data;\ndimensions ntax=2 nchar=4;\nformat datatype=dna gap=- missing=?{options};\nmatrix\n"


def nexus(matrix: str, options: str = "") -> str:
    return HEAD.format(options=options) + matrix + "\n;\nend;\n"


def masks(alignment: Alignment) -> list[list[int]]:
    return alignment.patterns[:, alignment.site_patterns].tolist()


def write(tmp_path, content, name="a.txt"):
    path = tmp_path / name
    path.write_bytes(content.encode())
    return path


def test_codes():
    symbols = "ACGTURYSWKMBDHVNXO?-"
    expected = [1, 2, 4, 8, 8, 5, 10, 6, 9, 12, 3, 14, 13, 11, 7, 15, 15, 15, 15, 15]
    alignment = Alignment.from_sequences({"a": symbols, "b": symbols.lower()}, data_type="DNA")
    assert masks(alignment) == [expected, expected]
    assert alignment.patterns.dtype == torch.uint8


def test_patterns_are_counted_in_order_of_appearance():
    alignment = Alignment.from_sequences({"x": "TATTA", "y": "CACCG"})
    assert alignment.patterns.tolist() == [[8, 1, 1], [2, 1, 4]]
    assert alignment.weights.tolist() == [3, 1, 1]
    assert alignment.site_patterns.tolist() == [0, 1, 0, 0, 2]
    assert (alignment.num_taxa, alignment.num_sites, alignment.num_patterns) == (2, 5, 3)


GOOD = {
    "fasta": ">a description\nac\ngt\n\n>b\nAC-N\n",
    "fasta with carriage returns": ">a\r\nacgt\r\n>b\r\nAC-N\r\n",
    "fasta with byte order mark": "\ufeff>a\nacgu\n>b\nAC-N\n",
    "nexus": nexus("a acgt\nb AC-N"),
    "nexus with carriage returns": nexus("a acgt\nb AC-N").replace("\n", "\r\n"),
    "nexus with comments": nexus("[one\ntwo]a ac[x]gt\nb AC-N [end]"),
    "nexus over several lines": nexus("a\nac\ngt\nb AC\n-N"),
    "nexus with blanks": nexus("a ac gt\nb AC -N"),
    "interleaved nexus": nexus("a ac\nb AC\n\na gt\nb -N", " interleave"),
    "interleaved nexus, yes": nexus("a ac\nb AC\n\na gt\nb -N", " interleave=yes"),
    "nexus, interleave=no": nexus("a acgt\nb AC-N", " interleave=no"),
    "nexus with match characters": nexus("a acgt\nb ..-N", " matchchar=."),
    "interleaved nexus with match characters": nexus("a ac\nb ..\na gt\nb -N", " interleave matchchar=."),
    "nexus with own symbols": nexus("a acgt\nb AC~!").replace("gap=- missing=?", "gap = ~ missing='!'"),
    "nexus with sets": nexus("a acgt\nb {A}C-(ACGT)"),
    "nexus in capitals": nexus("a acgt\nb AC-N").replace("matrix", "MATRIX").replace("begin data", "BEGIN CHARACTERS"),
    "rna": nexus("a acgu\nb AC-N").replace("dna", "rna"),
    "phylip": "2 4\na  acgt\nb  AC-N\n",
    "sequential phylip": "2 4\na  ac\n gt\nb  AC\n-N\n",
    "interleaved phylip": " 2 4\na  ac\nb  AC\n\ngt\n-N\n",
    "strict phylip": "2 4\na         acgt\nb         AC-N\n",
}


@pytest.mark.parametrize("case", GOOD)
def test_formats(tmp_path, case):
    alignment = Alignment.from_file(write(tmp_path, GOOD[case]))
    assert alignment.taxa == ("a", "b")
    assert masks(alignment) == [[1, 2, 4, 8], [1, 2, 15, 15]]


def test_names(tmp_path):
    strict = "2 4\nHomo sapieacgt\nHomo erectacgt\n"
    assert Alignment.from_file(write(tmp_path, strict)).taxa == ("Homo sapie", "Homo erect")
    quoted = nexus("'Homo s.' acgt\n'it''s' acgt")
    assert Alignment.from_file(write(tmp_path, quoted)).taxa == ("Homo_s.", "it's")


def test_names_that_differ_in_case_or_look_like_bases(tmp_path):
    for text in ("2 4\na  acgt\nA  acga\n", ">a\nacgt\n>A\nacga\n", nexus("a acgt\nA acga"), nexus("a\nacgt\nA\nacga")):
        assert Alignment.from_file(write(tmp_path, text)).taxa == ("a", "A")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("begin assumptions; exset * mine = 1-2; end;", "EXSET"),
        ("begin assumptions; wtset * mine = 2: 1-2; end;", "WTSET"),
        ("begin paup; exclude 1; end;", "EXCLUDE"),
        ("begin mrbayes; delete a; end;", "DELETE"),
        ("begin assumptions; exset mine = 1-2; exset * none = ; end; begin paup; set criterion=likelihood; end;", None),
    ],
)
def test_commands_that_leave_sites_out_are_said_not_to_be_read(command, name, tmp_path):
    path = tmp_path / "sets.nex"
    start = "#NEXUS begin data; dimensions ntax=2 nchar=4; format datatype=dna; matrix\na acgt\nb ac-n\n; end;\n"
    path.write_text(start + command)
    with pytest.warns(ConversionWarning, match=f"line 5: the command {name} is not read") if name else nullcontext():
        assert Alignment.from_file(path).num_sites == 4


#: Names that may be bases: other variants of the format give the announced lengths, too.
NAMES_LIKE_BASES = {
    "codons": (
        "3 21\nCat ATG GCC AAA\nTTT GGG CCC AAA\nDog ATG GCT AAA\nTTT GGC CCC AAG\nCow ATG GCA AAA\nTTT GGT CCC AAT\n",
        {"Cat": "ATGGCCAAATTTGGGCCCAAA", "Dog": "ATGGCTAAATTTGGCCCCAAG", "Cow": "ATGGCAAAATTTGGTCCCAAT"},
    ),
    "names of ten": (
        "2 25\nPan_paniscACGTACGTAC\nACGTACGTAC ACGTA\nPan_troglo TTTTTTTTTT\nACGTACGTAC ACGTT\n",
        {"Pan_panisc": "ACGTACGTACACGTACGTACACGTA", "Pan_troglo": "TTTTTTTTTTACGTACGTACACGTT"},
    ),
    "a block as long as a name": (
        "2 25\nHomo_sapie ACGTACGTAC\nACGTACGTAG ACGTA\nGorilla_go TTTTTTTTTT\nACGTACGTAC ACGTT\n",
        {"Homo_sapie": "ACGTACGTACACGTACGTAGACGTA", "Gorilla_go": "TTTTTTTTTTACGTACGTACACGTT"},
    ),
}


@pytest.mark.parametrize(("text", "sequences"), NAMES_LIKE_BASES.values(), ids=NAMES_LIKE_BASES)
def test_names_are_not_taken_for_bases(text, sequences, tmp_path):
    path = tmp_path / "names.phy"
    path.write_text(text)
    found, expected = Alignment.from_file(path), Alignment.from_sequences(sequences)
    assert found.taxa == expected.taxa
    assert torch.equal(
        torch.as_tensor(found.patterns)[:, found.site_patterns],
        torch.as_tensor(expected.patterns)[:, expected.site_patterns],
    )


def test_a_file_that_can_be_read_in_two_ways_is_refused(tmp_path):
    path = tmp_path / "names.phy"
    path.write_text("2 6\nTA CC\nTTAG\nCA CC\nTTAC\n")
    assert Alignment.from_file(path).taxa == ("TA", "CA")
    path.write_text("2 9\nCat ATG\nDog GGA\nCow CCC\nCar TTT\n")
    with pytest.raises(
        AlignmentError,
        match="names.phy, line 1: the file can be read in two ways, .* Cat, Cow or Cat, Dog|Cat, Dog or Cat, Cow",
    ):
        Alignment.from_file(path)


def test_long_interleaved_phylip_is_not_read_as_sequential(tmp_path):
    text = "2 8\na  acgt\nb  acga\n\nacgt\nacgg\n"
    assert masks(Alignment.from_file(write(tmp_path, text)))[1] == [1, 2, 4, 1, 1, 2, 4, 4]


def test_format_is_told_by_content_then_suffix_then_argument(tmp_path):
    path = write(tmp_path, GOOD["fasta"], "misleading.nex")
    assert Alignment.from_file(path).taxa == ("a", "b")
    assert Alignment.from_file(path, format="FASTA").taxa == ("a", "b")
    with pytest.raises(AlignmentError, match="line 1: FASTA must start"):
        Alignment.from_file(write(tmp_path, "acgt\n", "a.fasta"))
    with pytest.raises(AlignmentError, match="PHYLIP must start"):
        Alignment.from_file(path, format="phylip")
    for wrong in ("emboss", 3):
        with pytest.raises(SettingsError, match=f"format={wrong!r} is unknown. Remedy: use 'fasta', .* or 'stockholm'"):
            Alignment.from_file(path, format=wrong)


BAD = {
    "empty": ("", r"a\.txt: the file is empty"),
    "blank": (" \n\n", "the file is empty"),
    "unknown format": ("acgt\n", "line 1: the format is not recognized"),
    "unequal fasta": (">a\nacgt\n>b\nACT\n", r"a\.txt, line 3: taxon 'b' has 3 sites, but 4 are expected"),
    "unknown character": (
        ">a\nac\ngt\n>b\nAC\n!T\n",
        r"line 6: unknown character '!' in taxon 'b' at site 3",
    ),
    "protein": (">a\nac\ngt\n>b\nAC\nLT\n", r"line 6: unknown character 'L'.*protein"),
    "not ascii": (">a\nac\u00e9t\n>b\nacgt\n", r"line 2: unknown character '\u00e9' in taxon 'a' at site 3"),
    "not latin": (">a\nac\u0416t\n>b\nacgt\n", "unknown character '\u0416'"),
    "repeated name": (
        ">a\nacgt\n>b\nACGT\n>a\nACGT\n",
        r"line 5: the taxon 'a' occurs twice \(first in line 1\)",
    ),
    "no name": (">\nacgt\n", "line 1: a sequence has no name"),
    "no sites": (">a\n>b\n", "has no sites"),
    "nexus character": (nexus("a acgt\nb AC!T"), r"line 7: unknown character '!' in taxon 'b' at site 3"),
    "interleaved character": (
        nexus("a ac\nb AC\n\na gt\nb !T", " interleave"),
        r"line 10: unknown character '!' in taxon 'b' at site 3",
    ),
    "nexus set": (nexus("a acgt\nb AC{AZ}T"), "line 7: unknown character 'Z'"),
    "nexus too short": (nexus("a acg\nb ACGT"), r"line 6: taxon 'a' has 3 sites, but nchar=4"),
    "nexus last too short": (nexus("a acgt\nb ACG"), r"line 7: taxon 'b' has 3 sites, but nchar=4"),
    "nexus too long": (nexus("a acgt\nb ACGTT"), r"line 7: taxon 'b' has 5 sites"),
    "nexus repeated": (nexus("a acgt\na ACGT"), r"line 7: the taxon 'a' occurs twice \(first in line 6\)"),
    "nexus ntax": (
        nexus("a acgt\nb ACGT").replace("ntax=2", "ntax=3"),
        "line 5: the matrix has 2 taxa, but ntax=3",
    ),
    "nexus restriction": (
        nexus("a 0101\nb 0121").replace("dna", "restriction"),
        r"line 7: unknown character '2' in taxon 'b' at site 3. Remedy: use the symbols 0 1",
    ),
    "nexus continuous": (
        nexus("a acgt\nb ACGT").replace("dna", "continuous"),
        r"line 4: data of type 'continuous' are not supported",
    ),
    "nexus equate": (nexus("a acgt\nb ACGT", ' equate="z A"'), "line 4: EQUATE='z A' is not read"),
    "nexus equate unknown": (nexus("a acgt\nb ACzT", ' equate="z=!"'), "line 7: unknown character '!'.*'b' at site 3"),
    "nexus transpose": (nexus("a acgt\nb ACGT", " transpose"), "line 4: the format option 'TRANSPOSE'"),
    "nexus tokens": (nexus("a acgt\nb ACGT", " tokens=yes"), "line 4: the format option 'TOKENS'"),
    "nexus empty set": (nexus("a acgt\nb A{}GT"), "line 7: unknown character"),
    "nexus open set": (nexus("a acgt\nb A{CGT"), "line 7: taxon 'b' has 5 sites"),
    "nexus empty": (nexus("").replace("ntax=2", ""), "line 5: the matrix is empty"),
    "nexus without sites": (nexus("a\nb").replace("nchar=4", "nchar=0"), "line 5: nchar is not announced"),
    "nexus without matrix": ("#NEXUS\nbegin trees;\ntree a=(1,2);\nend;\n", "a file of trees.*TreeSample"),
    "nexus eliminate": (nexus("a acgt\nb ACGT").replace("matrix", "eliminate 2;\nmatrix"), "line 5: .*ELIMINATE"),
    "second matrix": (
        nexus("a acgt\nb ACGT") + nexus("a aaaa\nb AAAA")[7:],
        "line 13: the file holds 2 matrices .*read_matrices",
    ),
    "no labels": (nexus("a acgt\nb ACGT", " nolabels"), "the format option 'NOLABELS'"),
    "labels on the right": (nexus("a acgt\nb ACGT", " labels=right"), "the format option 'LABELS'"),
    "phylip one too many": ("2 4\na acgt\nb acgt\nc acgt\n", "line 1: 2 taxa are announced, but more"),
    "match character in front": (
        nexus("a .cgt\nb ACGT", " matchchar=."),
        "line 6: taxon 'a' has the match character",
    ),
    "dot that is no match character": (
        nexus("a ac.t\nb A.GT"),
        r"line 6: unknown character '\.' in taxon 'a' at site 3",
    ),
    "interleaved too long": (
        nexus("a ac\nb AC\n\na gt\nb GTA", " interleave"),
        r"line \d+: the matrix does not consist of 2 sequences of 4 sites",
    ),
    "interleaved too long by one block": (
        nexus("a ac\nb AC\n\na gt\nb GT\n\na a\nb b", " interleave"),
        r"line \d+: the matrix does not consist of 2 sequences of 4 sites",
    ),
    "nexus short name": (
        nexus("a\nac\ng\nb\nACGT"),
        r"line \d+: the matrix does not consist of 2 sequences of 4 sites",
    ),
    "no nchar": (nexus("a acgt\nb ACGT").replace("nchar=4", ""), "line 5: nchar is not announced"),
    "open comment": (nexus("a [acgt\nb ACGT"), "line 6: a comment is never closed"),
    "phylip too short": ("2 4\na  acgt\nb  act\n", r"line 3: taxon 'b' has 3 sites, but 4"),
    "phylip truncated": ("3 4\na  acgt\n", "line 1: 3 taxa are announced, but 1 lines"),
    "phylip too many": ("1 4\na  acgt\nb  acgt\n", "announced"),
    "phylip character": ("2 4\na  acgt\nb  ac!t\n", r"line 3: unknown character '!'"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_files(tmp_path, case):
    content, message = BAD[case]
    with pytest.raises(AlignmentError, match=message) as error:
        Alignment.from_file(write(tmp_path, content))
    assert "Remedy" in str(error.value) and "a.txt" in str(error.value)


@pytest.mark.parametrize("cut", range(1, 60))
def test_truncated_nexus_is_never_accepted(tmp_path, cut):
    content = nexus("a acgt\nb ACGT").rstrip()
    with pytest.raises(AlignmentError, match="truncated|no DATA block"):
        Alignment.from_file(write(tmp_path, content[:-cut]))


def test_unreadable_files(tmp_path):
    with pytest.raises(AlignmentError, match=r"missing\.fasta: there is no such file"):
        Alignment.from_file(tmp_path / "missing.fasta")
    with pytest.raises(AlignmentError, match="cannot be read"):
        Alignment.from_file(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    with pytest.raises(AlignmentError, match="cannot be read"):
        Alignment.from_file(tmp_path / "binary")


def test_malformed_sequences():
    with pytest.raises(AlignmentError, match="no site"):
        Alignment.from_sequences({})
    with pytest.raises(AlignmentError, match="taxon 'b' has 2 sites, but 3 are expected, as in 'a'"):
        Alignment.from_sequences({"a": "acg", "b": "ac"})
    with pytest.raises(AlignmentError, match="unknown character 'J' in taxon 'a' at site 2"):
        Alignment.from_sequences({"a": "aJg"})
    with pytest.raises(AlignmentError, match="unknown character"):
        Alignment.from_sequences({"a": "a\0g"})


@pytest.mark.parametrize("case", ["fasta", "nexus", "interleaved nexus", "nexus with match characters", "phylip"])
def test_dendropy_agrees(case, tmp_path):
    dendropy = pytest.importorskip("dendropy")
    schema = case.split()[-1] if case in ("fasta", "nexus", "phylip") else "nexus"
    matrix = dendropy.DnaCharacterMatrix.get(data=GOOD[case].replace(" description", ""), schema=schema)
    rows = {taxon.label: matrix[taxon].symbols_as_string() for taxon in matrix}
    ours = Alignment.from_file(write(tmp_path, GOOD[case]))
    assert masks(Alignment.from_sequences(rows)) == masks(ours)


def test_some_of_the_taxa_make_an_alignment_of_their_own():
    sequences = {"A": "AACGT-", "B": "ACCGTT", "C": "AACRTA", "D": "TTTTTT"}
    alignment = Alignment.from_sequences(sequences)
    chosen = alignment.select(["C", "A"])
    expected = Alignment.from_sequences({name: sequences[name] for name in ("C", "A")})
    assert chosen.taxa == ("C", "A") and torch.equal(chosen.patterns, expected.patterns)
    assert torch.equal(chosen.weights, expected.weights)
    assert torch.equal(chosen.site_patterns, expected.site_patterns)
    for wrong, message in ((["A", "X"], "no taxon 'X'"), (["A", "A"], "each taxon once"), ([], "at least one taxon")):
        with pytest.raises(AlignmentError, match=f"{message}.*Remedy"):
            alignment.select(wrong)
    with pytest.raises(AlignmentError, match=r"'A' is one name.*\['A'\]"):
        alignment.select("A")


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (["ACGT"], "sequences: list is not a mapping"),
        ({"a": 3}, "taxon 'a' has the sequence 3"),
        ({1: "ACGT"}, "taxon 1 has the sequence 'ACGT'"),
        ({"": "ACGT", "b": "ACGT"}, "a taxon has no name"),
        ({"a": "ACGT", " ": "ACGT"}, "a taxon has no name"),
    ],
)
def test_sequences_that_are_not_named_texts(sequences, message):
    with pytest.raises(AlignmentError, match=f"{message}.*Remedy"):
        Alignment.from_sequences(sequences)


@pytest.mark.parametrize("path", [None, 3, b"a.fasta", ["a.fasta"]])
def test_what_is_not_a_path(path):
    with pytest.raises(AlignmentError, match=r"path: .* is not a path\. Remedy: give the path of a FASTA"):
        Alignment.from_file(path)


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_names_hold_no_ends_of_lines_but_those_of_files(separator, tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text(f">a{separator}T\nAC\r\n>b{separator}G\nAG\n>c\nAT\n", newline="")
    read = Alignment.from_file(path)
    assert read.num_sites == 2 and tuple(read.taxa) == ("a", "b", "c")


def test_sets_of_bases_in_fasta(tmp_path):
    with pytest.raises(AlignmentError, match=r"a\.txt, line 4: .*brackets.*Remedy.*IUPAC"):
        Alignment.from_file(write(tmp_path, ">a\nACGT\n>b\nAC{GT}\n>c\nACGT\n"))


def test_compressed_files(tmp_path):
    path = tmp_path / "a.phy.gz"
    content = gzip.compress(GOOD["phylip"].replace("\n", "\r\n").encode())
    path.write_bytes(content)
    assert Alignment.from_file(path).taxa == ("a", "b")
    path.write_bytes(content[:-9])
    with pytest.raises(AlignmentError, match=r"a\.phy\.gz: the file cannot be read.*Remedy"):
        Alignment.from_file(path)
    path.write_bytes(bz2.compress(b"abc"))
    with pytest.raises(AlignmentError, match=r"the file is compressed \(bzip2\)\. Remedy: unpack it"):
        Alignment.from_file(path)


def test_types_of_data_are_told_by_symbols_and_declared(tmp_path):
    protein = ">a\nMKVLATQF\n>b\nMKVIATEF\n"
    assert str(Alignment.from_file(write(tmp_path, protein)).data_type) == "protein"
    digits = Alignment.from_file(write(tmp_path, "2 4\na  0120\nb  0-?2\n"))
    assert digits.data_type == standard_characters(3) and masks(digits) == [[1, 2, 4, 1], [1, 7, 7, 4]]
    declared = nexus("a MKVL\nb MRVI").replace("dna", "protein")
    assert repr(Alignment.from_file(write(tmp_path, declared))) == "Alignment(protein, 2 taxa, 4 sites, 4 patterns)"
    states = nexus("a 0(01)2-\nb 01{12}?").replace("datatype=dna", 'datatype=standard symbols="0 1 2"')
    assert masks(Alignment.from_file(write(tmp_path, states))) == [[1, 3, 4, 7], [1, 2, 6, 7]]
    letters = nexus("a 0ab-\nb 01b?").replace("datatype=dna", "datatype=standard")
    assert Alignment.from_file(write(tmp_path, letters)).data_type.num_states == 12
    several = Alignment.from_sequences({"a": "BZJX-", "b": "NQLMU"}, data_type="protein")
    names = several.data_type.states
    found = ["".join(name for k, name in enumerate(names) if mask >> k & 1) for mask in masks(several)[0]]
    assert found == ["ND", "QE", "IL", "".join(names), "".join(names)] and several.patterns.dtype == torch.int64
    assert several.select(["b"]).data_type == PROTEIN


def test_codons_are_read_in_frame(tmp_path):
    path = write(tmp_path, ">a\nATGAARTTN---\n>b\nATGAAAAGACCC\n")
    alignment = Alignment.from_file(path, data_type="codon")
    states = alignment.data_type.states
    found = [[states[k] for k in range(61) if mask >> k & 1] for mask in masks(alignment)[0]]
    assert found[:3] == [["ATG"], ["AAA", "AAG"], ["TTA", "TTC", "TTG", "TTT"]] and len(found[3]) == 61
    with pytest.raises(AlignmentError, match="line 4: taxon 'b' has the stop codon 'AGA' at site 7.*Remedy"):
        Alignment.from_file(path, data_type=codons("vertebrate mitochondrial"))
    with pytest.raises(AlignmentError, match="line 4: taxon 'b' has the stop codon 'TAA' at site 4"):
        Alignment.from_file(write(tmp_path, ">a\nATGAAA\n>b\nATGTAA\n"), data_type="codon")
    with pytest.raises(AlignmentError, match="'a' has 5 bases, which is not a multiple of three"):
        Alignment.from_sequences({"a": "ATGAA", "b": "ATGAA"}, data_type="codon")
    assert "".join(sorted(set(codons().amino_acids))) == "ACDEFGHIKLMNPQRSTVWY"


def test_proteins_are_not_taken_for_bases(tmp_path):
    text = ">a\nMKVAAGNTSRDHWCYC\n>b\nMKVAAGNTSRDHWCYC\n"
    with pytest.raises(AlignmentError, match=r"a\.txt: only 12 of 30 letters are A, C, G, T or U.*data_type='protein'"):
        Alignment.from_file(write(tmp_path, text))
    assert Alignment.from_file(write(tmp_path, text), data_type="protein").data_type == PROTEIN
    assert Alignment.from_file(write(tmp_path, text), data_type="DNA").data_type == DNA
    with pytest.raises(AlignmentError, match="the file declares DNA data, but data_type='protein'"):
        Alignment.from_file(write(tmp_path, nexus("a acgt\nb ACGT")), data_type="protein")
    with pytest.warns(ConversionWarning, match=r"taxon 'b' has '\*', the end of a protein, at site 3"):
        ended = Alignment.from_sequences({"a": "MKV", "b": "MK*", "c": "*KV"}, data_type="protein")
    assert masks(ended) == masks(Alignment.from_sequences({"a": "MKV", "b": "MK-", "c": "-KV"}, data_type="protein"))
    with pytest.raises(AlignmentError, match="unknown character '7' .*use the symbols 0 1 2"):
        Alignment.from_sequences({"a": "0172"}, data_type=standard_characters("012"))
    with pytest.raises(UnknownNameError, match="did you mean 'protein'"):
        Alignment.from_sequences({"a": "MKV"}, data_type="proteins")
    with pytest.raises(SettingsError, match="data_type: 3 is not a type of data"):
        Alignment.from_sequences({"a": "MKV"}, data_type=3)
