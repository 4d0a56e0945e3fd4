"""Constraints on topologies, by enumeration of all topologies of six taxa."""

import math

import numpy as np
import pytest

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import SubsplitBayesianNetwork, all_topologies
from bayeskit.models.phylogenetics._topology_constraints import (
    check_constraints,
    constraint_splits,
    log_number_of_topologies,
)

SIX = all_topologies("ABCDEF")
GROUPS = [
    ([], 105),
    ([["A", "B"]], 15),
    ([["D", "B", "F"]], 9),
    ([["C", "D"], ["C", "D", "E"]], 3),
    ([["A", "F"], ["C", "D"]], 3),
    ([["A", "B", "C", "D"], ["E", "F"]], 15),
]


@pytest.mark.parametrize(("groups", "number"), GROUPS)
def test_the_topologies_that_satisfy_constraints(groups, number):
    splits = constraint_splits(groups, SIX.taxa)
    held = (SIX.below[:, :, None] == splits).all(-1).any(1).all(-1)
    assert held.sum() == number and log_number_of_topologies(6, splits) == pytest.approx(math.log(number), abs=1e-12)
    check_constraints(SIX.below[held], groups, SIX.taxa, "the trees")
    # All recombinations of their subsplits satisfy them, too.
    clades = SubsplitBayesianNetwork.from_topologies(SIX[np.flatnonzero(held)]).graph.clades
    check_constraints(clades, groups, SIX.taxa, "the support")
    for place in np.flatnonzero(~held):
        with pytest.raises(SettingsError, match="excludes a tree of the trees"):
            check_constraints(SIX[[place]].below, groups, SIX.taxa, "the trees")


def test_a_network_with_a_tree_that_violates_a_constraint():
    clades = SubsplitBayesianNetwork.from_topologies(SIX).graph.clades
    with pytest.raises(SettingsError, match="that on B, C excludes a tree of the support"):
        check_constraints(clades, [["B", "C"]], SIX.taxa, "the support")
