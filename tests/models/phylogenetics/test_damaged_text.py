"""Text with control characters and numbers of thousands of digits, which a damaged file may hold."""

import pytest

from bayeskit.errors import AlignmentError
from bayeskit.models.phylogenetics import Alignment, MrBayesBlock

LARGE = "9" * 5000
TWO = Alignment.from_sequences({"A": "ACGT", "B": "ACGA"})
NEXUS = "#NEXUS\nbegin data;\ndimensions ntax=2 nchar=4;\nformat datatype=dna;\nmatrix\nA ACGT\nB ACGA\n;\nend;\n"


def test_a_control_character_is_no_set_of_bases(tmp_path):
    path = tmp_path / "data.fasta"
    path.write_text(">A\nAC\x01T\n>B\nACGA\n")
    with pytest.raises(AlignmentError, match=r"line 2: unknown character '\\x01' in taxon 'A' at site 3"):
        Alignment.from_file(path)


@pytest.mark.parametrize(
    "text", [f"2 {LARGE}\nA ACGT\nB ACGA\n", f"{LARGE} 4\n", NEXUS.replace("nchar=4", f"nchar={LARGE}")]
)
def test_numbers_of_taxa_and_sites_may_be_too_large(tmp_path, text):
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(AlignmentError, match="Remedy"):
        Alignment.from_file(path, format="nexus" if "NEXUS" in text else "phylip")


@pytest.mark.parametrize("sites", [LARGE, f"1-{LARGE}", f"1-4\\{LARGE}"])
def test_numbers_of_sites_in_partitions_may_be_too_large(tmp_path, sites):
    path = tmp_path / "parts.nex"
    path.write_text(f"#nexus\nbegin sets;\ncharset a = {sites};\nend;\n")
    with pytest.raises(AlignmentError, match="neither a site nor a set"):
        TWO.partitioned(path)


@pytest.mark.parametrize(
    "command",
    [f"partition p = {LARGE}: a", f"lset applyto=({LARGE}) nst=6", f"lset ngammacat={LARGE}", "lset ngammacat=²"],
)
def test_numbers_in_a_mrbayes_block_may_be_too_large(tmp_path, command):
    path = tmp_path / "data.nex"
    path.write_text(f"{NEXUS}begin mrbayes;\ncharset a = 1-4;\n{command};\nend;\n")
    with pytest.raises(AlignmentError, match="Remedy"):
        MrBayesBlock.from_file(path)
