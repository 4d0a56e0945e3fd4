"""Neighbour joining on distances that are sums along a tree, and distances of Jukes and Cantor."""

import inspect
import math
import sys

import numpy as np
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import ShapeError, TreeError
from bayeskit.models.phylogenetics import (
    Alignment,
    Topologies,
    all_topologies,
    jukes_cantor_distances,
    neighbour_joining,
)


def path_lengths(topologies, place, lengths):
    """Sums of branch lengths between all pairs of taxa, `(taxa, taxa)`."""
    taxa = np.arange(topologies.num_taxa)
    below = (topologies.below[place, :, 0, None] >> taxa.astype(np.uint64)) & np.uint64(1)
    apart = below[:, :, None] != below[:, None, :]
    return torch.from_numpy(np.einsum("e,eij->ij", lengths.numpy(), apart))


@pytest.mark.parametrize("place", range(0, 105, 8))
def test_additive_distances_give_their_tree(place):
    topologies = all_topologies("ABCDEF")
    generator = new_generator(place, stream="additive distances")
    lengths = torch.rand(topologies.num_edges, generator=generator, dtype=torch.float64) + 0.01
    tree = neighbour_joining(path_lengths(topologies, place, lengths), topologies.taxa)
    assert Topologies.from_trees([tree], topologies.taxa).to_newick(0) == topologies.to_newick(place)
    found = topologies[place].branch_lengths_of([tree])[0]
    assert torch.allclose(found, lengths, rtol=0, atol=1e-13)


def test_joining_the_nearest_pair_is_noticed():
    topologies = all_topologies("ABCD")[2]
    lengths = torch.tensor([0.1, 1.0, 0.1, 1.0, 0.1], dtype=torch.float64)  # the nearest pair is not a cherry
    distances = path_lengths(topologies, 0, lengths)
    source, names = inspect.getsource(sys.modules[neighbour_joining.__module__]), {}
    correct = "criterion = (len(texts) - 2) * gaps - sums - sums[:, None]"
    assert correct in source
    exec(source.replace(correct, "criterion = gaps.copy()"), names)
    found = [
        Topologies.from_trees([function(distances, "ABCD")]).to_newick(0)
        for function in (neighbour_joining, names["neighbour_joining"])
    ]
    assert found[0] == topologies.to_newick(0) != found[1]


def test_distances():
    rows = {"A": "AAAAAAAAAA-", "B": "AAAAAAACCNA", "C": "CCCCCCCCCGA", "D": "----------A", "E": "AAAAARAAAC-"}
    distances = jukes_cantor_distances(Alignment.from_sequences(rows))
    assert distances.diagonal().eq(0).all() and torch.equal(distances, distances.T)
    # Two of nine known sites differ; all of ten; none of one; one of nine with a known base.
    expected = [-0.75 * math.log(1 - 4 / 3 * 2 / 9), math.inf, math.inf, -0.75 * math.log(1 - 4 / 3 / 9)]
    assert torch.allclose(distances[0, 1:], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)
    assert float(distances[1, 3]) == 0.0
    protein = Alignment.from_sequences({"A": "MKVLW", "B": "MKVLF", "C": "MRVLF"}, data_type="protein")
    assert float(jukes_cantor_distances(protein)[0, 1]) == pytest.approx(-0.95 * math.log(1 - 0.2 / 0.95), rel=1e-14)


def test_negative_lengths_become_zero():
    distances = torch.tensor([[0.0, 1.0, 5.0], [1.0, 0.0, 1.0], [5.0, 1.0, 0.0]])
    assert neighbour_joining(distances, "ABC").branch_lengths.tolist() == [2.5, 0.0, 2.5]


@pytest.mark.parametrize(
    ("distances", "taxa", "error", "words"),
    [
        (torch.zeros(3, 3), "ABCD", ShapeError, "4 taxa"),
        (torch.zeros(2, 2), "AB", TreeError, "2 taxa"),
        (torch.zeros(3, 3), "ABA", TreeError, "'A' occurs twice"),
        (torch.full((3, 3), torch.inf), "ABC", TreeError, "'A'"),
        (torch.tensor([[0.0, 1.0, 1.0], [2.0, 0.0, 1.0], [1.0, 1.0, 0.0]]), "ABC", TreeError, "way back"),
    ],
)
def test_input_outside_the_domain(distances, taxa, error, words):
    with pytest.raises(error, match=words):
        neighbour_joining(distances, taxa)
