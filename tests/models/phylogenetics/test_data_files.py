"""Files with data of several types, ordered characters and codings, as partitions."""

import pytest
import torch

from bayeskit.errors import AlignmentError, ConversionWarning, DataWarning, SettingsError
from bayeskit.models.phylogenetics import (
    GTR,
    JC69,
    Alignment,
    AminoAcidModel,
    GammaRates,
    Mk,
    OrderedMk,
    Partition,
    PartitionedTreeModel,
    Tree,
    TreeModel,
    VariableSites,
)
from bayeskit.models.phylogenetics._data_files import FileData, file_in_words, parse_models
from bayeskit.models.phylogenetics._substitution import Binary
from bayeskit.models.phylogenetics.workflows._topology_folder import model_of_file

TREE = Tree.from_newick("(a:0.1,b:0.1,(c:0.1,d:0.1):0.1);")
MIXED = "mixed(dna:1-6,protein:7-10,standard:11-16,restriction:17-20)"
ROWS = {
    **{"a": "ACGTACMKVL0102011101", "b": "ACGTAAMKIL0111001001"},
    **{"c": "ACTTAAMRVL1002110111", "d": "ACTTCAMRIL1100010011"},
}
STANDARD = {"a": "0102", "b": "0111", "c": "1000", "d": "1101"}


def block(kind, rows, title=""):
    matrix = "\n".join(f"{taxon} {row}" for taxon, row in rows.items())
    size = f"ntax={len(rows)} nchar={len(next(iter(rows.values())))}"
    name = f"title {title};\n" if title else ""
    return f"begin data;\n{name}dimensions {size};\nformat datatype={kind} gap=-;\nmatrix\n{matrix}\n;\nend;\n"


def write(tmp_path, *blocks):
    path = tmp_path / "mine.nex"
    path.write_text("#NEXUS\n" + "".join(blocks))
    return path


def models(partition):
    found = partition.substitution
    return {name: type(getattr(one, "model", one)) for name, one in found.items()}


def codings(partition):
    return {name: getattr(one, "coding", "all") for name, one in partition.substitution.items()}


def log_likelihood(partition):
    return float(PartitionedTreeModel(partition, TREE).log_likelihood(TREE.branch_lengths))


def test_each_type_has_its_usual_model(tmp_path):
    path = write(tmp_path, block(MIXED, ROWS))
    partition = Partition.from_file(path)
    assert {name: one.num_sites for name, one in partition.subsets.items()} == {
        **{"DNA": 6, "protein": 4, "states_2": 5, "states_3": 1, "restriction": 4},
    }
    expected = {"DNA": JC69, "protein": AminoAcidModel, "states_2": Mk, "states_3": Mk, "restriction": Binary}
    assert models(partition) == expected and partition.substitution["protein"].matrix == "LG"
    assert list(codings(partition).values()) == ["all", "all", "variable", "variable", "noabsence"]
    assert list(partition.priors(torch.empty(0))) == ["state_frequencies_restriction"]


def test_parts_are_those_of_files_with_one_type(tmp_path):
    """The log-likelihood of all types is the sum of those of single matrices."""
    whole = Partition.from_file(write(tmp_path, block(MIXED, ROWS)), models={"restriction": Binary([0.3, 0.7])})
    assert not whole.priors(torch.empty(0))
    types = {"dna": slice(0, 6), "protein": slice(6, 10), "standard": slice(10, 16), "restriction": slice(16, 20)}
    alone = []
    for kind, sites in types.items():
        path = write(tmp_path, block(kind, {taxon: row[sites] for taxon, row in ROWS.items()}))
        given = {"restriction": VariableSites(Binary([0.3, 0.7]), "noabsence")} if kind == "restriction" else None
        alone.append(log_likelihood(Partition.from_file(path, models=given)))
    assert codings(whole)["restriction"] == "all"  # a model that is given has the coding that is given
    whole = Partition.from_file(
        write(tmp_path, block(MIXED, ROWS)),
        models={"restriction": Binary([0.3, 0.7])},
        coding={"restriction": "noabsence"},
    )
    assert log_likelihood(whole) == pytest.approx(sum(alone), rel=1e-12)


def test_no_character_is_left_out_by_default(tmp_path):
    rows = {taxon: row + "11" for taxon, row in STANDARD.items()}
    partition = Partition.from_file(write(tmp_path, block("standard", rows)))
    assert set(codings(partition).values()) == {"all"} and partition.num_sites == 6
    absent = {taxon: row + "0" for taxon, row in {"a": "01", "b": "01", "c": "11", "d": "10"}.items()}
    assert set(codings(Partition.from_file(write(tmp_path, block("restriction", absent)))).values()) == {"all"}
    with pytest.warns(DataWarning, match=r"mine\.nex: the characters 5-6 \(counted from 1\) of 'standard' cannot be"):
        partition = Partition.from_file(write(tmp_path, block("standard", rows)), coding="variable")
    assert set(codings(partition).values()) == {"variable"} and partition.num_sites == 4
    constant = dict.fromkeys("abcd", "00")
    with pytest.raises(AlignmentError, match=r"mine\.nex: the characters 1-2 .*no others. Remedy: use coding='all'"):
        Partition.from_file(write(tmp_path, block("standard", constant)), coding="variable")


def test_models_and_rates_by_type_and_name(tmp_path):
    path = write(
        tmp_path, block("dna", {"a": "ACGT", "b": "ACGA"}, "one"), block("dna", {"b": "CGA", "a": "CGT"}, "two")
    )
    partition = Partition.from_file(path, models={"DNA": "HKY85+G4", "two": GTR()}, site_rates={"two": GammaRates()})
    assert [type(one).__name__ for one in partition.substitution.values()] == ["HKY85", "GTR"]
    assert sorted(partition.priors(torch.empty(0))) == [
        *("base_frequencies_one", "base_frequencies_two", "exchangeabilities_two", "kappa_one"),
        *("shape_one", "shape_two"),
    ]
    assert partition.subsets["two"].taxa == ("a", "b")
    mixed = write(tmp_path, block(MIXED, ROWS))
    given = {"standard": "Mkv+G4", "restriction": "Binary"}
    with pytest.warns(DataWarning, match="the characters 20 .* of 'restriction' cannot be"):
        partition = Partition.from_file(mixed, models=given, coding="variable")
    assert partition.linked == dict.fromkeys(["shape", "relative_rates", "branch_lengths"], (("states_2", "states_3"),))
    assert set(codings(partition).values()) == {"all", "variable"}
    assert codings(partition)["restriction"] == "variable"
    partition = Partition.from_file(mixed, models={"standard": "Mk"}, site_rates={"protein": GammaRates()})
    assert codings(partition)["states_2"] == "all" and partition.site_rates["protein"] is not None
    assert list(Partition.from_file(mixed, models={"standard": Mk(3)}).subsets)[2] == "standard"


def test_codons_by_the_name_of_their_model(tmp_path):
    rows = {"a": "ATGAAA01", "b": "ATGAAG10", "c": "ATGAAA11", "d": "ATGAAA00"}
    path = write(tmp_path, block("mixed(dna:1-6,standard:7-8)", rows))
    partition = Partition.from_file(path, models={"DNA": "GY94"})
    assert partition.subsets["DNA"].data_type.name == "codon" and partition.subsets["DNA"].num_sites == 2


ORDERED = {
    "begin mrbayes; ctype ordered: 4; end;": [4],
    "begin mrbayes; ctype ord: all; ctype unordered: 2-.; end;": [1],
    "begin paup; ctype unord: 1-3 ord: 4; end;": [4],
    "begin assumptions; typeset * mine = unord: 1 3, ord: 2 4; end;": [2, 4],
    "begin sets; charset some = 3-4; end; begin assumptions; typeset * mine (characters = x) = ord: some; end;": [3, 4],
    "begin assumptions; typeset mine = ord: 1-4; end;": [],  # it is not active
    "begin assumptions; options deftype=ord; typeset * mine = unord: 1; end;": [2, 3, 4],
    "begin assumptions; typeset other = dollo: 1; typeset * 'my types' = unord: 1-4; end;": [],
}


@pytest.mark.parametrize("commands", ORDERED)
def test_ordered_characters(tmp_path, commands):
    rows = {"a": "0000", "b": "1111", "c": "2222", "d": "0202"}
    partition = Partition.from_file(write(tmp_path, block("standard", rows, "x"), commands))
    ordered = len(ORDERED[commands])
    sizes = {name: one.num_sites for name, one in partition.subsets.items()}
    assert sizes.get("ordered_3", 0) == ordered and sizes.get("states_3", 0) == 4 - ordered
    text = str(FileData(write(tmp_path, block("standard", rows, "x"), commands)))
    assert ("ordered: " in text) == bool(ordered)


def test_ordered_characters_of_one_of_several_matrices(tmp_path):
    rows = {"a": "00", "b": "11", "c": "22", "d": "02"}
    blocks = "begin taxa; title second; end;", block("standard", rows, "first"), block("standard", rows, "'second'")
    named = "begin assumptions; typeset * mine (CHARACTERS = second) = ord: 2; end;"
    partition = Partition.from_file(write(tmp_path, *blocks, named))
    assert list(partition.subsets) == ["first_states_3", "second_states_3", "second_ordered_3"]
    linked = "begin assumptions; link characters = first; typeset * mine = ord: 2; end;"
    assert "first_ordered_3" in Partition.from_file(write(tmp_path, *blocks, linked)).subsets
    of_another = f"{linked.removesuffix('typeset * mine = ord: 2; end;')}end; begin sets; typeset * mine = ord: 2; end;"
    with pytest.raises(AlignmentError, match="for one of 2 matrices"):
        Partition.from_file(write(tmp_path, *blocks, of_another))
    with pytest.raises(
        AlignmentError, match=r"line 24: the command is for one of 2 matrices.*Remedy: give each block a"
    ):
        Partition.from_file(write(tmp_path, *blocks, "begin assumptions; typeset * mine = ord: 2; end;"))


def test_order_is_in_the_likelihood(tmp_path):
    path = write(
        tmp_path, block("standard", {"a": "0", "b": "1", "c": "3", "d": "0"}), "begin mrbayes; ctype ord: 1; end;"
    )
    # The first number is that of MrBayes 3.2.7a.
    assert log_likelihood(Partition.from_file(path, coding="all")) == pytest.approx(-13.02753, abs=1e-5)
    subset = Alignment.from_sequences({"a": "0", "b": "1", "c": "3", "d": "0"}, data_type="standard")
    model = TreeModel(subset, TREE, VariableSites(OrderedMk(4)))
    assert log_likelihood(Partition.from_file(path)) == pytest.approx(
        float(model.log_likelihood(TREE.branch_lengths)), rel=1e-12
    )


REFUSED_TYPES = {
    "begin assumptions; typeset * mine = irrev.up: 1-2; end;": "of the type 'irrev.up'",
    "begin assumptions; usertype mystep stepmatrix = 2 0 1 0 1 1 0; typeset * mine = unord: 1, mystep: 2; end;": (
        "of the type 'mystep'"
    ),
    "begin mrbayes; ctype irreversible: 1; end;": "of the type 'irreversible'",
    "begin assumptions; options deftype=dollo; end;": "of the type 'dollo'",
    "begin assumptions; typeset * mine = ord: 1-9; end;": "'1-9' is not within the 4 characters",
    "begin assumptions; typeset * mine (vector) = ord unord ord ord; end;": "gives no types of characters",
}


@pytest.mark.parametrize("commands", REFUSED_TYPES)
def test_types_of_characters_that_are_refused(tmp_path, commands):
    path = write(tmp_path, block("standard", STANDARD), commands)
    with pytest.raises(AlignmentError, match=rf"mine\.nex, line 12: .*{REFUSED_TYPES[commands]}.*Remedy"):
        Partition.from_file(path)
    bases = {taxon: "ACGT" for taxon in STANDARD}
    if "9" not in commands and "vector" not in commands:
        Partition.from_file(write(tmp_path, block("dna", bases), commands.replace("options deftype=dollo;", "")))


def test_subsets_of_a_file(tmp_path):
    path = write(
        tmp_path, block(MIXED, ROWS), "begin sets; charset g = 1-10; charset m = 11-16; charset r = 17-20; end;"
    )
    text = "DNA, first = 1-3\nDNA, others = 4-6\nAA, p = 7-10\nMULTI, m = 11-13\nMULTI, n = 14-16\nBIN, r = 17-20\n"
    (tmp_path / "parts.txt").write_text(text)
    with pytest.warns(ConversionWarning, match="not read, only the sites"):
        partition = Partition.from_file(path, subsets=tmp_path / "parts.txt", models={"first": "GTR"})
    assert list(partition.subsets) == ["first", "others", "p", "m_states_2", "n_states_2", "n_states_3", "r"]
    assert isinstance(partition.substitution["first"], GTR) and isinstance(partition.substitution["others"], JC69)
    with pytest.raises(AlignmentError, match=r"'g' has data of several types \(DNA in 1-6, protein in 7-10\).*Remedy"):
        Partition.from_file(path, subsets=path)
    with pytest.raises(AlignmentError, match="the subset 'none' has no site"):
        Partition.from_file(path, subsets={"none": [], "all": range(20)})
    with pytest.raises(AlignmentError, match="the subset 'all' has sites outside of the 20 of the file"):
        Partition.from_file(path, subsets={"all": range(21)})


def test_parts_of_one_type_in_two_ranges_are_joined(tmp_path):
    rows = {"a": "01ACG02", "b": "11ACT12", "c": "10CCG33", "d": "00ACG30"}
    path = write(tmp_path, block("mixed(standard:1-2,dna:3-5,standard:6-7)", rows))
    assert list(Partition.from_file(path).subsets) == ["standard_states_2", "DNA", "standard_2_states_4"]
    partition = Partition.from_file(path, subsets={"s": [0, 1, 5, 6], "d": [2, 3, 4]})
    assert {name: one.num_sites for name, one in partition.subsets.items()} == {"states_2": 2, "states_4": 2, "d": 3}


REFUSED = {
    "models": ({"models": {"codons": "GTR"}}, "models: .*mine.nex has no data 'codons'"),
    "one model": ({"models": "HKY85"}, "models: HKY85 is for data of one type, but .* has DNA, protein, standard"),
    "no model": ({"models": {"DNA": 3}}, "models: 3 of 'DNA' has the wrong type"),
    "type": ({"models": {"protein": "GTR"}}, "GTR is a model of DNA data, but the data of the alignment are protein"),
    "rates twice": ({"models": {"DNA": "GTR+G4"}, "site_rates": GammaRates()}, "the model of 'DNA' names its own"),
    "coding": ({"coding": "most"}, "coding='most' is unknown"),
    "coding of bases": ({"coding": {"DNA": "variable"}}, "coding: 'DNA' are DNA data"),
    "coding of a model": (
        {"models": {"standard": VariableSites(Mk(3))}, "coding": "all"},
        "coding='all': the model of 'standard' has coding='variable'",
    ),
    "coding twice": ({"models": {"standard": "Mkv"}, "coding": "informative"}, "'Mkv' means coding='variable'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_are_refused(tmp_path, case):
    arguments, said = REFUSED[case]
    with pytest.raises(SettingsError, match=f"(?s){said}.*Remedy"):
        Partition.from_file(write(tmp_path, block(MIXED, ROWS)), **arguments)


def test_a_coding_needs_data_that_are_coded(tmp_path):
    (tmp_path / "bases.fasta").write_text(">a\nACGT\n>b\nACGA\n>c\nACGA\n>d\nACGA\n")
    with pytest.raises(SettingsError, match="bases.fasta has DNA data only. Remedy: leave it out"):
        Partition.from_file(tmp_path / "bases.fasta", coding="variable")
    with pytest.raises(AlignmentError, match=r"mine\.nex, line 4: '17-30' is not within the 20 sites"):
        Partition.from_file(write(tmp_path, block(MIXED.replace("17-20", "17-30"), ROWS)))


def test_what_was_read_in_words(tmp_path):
    path = write(tmp_path, block(MIXED, ROWS))
    assert file_in_words(path, "DNA=GTR+G4,standard=Mk").splitlines() == [
        f"{path}: 4 taxa, 20 sites",
        "  DNA (6 sites): GTR, GammaRates with 4 categories",
        "  protein (4 sites): LG",
        "  standard (6 characters): coding all",
        "    5 characters: Mk with 2 states",
        "    1 character: Mk with 3 states",
        "  restriction (4 sites): Binary, coding noabsence",
    ]
    characters = write(tmp_path, block("standard", {"a": "010", "b": "0?1"}))
    assert "coding all (may be constant: 1-2)" in file_in_words(characters, None)
    bases = write(tmp_path, block("dna", {"a": "ACGT", "b": "ACGA"}))
    assert file_in_words(bases, None) == ""


def test_data_with_one_model_are_an_alignment(tmp_path):
    data, model = model_of_file(write(tmp_path, block("dna", {"a": "ACGT", "b": "ACGA"})), "HKY85+G4")
    assert isinstance(data, Alignment) and type(model["substitution"]).__name__ == "HKY85"
    data, model = model_of_file(write(tmp_path, block("standard", {"a": "01", "b": "10"})), None)
    assert isinstance(data, Alignment) and isinstance(model["substitution"], VariableSites)
    letters = tmp_path / "letters.fasta"
    letters.write_text(">a\nAC\n>b\nCB\n>c\nCB\n")
    assert model_of_file(letters, "Mkv")[0].data_type.num_states == 13  # C is the state after 0 to 9, A and B
    data, model = model_of_file(write(tmp_path, block(MIXED, ROWS)), None)
    assert isinstance(data, Partition) and not model


def test_models_by_type_as_text():
    assert parse_models(None) is None and parse_models("GTR+G4") == "GTR+G4"
    for text in ("DNA=", "DNA=GTR,standard", "DNA=GTR,DNA=JC69"):
        with pytest.raises(SettingsError, match="does not name a model of each type. Remedy"):
            parse_models(text)
