"""Morphological characters with their own numbers of states, as partitions."""

import pytest
import torch

from bayeskit.errors import AlignmentError, DataWarning, SettingsError
from bayeskit.models.phylogenetics import (
    Alignment,
    GammaRates,
    Mk,
    OrderedMk,
    Partition,
    PartitionedTreeModel,
    Tree,
    TreeModel,
    VariableSites,
    parse_substitution,
    standard_characters,
)

TREE = Tree.from_newick("(a:0.1,b:0.1,(c:0.1,d:0.1):0.1);")
NEXUS = """#NEXUS
begin data;
dimensions ntax=4 nchar={number};
format datatype=standard {symbols} missing=? gap=-;
matrix
{rows}
;
end;
"""


def read(tmp_path, rows, symbols=""):
    number = len(next(iter(rows.values())).replace("(12)", "x"))
    text = "\n".join(f"{taxon} {row}" for taxon, row in rows.items())
    (tmp_path / "matrix.nex").write_text(NEXUS.format(number=number, symbols=symbols, rows=text))
    return Alignment.from_file(tmp_path / "matrix.nex")


def log_likelihood(partition):
    return float(PartitionedTreeModel(partition, TREE).log_likelihood(TREE.branch_lengths))


@pytest.mark.parametrize("symbols", ["", 'symbols="01"', 'symbols="0123456789"', 'symbols="0~9"'])
def test_states_are_those_that_characters_show(tmp_path, symbols):
    rows = {"a": "00110", "b": "00010", "c": "11011", "d": "11001"}
    alignment = read(tmp_path, rows, symbols)
    assert alignment.data_type.states == ("0", "1")
    expected = TreeModel(alignment, TREE, Mk(2)).log_likelihood(TREE.branch_lengths)
    assert float(expected) == pytest.approx(-16.61516, abs=1e-5)
    by_name = TreeModel(alignment, TREE, parse_substitution("Mk", alignment)[0])
    assert by_name.log_likelihood(TREE.branch_lengths) == expected
    assert log_likelihood(Partition.of_characters(alignment)) == pytest.approx(float(expected), rel=1e-13)


def test_declared_states_are_an_option(tmp_path):
    rows = {"a": "00110", "b": "00010", "c": "11011", "d": "11001"}
    read(tmp_path, rows, 'symbols="0123456789"')
    declared = Alignment.from_file(tmp_path / "matrix.nex", data_type=standard_characters("0123456789"))
    assert declared.data_type.num_states == 10
    found = TreeModel(declared, TREE, Mk(10)).log_likelihood(TREE.branch_lengths)
    assert float(found) == pytest.approx(-36.1749, abs=1e-4)


@pytest.mark.parametrize(
    ("rows", "ordered", "site_rates", "expected"),
    [
        # Log-likelihoods of MrBayes 3.2.7a.
        ({"a": "02200", "b": "00020", "c": "22022", "d": "22002"}, (), None, -24.69881),
        ({"a": "0", "b": "1", "c": "0", "d": "(12)"}, (), None, -6.313666),
        ({"a": "0", "b": "1", "c": "-", "d": "?"}, (), None, -2.495927),
        ({"a": "012", "b": "101", "c": "000", "d": "011"}, (), GammaRates(0.5), -15.28004),
        ({"a": "0", "b": "1", "c": "3", "d": "0"}, [0], None, -13.02753),
    ],
)
def test_as_in_mrbayes(tmp_path, rows, ordered, site_rates, expected):
    partition = Partition.of_characters(read(tmp_path, rows), ordered=ordered, site_rates=site_rates)
    assert log_likelihood(partition) == pytest.approx(expected, abs=1e-5)


def test_subsets_models_and_shared_rates(tmp_path):
    alignment = read(tmp_path, {"a": "01020", "b": "01131", "c": "10220", "d": "1?310"})
    with pytest.warns(DataWarning, match="The characters 2-5 .* cannot be in data of coding='informative'"):
        partition = Partition.of_characters(alignment, ordered=[2, 4], coding="informative", site_rates=GammaRates())
    assert {name: one.num_sites for name, one in partition.subsets.items()} == {"states_2": 1}
    partition = Partition.of_characters(alignment, ordered=[2, 4], coding="variable", site_rates=GammaRates())
    assert list(partition.substitution) == ["states_2", "states_4", "ordered_4"]
    assert [type(model.model) for model in partition.substitution.values()] == [Mk, Mk, OrderedMk]
    assert all(isinstance(model, VariableSites) for model in partition.substitution.values())
    assert list(partition.priors(torch.empty(0))) == ["shape"]
    assert partition.subsets["states_2"].data_type.num_states == 2


def test_what_is_refused(tmp_path):
    bases = Alignment.from_sequences({"a": "ACGTACGTAC", "b": "ACGTACGTAA"})
    with pytest.raises(AlignmentError, match="The data are DNA, not standard characters"):
        Partition.of_characters(bases)
    alignment = read(tmp_path, {"a": "01", "b": "01", "c": "00", "d": "00"})
    with pytest.raises(AlignmentError, match=r"ordered: \[7\] are not sites"):
        Partition.of_characters(alignment, ordered=[7])
    with pytest.raises(SettingsError, match="coding='most' is unknown"):
        Partition.of_characters(alignment, coding="most")
    constant = read(tmp_path, {"a": "00", "b": "00", "c": "00", "d": "00"})
    with pytest.warns(DataWarning, match="characters 1, 2|characters 1-2"):
        with pytest.raises(AlignmentError, match="No character can be in data of coding='variable'"):
            Partition.of_characters(constant, coding="variable")
