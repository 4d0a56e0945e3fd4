"""Formats and encodings of alignments: the same data in each, matrices of several types, and what is refused."""

import gzip
import itertools

import pytest
import torch

from bayeskit.errors import AlignmentError, ConversionWarning
from bayeskit.models.phylogenetics import (
    HKY85,
    Alignment,
    Mk,
    Partition,
    Tree,
    TreeSample,
    read_matrices,
    standard_characters,
)

SEQUENCES = {"Homo_sap": "ACGTRACGTA-CGGA", "Pan_trog": "ACGTAACGTATCNGA", "Gorilla_": "ATGTAAYGTATC?GT"}
CUTS = ((0, 6), (6, 12), (12, 15))


def masks(alignment: Alignment) -> list[list[int]]:
    return alignment.patterns[:, alignment.site_patterns].tolist()


def same(one: Alignment, other: Alignment) -> bool:
    return (one.taxa, one.data_type, masks(one)) == (other.taxa, other.data_type, masks(other))


def nexus(matrix: str, options: str = "", num_sites: int = 15, data_type: str = "dna", num_taxa: int = 3) -> str:
    return (
        f"#NEXUS\nbegin data;\ndimensions ntax={num_taxa} nchar={num_sites};\nformat datatype={data_type}{options};\n"
        f"matrix\n{matrix}\n;\nend;\n"
    )


def rows(sequences: dict[str, str], start: int = 0, end: int | None = None, width: int = 9) -> str:
    return "\n".join(f"{name:<{width}} {text[start:end]}" for name, text in sequences.items())


def blocks(separator: str = "\n\n") -> str:
    return separator.join(rows(SEQUENCES, start, end) for start, end in CUTS)


def matched(sequences: dict[str, str]) -> dict[str, str]:
    first, *_ = sequences.values()
    pairs = {name: zip(text, first, strict=True) for name, text in sequences.items()}
    others = {name: "".join("." if one == same else one for one, same in found) for name, found in pairs.items()}
    return others | {next(iter(sequences)): first}


def unnamed(start: int, end: int) -> str:
    return "\n".join(text[start:end] for text in SEQUENCES.values())


NAMES = "\n".join(SEQUENCES)
CLUSTAL = "\n\n".join(rows(SEQUENCES, start, end) + "\n" + " " * 10 + "* **  "[: end - start] for start, end in CUTS)
STOCKHOLM = {name: text.replace("-", ".") for name, text in SEQUENCES.items()}
FORMATS = {
    "fasta": "".join(f">{name} described\n{text[:7]}\n{text[7:].lower()}\n" for name, text in SEQUENCES.items()),
    "relaxed phylip": f"3 15\n{rows(SEQUENCES)}\n",
    "strict phylip": "3 15\n" + "".join(f"{name:<10}{text}\n" for name, text in SEQUENCES.items()),
    "sequential phylip": "3 15\n" + "".join(f"{name} {text[:6]}\n{text[6:]}\n" for name, text in SEQUENCES.items()),
    "interleaved phylip": f"3 15\n{rows(SEQUENCES, 0, 6)}\n\n{unnamed(6, 12)}\n\n{unnamed(12, 15)}\n",
    "phylip of paml, names in front": f"3 15 I\n{NAMES}\n\n"
    + "\n".join(f"{start + 1}\n{unnamed(start, end)}\n" for start, end in CUTS),
    "phylip of paml, counters": "3 15\n"
    + "\n".join(f"{name}\n\n{text[:6]}  6\n{text[6:]} 15\n" for name, text in SEQUENCES.items()),
    "phylip of paml, match character": f"3 15\n{rows(matched(SEQUENCES))}\n",
    "phylip of paml, marks in front of names": "3 15\n"
    + "".join(f">\n{name}\n{text}\n" for name, text in SEQUENCES.items()),
    "nexus": nexus(rows(SEQUENCES)),
    "interleaved nexus": nexus(blocks(), " interleave=yes gap=-"),
    "nexus with match character": nexus(rows(matched(SEQUENCES)), " matchchar=."),
    "nexus with own signs": nexus(rows(SEQUENCES).replace("-", "~").replace("?", "x"), " gap=~ missing=X"),
    "nexus with equated symbols": nexus(
        rows(SEQUENCES).replace("R", "1").replace("T", "2").replace("Y", "w").replace("-", "3"),
        ' equate="1={AG} 2=T W = (C T) 3=-"',
    ),
    "nexus with sets": nexus(rows(SEQUENCES).replace("R", "{A G}").replace("Y", "(C,T)")),
    "nexus with lines of a database": nexus(rows(SEQUENCES)).replace("S\n", "S\n# one\n [note]\n  # two; it's\n", 1),
    "nexus without labels": nexus(unnamed(0, 15), " nolabels").replace(
        "S\n", f"S\nbegin taxa;\ndimensions ntax=3;\ntaxlabels {' '.join(SEQUENCES)};\nend;\n", 1
    ),
    "interleaved nexus without labels": nexus(
        "\n".join(unnamed(start, end) for start, end in CUTS), " labels=no interleave"
    ).replace("S\n", f"S\nbegin taxa;\ntaxlabels {' '.join(SEQUENCES)};\nend;\n", 1),
    "nexus with options that are off": nexus(rows(SEQUENCES), " transpose=no labels=left tokens=no interleave=no"),
    "clustal": f"CLUSTAL W (1.83) multiple sequence alignment\n\n\n{CLUSTAL}\n",
    "clustal with numbers": f"CLUSTAL O(1.2.4)\n\n{CLUSTAL}\n".replace("ACGTRA\n", "ACGTRA 6\n"),
    "muscle": f"MUSCLE (3.8) multiple sequence alignment\n\n{CLUSTAL}\n",
    "probcons": f"PROBCONS version 1.12 multiple sequence alignment\n\n{blocks()}\n",
    "stockholm": f"# STOCKHOLM 1.0\n#=GF ID x\n\n{rows(STOCKHOLM)}\n#=GC SS_cons {'.' * 15}\n//\n",
    "interleaved stockholm": "# STOCKHOLM 1.0\n"
    + "\n\n".join(rows(STOCKHOLM, start, end) + "\n#=GR Pan_trog SS ..." for start, end in CUTS)
    + "\n//\n",
}


@pytest.mark.parametrize("case", FORMATS)
def test_each_format_gives_the_same_alignment(case, tmp_path):
    expected, path = Alignment.from_sequences(SEQUENCES), tmp_path / "data"
    path.write_text(FORMATS[case])
    assert same(Alignment.from_file(path), expected)
    name = next(
        name for name in ("fasta", "phylip", "nexus", "stockholm", "clustal") if name in (*case.split(), "clustal")
    )
    assert same(Alignment.from_file(path, format=name), expected)
    path.write_bytes(gzip.compress(FORMATS[case].replace("\n", "\r\n").encode()))
    assert same(Alignment.from_file(path), expected)
    (matrix,) = read_matrices(path).values()
    assert same(matrix, expected)


ENCODINGS = {
    "UTF-16": "utf-16",
    "UTF-16 ": "utf-16-be",
    "UTF-32": "utf-32",
    "Latin-1": "latin-1",
    "Windows-1252": "cp1252",
}


@pytest.mark.parametrize(("said", "encoding"), ENCODINGS.items())
def test_other_encodings_are_read_with_a_warning(said, encoding, tmp_path):
    names = ("Gießen", "São_Paulo", "d\u2019Or" if said == "Windows-1252" else "é")
    text = "".join(f">{name}\nACG{base}\n" for name, base in zip(names, "TAC", strict=True))
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path = tmp_path / "data.fasta"
    for content in ((mark + text).encode(encoding), gzip.compress((mark + text).encode(encoding))):
        path.write_bytes(content)
        with pytest.warns(ConversionWarning, match=rf"data\.fasta: .* it was read as {said.strip()}\. Remedy"):
            assert Alignment.from_file(path).taxa == names
    trees = tmp_path / "data.trees"
    trees.write_bytes((mark + f"({','.join(names)});\n" * 2).encode(encoding))
    with pytest.warns(ConversionWarning, match=rf"data\.trees: .* it was read as {said.strip()}"):
        assert set(TreeSample.from_file(trees).taxa) == set(names)
    with pytest.warns(ConversionWarning, match=rf"it was read as {said.strip()}"):
        assert set(Tree.from_file(trees, 0).taxa) == set(names)


def test_what_is_no_text(tmp_path):
    path = tmp_path / "data"
    for content in (b">a\nAC\xe9\x00T\n", b">a\n\x81\x8d\n", b"\xff\xfeA", ">a\nAC".encode("utf-16")[:-1]):
        path.write_bytes(content)
        with pytest.raises(AlignmentError, match=r"data: the file cannot be read as text.*Remedy"):
            Alignment.from_file(path)


def test_equated_symbols(tmp_path):
    """Every symbol stands for both cases, but where the other case has a meaning of its own, or RESPECTCASE is set."""
    path = tmp_path / "data.nex"
    path.write_text(nexus("x ACGUAC\ny ACgTTC\nz ACC{UA}AC", ' missing=? gap=- equate="U=T"', 6))
    assert masks(Alignment.from_file(path)) == [[1, 2, 4, 8, 1, 2], [1, 2, 4, 8, 8, 2], [1, 2, 2, 9, 1, 2]]
    options = ' symbols="012" missing=? equate="E=(012) e=? F={12}"'
    for text, expected in ((options, [7, 7, 6, 6]), (options.replace("F", "f") + " respectcase", None)):
        path.write_text(nexus("x 0000\ny EeFf", text, 4, "standard", 2))
        if expected is None:
            with pytest.raises(AlignmentError, match="line 7: unknown character 'F' in taxon 'y' at site 3"):
                Alignment.from_file(path)
        else:
            assert masks(Alignment.from_file(path))[1] == expected
    path.write_text(nexus("x 01aA\ny 0000", ' symbols="01aA" respectcase', 4, "standard", 2))
    with pytest.raises(AlignmentError, match="line 4: the format option 'RESPECTCASE'.*Remedy"):
        Alignment.from_file(path)


def test_types_that_are_not_read_are_refused_before_their_matrix(tmp_path):
    path = tmp_path / "data.nex"
    for data_type, said in (("continuous", "'continuous'"), ("mixed", "'mixed'"), ("binary", "'binary'")):
        path.write_text(nexus("x 0.1 0.2\ny 0.3 0.4", "", 2, data_type, 2))
        with pytest.raises(AlignmentError, match=rf"data\.nex, line 4: data of type {said} are not supported.*Remedy"):
            Alignment.from_file(path)


def test_symbols_of_states(tmp_path):
    path = tmp_path / "data.nex"
    for symbols in ("0~3", "0 1 2 3", "0123"):
        path.write_text(nexus("x 0123\ny 0000", f' symbols = "{symbols}"', 4, "standard", 2))
        assert Alignment.from_file(path).data_type == standard_characters(4)
    for symbols in ("0+", "011", "3~0+"):
        path.write_text(nexus("x 0123\ny 0000", f' symbols="{symbols}"', 4, "standard", 2))
        with pytest.raises(AlignmentError, match=r"data\.nex, line 4: SYMBOLS='.*' gives no states.*Remedy"):
            Alignment.from_file(path)


@pytest.mark.parametrize(
    "command",
    [
        "begin assumptions; typeset * mine = unord: 1, ord: 2-3;",
        "begin mrbayes;\nctype ordered: 2;",
        "begin paup; ctype DOLLO:1;",
    ],
)
def test_ordered_characters_are_said_to_be_read_as_unordered(command, tmp_path):
    path = tmp_path / "data.nex"
    text = nexus("x 0123\ny 0000", "", 4, "standard", 2)
    path.write_text(f"{text}{command}\nend;\n")
    with pytest.warns(
        ConversionWarning, match=r"data\.nex, line 1[01]: the command (TYPE|CTYPE).*unordered.*Partition.from_file"
    ):
        Alignment.from_file(path)
    path.write_text(f"{text}begin assumptions; typeset * ord = unord: 1-4; end;\n")
    assert Alignment.from_file(path).num_sites == 4


NAMES = {
    "O'Brien ACGT\nd'Urvillea ACGA\n'it''s' ACGG": ("O'Brien", "d'Urvillea", "it's"),
    "'O''Brien x' ACGT\n'[b] c' ACGA\nc' ACGG": ("O'Brien_x", "[b]_c", "c'"),
    "'a b'ACGT\nb\tACGA\n'c d'  AC GG": None,
}


@pytest.mark.parametrize(("matrix", "names"), NAMES.items())
def test_apostrophes_and_quoted_names(matrix, names, tmp_path):
    path = tmp_path / "data.nex"
    path.write_text(nexus(matrix, num_sites=4))
    if names is None:
        with pytest.raises(AlignmentError, match=r"data\.nex, line 6: .*Remedy"):
            Alignment.from_file(path)
    else:
        assert Alignment.from_file(path).taxa == names


def test_restriction_sites(tmp_path):
    path = tmp_path / "data.nex"
    path.write_text(nexus("a 0010\nb 0?1-\nc 00(01)0", " interleave=no", 4, "Restriction"))
    alignment = Alignment.from_file(path)
    assert alignment.data_type == standard_characters("01")
    assert masks(alignment) == [[1, 1, 2, 1], [1, 3, 2, 3], [1, 1, 3, 1]]
    assert list(read_matrices(path)) == ["restriction"]


MIXED = """#NEXUS
begin data;
dimensions ntax=4 nchar=9;
format datatype=mixed(DNA:1-6,Standard:7-9) interleave=yes missing=? gap=-;
matrix
a ACGTAC
b ACGTTC
c ACCTAC
d ACC{CT}TC

a 001
b 01{12}
c 1(12)2
d 102
;
end;
"""
PARTS = {
    "DNA": {"a": "ACGTAC", "b": "ACGTTC", "c": "ACCTAC", "d": "ACCYTC"},
    "standard": {"a": "001", "b": "011", "c": "112", "d": "102"},
}


def test_mixed_matrices(tmp_path):
    path = tmp_path / "mixed.nex"
    path.write_text(MIXED)
    found = read_matrices(path)
    assert list(found) == ["DNA", "standard"] and same(found["DNA"], Alignment.from_sequences(PARTS["DNA"]))
    assert found["standard"].taxa == tuple("abcd")
    assert masks(found["standard"]) == [[1, 1, 2], [1, 2, 6], [2, 6, 4], [2, 1, 4]]
    with pytest.raises(
        AlignmentError, match=r"mixed\.nex, line 5: the file holds 2 matrices.*read_matrices.*Partition"
    ):
        Alignment.from_file(path)
    partition = Partition(found, {"DNA": HKY85(), "standard": Mk(3)})
    assert partition.num_sites == 9


def test_the_parts_of_a_mixed_matrix_are_named_after_sets_of_the_same_sites(tmp_path):
    path = tmp_path / "mixed.nex"
    sets = "begin mrbayes;\ncharset wings = 7-.;\ncharset all_but_one = 1-5;\ncharset odd = nothing;\nend;\n"
    path.write_text(MIXED + sets)
    assert list(read_matrices(path)) == ["DNA", "wings"]
    text = MIXED.replace("DNA:1-6,Standard:7-9", "Standard : 7 - 8, DNA:1-3 5, dna:4 6,standard: 9")
    path.write_text(text)
    found = read_matrices(path)
    assert {name: one.num_sites for name, one in found.items()} == {
        "standard": 2,
        "DNA": 4,
        "DNA_2": 2,
        "standard_2": 1,
    }
    assert masks(found["DNA_2"]) == [[8, 2], [8, 2], [8, 2], [10, 2]]


WRONG_MIXED = {
    "overlap": (
        "DNA:1-6,Standard:6-9",
        "line 4: the subsets 'DNA:1-6' and 'Standard:6-9' overlap; sites in both are 6",
    ),
    "the same twice": ("DNA:1-9,DNA:1-9", r"line 4: the subsets 'DNA:1-9' and 'DNA:1-9 \(again\)' overlap"),
    "gap": ("DNA:1-5,Standard:7-9", "line 4: the sites 6 .* are in no subset"),
    "outside": ("DNA:1-6,Standard:7-10", "line 4: '7-10' is not within the 9 sites"),
    "from zero": ("DNA:0-6,Standard:7-9", "line 4: '0-6' is not within the 9 sites"),
    "backward": ("DNA:6-1,Standard:7-9", "line 4: '6-1' is not within"),
    "no number": ("DNA:1-6,Standard:x", "line 4: 'x' is neither a site nor a set"),
    "unknown type": ("DNA:1-6,Continuous:7-9", "line 4: data of type 'continuous' are not supported"),
    "no sites": ("DNA,Standard:7-9", "line 4: 'DNA' gives no type and its sites"),
    "wrong type": (
        "Standard:1-6,DNA:7-9",
        r"mixed\.nex, DNA in the sites 7-9, line 11: unknown character '0'.*'a' at site 1",
    ),
    "too few": ("DNA:1-3,Standard:4-9", r"standard in the sites 4-9: .*"),
}


@pytest.mark.parametrize("case", WRONG_MIXED)
def test_wrong_ranges_of_mixed_matrices(case, tmp_path):
    declared, message = WRONG_MIXED[case]
    path = tmp_path / "mixed.nex"
    path.write_text(
        MIXED.replace("DNA:1-6,Standard:7-9", declared).replace("AC\n", "A!\n" if case == "too few" else "AC\n")
    )
    with pytest.raises(AlignmentError, match=rf"(?s){message}.*Remedy") as error:
        read_matrices(path)
    assert "mixed.nex" in str(error.value)


def test_a_format_without_its_own_command_is_named_with_its_line(tmp_path):
    path = tmp_path / "mixed.nex"
    path.write_text(MIXED.replace("nchar=9;\nformat", "nchar=9 format").replace("7-9", "7-12"))
    with pytest.raises(AlignmentError, match="line 3: '7-12' is not within the 9 sites"):
        read_matrices(path)


def block(data_type: str, matrix: str, num_sites: int, title: str = "") -> str:
    return (
        f"begin characters;\n{title}dimensions nchar={num_sites};\nformat datatype={data_type};\nmatrix\n{matrix}\n;\n"
        "end;\n"
    )


def test_several_blocks(tmp_path):
    path = tmp_path / "blocks.nex"
    first, second = block("dna", "a ACGT\nb ACGA\nc ACCA", 4), block("standard", "c 10\na 00\nb 01", 2)
    path.write_text("#NEXUS\n" + first + second + block("standard", "a 2\nb 1\nc 0", 1))
    found = read_matrices(path)
    assert list(found) == ["DNA", "standard", "standard_2"] and {one.taxa for one in found.values()} == {
        ("a", "b", "c")
    }
    assert masks(found["standard"]) == [[1, 1], [1, 2], [2, 1]]
    with pytest.raises(
        AlignmentError, match=r"blocks\.nex, line 14: the file holds 3 matrices \(DNA, standard, standard\)"
    ):
        Alignment.from_file(path)
    titled = (
        block("dna", "a AC\nb GT\nc GG", 2, "title 'the gene';\n"),
        block("dna", "a C\nb T\nc G", 1, "TITLE the_gene;\n"),
    )
    path.write_text("#NEXUS\n" + "".join(titled))
    assert list(read_matrices(path)) == ["the_gene", "the_gene_2"]
    path.write_text("#NEXUS\n" + first + block("standard", "a 00\nb 01\nd 11", 2))
    with pytest.raises(
        AlignmentError, match=r"blocks\.nex, line 14: the taxon 'c' is not in all matrices.*Remedy.*'\?'"
    ):
        read_matrices(path)


def test_settings_of_one_block_do_not_hold_in_the_next(tmp_path):
    path = tmp_path / "blocks.nex"
    first = block("dna matchchar=. equate='1=A'", "a 1CGT\nb ..G1", 4)
    path.write_text("#NEXUS\n" + first + block("standard", "a 11\nb 10", 2))
    found = read_matrices(path)
    assert masks(found["DNA"]) == [[1, 2, 4, 8], [1, 2, 4, 1]] and masks(found["standard"]) == [[2, 2], [2, 1]]
    path.write_text("#NEXUS\n" + first + "begin characters;\nmatrix\na 11\nb 10\n;\nend;\n")
    with pytest.raises(AlignmentError, match="line 11: nchar is not announced"):
        read_matrices(path)


BAD = {
    "clustal without sites": ("CLUSTAL\n\na ACGT\nb\n", "line 4: taxon 'b' has no sites"),
    "clustal too short": (
        "CLUSTAL\n\na ACGT\nb ACG\n",
        r"line 4: taxon 'b' has 3 sites, but 4 are expected, as in 'a'",
    ),
    "clustal twice": ("CLUSTAL\n\na ACGT\na ACGA\n", r"line 4: the taxon 'a' occurs twice \(first in line 3\)"),
    "clustal character": (
        "CLUSTAL\n\na ACGT\nb ACGA\n  ***\n\na A\nb !\n",
        "line 8: unknown character '!'.*'b' at site 5",
    ),
    "clustal empty": ("CLUSTAL\n\n", "there is no sequence"),
    "stockholm truncated": ("# STOCKHOLM 1.0\na ACGT\nb ACGA\n", "line 3: the file ends without '//'"),
    "stockholm of two": (
        "# STOCKHOLM 1.0\na A\nb A\n//\n# STOCKHOLM 1.0\na A\nb A\n//\n",
        "line 5: a second alignment",
    ),
    "stockholm twice": ("# STOCKHOLM 1.0\na ACGT\na ACGA\n//\n", "line 3: the taxon 'a' occurs twice"),
    "stockholm too short": ("# STOCKHOLM 1.0\na ACGT\nb A.A\n//\n", "line 3: taxon 'b' has 3 sites"),
    "stockholm empty": ("# STOCKHOLM 1.0\n//\n", "there is no sequence"),
    "strict phylip twice": (
        "2 4\nABCDEFGHIJACGT\nABCDEFGHIJACGA\n",
        r"line 3: the taxon 'ABCDEFGHIJ' occurs twice \(first in line 2\)",
    ),
    "interleaved strict phylip twice": (
        "3 6\nABCDEFGHIJACG\nABCDEFGHIXACG\nABCDEFGHIJACG\n\nTTT\nTTA\nTTC\n",
        r"line 4: the taxon 'ABCDEFGHIJ' occurs twice \(first in line 2\)",
    ),
    "strict phylip twice with blanks": (
        "2 4\nHomo sapieACGT\nHomo sapieACGA\n",
        r"line 3: the taxon '(Homo|Homo sapie)' occurs twice \(first in line 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_files(case, tmp_path):
    text, message = BAD[case]
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(AlignmentError, match=message) as error:
        Alignment.from_file(path)
    assert "data.txt" in str(error.value) and "Remedy" in str(error.value)


@pytest.mark.parametrize("format", ["clustal", "stockholm"])
def test_a_format_that_is_not_that_of_the_file(format, tmp_path):
    path = tmp_path / "data"
    path.write_text(">a\nACGT\n>b\nACGT\n")
    with pytest.raises(AlignmentError, match=f"line 1: {format.capitalize()} must start with .*Remedy"):
        Alignment.from_file(path, format=format)


def test_a_long_matrix_of_sets_is_cut_at_the_right_sites(tmp_path):
    """Sets before a range do not shift those in it."""
    generator = torch.Generator().manual_seed(1)
    codes = {"R": "{AG}", "Y": "(CT)", "M": "{A,C}", "A": "A", "C": "C", "G": "G", "T": "T"}
    draws = torch.randint(len(codes), (3, 60), generator=generator)
    plain = {name: "".join("RYMACGT"[k] for k in row) for name, row in zip("abc", draws.tolist(), strict=True)}
    text = "\n".join(f"{name} {''.join(codes[code] for code in row)}" for name, row in plain.items())
    path = tmp_path / "data.nex"
    path.write_text(nexus(text, num_sites=60, data_type="mixed(dna:1-17 40-60,rna:18-39)"))
    first, second = read_matrices(path).values()
    chosen = [*range(17), *range(39, 60)]
    for part, sites in ((first, chosen), (second, range(17, 39))):
        cut = {name: "".join(itertools.compress(row, [k in sites for k in range(60)])) for name, row in plain.items()}
        assert masks(part) == masks(Alignment.from_sequences(cut, data_type="DNA"))


LINES = rows(SEQUENCES)
BEHIND = {
    "a mark": "//end of file\n",
    "a remark": "\nData of A. Author (1987), in two lines,\nof which\n",
    "an alternative head": "3 15 G\nG 2 7 8\n",
    "trees": "1\n(1,2,3);\n",
}


@pytest.mark.parametrize("case", BEHIND)
def test_remarks_behind_a_phylip_alignment_are_left_out_with_a_warning(case, tmp_path):
    path = tmp_path / "data.phy"
    path.write_text(f"3 15\n{LINES}\n{BEHIND[case]}")
    line = 6 if BEHIND[case].startswith("\n") else 5
    with pytest.warns(ConversionWarning, match=f"data.phy, line {line}: this line and all below .* were not read"):
        assert same(Alignment.from_file(path), Alignment.from_sequences(SEQUENCES))


@pytest.mark.parametrize("behind", ["A\n-C-\n", "Mus_musc\nACGTRA\nTTT-CCAAA\n", "Mus_musc ACGTRATTT-CCAAA\nx\n"])
def test_sequences_behind_those_announced_are_an_error(behind, tmp_path):
    path = tmp_path / "data.phy"
    path.write_text(f"3 15\n{LINES}\n{behind}")
    with pytest.raises(AlignmentError, match="line 1: 3 taxa are announced, but more sequences or sites follow"):
        Alignment.from_file(path)


@pytest.mark.parametrize("genes", ["G 2 7 8", "G2\n1111111\n22222222", "G 2\n12312"])
def test_genes_of_paml_are_not_read(genes, tmp_path):
    path = tmp_path / "data.phy"
    path.write_text(f"3 15  GC\n{genes}\n\n{LINES}\n")
    with pytest.warns(ConversionWarning, match=r"line 1: the sites of each gene \(option G\) are not read"):
        assert same(Alignment.from_file(path), Alignment.from_sequences(SEQUENCES))


def test_names_of_paml_end_at_two_blanks(tmp_path):
    path = tmp_path / "data.phy"
    path.write_text("2 6\nHomo sapiens\nACG TAC\nPan troglodytes  ACG\nTAA\n")
    assert same(
        Alignment.from_file(path), Alignment.from_sequences({"Homo_sapiens": "ACGTAC", "Pan_troglodytes": "ACGTAA"})
    )


def test_several_phylip_alignments_are_several_matrices(tmp_path):
    path = tmp_path / "data.phy"
    path.write_text("2 3\na ACG\nb ACA\n\n 2 10\nb MKVLATGHSE\na MKILATGHSE\n\n2 2\na AA\nb AC\n")
    found = read_matrices(path)
    assert [(name, matrix.num_sites) for name, matrix in found.items()] == [("DNA", 3), ("protein", 10), ("DNA_2", 2)]
    assert same(found["protein"], Alignment.from_sequences({"a": "MKILATGHSE", "b": "MKVLATGHSE"}))
    assert Partition.from_file(path).num_sites == 15
    with pytest.raises(AlignmentError, match="line 5: the file holds 3 matrices .*read_matrices"):
        Alignment.from_file(path)
    path.write_text("2 3\na ACG\nb ACA\n2 3\na ACG\nc ACA\n")
    with pytest.raises(AlignmentError, match="line 4: the taxon 'b' is not in all matrices"):
        read_matrices(path)


def test_whole_lines_are_fasta_names_where_first_words_are_not_unique(tmp_path):
    path = tmp_path / "data.fasta"
    path.write_text(">Morelia  viridis N\nACGT\n>Morelia boeleni\nACGA\n>Liasis mackloti\nACGC\n")
    with pytest.warns(ConversionWarning, match="first words of the names are not unique"):
        assert Alignment.from_file(path).taxa == ("Morelia_viridis_N", "Morelia_boeleni", "Liasis_mackloti")


def test_points_in_fasta_are_gaps_if_the_first_sequence_has_them(tmp_path):
    path = tmp_path / "data.fasta"
    path.write_text(">a\nAC.T\n>b\nA..T\n")
    assert same(Alignment.from_file(path), Alignment.from_sequences({"a": "AC-T", "b": "A--T"}))
    path.write_text(">a\nACGT\n>b\nA..T\n")
    with pytest.raises(AlignmentError, match=r"unknown character '\.' in taxon 'b' at site 2"):
        Alignment.from_file(path)


def test_points_in_nexus_are_match_characters_where_none_is_declared(tmp_path):
    path = tmp_path / "data.nex"
    path.write_text(nexus(rows(matched(SEQUENCES))))
    with pytest.warns(ConversionWarning, match="declares no match character"):
        assert same(Alignment.from_file(path), Alignment.from_sequences(SEQUENCES))
    path.write_text(nexus(rows(SEQUENCES).replace("-", "."), " gap=. labels='1 2'"))
    assert same(Alignment.from_file(path), Alignment.from_sequences(SEQUENCES))


def test_long_sequences_of_ambiguous_codes_are_bases(tmp_path):
    """No protein of a hundred letters has codes of bases only."""
    path = tmp_path / "data.fasta"
    codes = "RYKMSWBDHVN" * 9
    path.write_text(f">a\n{codes}A\n>b\n{codes}C\n")
    assert Alignment.from_file(path).data_type.name == "DNA"
    path.write_text(f">a\n{codes}\n>b\n{codes}\n")
    with pytest.raises(AlignmentError, match="look like amino acids"):
        Alignment.from_file(path)


def test_letters_in_front_of_digits_are_not_counted_as_states(tmp_path):
    path = tmp_path / "data.nex"
    path.write_text(nexus("a 0120\nb 1100\nc 2010", ' symbols="A C G T 0 1 2 3"', 4, "standard"))
    assert Alignment.from_file(path).data_type == standard_characters(3)
    path.write_text(nexus("a 0B\nb 1B\nc 2A", ' symbols="AB012"', 2, "standard"))
    assert Alignment.from_file(path).data_type.states == tuple("012AB")


def test_continuous_characters_beside_others_are_left_out_with_a_warning(tmp_path):
    def block(title: str, data_type: str, rows: str, num_sites: int) -> str:
        return nexus(rows, num_sites=num_sites, data_type=data_type)[7:].replace(
            "data;", f"characters;\ntitle {title};"
        )

    measured = block("sizes", "continuous", "a 0.1 2.5\nb 0.2 1.5\nc -1 3e-1", 2)
    counted = block("counts", "standard", "a 01\nb 12\nc 20", 2)
    others = block("others", "standard", "a 01\nb 12\nc 20", 2)
    types = "begin assumptions;\ntypeset * x (characters = others) = ord: 1;\nend;\n"
    path = tmp_path / "data.nex"
    path.write_text(f"#NEXUS\n{measured}{counted}")
    with pytest.warns(ConversionWarning, match="line 5: the matrix of continuous characters is not read"):
        assert Alignment.from_file(path).num_sites == 2
    path.write_text(f"#NEXUS\n{counted}{measured}{others}{types}")
    with pytest.warns(ConversionWarning, match="line 15: the matrix of continuous"):
        assert [*Partition.from_file(path).subsets] == ["counts_states_3", "others_states_3", "others_ordered_3"]
    path.write_text(f"#NEXUS\n{measured}")
    with pytest.raises(AlignmentError, match="line 5: data of type 'continuous' are not supported"):
        Alignment.from_file(path)
