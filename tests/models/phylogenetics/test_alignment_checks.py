"""Alignments that say little about a topology."""

import warnings

import pytest

from bayeskit.errors import AlignmentError, DataWarning
from bayeskit.models.phylogenetics import Alignment, check_for_search, primates

USUAL = {"a": "ACGT", "b": "ACGA", "c": "AGCA", "d": "TGCA"}
DOUBTFUL = {
    "no site varies": ({"a": "AC-R", "b": "ACGG", "c": "ACGR", "d": "A-GR"}, ["No site varies"]),
    "a row of gaps": (USUAL | {"e": "-N?X"}, ["No base is known of 'e'"]),
    "rows of gaps are not called identical": (USUAL | {"e": "----", "f": "????"}, ["of 'e', 'f'"]),
    "identical rows": (USUAL | {"e": "ACGT", "f": "TGCA", "g": "acgu"}, ["sequences: 'a', 'e', 'g'; 'd', 'f'"]),
    "columns of gaps": ({name: "-" + row + "--" for name, row in USUAL.items()}, ["sites 1, 6-7 .*likelihood of each"]),
    "several": (USUAL | {"e": "ACGT", "f": "----"}, ["of 'f'", "'a', 'e'"]),
}


def test_usual_data_pass_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_for_search(Alignment.from_sequences(USUAL))
        check_for_search(primates()[0])


def test_three_taxa_have_one_topology():
    alignment = Alignment.from_sequences(USUAL).select(["a", "b", "c"])
    with pytest.raises(AlignmentError, match=r"3 taxa \(a, b, c\).*Remedy: give at least four"):
        check_for_search(alignment)


@pytest.mark.parametrize("case", DOUBTFUL)
def test_doubtful_data_are_named(case):
    sequences, expected = DOUBTFUL[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_for_search(Alignment.from_sequences(sequences))
    assert len(caught) == len(expected)
    for found, text in zip(caught, expected, strict=True):
        assert found.category is DataWarning and found.filename == __file__
        with pytest.raises(DataWarning, match=text):
            raise found.message
        assert "Remedy" in str(found.message)
