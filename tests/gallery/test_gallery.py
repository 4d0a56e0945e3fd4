import math

import pytest
import torch

from bayeskit import exact, gallery
from bayeskit.errors import AlignmentError, ConversionWarning, TreeError, UnknownNameError
from bayeskit.gallery._registry import get_model
from bayeskit.gallery._trees import mrbayes_block


def test_every_exact_case_and_the_primates_are_in_the_gallery():
    assert set(gallery.names()) == {"primates", *exact.CASES}


@pytest.mark.parametrize("name", gallery.names())
def test_every_entry_builds_a_target_with_a_finite_density(name):
    entry = get_model(name)
    assert entry.name == name and entry.description and "\n" not in entry.description
    target = entry.build()
    assert math.isfinite(float(target.log_density(torch.zeros(target.dim, dtype=target.dtype))))
    assert entry.reference is None or entry.reference_source


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'eight_schools'"):
        get_model("Eight-Schools")


@pytest.fixture
def files(tmp_path):
    alignment, tree = tmp_path / "a.fasta", tmp_path / "t.nwk"
    alignment.write_text(">A\nACGT\n>B\nACGA\n>C\nACAA\n")
    tree.write_text("(A,B,C);")
    return alignment, tree


def test_tree_target_reads_files(files):
    assert gallery.tree_target(*files).dim == 3


def test_tree_target_reads_a_mrbayes_block(files):
    alignment, tree = files
    matrix = "#NEXUS\nbegin data;\ndimensions ntax=3 nchar=4;\nmatrix\nA ACGT\nB ACGA\nC ACAA\n;\nend;\n"
    alignment.write_text(matrix + "begin mrbayes;\nlset nst=2 rates=gamma;\nend;\n")
    target = gallery.tree_target(*files)
    assert {site.name for site in target.sites} == {"branch_lengths", "kappa", "base_frequencies", "shape"}
    with pytest.warns(ConversionWarning, match="the MrBayes block is not used"):
        assert gallery.tree_target(alignment, tree, "JC69").dim == 3
    assert mrbayes_block(alignment).alignment.taxa == ("A", "B", "C")
    alignment.write_text(matrix)
    assert mrbayes_block(alignment) is None


def test_tree_target_names_what_is_wrong(files, tmp_path):
    alignment, tree = files
    with pytest.raises(UnknownNameError, match="JC69"):
        gallery.tree_target(alignment, tree, "jukes")
    with pytest.raises(AlignmentError, match=r"nothing\.fasta"):
        gallery.tree_target(tmp_path / "nothing.fasta", tree)
    with pytest.raises(TreeError, match=r"nothing\.nwk"):
        gallery.tree_target(alignment, tmp_path / "nothing.nwk")
    tree.write_text("(A,B,D);")
    with pytest.raises(TreeError, match="'D'"):
        gallery.tree_target(alignment, tree)
