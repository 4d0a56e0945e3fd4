"""Rooted topologies, the dates of their tips, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

from bayeskit.errors import DataError, TreeError
from bayeskit.models.phylogenetics import DatedTopology, Topologies, Tree

DATES = {"A": 2010.0, "B": 2009.0, "C": 2000.5}


def test_heights_count_backward_from_the_youngest_tip():
    dated = DatedTopology.of("((B,A),C);", dates=DATES)
    heights = dict(zip(dated.topology.taxa, dated.tip_heights.tolist(), strict=True))
    assert heights == {"A": 0.0, "B": 1.0, "C": 9.5}
    assert dated.is_dated and dated.youngest_date == 2010.0
    assert dated.lower_bounds.tolist() == [1.0, 9.5]
    other = DatedTopology.of("((B,A),C);", tip_heights=heights)
    assert torch.equal(other.tip_heights, dated.tip_heights)
    assert not DatedTopology.of("((B,A),C);").is_dated


def test_a_series_of_pandas_is_a_mapping():
    dated = DatedTopology.of("((B,A),C);", dates=pd.Series(DATES))
    assert torch.equal(dated.tip_heights, DatedTopology.of("((B,A),C);", dates=DATES).tip_heights)


def test_text_and_topologies_give_the_same_tree():
    text = "(((E,D),A),(C,B));"
    unrooted = Topologies.from_trees([Tree.from_newick("((E,D),A,(C,B));")], taxa="EDACB")
    edge = int(np.flatnonzero((unrooted.below[0, :, 0] == 0b11000) | (unrooted.below[0, :, 0] == 0b00111))[0])
    one, other = DatedTopology.of(text), DatedTopology.of(unrooted.rooted_at(edge))
    assert np.array_equal(one.topology.children, other.topology.children)
    assert one.node_names == ("E|D", "C|B", "E|D|A", "E|D|A|... (5 taxa)".replace("A|...", "...|B"))


def test_durations_of_edges_are_differences_of_heights():
    dated = DatedTopology.of("((A,B),(C,D));", tip_heights={"A": 0.0, "B": 0.5, "C": 0.0, "D": 2.0})
    times = dated.edge_times(torch.tensor([[1.0, 3.0, 4.0]]))
    assert dict(zip(dated.edge_names, times[0].tolist(), strict=True)) == {
        "A": 1.0, "B": 0.5, "C": 3.0, "D": 1.0, "A|B": 3.0, "C|D": 1.0,
    }  # fmt: skip


WRONG_TREES = {
    "a Tree": (Tree.from_newick("((A,B),C,D);"), "a Tree is unrooted.*rooted_at"),
    "three subtrees": ("((A,B),C,D);", "joins three subtrees, so the tree is unrooted.*rooted_at"),
    "a polytomy": ("((A,B,C),D);", r"\(A, B, C\) joins 3 subtrees"),
    "two taxa": ("(A,B);", "2 taxa.*at least 3"),
    "a repeated taxon": ("((A,B),A);", "'A' occurs twice"),
    "a path": ("tree.nwk", "not Newick text.*read_text"),
    "unrooted topologies": (Topologies.from_trees([Tree.from_newick("((A,B),C,D);")]), "unrooted.*rooted_at"),
    "no tree": (None, "NoneType is not a rooted topology"),
    "no topology": (Topologies.from_trees([Tree.from_newick("((A,B),C,D);")]).rooted_at("A")[:0], "0 topologies"),
}


@pytest.mark.parametrize("case", WRONG_TREES)
def test_other_trees_are_refused(case):
    tree, message = WRONG_TREES[case]
    with pytest.raises(TreeError, match=message) as error:
        DatedTopology.of(tree)
    assert "Remedy" in str(error.value)


WRONG_DATES = {
    "a missing taxon": ({"dates": {"A": 1.0, "B": 2.0}}, "dates: there is none for 'C'"),
    "an unknown taxon": ({"dates": {**DATES, "X": 1.0}}, "dates: 'X' belongs to no taxon"),
    "both": ({"dates": {"A": 1.0, "B": 2.0, "c": 1.0}}, "none for 'C' and 'c' belongs to no taxon"),
    "NaN": ({"dates": {**DATES, "C": float("nan")}}, "nan of the taxon 'C' is not a finite number"),
    "infinity": ({"tip_heights": {"A": 0.0, "B": 0.0, "C": float("inf")}}, "tip_heights: inf of the taxon 'C'"),
    "text": ({"dates": {**DATES, "C": "2000"}}, "'2000' of the taxon 'C'"),
    "nothing": ({"dates": {**DATES, "C": None}}, "None of the taxon 'C'"),
    "negative heights": ({"tip_heights": {"A": 0.0, "B": 1.0, "C": -1.0}}, "the least is -1, not 0"),
    "heights without zero": ({"tip_heights": {"A": 3.0, "B": 1.0, "C": 2.0}}, "the least is 1, not 0.*dates="),
    "a list": ({"dates": [1.0, 2.0, 3.0]}, "list is not a mapping.*dates_from_names"),
    "two kinds": ({"dates": DATES, "tip_heights": {"A": 0.0, "B": 0.0, "C": 0.0}}, "both given"),
}


@pytest.mark.parametrize("case", WRONG_DATES)
def test_other_dates_are_refused(case):
    settings, message = WRONG_DATES[case]
    with pytest.raises(DataError, match=message) as error:
        DatedTopology.of("((A,B),C);", **settings)
    assert "Remedy" in str(error.value)


def test_common_ancestors():
    dated = DatedTopology.of("(((A,B),C),(D,E));")
    for taxa, name in (("AB", "A|B"), ("BC", "A|B|C"), ("DE", "D|E"), ("CABA", "A|B|C"), ("AE", dated.node_names[-1])):
        assert dated.node_names[dated.common_ancestor(list(taxa))] == name
    for wrong in (["A"], ["A", "A"], ["A", "X"], "AB"):
        with pytest.raises(TreeError, match="Remedy"):
            dated.common_ancestor(wrong)
