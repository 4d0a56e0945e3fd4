"""The orders of edges of trees and of topologies, and what converts one into the other."""

import random

import numpy as np
import pytest
import torch

from bayeskit.errors import TreeError
from bayeskit.models.phylogenetics import Alignment, ForestLikelihood, Topologies, Tree, TreeModel, TreeSample

TAXA = [f"t{number}" for number in range(8)]


def random_trees(count: int, seed: int) -> list[Tree]:
    source = random.Random(seed)
    trees = []
    for _ in range(count):
        parts = [f"{taxon}:{source.uniform(0.01, 0.5)!r}" for taxon in TAXA]
        while len(parts) > 3:
            source.shuffle(parts)
            parts = [f"({parts[0]},{parts[1]}):{source.uniform(0.01, 0.5)!r}", *parts[2:]]
        trees.append(Tree.from_newick(f"({','.join(parts)});"))
    return trees


def random_alignment(seed: int) -> Alignment:
    source = random.Random(seed)
    return Alignment.from_sequences({taxon: "".join(source.choices("ACGT", k=40)) for taxon in TAXA})


def test_one_likelihood_takes_each_order():
    alignment, trees = random_alignment(1), random_trees(6, seed=2)
    topologies = Topologies.from_trees(trees, taxa=alignment.taxa)
    forest = ForestLikelihood(alignment, compile=False)
    each = torch.stack([TreeModel(alignment, tree).log_likelihood(tree.branch_lengths) for tree in trees])
    together = forest.log_likelihood(topologies, topologies.branch_lengths_of(trees))
    torch.testing.assert_close(together, each, rtol=1e-12, atol=0)
    # The mutation: lengths in the order of the trees.
    mixed = forest.log_likelihood(topologies, torch.stack([tree.branch_lengths for tree in trees]))
    assert ((mixed - each).abs() > 0.1).all()


def test_sampled_lengths_reach_a_model_of_one_tree():
    alignment, sample = random_alignment(3), TreeSample.from_trees(random_trees(4, seed=4))
    lengths = sample.branch_lengths
    forest = ForestLikelihood(alignment, compile=False)
    for place in range(4):
        topology = int(sample.index[place])
        model = TreeModel(alignment, sample.topologies.tree(topology))
        ordered = lengths[place, sample.topologies.tree_edges(topology)]
        assert torch.equal(ordered, sample.sampled_tree(place).branch_lengths)
        expected = forest.log_likelihood(sample.topologies[[topology]], lengths[place][None])[0]
        torch.testing.assert_close(model.log_likelihood(ordered), expected, rtol=1e-12, atol=0)
        assert abs(model.log_likelihood(lengths[place]) - expected) > 0.1


def test_gradients_follow_the_order():
    tree = Tree.from_newick("((A:1,B:2):3,C:4,D:5);")
    own = tree.branch_lengths.clone().requires_grad_()
    topologies = Topologies.from_trees([tree], "DBCA")
    (topologies.branch_lengths_of([Tree(tree.taxa, tree.children, own)])[0] * torch.arange(5.0)).sum().backward()
    assert own.grad.tolist() == [3, 1, 2, 0, 4]


def test_what_is_refused():
    trees = random_trees(3, seed=5)
    topologies = Topologies.from_trees(trees)
    for wrong in (trees[:2], trees[::-1]):
        with pytest.raises(TreeError, match="other topologies than these 3"):
            topologies.branch_lengths_of(wrong)
    bare = [Tree(tree.taxa, tree.children) for tree in trees]
    with pytest.raises(TreeError, match="no branch lengths"):
        topologies.branch_lengths_of(bare)
    with pytest.raises(TreeError, match="Only 2 of 3"):
        topologies.branch_lengths_of([*trees[:2], bare[2]])
    for index in (3, -4):
        with pytest.raises(TreeError, match=f"no topology {index}.*0 to 2"):
            topologies.tree_edges(index)
    with pytest.raises(TreeError, match="rooted"):
        topologies.rooted_at("t1").tree_edges(0)
    for wrong, message in (
        (["((A,B),C,D);"], "Tree 1 of the list is of type str.*from_newick"),
        ("((A,B),C,D);", "Tree 1 of the list is of type str"),
        (trees[0], "Tree is not a list of trees"),
        (None, "NoneType is not a list"),
    ):
        with pytest.raises(TreeError, match=message):
            Topologies.from_trees(wrong)
        with pytest.raises(TreeError, match=message):
            TreeSample.from_trees(wrong)
    assert np.array_equal(topologies.tree_edges(-1), topologies.tree_edges(2))
