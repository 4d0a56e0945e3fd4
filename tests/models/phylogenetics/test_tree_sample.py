"""Samples of trees: weights, credible sets, pooling, branch lengths, and what is written and read back."""

import random

import numpy as np
import pytest
import torch

from bayeskit.errors import OutputError, SettingsError, ShapeError, TreeError
from bayeskit.models.phylogenetics._samples import TreeSample
from bayeskit.models.phylogenetics._topologies import Topologies, all_topologies
from bayeskit.models.phylogenetics._trees import Tree

TEXTS = ("((A:1,B:2):3,C:4,D:5);", "((A:6,C:7):8,B:9,D:10);", "(D:15,C:14,(A:11,B:12):13);")


def lengths_by_split(tree: Tree) -> dict[frozenset[str], float]:
    below = [{taxon} for taxon in tree.taxa]
    for children in tree.children:
        below.append(set().union(*(below[child] for child in children)))
    first = min(tree.taxa)
    sides = [frozenset(set(tree.taxa) - side if first in side else side) for side in below[:-1]]
    return dict(zip(sides, tree.branch_lengths.tolist(), strict=True))


def random_sample(num_taxa: int, count: int, seed: int, rooted: bool = False) -> TreeSample:
    source = random.Random(seed)
    trees = []
    for _ in range(count):
        parts = [f"t{i}:{source.uniform(0, 1)!r}" for i in range(num_taxa)]
        while len(parts) > 3:
            source.shuffle(parts)
            parts = [f"({parts[0]},{parts[1]}):{source.uniform(0, 1)!r}", *parts[2:]]
        trees.append(Tree.from_newick(f"({','.join(parts)});"))
    sample = TreeSample.from_trees(trees, taxa=[f"t{i}" for i in range(num_taxa)])
    if not rooted:
        return sample
    topologies = sample.topologies.rooted_at(num_taxa)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.rand(count, topologies.num_edges, dtype=torch.float64, generator=generator)
    return TreeSample.from_topologies(topologies[sample.index], [source.random() for _ in range(count)], lengths)


def test_equal_topologies_are_counted_together():
    sample = TreeSample.from_trees([Tree.from_newick(text) for text in TEXTS], weights=[1, 5, 2])
    assert (sample.num_samples, sample.num_taxa, sample.taxa, sample.rooted) == (3, 4, tuple("ABCD"), False)
    assert sample.index.tolist() == [0, 1, 0] and len(sample.topologies) == 2
    assert sample.sample_weights.tolist() == [0.125, 0.625, 0.25] and sample.weights.tolist() == [0.375, 0.625]
    assert [tree.edge_names[-1] for tree in sample.trees] == ["C|D", "B|D"]
    assert repr(sample) == "TreeSample(3 trees, 2 unrooted topologies, 4 taxa)"
    # Edges 0-3 end in A, B, C, D; edge 4 is inside.
    assert sample.branch_lengths.tolist() == [[1, 2, 4, 5, 3], [6, 9, 7, 10, 8], [11, 12, 14, 15, 13]]
    assert sample.branch_lengths.dtype == torch.float64
    for number, text in enumerate(TEXTS):
        assert lengths_by_split(sample.sampled_tree(number)) == lengths_by_split(Tree.from_newick(text))


def test_lengths_of_many_taxa_follow_their_edges():
    sample = random_sample(66, 5, seed=1)
    again = sample.with_taxa(random.Random(2).sample(sample.taxa, 66))
    assert again.taxa != sample.taxa
    for number in range(5):
        expected = lengths_by_split(sample.sampled_tree(number))
        assert len(expected) == 129 and lengths_by_split(again.sampled_tree(number)) == expected
    # The mutation: lengths in the order of the other taxa.
    broken = TreeSample(again.topologies, again.index, again.sample_weights, sample.branch_lengths)
    assert lengths_by_split(broken.sampled_tree(0)) != lengths_by_split(sample.sampled_tree(0))


def test_from_topologies():
    every = all_topologies("ABCDE")
    sample = TreeSample.from_topologies(every[[3, 3, 1]])
    assert sample.weights.tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-15) and sample.branch_lengths is None
    assert (sample.topologies.children == every.children[[3, 1]]).all()
    weights = torch.tensor([1.0, 2.0, 5.0])
    lengths = torch.rand(3, 7, generator=torch.Generator().manual_seed(0))
    sample = TreeSample.from_topologies(every[[3, 3, 1]], weights, lengths)
    assert sample.weights.tolist() == [0.375, 0.625] and torch.equal(sample.branch_lengths, lengths.double())


def test_most_probable_topologies():
    every = all_topologies("ABCDE")
    weights = np.array([1, 9, 4, 4, 0, 2] + [0] * 9) / 20
    sample = TreeSample.from_topologies(every, weights)
    assert sample.top(3).tolist() == [1, 2, 3] and len(sample.top(99)) == 15
    assert (sample.most_probable.children == every.children[[1]]).all()
    for level, size in ((0.01, 1), (0.45, 1), (0.4501, 2), (0.65, 2), (0.85, 3), (0.95, 4), (0.9501, 5), (1.0, 5)):
        chosen = sample.credible_set(level)
        assert chosen.tolist() == [1, 2, 3, 5, 0][:size]
        assert weights[chosen].sum() >= level - 1e-12 > weights[chosen[:-1]].sum() - 1e-9
    third = TreeSample.from_topologies(every[:3])
    assert len(third.credible_set(1.0)) == 3 and len(third.credible_set(2 / 3)) == 2


def test_pooling_gives_each_run_the_same_weight():
    every = all_topologies("ABCD")
    one = TreeSample.from_topologies(every[[0, 1]], [3, 1], torch.ones(2, 5))
    other = TreeSample.from_topologies(every[[2, 1, 1, 1]], None, torch.full((4, 5), 2.0))
    pooled = TreeSample.pooled([one, other.with_taxa("DCBA")])
    assert pooled.taxa == tuple("ABCD") and pooled.index.tolist() == [0, 1, 2, 1, 1, 1]
    assert pooled.weights.tolist() == [0.375, 0.5, 0.125]
    assert pooled.branch_lengths[:, 0].tolist() == [1, 1, 2, 2, 2, 2]
    bare = TreeSample.from_topologies(every[[2]])
    assert TreeSample.pooled([one, bare]).branch_lengths is None
    with pytest.raises(TreeError, match="Only one of sample 1 and sample 2 is rooted"):
        TreeSample.pooled([one, TreeSample.from_topologies(every.rooted_at(0))])
    with pytest.raises(TreeError, match="only in sample 2: 'E'"):
        TreeSample.pooled([one, TreeSample.from_topologies(all_topologies("ABCE"))])
    with pytest.raises(TreeError, match="no sample"):
        TreeSample.pooled([])


def test_unrooting_adds_the_lengths_at_the_root():
    sample = random_sample(9, 40, seed=3, rooted=True)
    unrooted = sample.unrooted()
    assert not unrooted.rooted and unrooted.unrooted() is unrooted
    np.testing.assert_allclose(unrooted.branch_lengths.sum(dim=1), sample.branch_lengths.sum(dim=1), atol=1e-12)
    for number in range(40):
        newick = sample.topologies.to_newick(int(sample.index[number]), sample.branch_lengths[number])
        with pytest.warns(UserWarning, match="lengths add"):
            expected = lengths_by_split(Tree.from_newick(newick))
        found = lengths_by_split(unrooted.sampled_tree(number))
        assert found.keys() == expected.keys()
        assert all(abs(found[side] - expected[side]) < 1e-12 for side in found)
    assert np.array_equal(unrooted.sample_weights, sample.sample_weights)
    with pytest.raises(TreeError, match="unrooted"):
        sample.sampled_tree(0)


@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("suffix", [".trees", ".t"])
def test_chains_are_read_back_as_they_were(tmp_path, rooted, suffix):
    sample = random_sample(66, 30, seed=4, rooted=rooted)
    path = tmp_path / f"run{suffix}"
    sample.to_file(path)
    again = TreeSample.from_file(path)
    assert again.taxa == sample.taxa and again.rooted == rooted
    assert (again.topologies.children == sample.topologies.children).all()
    assert np.array_equal(again.index, sample.index)
    np.testing.assert_allclose(again.sample_weights, sample.sample_weights, rtol=1e-14)
    assert torch.equal(again.branch_lengths, sample.branch_lengths)


@pytest.mark.parametrize("rooted", [False, True])
def test_weighted_topologies_are_read_back_as_they_were(tmp_path, rooted):
    every = all_topologies("ABCDE", rooted)
    names = ("it's", "a b", "x_1", "(y)", "1")
    weights = np.random.default_rng(0).dirichlet(np.ones(len(every)))
    sample = TreeSample.from_topologies(Topologies(names, every.children, rooted), weights)
    sample.to_file(tmp_path / "all.trprobs")
    again = TreeSample.from_file(tmp_path / "all.trprobs")
    order = sample.top(len(every))
    assert again.taxa == names and again.rooted == rooted and again.branch_lengths is None
    assert (again.topologies.children == every.children[order]).all()
    np.testing.assert_allclose(again.weights, weights[order], rtol=1e-14)
    largest = float(sample.weights.max())
    head = f"tree tree_1 [p = {largest:.3f}, P = {largest:.3f}] = [&W {largest!r}] {'[&R]' if rooted else '[&U]'} ("
    assert head in (tmp_path / "all.trprobs").read_text()


def test_an_outgroup_and_back():
    sample = random_sample(9, 6, seed=3)
    for taxon in ("t0", "t5"):
        rooted = sample.rooted_at(taxon)
        assert rooted.rooted and len(rooted) == 6
        for number in range(6):
            lengths = rooted.branch_lengths[number]
            row = rooted.topologies[int(rooted.index[number])]
            one, other = row.children[0, -1]
            # The two edges at the root are halves of the outgroup's.
            assert rooted.taxa.index(taxon) in (one, other) and lengths[one] == lengths[other]
        again = rooted.unrooted()
        assert np.array_equal(again.topologies.children, sample.topologies.children)
        torch.testing.assert_close(again.branch_lengths, sample.branch_lengths, rtol=1e-15, atol=0)
    assert random_sample(5, 3, seed=1).rooted_at("t1").unrooted().num_samples == 3
    bare = TreeSample.from_topologies(all_topologies("ABCD")).rooted_at("C")
    assert bare.branch_lengths is None and bare.topologies.to_newick(0).startswith("(C,")
    with pytest.raises(TreeError, match="no taxon 'X'"):
        sample.rooted_at("X")
    with pytest.raises(TreeError, match="have a root"):
        bare.rooted_at("A")


def test_table_of_topologies():
    sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 6, 3])
    table = sample.to_pandas()
    assert table.columns.tolist() == ["topology", "weight", "cumulative", "newick"]
    assert table["topology"].tolist() == [1, 2, 0] and table["weight"].tolist() == sample.weights[[1, 2, 0]].tolist()
    assert table["cumulative"].tolist() == pytest.approx([0.6, 0.9, 1.0], abs=1e-15)
    assert table["newick"].tolist() == [sample.topologies.to_newick(place) for place in (1, 2, 0)]
    assert len(sample) == 3


def test_samples_that_are_not_there():
    sample = random_sample(5, 3, seed=1)
    for number in (3, 9999, -4, 1.5):
        with pytest.raises(SettingsError, match=f"sample={number}.*0 to 2"):
            sample.sampled_tree(number)


def test_what_is_refused(tmp_path):
    every = all_topologies("ABCD")
    for weights in ([1, 2], [1, -1, 1], [0, 0, 0], [1, float("nan"), 1], [1, float("inf"), 1]):
        with pytest.raises(SettingsError, match="Remedy: give one non-negative weight for each"):
            TreeSample.from_topologies(every, weights)
    with pytest.raises(ShapeError, match=r"\(3, 4\)"):
        TreeSample.from_topologies(every, None, torch.ones(3, 4))
    with pytest.raises(TreeError, match="no topology"):
        TreeSample.from_topologies(every[:0])
    with pytest.raises(TreeError, match="no tree"):
        TreeSample.from_trees([])
    with pytest.raises(TreeError, match="Only 1 of 2 trees have branch lengths"):
        TreeSample.from_trees([Tree.from_newick(TEXTS[0]), Tree.from_newick("((A,B),C,D);")])
    sample = TreeSample.from_topologies(every)
    for level in (0.0, 1.1, float("nan")):
        with pytest.raises(SettingsError, match="not a probability"):
            sample.credible_set(level)
    with pytest.raises(SettingsError, match="at least one"):
        sample.top(0)
    with pytest.raises(SettingsError, match=r"'\.trprobs', '\.trees' or '\.t'"):
        sample.to_file(tmp_path / "trees.txt")
    with pytest.raises(OutputError, match="missing"):
        sample.to_file(tmp_path / "missing" / "run.trees")


def test_parts_that_do_not_belong_together_are_refused():
    topologies = all_topologies("ABCD")
    index = np.array([0, 2])
    for weights in ([0.5, 0.6], [1.5, -0.5], [0.5, float("nan")]):
        with pytest.raises(SettingsError, match="sample_weights"):
            TreeSample(topologies, index, np.array(weights))
    for places in ([0, 3], [-1, 0], [0.0, 1.0]):
        with pytest.raises(SettingsError, match="index: .* 0 to 2"):
            TreeSample(topologies, np.array(places), np.array([0.5, 0.5]))
    for other in (list(topologies), TreeSample.from_topologies(topologies), None):
        with pytest.raises(TreeError, match="no topology in this.*from_trees"):
            TreeSample.from_topologies(other)


def test_weights_and_lengths_that_need_gradients_are_taken():
    topologies = all_topologies("ABCD")
    weights = torch.tensor([1.0, 1.0, 2.0], requires_grad=True)
    lengths = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    sample = TreeSample.from_topologies(topologies, weights, lengths)
    assert sample.weights.tolist() == [0.25, 0.25, 0.5] and not sample.branch_lengths.requires_grad
    trees = [topologies.tree(place) for place in range(3)]
    trees = [Tree(tree.taxa, tree.children, one) for tree, one in zip(trees, lengths, strict=True)]
    again = TreeSample.from_trees(trees, weights)
    assert again.weights.tolist() == sample.weights.tolist() and not again.branch_lengths.requires_grad
