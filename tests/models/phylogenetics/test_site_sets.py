"""Sets of sites, as numbers and as files."""

import re

import numpy as np
import pytest

from bayeskit.errors import AlignmentError, ConversionWarning
from bayeskit.models.phylogenetics import Alignment, read_partitions
from bayeskit.models.phylogenetics._site_sets import parse_numbers, ranges

SETS = {"28S": np.array([2, 3]), "first-half": np.array([0, 1])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1-3 7", [0, 1, 2, 6]),
        ("1 - 3,7", [0, 1, 2, 6]),
        ("2-10\\3", [1, 4, 7]),
        ("2 - . / 3", [1, 4, 7]),
        (".", [9]),
        ("9-. 1 1", [0, 8, 9]),
        ("28s 10", [2, 3, 9]),
        ("FIRST-half", [0, 1]),
        ("all", list(range(10))),
        ("", []),
    ],
)
def test_lists_of_numbers(text, expected):
    assert parse_numbers(text, 10, SETS, "here").tolist() == expected


@pytest.mark.parametrize("text", ["0-3", "3-1", "11", "1-11", "1-3\\0", "third", "-3", "1-3-5", "1.5", "²"])
def test_other_words_are_named(text):
    with pytest.raises(AlignmentError, match=rf"here: {re.escape(repr(text))}.*Remedy"):
        parse_numbers(text, 10, SETS, "here")


def test_ranges_read_back():
    generator = np.random.default_rng(0)
    for _ in range(50):
        sites = np.flatnonzero(generator.random(30) < 0.6)
        text = ranges(sites)
        if "more" not in text:
            assert parse_numbers(text, 30, {}, "here").tolist() == sites.tolist()
    assert ranges(range(0, 100, 2)).endswith("17, 19 and 40 more ranges")


HALVES = {"first": list(range(0, 9, 3)), "rest": sorted([*range(1, 9, 3), *range(2, 9, 3)])}
FILES = {
    "raxml": "DNA, first = 1-9\\3\n\nDNA,rest=2-9\\3, 3-9\\3 # both\n",
    "without types": "first = 1-9\\3\nrest = 2-9\\3,3-9\\3",
    "sets": "#NEXUS\nbegin sets;\n charset first = 1-.\\3;\n charset rest = 2-.\\3 3-.\\3;\nend;",
    "partition": "#nexus\nBEGIN SETS; charset a = 1-9\\3; charset rest = 2-9\\3 3-9\\3;\n"
    "charpartition mine = first:a, rest:2-9\\3 3-9\\3; end;",
    "mrbayes": "#nexus\nbegin mrbayes;\ncharset rest [yes] = 2-9\\3 3-9\\3; charset first = 1-9\\3;\n"
    "partition both = 2: first, rest; lset nst=6; end;",
}


@pytest.mark.parametrize("case", FILES)
def test_partition_files(tmp_path, case):
    path = tmp_path / "genes.txt"
    path.write_text(FILES[case])
    found = {name: sites.tolist() for name, sites in read_partitions(path, 9).items()}
    assert found == HALVES and list(found) == list(HALVES)
    alignment = Alignment.from_sequences({"a": "ACGTACGTA", "b": "ACGAACGAA"})
    assert {name: subset.num_sites for name, subset in alignment.partitioned(path).items()} == {"first": 3, "rest": 6}


@pytest.mark.parametrize(
    "text",
    ["GTR+G, first = 1-4\nDNA, rest = 5-9", FILES["sets"][:-4] + "charpartition m = GTR+G:first, HKY:rest; end;"],
)
def test_models_in_partition_files_are_named(tmp_path, text):
    path = tmp_path / "genes.txt"
    path.write_text(text)
    with pytest.warns(ConversionWarning, match=r"the models GTR\+G.* are not read.*Remedy"):
        assert list(read_partitions(path, 9)) == ["first", "rest"]


BAD = {
    "no subset": ("#", "there is no subset"),
    "no equals sign": ("DNA, first 1-9", "line 1: 'DNA, first 1-9' is not a subset"),
    "twice": ("a = 1-4\n\na = 5-9", "line 3: the subset 'a' occurs twice"),
    "outside": ("a = 1-10", "line 1: '1-10' is not within the 9 sites"),
    "overlap": ("a = 1-5\nb = 4-9", "the subsets 'a' and 'b' overlap; sites in both are 4-5 "),
    "left out": ("a = 1-4\nb = 6-8", "the sites 5, 9 .* are in no subset"),
    "two partitions": (
        "#nexus begin sets;\ncharpartition m = 1:1-4,2:5-9;\npartition n = 1:all; end;",
        "line 3: there is",
    ),
    "no name": ("#nexus begin sets;\ncharset = 1-4; end;", "line 2: '= 1-4' defines no set"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_partition_files(tmp_path, case):
    text, message = BAD[case]
    path = tmp_path / "genes.txt"
    path.write_text(text)
    alignment = Alignment.from_sequences({"a": "ACGTACGTA", "b": "ACGAACGAA"})
    with pytest.raises(AlignmentError, match=rf"genes\.txt.*{message}.*Remedy"):
        alignment.partitioned(path)


def test_subsets_in_memory():
    alignment = Alignment.from_sequences({"a": "ACGTACGTA", "b": "ACGAACGAA"})
    subsets = alignment.partitioned(HALVES)
    assert subsets["first"].patterns.tolist() == [[1, 8, 4], [1, 1, 4]]
    assert sum(subset.num_sites for subset in subsets.values()) == alignment.num_sites
    assert alignment.select_sites([8, 0, 3]).site_patterns.tolist() == [0, 0, 1]
    for wrong in ([1.5], "abc", [-1], [9], [[1]], None, ["a"]):
        with pytest.raises(AlignmentError, match=r"subsets, 'x': .* are not sites.*0 to 8"):
            alignment.partitioned({"x": wrong})
    with pytest.raises(AlignmentError, match=r"'x' has the sites 2-3 .* more than once"):
        alignment.partitioned({"x": [1, 1, 2, 2, 3]})
    with pytest.raises(AlignmentError, match="the subset 'x' has no site"):
        alignment.partitioned({"x": []})
    with pytest.raises(AlignmentError, match="there is no site"):
        alignment.select_sites([])
